"""The publisher inside vLLM, on a scheduler shaped like vLLM's: what is shown when, and what never reaches the engine.

The real scheduler runs with the same publisher in ``test_vllm_scheduler.py``.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.calibrate.read_log import read_batches, read_step_log
from headway.engines import vllm, vllm_publisher
from headway.engines.vllm_limits import unchecked
from headway.engines.vllm_outlets import RETRY_S, Outlet, PublisherOptions
from headway.engines.vllm_state import CHECKED_VERSIONS
from headway.errors import ConfigError, SnapshotError
from headway.snapshot import wire
from headway.snapshot.shared_memory import SharedMemoryReader, segment_path
from headway.testing import segment_name
from headway.types import EngineLimits, Snapshot, SnapshotRequest
from scripted_scheduler import BLOCK_SIZE, NUM_BLOCKS, ScriptedRequest, ScriptedScheduler


class PublishingScripted(vllm.Publishing, ScriptedScheduler):
    """What ``headway.engines.vllm`` makes of vLLM's scheduler, made of the scripted one."""


class AsyncScheduler(ScriptedScheduler):
    """Bears the name by which vLLM's asynchronous scheduler is told from the other."""


class AsyncPublishingScripted(vllm.Publishing, AsyncScheduler):
    """The asynchronous flavour."""


class Sink:
    """A transport in memory, which fails on demand."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.trouble: Exception | None = None
        self.is_closed = False

    def write(self, data: bytes) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.snapshots.append(wire.decode(data))

    def close(self) -> None:
        self.is_closed = True

    def new(self) -> list[Snapshot]:
        """What came since the last look."""
        found, self.snapshots = self.snapshots, []
        return found


Start = Callable[..., tuple[Any, Sink]]


@pytest.fixture(autouse=True)
def installed_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that says it is the vLLM whose scheduler was checked."""
    module = ModuleType("vllm")
    module.__version__ = f"{CHECKED_VERSIONS[-1]}+cpu"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name in ("INSTANCE", "SNAPSHOT_SHARED_MEMORY", "SNAPSHOT_ZEROMQ", "STEP_LOG", "STEP_LOG_REQUESTS"):
        monkeypatch.delenv(f"HEADWAY_{name}", raising=False)
    return module


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts publishing schedulers whose one transport is a sink in memory."""
    sink = Sink()

    def outlets(options: PublisherOptions) -> list[Outlet]:
        return [Outlet("memory", lambda: sink, lambda: 0.0)] if options.publishes else []

    def start_one(kind: type = PublishingScripted, **options: Any) -> tuple[Any, Sink]:
        monkeypatch.setenv("HEADWAY_SNAPSHOT_SHARED_MEMORY", "unused")
        return kind(is_async=kind is AsyncPublishingScripted, **options), sink

    monkeypatch.setattr(vllm_publisher, "outlets", outlets)
    return start_one


def step(scheduler: Any) -> None:
    """One step of a synchronous engine."""
    scheduler.update_from_output(scheduler.schedule(), None)


def test_without_settings_it_is_the_engines_own_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    """No variable set: no publisher is made, nothing is said, and steps go as ever."""
    scheduler = PublishingScripted()
    assert scheduler._headway is None
    scheduler.add_request(ScriptedRequest("a"))
    for _ in range(6):
        step(scheduler)
    assert scheduler.finish_requests(["a"], None) == []
    scheduler.shutdown()
    assert scheduler.is_shut_down
    assert not scheduler.requests
    assert caplog.records == []


def test_a_starting_engine_shows_itself(start: Start) -> None:
    """Before the first request there is a snapshot: limits, version, all blocks free, nothing unchecked."""
    _, sink = start()
    (shown,) = sink.new()
    assert shown.limits == EngineLimits(
        max_num_batched_tokens=512, max_num_seqs=64, max_model_len=4096, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
    )
    assert (shown.engine_version, shown.instance_id, shown.free_blocks) == ("vllm-0.32.0", "unused", NUM_BLOCKS - 1)
    assert (shown.running, shown.waiting, shown.batch_start_s, shown.unchecked) == ([], [], None, [])


def test_a_snapshot_after_schedule_shows_the_batch_in_flight(start: Start) -> None:
    """Computed tokens count the batch, outputs do not; the third of two seats waits; arrivals are monotonic times."""
    scheduler, sink = start()
    for name in "abc":
        scheduler.add_request(ScriptedRequest(name, 40, max_tokens=9))
    sink.new()
    scheduler.schedule()
    (shown,) = sink.new()
    arrival_s = shown.running[0].arrival_s
    assert [request.request_id for request in shown.running] == ["a", "b"]
    assert shown.running[0] == SnapshotRequest("a", 40, 40, 0, 3, 9, 0, arrival_s, 40, 0)
    assert shown.waiting == [SnapshotRequest("c", 40, 0, 0, 0, 9, 0, arrival_s, 0, 0)]
    assert shown.batch_start_s is not None
    assert shown.batch_start_s <= shown.engine_s
    assert shown.free_blocks == NUM_BLOCKS - 1 - 6


def test_an_update_is_shown_when_somebody_ended_and_not_when_all_run_on(start: Start) -> None:
    """A token more for each of the batch is what its snapshot said would come; an end is not."""
    scheduler, sink = start()
    scheduler.add_request(ScriptedRequest("a", max_tokens=2))
    scheduler.add_request(ScriptedRequest("b", max_tokens=9))
    sink.new()
    step(scheduler)
    assert len(sink.new()) == 1
    step(scheduler)
    in_flight, after = sink.new()
    assert [request.request_id for request in in_flight.running] == ["a", "b"]
    assert [(r.request_id, r.output_tokens, r.scheduled_tokens) for r in after.running] == [("b", 2, 0)]
    assert after.batch_start_s is None
    assert after.sequence == in_flight.sequence + 1


def test_the_end_of_the_last_request_shows_an_idle_engine(start: Start) -> None:
    """Nothing runs, nothing is in flight, all blocks are free; the empty call that follows is no news."""
    scheduler, sink = start()
    scheduler.add_request(ScriptedRequest("a", max_tokens=1))
    step(scheduler)
    last = sink.new()[-1]
    assert (last.running, last.waiting, last.batch_start_s, last.free_blocks) == ([], [], None, NUM_BLOCKS - 1)
    step(scheduler)
    assert sink.new() == []


def test_what_was_cancelled_is_gone_with_the_next_call(start: Start) -> None:
    """A request taken out of an engine that has nothing else shows with the empty call that follows."""
    scheduler, sink = start()
    scheduler.add_request(ScriptedRequest("a", max_tokens=9))
    step(scheduler)
    scheduler.finish_requests(["a"], "aborted")
    sink.new()
    step(scheduler)
    (shown,) = sink.new()
    assert shown.running == []


def test_a_preempted_request_waits_without_blocks_at_its_place(start: Start) -> None:
    """It stands first, its outputs kept, its blocks free again."""
    scheduler, sink = start()
    for name in "abc":
        scheduler.add_request(ScriptedRequest(name, 40, max_tokens=9))
    step(scheduler)
    scheduler.max_running = 1
    scheduler.preempt(scheduler.requests["b"])
    sink.new()
    step(scheduler)
    (shown,) = sink.new()
    assert [(r.request_id, r.computed_tokens, r.output_tokens, r.num_blocks) for r in shown.waiting] == [
        ("b", 0, 1, 0),
        ("c", 0, 0, 0),
    ]


def test_two_batches_in_flight_are_shown_one_at_a_time(start: Start) -> None:
    """An asynchronous engine shows the batch that runs, and what arrived while it ran, never the batch behind it."""
    scheduler, sink = start(AsyncPublishingScripted)
    for name in "ab":
        scheduler.add_request(ScriptedRequest(name, max_tokens=9))
    first = scheduler.schedule()
    assert len(sink.new()) == 2  # at the start, and the first batch alone
    second = scheduler.schedule()
    assert sink.new() == []
    scheduler.update_from_output(first, None)
    (shown,) = sink.new()
    assert [(r.computed_tokens, r.output_tokens, r.scheduled_tokens) for r in shown.running] == [(21, 1, 1)] * 2
    scheduler.add_request(ScriptedRequest("c"))
    third = scheduler.schedule()
    (shown,) = sink.new()
    assert [(r.computed_tokens, r.output_tokens, r.scheduled_tokens) for r in shown.running] == [(21, 1, 1)] * 2
    assert [r.request_id for r in shown.waiting] == ["c"]
    scheduler.update_from_output(second, None)
    (shown,) = sink.new()
    assert [(r.computed_tokens, r.output_tokens, r.scheduled_tokens) for r in shown.running] == [(22, 2, 1)] * 2
    assert shown.batch_start_s is not None
    scheduler.update_from_output(third, None)
    assert sink.new() == []  # all run on, and nothing is in flight that a snapshot would have to tell of


def test_a_queue_by_priority_is_shown_in_its_order(start: Start) -> None:
    """However the heap lies, the sooner comes first: by priority, then by arrival, then by name."""
    scheduler, sink = start(policy="priority")
    for name, priority, arrival_time in (
        ("d", 1, 5.0),
        ("c", 0, 9.0),
        ("b", 1, 5.0),
        ("a", 1, 4.0),
        ("e", -(2**40), 9.0),
    ):
        scheduler.add_request(ScriptedRequest(name, priority=priority, arrival_time=1.7e9 + arrival_time))
    scheduler.max_running = 0
    scheduler._headway.publish()
    shown = sink.new()[-1]
    assert [r.request_id for r in shown.waiting] == ["e", "c", "a", "b", "d"]


def test_tokens_in_the_prefix_cache_are_shown(start: Start) -> None:
    """A waiting request shows what it would find now, also when that changed; a running one what it found."""
    scheduler, sink = start(prefix_caching=True)
    scheduler.cached_blocks = 1
    for name in "abc":
        scheduler.add_request(ScriptedRequest(name, 40, max_tokens=9))
    scheduler.schedule()
    shown = sink.new()[-1]
    assert shown.limits.prefix_caching
    assert [r.cached_tokens for r in (*shown.running, *shown.waiting)] == [16, 16, 16]
    scheduler.cached_blocks, scheduler.held_blocks = 2, 1
    scheduler._headway.publish()
    shown = sink.new()[-1]
    assert [r.cached_tokens for r in (*shown.running, *shown.waiting)] == [16, 16, 32]
    assert [r.shared_blocks for r in (*shown.running, *shown.waiting)] == [0, 0, 1]


def test_a_failing_transport_is_counted_and_said_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The engine steps on; the log has one line for the failure and one for the recovery."""
    scheduler, sink = start()
    scheduler.add_request(ScriptedRequest("a", max_tokens=20))
    sink.trouble = SnapshotError("no room")
    for _ in range(5):
        step(scheduler)
    (outlet,) = scheduler._headway.outlets
    assert outlet.num_failed == 5
    sink.trouble = None
    step(scheduler)
    assert sink.new()[-1].running[0].output_tokens == 5
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert texts == [
        "no snapshots on memory, serving goes on: no room",
        "snapshots go out on memory again, after 5 that did not",
    ]


def test_what_cannot_be_encoded_is_counted_and_said_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A request id that is no text keeps snapshots back while its request is there, and nothing else."""
    scheduler, sink = start()
    scheduler.add_request(ScriptedRequest("\udc80", max_tokens=3))
    sink.new()
    for _ in range(3):
        step(scheduler)
    assert scheduler._headway.num_failed == 3  # the three batches; the end shows an idle engine again
    assert sink.new()[-1].running == []
    assert not scheduler.requests
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "Headway failed in publish, serving goes on: UnicodeEncodeError" in warnings[0].getMessage()


def test_a_transport_is_tried_again_later_but_not_a_wrong_name(caplog: pytest.LogCaptureFixture) -> None:
    """A segment that another engine still holds may be free in a moment; a name that is none never will."""
    now, attempts, sink = [0.0], [], Sink()

    def connect() -> Sink:
        attempts.append(now[0])
        if now[0] < 2 * RETRY_S:
            raise SnapshotError("in use by a running engine")
        return sink

    outlet = Outlet("segment", connect, lambda: now[0])
    data = wire.encode(_idle())
    while now[0] < 3 * RETRY_S:
        outlet.write(data)
        now[0] += 1.0
    assert attempts == [0.0, RETRY_S, 2 * RETRY_S]
    assert outlet.num_failed == 2 * RETRY_S
    assert len(sink.new()) == RETRY_S
    outlet.close()
    assert sink.is_closed

    def refuse() -> Sink:
        attempts.append(now[0])
        raise ConfigError("no such name")

    attempts.clear()
    wrong = Outlet("segment", refuse, lambda: now[0])
    for _ in range(100):
        wrong.write(data)
        now[0] += 1.0
    assert len(attempts) == 1
    assert len([record for record in caplog.records if "no snapshots" in record.getMessage()]) == 2


def _idle() -> Snapshot:
    return Snapshot(
        instance_id="a", engine_version="vllm-0.32.0", engine_start=1, sequence=1, engine_s=1.0, running=[], waiting=[],
        limits=EngineLimits(max_num_batched_tokens=8, max_num_seqs=8, max_model_len=8, block_size=8, num_blocks=8),
        free_blocks=7,
    )  # fmt: skip


def test_a_segment_is_opened_named_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real transport: the reader gets the engine by the name it was given; the end unlinks the segment."""
    segment = segment_name()
    monkeypatch.setenv("HEADWAY_SNAPSHOT_SHARED_MEMORY", segment)
    monkeypatch.setenv("HEADWAY_INSTANCE", "gpu-a")
    scheduler = PublishingScripted()
    reader = SharedMemoryReader(segment)
    shown = reader.poll()
    assert shown is not None
    assert shown.instance_id == "gpu-a"
    scheduler.shutdown()
    assert scheduler.is_shut_down
    assert not segment_path(segment).exists()
    reader.close()


@pytest.mark.parametrize("variable", ["SHARED_MEMORY", "ZEROMQ"])
def test_a_wrong_place_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    """A name or address that is none is said once at the start; the engine serves."""
    monkeypatch.setenv(f"HEADWAY_SNAPSHOT_{variable}", "no/such place")
    scheduler = PublishingScripted()
    scheduler.add_request(ScriptedRequest("a"))
    for _ in range(6):
        step(scheduler)
    scheduler.shutdown()
    assert not scheduler.requests
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "serving goes on" in caplog.text


def test_an_unknown_version_says_so_at_start_and_in_every_snapshot(
    start: Start, installed_vllm: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """What was never compared with the real scheduler does not pass as checked."""
    installed_vllm.__version__ = "0.33.0"  # type: ignore[attr-defined]
    _, sink = start()
    (shown,) = sink.new()
    assert shown.engine_version == "vllm-0.33.0"
    assert shown.unchecked == ["vLLM 0.33.0 (only on 0.32.0)"]
    assert "never checked on vLLM 0.33.0" in caplog.text


def test_features_without_a_rule_are_named() -> None:
    """Each feature that changes batches is named, and so is one that this vLLM does not tell of."""
    scheduler = ScriptedScheduler()
    assert unchecked(scheduler, "0.32.0", is_async_class=False) == []
    scheduler.num_spec_tokens, scheduler.use_pp = 3, True
    del scheduler.connector
    assert unchecked(scheduler, "0.32.0", is_async_class=True) == [
        "async_scheduling off with the other scheduler class (use PublishingScheduler)",
        "speculative decoding",
        "a KV connector (this vLLM does not tell)",
        "pipeline parallelism",
    ]


def test_a_scheduler_of_another_shape_serves_without_a_publisher(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that keeps its state elsewhere is said to publish nothing, and works."""
    monkeypatch.setattr(ScriptedScheduler, "requests", None, raising=False)
    monkeypatch.setattr(vllm_publisher, "read_limits", lambda scheduler: scheduler.no_such_limit)
    scheduler, _ = start()
    assert scheduler._headway is None
    scheduler.add_request(ScriptedRequest("a"))
    step(scheduler)
    assert "publishes nothing, serving goes on: AttributeError" in caplog.text


def test_steps_are_logged_for_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line per batch with its sums and no name of a request, readable by ``headway calibrate``."""
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("HEADWAY_STEP_LOG", str(path))
    scheduler = PublishingScripted()
    scheduler.add_request(ScriptedRequest("secret", 40, max_tokens=3))
    for _ in range(5):
        step(scheduler)
    scheduler.shutdown()
    log = read_step_log(path)
    assert (log.header.engine_version, log.header.model) == ("vllm-0.32.0", "tiny")
    assert log.steps.column("tokens").tolist() == [40.0, 1.0, 1.0]
    assert log.steps.column("decodes").tolist() == [0.0, 1.0, 1.0]
    assert log.steps.column("context").tolist() == [0.0, 40.0, 41.0]
    assert log.steps.finished is not None
    assert log.steps.finished.tolist() == [0.0, 0.0, 1.0]
    assert b"secret" not in path.read_bytes()


def test_steps_are_logged_with_their_requests_on_demand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arrivals stand in the line of the first call that saw them, ends with true lengths, cancels where they were."""
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("HEADWAY_STEP_LOG", str(path))
    monkeypatch.setenv("HEADWAY_STEP_LOG_REQUESTS", "1")
    scheduler = PublishingScripted(prefix_caching=True)
    scheduler.cached_blocks = 1
    scheduler.add_request(ScriptedRequest("a", 40, max_tokens=2))
    step(scheduler)
    scheduler.add_request(ScriptedRequest("b", 20, max_tokens=9, priority=3))
    step(scheduler)
    scheduler.finish_requests(["b"], "aborted")
    step(scheduler)
    scheduler.add_request(ScriptedRequest("c", max_tokens=1))
    for _ in range(2):
        step(scheduler)
    scheduler.shutdown()
    _, batches = read_batches(path)
    assert [batch.scheduled for batch in batches] == [[("a", 24)], [("a", 1), ("b", 4)], [("c", 4)]]
    assert [[arrival.request_id for arrival in batch.arrivals] for batch in batches] == [["a"], ["b"], ["c"]]
    assert [batch.cancelled for batch in batches] == [[], [], ["b"]]
    assert [(gone.request_id, gone.output_tokens) for gone in batches[2].cancelled_ends] == [("b", 1)]
    assert [[(end.request_id, end.output_tokens) for end in batch.ended] for batch in batches] == [
        [],
        [("a", 2)],
        [("c", 1)],
    ]
    assert [batch.cached for batch in batches] == [[("a", 16)], [("b", 16)], [("c", 16)]]
    arrival = batches[1].arrivals[0]
    assert (arrival.prompt_tokens, arrival.max_tokens, arrival.priority, len(arrival.prompt_blocks)) == (20, 9, 3, 1)
    assert len(batches[0].arrivals[0].prompt_blocks) == 2


@pytest.mark.parametrize("place", ["missing/steps.jsonl", "/dev/full"])
def test_a_log_that_cannot_be_written_leaves_the_engine_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, place: str
) -> None:
    """A directory that is not there, a disk that is full: said, given up, and the engine serves."""
    monkeypatch.setenv("HEADWAY_STEP_LOG", str(tmp_path / place))
    scheduler = PublishingScripted()
    for number in range(200):
        scheduler.add_request(ScriptedRequest(str(number), max_tokens=5))
    while scheduler.requests:
        step(scheduler)
    step(scheduler)
    scheduler.shutdown()
    assert scheduler.is_shut_down
    assert "serving goes on" in caplog.text
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 3


def test_importing_it_loads_no_gateway_no_core_and_no_vllm() -> None:
    """It lives in somebody else's process: neither servers nor estimators come with it, nor vLLM before it is asked."""
    program = "import headway.engines.vllm, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    unwanted = {"aiohttp", "uvicorn", "starlette", "headway.router", "headway.estimate", "headway.fleet", "vllm"}
    unwanted |= {"headway.config", "headway.gateway", "torch", "numpy", "zmq", "yaml"}
    assert loaded & unwanted == set()


def test_there_is_no_other_scheduler_class() -> None:
    """A misspelt class is the error that vLLM shows for any."""
    with pytest.raises(AttributeError, match="no attribute 'PublishingSheduler'"):
        vllm.PublishingSheduler  # noqa: B018 - the access is what is tested
