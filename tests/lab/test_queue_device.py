"""The lab's decode worker: closed forms against one iteration at a time, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.lab.queue_device import Device, DeviceSpec, IterationTime
from reference_device import ReferenceDevice

CLOCKS = st.sampled_from(
    [
        IterationTime(),
        IterationTime(fixed=0.5, per_sequence=0.25),
        IterationTime(fixed=0.01, per_sequence=0.003, per_token=0.0007, per_prompt_token=0.0009),
    ]
)
REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=12)


def play(
    spec: DeviceSpec, arrivals: list[tuple[float, int, int, int]]
) -> tuple[Device, dict[int, float], dict[int, float]]:
    """Submit each request as it arrives, run the device to its end; ends and joins by request."""
    device, ended, joined = Device(spec), {}, {}

    def run_to(now: float) -> None:
        while device.next_event <= now:
            ended.update({request: time for time, request in device.step()})
            joined.update({one.request: one.time for one in device.joins})
            device.joins.clear()

    for number, (time, request, prompt, output) in enumerate(arrivals):
        run_to(time)
        device.submit(request, prompt, output, time)
        if number + 1 == len(arrivals) or arrivals[number + 1][0] > time:
            run_to(time)
    run_to(1e9)
    return device, ended, joined


@example([(3, 7, 18), (8, 30, 12), (20, 1, 1)], IterationTime(), 2, 65, True)  # one arrives as memory runs short
@settings(max_examples=150, deadline=None)
@given(REQUESTS, CLOCKS, st.integers(1, 4), st.integers(56, 120), st.booleans())
def test_closed_forms_are_the_iterations(
    requests: list[tuple[int, int, int]], clock: IterationTime, slots: int, kv_tokens: int, mixing: bool
) -> None:
    """Joins, ends and preemptions of any run are those of the device that takes one iteration at a time."""
    spec = DeviceSpec(max_num_seqs=slots, kv_tokens=kv_tokens, time=clock, mixing=mixing)
    arrivals = [(float(time), n, prompt, output) for n, (time, prompt, output) in enumerate(sorted(requests))]
    reference = ReferenceDevice(spec)
    reference.play(arrivals)
    device, ended, joined = play(spec, arrivals)
    assert ended == pytest.approx(reference.ended)
    assert joined == pytest.approx(reference.joined)
    assert device.num_preemptions == reference.num_preemptions
    assert device.num_requests == 0
    assert device.kv_tokens == 0


def test_the_abstract_clock_takes_a_period_per_token() -> None:
    """A request of five tokens that joins at 3 ends at 8, and one that must wait for its slot follows at once."""
    spec = DeviceSpec(max_num_seqs=1, kv_tokens=100)
    _, ended, joined = play(spec, [(3.0, 0, 10, 5), (4.0, 1, 10, 2)])
    assert ended == {0: 8.0, 1: 10.0}
    assert joined == {0: 3.0, 1: 8.0}


def test_mixing_computes_the_prompt_first() -> None:
    """Where prompts are computed on the device, the first of its iterations gives no token."""
    _, ended, _ = play(DeviceSpec(max_num_seqs=1, kv_tokens=100, mixing=True), [(0.0, 0, 10, 5)])
    assert ended == {0: 6.0}


def test_a_request_beyond_the_memory_is_refused() -> None:
    """What grows beyond the device's memory even alone is an error, not a request that is preempted for good."""
    with pytest.raises(ConfigError, match="grows to 101"):
        Device(DeviceSpec(max_num_seqs=1, kv_tokens=100)).submit(0, 91, 10, 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": 0, "kv_tokens": 10},
        {"max_num_seqs": 1, "kv_tokens": 0},
        {"max_num_seqs": 1, "kv_tokens": 10, "time": IterationTime(fixed=0.0)},
        {"max_num_seqs": 1, "kv_tokens": 10, "time": IterationTime(per_token=-1.0)},
    ],
)
def test_impossible_devices_are_refused(fields: dict[str, object]) -> None:
    """No slot, no memory, or a clock that does not go forward is an error."""
    with pytest.raises(ConfigError):
        DeviceSpec(**fields)  # type: ignore[arg-type]
