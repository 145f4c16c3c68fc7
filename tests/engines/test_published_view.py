"""What a simulated engine publishes: the view after scheduling, which completed by the batch's outcome is its state."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from headway._core import ReplayedEngine
from headway.engines.simulated import FinishReason, Generation, SimulatedEngine
from headway.profiles import TruthProfile, load_truth
from headway.types import EngineLimits, EngineRequest, EngineState, Snapshot, SnapshotRequest


class Silent:
    """An observer that listens to nothing."""

    def first_token(self, ttft_s: float, queue_s: float) -> None: ...
    def preempted(self, num_requests: int) -> None: ...
    def step(self, prompt_tokens: int, output_tokens: int) -> None: ...
    def finished(self, reason: FinishReason) -> None: ...


class Recorder:
    """A sink that keeps the last snapshot."""

    last: Snapshot

    def publish(self, snapshot: Snapshot) -> None:
        self.last = snapshot


def truth_with(limits: EngineLimits) -> TruthProfile:
    return msgspec.structs.replace(load_truth("h100-qwen3-8b"), limits=limits)


def random_limits(rng: random.Random) -> EngineLimits:
    block_size = rng.choice([4, 16])
    return EngineLimits(
        max_num_batched_tokens=rng.choice([16, 64, 512]),
        max_num_seqs=rng.choice([2, 8, 32]),
        max_model_len=200,
        block_size=block_size,
        num_blocks=rng.choice([200, 300, 1000]) // block_size + 5,
        long_prefill_token_threshold=rng.choice([0, 0, 12]),
        policy=rng.choice(["fcfs", "priority"]),  # type: ignore[arg-type]
        watermark=rng.choice([0.0, 0.05]),
        reserve_full_isl=rng.choice([True, False]),
        prefix_caching=rng.choice([True, False]),
    )


def completed(snapshot: Snapshot, targets: dict[str, int]) -> EngineState:
    """The snapshot after the batch in flight: requests whose tokens are all computed get one output, ended ones go."""
    free_blocks = snapshot.free_blocks
    running = []
    for request in snapshot.running:
        outputs = request.output_tokens
        if request.computed_tokens == request.prompt_tokens + outputs:
            outputs += 1
            if outputs >= min(targets[request.request_id], request.max_tokens):
                free_blocks += request.num_blocks
                continue
        running.append(engine_request(request, outputs, targets))
    waiting = [engine_request(request, request.output_tokens, targets) for request in snapshot.waiting]
    return EngineState(limits=snapshot.limits, running=running, waiting=waiting, free_blocks=free_blocks)


def engine_request(request: SnapshotRequest, output_tokens: int, targets: dict[str, int]) -> EngineRequest:
    return EngineRequest(
        request_id=request.request_id,
        prompt_tokens=request.prompt_tokens,
        computed_tokens=request.computed_tokens,
        output_tokens=output_tokens,
        target_output_tokens=targets[request.request_id],
        max_tokens=request.max_tokens,
        priority=request.priority,
        arrival_s=request.arrival_s,
        num_blocks=request.num_blocks,
        cached_tokens=request.cached_tokens,
    )


def assert_completes_to(snapshot: Snapshot, engine: ReplayedEngine, targets: dict[str, int]) -> None:
    expected, state = completed(snapshot, targets), engine.state()
    assert without_sharing(expected.running) == without_sharing(state.running)
    # What those behind the head of the queue would find may be old news.
    assert without_sharing(expected.waiting, cached_tokens=0) == without_sharing(state.waiting, cached_tokens=0)
    assert expected.free_blocks is not None
    assert state.free_blocks is not None
    if snapshot.limits.prefix_caching:  # blocks that others share with those who end do not come free
        assert snapshot.free_blocks <= state.free_blocks <= expected.free_blocks
    else:
        assert expected.free_blocks == state.free_blocks


def without_sharing(requests: Sequence[EngineRequest], **more: int) -> list[EngineRequest]:
    """A snapshot counts a shared block at each of those who hold it."""
    return [msgspec.structs.replace(request, shared_blocks=0, **more) for request in requests]


def play(seed: int) -> tuple[int, int]:
    """A random workload with arrivals inside and between batches and cancels; the numbers of steps and preemptions."""
    rng = random.Random(seed)
    now = [100.0]
    recorder = Recorder()
    engine = SimulatedEngine(
        truth_with(random_limits(rng)),
        seed=seed,
        instance_id="e",
        observer=Silent(),
        sink=recorder,
        clock=lambda: now[0],
    )
    targets: dict[str, int] = {}
    alive: list[Generation] = []
    num_steps = num_preempted = 0

    def arrive() -> None:
        request = EngineRequest(
            request_id=f"cmpl-{len(targets)}-0",
            prompt_tokens=rng.randint(1, 150),
            target_output_tokens=rng.randint(1, 80),
            max_tokens=rng.choice([None, 5, 60]),
            priority=rng.randint(0, 2),
        )
        targets[request.request_id] = request.target_output_tokens
        family = rng.randint(1, 3)  # prompts of a family begin alike, and end alike where they are as long
        blocks = [100 * family + number for number in range(request.prompt_tokens // engine.truth.limits.block_size)]
        alive.append(engine.submit(request, arrival_s=now[0], on_progress=lambda: None, prefix_blocks=blocks))

    while num_steps < 150:
        if rng.random() < 0.4:
            arrive()
        end_s = engine.begin()
        if end_s is None:
            assert recorder.last.batch_start_s is None
            now[0] += 0.01
            continue
        num_steps += 1
        num_preempted += sum(request.output_tokens > 0 for request in recorder.last.waiting)
        assert recorder.last.batch_start_s is not None
        assert_completes_to(recorder.last, engine._engine, targets)
        if rng.random() < 0.1:
            engine.cancel(rng.choice(alive))
            assert_completes_to(recorder.last, engine._engine, targets)
        now[0] = end_s - 1e-4
        if rng.random() < 0.2:
            before = len(recorder.last.waiting)
            arrive()  # inside the batch: queued behind it, and published at once
            assert len(recorder.last.waiting) == before + 1
            assert recorder.last.batch_start_s is not None
        now[0] = end_s
        engine.end()
        alive = [generation for generation in alive if generation.finish_reason is None] or alive[-1:]
    return num_steps, num_preempted


def test_completing_the_published_batch_gives_the_engine_state() -> None:
    """Over random workloads, both policies, tight blocks, prefix caches and cancels: running, waiting and free blocks
    are exact."""
    played = [play(seed) for seed in range(60)]
    assert sum(num_steps for num_steps, _ in played) == 60 * 150
    assert sum(num_preempted for _, num_preempted in played) > 200  # preempted requests were among the waiting


@pytest.fixture
def idle() -> tuple[SimulatedEngine, Recorder]:
    recorder = Recorder()
    truth = load_truth("h100-qwen3-8b")
    engine = SimulatedEngine(truth, seed=1, instance_id="e", observer=Silent(), sink=recorder, clock=lambda: 5.0)
    return engine, recorder


def test_a_prefill_in_flight_is_shown_as_computed_without_its_output(idle: tuple[SimulatedEngine, Recorder]) -> None:
    """During the batch a newcomer runs, its whole prompt computed and scheduled, its first output still to come."""
    engine, recorder = idle
    request = EngineRequest(request_id="cmpl-a-0", prompt_tokens=1000, target_output_tokens=3, max_tokens=50)
    engine.submit(request, arrival_s=4.0, on_progress=lambda: None)
    assert engine.begin() is not None
    assert recorder.last.running == [SnapshotRequest("cmpl-a-0", 1000, 1000, 0, 63, 50, 0, 4.0, 1000)]
    assert recorder.last.waiting == []
    assert recorder.last.batch_start_s == 4.0
    assert recorder.last.free_blocks == 23894 - 1 - 63
    assert recorder.last.engine_version == "vllm-0.32.0"
    assert recorder.last.limits == load_truth("h100-qwen3-8b").limits


def test_an_engine_that_became_idle_publishes_itself_empty(idle: tuple[SimulatedEngine, Recorder]) -> None:
    """After the last answer a snapshot without requests follows, all blocks free, sequence risen."""
    engine, recorder = idle
    request = EngineRequest(request_id="cmpl-a-0", prompt_tokens=1000, target_output_tokens=1)
    engine.submit(request, arrival_s=4.0, on_progress=lambda: None)
    engine.begin()
    in_flight = recorder.last.sequence
    engine.end()
    assert engine.begin() is None
    assert (recorder.last.running, recorder.last.waiting) == ([], [])
    assert recorder.last.batch_start_s is None
    assert recorder.last.free_blocks == 23894 - 1
    assert recorder.last.sequence == in_flight + 1
