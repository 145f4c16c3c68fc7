"""The fleet view: snapshots completed and aged, the ledger joined, nothing stale passed off as fresh."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway._core import ReplayedEngine
from headway.errors import EngineInputError
from headway.fleet import FleetView, LengthRule
from headway.types import EngineRequest, EngineState, Instance, Snapshot, SnapshotRequest
from pools import FAST, LIMITS, book, instance


def resident(
    name: str, prompt: int, computed: int, output: int, *, scheduled: int = 0, max_tokens: int = 0
) -> SnapshotRequest:
    return SnapshotRequest(name, prompt, computed, output, -(-computed // 16), max_tokens, 0, 0.0, scheduled)


def shown(
    *running: SnapshotRequest,
    waiting: tuple[SnapshotRequest, ...] = (),
    at_s: float = 0.0,
    sequence: int = 1,
    start: int = 1,
    batch_start_s: float | None = None,
) -> Snapshot:
    held = sum(r.num_blocks for r in (*running, *waiting))
    return Snapshot(
        instance_id="a",
        engine_version="vllm-0.32.0",
        engine_start=start,
        sequence=sequence,
        engine_s=at_s,
        limits=LIMITS,
        running=list(running),
        waiting=list(waiting),
        free_blocks=LIMITS.num_blocks - 1 - held,
        batch_start_s=batch_start_s,
    )


def fleet_of(*snapshots: Snapshot, one: Instance | None = None) -> FleetView:
    fleet = FleetView([one or instance("a")])
    for snapshot in snapshots:
        fleet.observe_snapshot(snapshot, snapshot.engine_s)
    return fleet


def engine_of(fleet: FleetView) -> ReplayedEngine:
    engine = fleet.views[0].engine
    assert engine is not None
    return engine


def ttft_s(fleet: FleetView, now: float, prompt_tokens: int = 1000) -> float | None:
    fleet.age(now)
    return fleet.first_tokens([prompt_tokens], 0)[0][0]


@pytest.mark.parametrize(
    ("predicted", "done", "max_tokens", "target"),
    [
        (300.0, 100, None, 300),
        (210.0, 200, None, 264),  # at least 64 more
        (300.0, 1000, None, 1250),  # or a quarter of what there is
        (300.0, 280, 310, 310),  # never beyond max_tokens
        (300.0, 310, 310, 311),  # and never over already
        (200.5, 0, 0, 201),
    ],
)
def test_remaining_length_survives_its_prediction(
    predicted: float, done: int, max_tokens: int | None, target: int
) -> None:
    """A resident that outlives its prediction is expected to go on, within max_tokens."""
    assert LengthRule("survival").target_tokens(predicted, 100, done, max_tokens or 0) == target


def test_plain_rule_takes_the_prediction_as_it_is() -> None:
    """Without survival a request that outlives its prediction is expected to end with its next token."""
    plain = LengthRule("plain")
    assert plain.target_tokens(300.0, 100, 100, 0) == 300
    assert plain.target_tokens(300.0, 100, 500, 0) == 501


def test_conditional_median_asks_the_answers_seen() -> None:
    """The median of the longer answers of the prompt's bin; a quarter more where none was longer."""
    rule = LengthRule("conditional_median", edges=(128, 512), lengths=([50, 10, 90, 400], [7], []))
    assert rule.target_tokens(300.0, 100, 0, 0) == 300  # nothing seen of it yet: the prediction
    assert rule.target_tokens(300.0, 128, 20, 0) == 90
    assert rule.target_tokens(300.0, 128, 20, 60) == 60
    assert rule.target_tokens(300.0, 128, 400, 0) == 500
    assert rule.target_tokens(300.0, 129, 5, 0) == 7
    assert rule.target_tokens(300.0, 9000, 5, 0) == 69


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("kind", {"kind": "guess"}),
        ("edges", {"kind": "conditional_median", "edges": (5, 5), "lengths": ([], [], [])}),
        ("lengths", {"kind": "conditional_median", "edges": (5,), "lengths": ([],)}),
        ("lengths", {"kind": "conditional_median", "edges": (), "lengths": ([math.nan],)}),
    ],
)
def test_impossible_length_rules_are_refused_by_name(field: str, arguments: dict[str, Any]) -> None:
    """Unknown kinds, edges that do not rise and tables that do not fit raise an error naming the field."""
    with pytest.raises(EngineInputError, match=field):
        LengthRule(**arguments)


def test_batch_in_flight_is_completed() -> None:
    """A decoder gets its output, a finished prefill its first one, a partial prefill none, and the end is residual."""
    decoder = resident("chatcmpl-d", 900, 901, 1, scheduled=1)
    prefilled = resident("cmpl-p-0", 500, 500, 0, scheduled=500)
    partial = resident("c", 4000, 300, 0, scheduled=300)
    fleet = fleet_of(shown(decoder, prefilled, partial, at_s=10.0, batch_start_s=10.0))
    fleet.age(10.0)
    state = engine_of(fleet).state()
    assert [(r.computed_tokens, r.output_tokens) for r in state.running] == [(901, 2), (500, 1), (300, 0)]
    pairs = 500 * 501 / 2 + 300 * 301 / 2
    c = FAST.named()
    assert state.residual_s == pytest.approx(c["b0"] + c["b1"] * 801 + c["b2"] * 900 + c["b3"] * pairs, rel=1e-12)


def test_request_that_ends_in_the_batch_leaves_with_its_blocks() -> None:
    """The last token of max_tokens ends a request: it is gone after the batch and its blocks are free."""
    ending = resident("e", 900, 909, 9, scheduled=1, max_tokens=10)
    fleet = fleet_of(shown(ending, at_s=10.0, batch_start_s=10.0))
    fleet.age(10.0)
    state = engine_of(fleet).state()
    assert state.running == ()
    assert state.free_blocks == LIMITS.num_blocks - 1


def test_without_completion_a_decoder_would_stand_still() -> None:
    """A request whose computed tokens equal its tokens is no state between steps: the core refuses it by name."""
    with pytest.raises(EngineInputError, match="computed_tokens"):
        EngineRequest(request_id="d", prompt_tokens=900, computed_tokens=901, output_tokens=1, target_output_tokens=9)


def test_ageing_equals_replaying_the_state_for_as_long() -> None:
    """An engine aged in small and large bites stands where one native advance() would put it."""
    snapshot = shown(resident("d", 900, 901, 1, scheduled=1), at_s=5.0, batch_start_s=5.0)
    fleet = fleet_of(snapshot)
    fleet.age(5.0)
    expected = ReplayedEngine.from_state(engine_of(fleet).state(), FAST)
    expected.advance(0.05)
    for now in (5.001, 5.0123, 5.04, 5.05):
        fleet.age(now)
    aged = engine_of(fleet).state()
    assert aged.running == expected.state().running
    assert aged.residual_s == pytest.approx(expected.residual_s, abs=1e-12)


def test_a_batch_that_is_overdue_still_runs() -> None:
    """No newer snapshot means no newer batch: for as long again as it was to take, the engine stands at its end."""
    fleet = fleet_of(shown(resident("p", 4000, 4000, 0, scheduled=4000), at_s=5.0, batch_start_s=5.0))
    fleet.age(5.0)
    batch_s = engine_of(fleet).residual_s
    fleet.age(5.0 + 1.9 * batch_s)
    assert engine_of(fleet).residual_s == pytest.approx(0.0, abs=1e-12)
    assert [r.output_tokens for r in engine_of(fleet).running] == [1]
    fleet.age(5.0 + 2.1 * batch_s)
    assert engine_of(fleet).running[0].output_tokens > 1


def test_booked_request_counts_before_any_snapshot_shows_it() -> None:
    """The ledger delays the next newcomer at once, and only once when the snapshot catches up."""
    fleet = fleet_of(shown())
    alone = ttft_s(fleet, 1.0)
    book(fleet, "r1", "a", now=1.0, prompt_tokens=8000)
    behind = ttft_s(fleet, 1.0)
    assert alone is not None
    assert behind is not None
    assert behind > alone
    fleet.observe_snapshot(shown(resident("chatcmpl-r1", 8000, 8000, 0, scheduled=8000), at_s=1.0, sequence=2), 1.0)
    fleet.age(1.0)
    assert [r.request_id for r in engine_of(fleet).running] == ["chatcmpl-r1"]
    assert engine_of(fleet).num_waiting == 0


def test_snapshot_uses_the_ledgers_predicted_length() -> None:
    """A resident known from the ledger is expected to answer as long as predicted for it."""
    fleet = fleet_of(shown())
    fleet.age(0.0)
    book(fleet, "r1", "a", prompt_tokens=500)  # predicted: 200 tokens
    snapshot = shown(resident("cmpl-r1-0", 500, 509, 10), resident("other", 500, 509, 10), sequence=2)
    fleet.observe_snapshot(snapshot, 0.0)
    fleet.age(0.0)
    assert [r.target_output_tokens for r in engine_of(fleet).running] == [200, 256]


def test_request_that_ended_is_not_replayed_again() -> None:
    """A release takes the request out of the replay, also when an older snapshot still shows it."""
    fleet = fleet_of(shown())
    fleet.age(0.0)
    book(fleet, "r1", "a")
    fleet.observe_snapshot(shown(resident("cmpl-r1-0", 1000, 1000, 1), sequence=2, at_s=0.1), 0.1)
    fleet.age(0.1)
    assert engine_of(fleet).num_running == 1
    assert fleet.release("r1", 0.2)
    fleet.age(0.2)
    assert engine_of(fleet).num_running == 0
    fleet.observe_snapshot(shown(resident("cmpl-r1-0", 1000, 1001, 2), sequence=3, at_s=0.15), 0.3)
    fleet.age(0.3)
    assert engine_of(fleet).num_running == 0


def test_answered_request_that_a_later_snapshot_lacks_is_over() -> None:
    """Once its first token was seen, a request that a later snapshot does not show is not submitted again."""
    fleet = fleet_of(shown())
    fleet.age(0.0)
    book(fleet, "r1", "a")
    fleet.first_token_seen("r1", 0.5)
    fleet.observe_snapshot(shown(sequence=2, at_s=0.6), 0.6)
    fleet.age(0.6)
    assert engine_of(fleet).num_running + engine_of(fleet).num_waiting == 0


def test_older_snapshot_is_ignored_but_a_restarted_engine_is_not() -> None:
    """Sequence numbers order the snapshots of one engine start; a new start begins anew."""
    fleet = fleet_of(shown(sequence=5, at_s=1.0))
    fleet.observe_snapshot(shown(resident("x", 10, 10, 1), sequence=4, at_s=0.9), 1.0)
    fleet.age(1.0)
    assert engine_of(fleet).num_running == 0
    fleet.observe_snapshot(shown(resident("x", 10, 10, 1), sequence=1, start=2, at_s=1.1), 1.1)
    fleet.age(1.1)
    assert engine_of(fleet).num_running == 1


def test_busy_engine_that_falls_silent_is_stale_and_recovers() -> None:
    """T7: silence beyond the batch in flight marks the state stale; nothing is replayed until a snapshot comes."""
    fleet = fleet_of(shown(resident("x", 900, 901, 1, scheduled=1), at_s=0.0, batch_start_s=0.0))
    assert ttft_s(fleet, 1.9) is not None
    assert ttft_s(fleet, 2.5) is None
    assert fleet.views[0].stale
    fleet.observe_snapshot(shown(sequence=2, at_s=3.0), 3.0)
    assert ttft_s(fleet, 3.0) is not None
    assert not fleet.views[0].stale


def test_idle_engine_may_be_silent_until_a_booked_request_does_not_show() -> None:
    """An idle engine has nothing to publish; one that never shows what was sent to it is stale."""
    fleet = fleet_of(shown())
    assert ttft_s(fleet, 1000.0) is not None
    book(fleet, "r1", "a", now=1000.0)
    assert ttft_s(fleet, 1001.0) is not None
    assert ttft_s(fleet, 1002.5) is None
    assert fleet.views[0].stale


def test_instance_without_state_has_no_replay() -> None:
    """A hosted instance is in the fleet, with no engine and no figure."""
    fleet = FleetView([Instance(id="h", model="m"), instance("a")])
    fleet.observe_snapshot(shown(), 0.0)
    fleet.age(0.0)
    ttfts, waits = fleet.first_tokens([1000, 1000], 0)
    assert ttfts[0] is None
    assert waits[0] is None
    assert ttfts[1] is not None


def test_prompt_that_cannot_run_is_infinitely_late() -> None:
    """A prompt beyond the engine's length gets an infinite estimate, not an error, beside the others."""
    fleet = fleet_of(shown())
    assert ttft_s(fleet, 0.0, prompt_tokens=10**6) == math.inf


def test_limits_of_the_engine_are_replayed_and_the_difference_told() -> None:
    """The snapshot's limits are the engine's own; where the configuration differs, the view says so."""
    small = LIMITS.__class__(
        max_num_batched_tokens=2048, max_num_seqs=8, max_model_len=4096, block_size=16, num_blocks=2000
    )
    fleet = fleet_of(shown(), one=instance("a", limits=small))
    fleet.age(0.0)
    assert engine_of(fleet).state().limits == LIMITS
    assert "max_num_batched_tokens" in (fleet.views[0].problem or "")


def test_state_that_no_engine_could_hold_is_told_not_replayed() -> None:
    """A snapshot that shows one request twice leaves the instance without a replay, with the reason in words."""
    fleet = fleet_of(shown(resident("x", 100, 100, 1), resident("x", 100, 100, 1)))
    assert ttft_s(fleet, 0.0) is None
    assert "request_id: 'x'" in (fleet.views[0].problem or "")


def test_a_request_is_booked_once() -> None:
    """Booking an id twice is an error that names it; releasing twice is not."""
    fleet = fleet_of(shown())
    book(fleet, "r1", "a")
    with pytest.raises(EngineInputError, match="r1"):
        book(fleet, "r1", "a")
    assert fleet.release("r1", 0.0)
    assert not fleet.release("r1", 0.0)
    assert fleet.views[0].num_outstanding == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["book", "release", "first", "snapshot"])), max_size=60))
def test_the_ledger_never_leaks(events: list[tuple[int, str]]) -> None:
    """T6: whatever the order of bookings, releases and snapshots, counts are never negative and end at zero."""
    fleet = fleet_of(shown())
    for number, (request, event) in enumerate(events):
        now = 0.01 * number
        fleet.age(now)
        if event == "book" and f"r{request}" not in fleet:
            book(fleet, f"r{request}", "a", now=now)
        elif event == "release":
            fleet.release(f"r{request}", now)
        elif event == "first":
            fleet.first_token_seen(f"r{request}", now)
        else:
            rows = [resident(f"cmpl-r{i}-0", 1000, 1000, 1) for i in range(request)]
            fleet.observe_snapshot(shown(*rows, sequence=number + 2, at_s=now), now)
        assert fleet.views[0].num_outstanding == len(fleet.views[0].ledger) >= 0
    for request in range(10):
        fleet.release(f"r{request}", 1.0)
    assert fleet.views[0].num_outstanding == 0


def test_an_aged_state_round_trips_through_its_own_state() -> None:
    """What the fleet replays can be taken out and replayed elsewhere with the same result."""
    fleet = fleet_of(shown(resident("d", 900, 901, 1, scheduled=1), at_s=0.0, batch_start_s=0.0))
    here = ttft_s(fleet, 0.004)
    state = engine_of(fleet).state()
    assert isinstance(state, EngineState)
    assert ReplayedEngine.from_state(state, FAST).ttft_s(1000) == pytest.approx(here, rel=1e-12)
