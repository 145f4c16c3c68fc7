"""Snapshots of asynchronous engines: the batch in flight stays one, the next is scheduled beside it, later comers wait.

The engine that publishes here is a replayed one, so what a router should see is known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from headway._core import ReplayedEngine
from headway.fleet import FleetView, LengthRule
from headway.types import EngineLimits, EngineRequest, Instance, Snapshot, SnapshotRequest, StepTime
from pools import book
from random_states import random_case
from replay_comparison import same_time

CLOCK = StepTime.linear(b0=0.01, b1=1e-5, b2=1e-7, b3=1e-9)
LIMITS = EngineLimits(
    max_num_batched_tokens=256,
    max_num_seqs=8,
    max_model_len=4096,
    block_size=16,
    num_blocks=1000,
    async_scheduling=True,
)


def published(engine: ReplayedEngine, at_s: float, limits: EngineLimits = LIMITS) -> Snapshot:
    """What a publisher shows of an engine whose newest batch starts now."""

    def row(r: EngineRequest) -> SnapshotRequest:
        return SnapshotRequest(
            r.request_id,
            r.prompt_tokens,
            r.computed_tokens,
            r.output_tokens,
            r.num_blocks or 0,
            r.max_tokens or 0,
            r.priority,
            r.arrival_s or 0.0,
            r.scheduled_tokens,
        )

    running, waiting = [row(r) for r in engine.running], [row(r) for r in engine.waiting]
    is_busy = any(r.scheduled_tokens for r in running)
    return Snapshot(
        instance_id="a",
        engine_version="vllm-0.32.0",
        engine_start=1,
        sequence=1,
        engine_s=at_s,
        limits=limits,
        running=running,
        waiting=waiting,
        free_blocks=engine.free_blocks,
        batch_start_s=at_s if is_busy else None,
    )


def fleet_of(snapshot: Snapshot, step_time: StepTime = CLOCK) -> FleetView:
    instance = Instance(id="a", model="m", engine="vllm-0.32", limits=snapshot.limits, step_time=step_time)
    fleet = FleetView([instance], length_rule=LengthRule("plain"), default_output_tokens=1e6)
    fleet.observe_snapshot(snapshot, snapshot.engine_s)
    return fleet


def busy_engine() -> ReplayedEngine:
    engine = ReplayedEngine(LIMITS, CLOCK)
    engine.submit(EngineRequest(request_id="r", prompt_tokens=100, target_output_tokens=50))
    engine.submit(EngineRequest(request_id="s", prompt_tokens=300, target_output_tokens=50))
    engine.step()
    return engine


def test_a_newcomer_waits_out_the_batch_in_flight_and_the_one_behind_it() -> None:
    """Sent 4 ms into a batch, it is in the third: the rest of this one, all of the next, then its own."""
    engine = busy_engine()  # in flight: 100 + 156 tokens; behind it: one decode, 144 tokens
    fleet = fleet_of(published(engine, 5.0))
    fleet.age(5.004)
    (ttft_s,), (wait_s,) = fleet.first_tokens([50], 0)
    engine.start_batch()
    in_flight_s = engine.residual_s
    answer = engine.first_token(50)
    assert wait_s == pytest.approx(answer.wait_s - 0.004)
    assert ttft_s == pytest.approx(answer.ttft_s - 0.004)
    assert in_flight_s + 0.01 < answer.wait_s < 2 * in_flight_s + 0.01


def test_a_request_sent_since_is_seen_by_the_batch_after_the_next() -> None:
    """The ledger's request joins behind what was scheduled when its batch started, not before."""
    engine = busy_engine()
    fleet = fleet_of(published(engine, 5.0))
    book(fleet, "later", "a", prompt_tokens=40, now=5.002)
    fleet.age(5.003)
    engine.start_batch()
    assert [r.request_id for r in engine.waiting] == []
    seen = fleet.views[0].engine
    assert seen is not None
    assert [r.request_id for r in seen.waiting] == ["later"]
    assert [(r.request_id, r.scheduled_tokens) for r in seen.running] == [("r", 1), ("s", 144)]


def test_a_released_request_leaves_its_share_of_the_batch_in_flight() -> None:
    """A cancelled one is gone from the replay, while the batch that holds it still takes its time."""
    engine = busy_engine()
    fleet = fleet_of(published(engine, 5.0))
    book(fleet, "s", "a", prompt_tokens=300, now=4.9)
    fleet.release("s", 5.0)
    fleet.age(5.0)
    seen = fleet.views[0].engine
    assert seen is not None
    assert [r.request_id for r in seen.running] == ["r"]
    engine.start_batch()
    assert seen.residual_s == pytest.approx(engine.residual_s)


def without_ends(requests: Sequence[EngineRequest]) -> list[EngineRequest]:
    return [
        msgspec.structs.replace(request, target_output_tokens=1_000_000, cached_tokens=0, shared_blocks=0)
        for request in requests
    ]


def test_what_a_snapshot_shows_is_what_the_engine_does() -> None:
    """On random asynchronous engines a newcomer's first token by the snapshot equals the engine's own."""
    num_busy = 0
    for seed in range(250):
        case = random_case(seed, policy="fcfs", ties=False)
        if not case.state.limits.async_scheduling:
            continue
        state = msgspec.structs.replace(
            case.state,
            running=without_ends(case.state.running),
            waiting=without_ends(case.state.waiting),
            residual_s=0.0,
        )
        engine = ReplayedEngine.from_state(state, case.step_time)
        fleet = fleet_of(published(engine, 5.0, state.limits), case.step_time)
        fleet.age(5.0)
        (ttft_s,), (wait_s,) = fleet.first_tokens([case.newcomer.prompt_tokens], 0)
        engine.start_batch()
        expected = engine.first_token(case.newcomer.prompt_tokens)
        assert ttft_s is not None
        assert wait_s is not None
        assert same_time(ttft_s, expected.ttft_s), f"seed {seed}"
        assert same_time(wait_s, expected.wait_s), f"seed {seed}"
        num_busy += bool(engine.residual_s)
    assert num_busy > 50
