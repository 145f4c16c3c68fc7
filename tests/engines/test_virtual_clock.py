"""The simulated engine's clock: batches follow each other in virtual time, whatever the process is doing meanwhile."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import numpy as np
import pytest

from headway._core import batch_time_s
from headway.engines import simulated
from headway.engines.simulated import FinishReason, Generation, SimulatedEngine, StepClock
from headway.errors import EngineInputError, SnapshotError
from headway.profiles import load_truth
from headway.types import EngineRequest, Snapshot

TRUTH = load_truth("h100-qwen3-8b")
NOISELESS = msgspec.structs.replace(TRUTH, step_noise=0.0, stall_probability=0.0, host_gap_s=(0.0, 0.0))


class Figures:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.first_tokens: list[tuple[float, float]] = []
        self.ended: list[FinishReason] = []

    def first_token(self, ttft_s: float, queue_s: float) -> None:
        self.first_tokens.append((ttft_s, queue_s))

    def preempted(self, num_requests: int) -> None: ...
    def step(self, prompt_tokens: int, output_tokens: int) -> None: ...

    def finished(self, reason: FinishReason) -> None:
        self.ended.append(reason)


def engine_at(now: list[float], **options: object) -> SimulatedEngine:
    settings: dict[str, object] = {"seed": 1, "instance_id": "e", "observer": Figures(), "clock": lambda: now[0]}
    return SimulatedEngine(NOISELESS, **(settings | options))  # type: ignore[arg-type]


def submit(
    engine: SimulatedEngine, arrival_s: float, *, prompt: int = 100, target: int = 5, name: str = "a"
) -> Generation:
    request = EngineRequest(request_id=name, prompt_tokens=prompt, target_output_tokens=target)
    return engine.submit(request, arrival_s=arrival_s, on_progress=lambda: None)


def step_s(*chunks: tuple[int, int, bool]) -> float:
    return batch_time_s(NOISELESS.step_time, list(chunks))


def test_an_idle_engine_starts_at_the_arrival() -> None:
    """The first batch of an idle engine starts when the request came, not when the process got to it."""
    now = [50.0]
    engine = engine_at(now)
    generation = submit(engine, 49.9)
    assert engine.begin() == pytest.approx(49.9 + step_s((100, 0, False)))
    engine.end()
    assert generation.num_tokens == 1
    assert generation.ttft_s == pytest.approx(step_s((100, 0, False)))
    assert generation.queue_s == 0.0


def test_lateness_of_the_process_does_not_add_up() -> None:
    """A batch starts at the virtual end of the one before, though the process woke a second after it."""
    now = [50.0]
    engine = engine_at(now)
    submit(engine, 50.0)
    first_end_s = engine.begin()
    assert first_end_s is not None
    now[0] = first_end_s + 1.0
    engine.end()
    assert engine.begin() == pytest.approx(first_end_s + step_s((1, 100, True)))


def test_a_request_joins_no_batch_that_started_before_it_came() -> None:
    """What arrived after the virtual start of a batch waits for the next one, also when the process is late."""
    now = [50.0]
    engine = engine_at(now)
    submit(engine, 50.0, name="a")
    first_end_s = engine.begin()
    assert first_end_s is not None
    engine.end()
    now[0] = first_end_s + 0.002  # late: the second batch has started already, virtually
    late = submit(engine, first_end_s + 0.001, name="b")
    second_end_s = engine.begin()
    assert second_end_s == pytest.approx(first_end_s + step_s((1, 100, True)))
    assert late.scheduled_tokens == 0
    engine.end()
    assert engine.begin() == pytest.approx(second_end_s + step_s((1, 101, True), (100, 0, False)))
    engine.end()
    assert late.queue_s == pytest.approx(second_end_s - (first_end_s + 0.001))
    assert late.ttft_s == pytest.approx(late.queue_s + step_s((1, 101, True), (100, 0, False)))


def test_a_request_that_came_before_the_virtual_start_joins() -> None:
    """What arrived while a batch was in flight is in the next one."""
    now = [50.0]
    engine = engine_at(now)
    submit(engine, 50.0, name="a")
    end_s = engine.begin()
    assert end_s is not None
    joined = submit(engine, end_s - 0.001, name="b")
    engine.end()
    engine.begin()
    assert joined.scheduled_tokens == 100


def test_time_scale_stretches_the_wall_and_not_the_figures() -> None:
    """With a scale of 10 a batch lasts ten times as long on the machine; the engine's own figures stay."""
    now = [50.0]
    engine = engine_at(now, time_scale=10.0)
    generation = submit(engine, 50.0)
    assert engine.begin() == pytest.approx(50.0 + 10 * step_s((100, 0, False)))
    engine.end()
    assert generation.ttft_s == pytest.approx(step_s((100, 0, False)))


def test_answers_end_by_their_own_or_at_a_limit() -> None:
    """An answer that reaches its length has stopped; one that was cut by max_tokens or the context says length."""
    now = [50.0]
    figures = Figures()
    limits = msgspec.structs.replace(NOISELESS.limits, max_model_len=110)
    truth = msgspec.structs.replace(NOISELESS, limits=limits)
    engine = SimulatedEngine(truth, seed=1, instance_id="e", observer=figures, clock=lambda: now[0])
    ends = {}
    for name, prompt, target, max_tokens in [("a", 50, 3, 10), ("b", 50, 30, 4), ("c", 105, 30, None), ("d", 50, 6, 6)]:
        request = EngineRequest(
            request_id=name, prompt_tokens=prompt, target_output_tokens=target, max_tokens=max_tokens
        )
        ends[name] = engine.submit(request, arrival_s=50.0, on_progress=lambda: None)
    while engine.begin() is not None:
        engine.end()
    assert {name: (end.num_tokens, end.finish_reason) for name, end in ends.items()} == {
        "a": (3, "stop"),
        "b": (4, "length"),
        "c": (5, "length"),
        "d": (6, "length"),
    }
    assert sorted(figures.ended) == ["length", "length", "length", "stop"]


def test_a_prompt_without_room_for_an_answer_is_refused() -> None:
    """The engine names the field of a request that it could never run."""
    engine = engine_at([50.0])
    with pytest.raises(EngineInputError, match="must be at most 131071") as caught:
        submit(engine, 50.0, prompt=131072)
    assert caught.value.field == "prompt_tokens"


def test_a_request_id_in_use_gets_a_number() -> None:
    """Two requests of one id at a time stay apart; once they are gone the id is free again."""
    now = [50.0]
    engine = engine_at(now)
    assert [submit(engine, 50.0, name="x").request_id for _ in range(3)] == ["x", "x-2", "x-3"]
    engine.close()
    assert submit(engine, 50.0, name="x").request_id == "x"


def test_cancelling_frees_blocks_at_once_and_twice_changes_nothing() -> None:
    """A cancel inside a batch frees the blocks before the batch ends; a second one is a no-op."""
    now = [50.0]
    engine = engine_at(now)
    generation = submit(engine, 50.0, prompt=1000)
    engine.begin()
    assert engine.view.free_blocks == 23893 - 63
    engine.cancel(generation)
    engine.cancel(generation)
    assert engine.view.free_blocks == 23893
    assert generation.finish_reason == "abort"
    engine.end()
    assert generation.num_tokens == 0
    assert engine.begin() is None


def test_the_drawn_durations_are_those_of_the_profile() -> None:
    """Noise, stalls and host gaps of 200,000 steps have the stated size; a seed repeats them, a name moves them."""
    clock = StepClock(TRUTH, seed=3)
    drawn = np.array([clock.duration_s(0.010) for _ in range(200_000)])
    logs = np.log((drawn - 0.0002) / 0.010)
    calm = logs[np.abs(logs) < 0.2]
    assert calm.std() == pytest.approx(0.0304, abs=0.0005)  # 3 % noise and gaps of ±0.1 ms on 10 ms
    assert calm.mean() == pytest.approx(0.0, abs=0.0005)
    assert (drawn > 0.015).mean() == pytest.approx(2e-4 * np.exp(-0.005 / 0.030), rel=0.5)
    again = StepClock(TRUTH, seed=3)
    assert [again.duration_s(0.010) for _ in range(100)] == drawn[:100].tolist()
    other = StepClock(load_truth("h100-qwen3-32b"), seed=3)
    assert [other.duration_s(0.010) for _ in range(100)] != drawn[:100].tolist()


async def test_an_idle_engine_keeps_publishing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats tell a router that an engine without requests is alive; each has a new sequence number."""
    monkeypatch.setattr(simulated, "HEARTBEAT_S", 0.001)
    seen: asyncio.Queue[Snapshot] = asyncio.Queue()

    class Sink:
        def publish(self, snapshot: Snapshot) -> None:
            seen.put_nowait(snapshot)

    engine = SimulatedEngine(TRUTH, seed=1, instance_id="e", observer=Figures(), sink=Sink())
    steps = asyncio.create_task(engine.run())
    sequences = [(await asyncio.wait_for(seen.get(), 10)).sequence for _ in range(4)]
    assert sequences == [1, 2, 3, 4]
    steps.cancel()
    with pytest.raises(asyncio.CancelledError):
        await steps


async def test_a_running_engine_gives_tokens_in_real_time() -> None:
    """Under the event loop every token is announced, in order, and none before its batch has ended."""
    engine = SimulatedEngine(TRUTH, seed=1, instance_id="e", observer=Figures(), time_scale=0.1)
    steps = asyncio.create_task(engine.run())
    progress: asyncio.Queue[int] = asyncio.Queue()
    request = EngineRequest(request_id="a", prompt_tokens=100, target_output_tokens=4)
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    generation = engine.submit(
        request, arrival_s=start_s, on_progress=lambda: progress.put_nowait(generation.num_tokens)
    )
    assert [await asyncio.wait_for(progress.get(), 10) for _ in range(4)] == [1, 2, 3, 4]
    assert loop.time() - start_s >= 0.1 * 4 * 0.006  # four steps of 7 ms, scaled
    assert generation.finish_reason == "stop"
    steps.cancel()
    with pytest.raises(asyncio.CancelledError):
        await steps


def test_a_snapshot_too_large_is_warned_of_once_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """When a snapshot cannot be published the engine says so once, not on every step."""

    class Full:
        def publish(self, snapshot: Snapshot) -> None:
            raise SnapshotError("too large")

    now = [50.0]
    engine = engine_at(now, sink=Full())
    generation = submit(engine, 50.0)
    with caplog.at_level(logging.WARNING):
        while engine.begin() is not None:
            engine.end()
    assert generation.finish_reason == "stop"
    assert [record.getMessage() for record in caplog.records] == ["snapshot not published: too large"]


def test_an_engine_that_cannot_follow_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """More than a second behind its virtual clock the engine warns, at most every ten seconds."""
    now = [50.0]
    engine = engine_at(now)
    submit(engine, 50.0, target=20)
    now[0] = 53.0
    with caplog.at_level(logging.WARNING):
        while engine.begin() is not None:
            engine.end()
    assert len(caplog.records) == 1
    assert "too slow" in caplog.records[0].getMessage()


def test_a_prompt_that_begins_like_an_earlier_one_prefills_the_rest() -> None:
    """With a prefix cache the second of two prompts computes what differs, and of an equal one all but a last block."""
    now = [50.0]
    limits = msgspec.structs.replace(NOISELESS.limits, prefix_caching=True)
    truth = msgspec.structs.replace(NOISELESS, limits=limits)
    engine = SimulatedEngine(truth, seed=1, instance_id="e", observer=Figures(), clock=lambda: now[0])
    blocks = list(range(100))
    waits_s = []
    for name, held in (("first", blocks), ("longer", [*blocks, 100, 101]), ("equal", blocks), ("other", [500, 501])):
        request = EngineRequest(request_id=name, prompt_tokens=16 * len(held), target_output_tokens=1)
        generation = engine.submit(request, arrival_s=now[0], on_progress=lambda: None, prefix_blocks=held)
        end_s = engine.begin()
        assert end_s is not None
        now[0] = end_s
        engine.end()
        assert generation.ttft_s is not None
        waits_s.append(generation.ttft_s)
    expected = [(1600, 0, False), (32, 1600, False), (16, 1584, False), (32, 0, False)]
    assert waits_s == pytest.approx([step_s(chunk) for chunk in expected])


def test_what_the_cache_lost_has_to_be_computed_again() -> None:
    """The cache has the engine's blocks and no more: where others needed the room, a prompt is prefilled anew."""
    now = [50.0]
    limits = msgspec.structs.replace(NOISELESS.limits, prefix_caching=True, num_blocks=121, max_model_len=1900)
    truth = msgspec.structs.replace(NOISELESS, limits=limits)
    engine = SimulatedEngine(truth, seed=1, instance_id="e", observer=Figures(), clock=lambda: now[0])
    ttfts_s = []
    for name, first in (("a", 0), ("b", 1000), ("a again", 0), ("a a third time", 0)):
        blocks = list(range(first, first + 100))
        request = EngineRequest(request_id=name, prompt_tokens=1600, target_output_tokens=1)
        generation = engine.submit(request, arrival_s=now[0], on_progress=lambda: None, prefix_blocks=blocks)
        end_s = engine.begin()
        assert end_s is not None
        now[0] = end_s
        engine.end()
        ttfts_s.append(generation.ttft_s)
    # b took 80 of a's blocks beside the 20 that were free, a's tail first: 20 are left.
    expected = [(1600, 0, False), (1600, 0, False), (1280, 320, False), (16, 1584, False)]
    assert ttfts_s == pytest.approx([step_s(chunk) for chunk in expected])


def test_an_engine_that_schedules_ahead_is_not_simulated() -> None:
    """Its batches overlap, which the virtual clock does not know."""
    limits = msgspec.structs.replace(NOISELESS.limits, async_scheduling=True)
    truth = msgspec.structs.replace(NOISELESS, limits=limits)
    with pytest.raises(EngineInputError, match="async_scheduling"):
        SimulatedEngine(truth, seed=1, instance_id="e", observer=Figures())
