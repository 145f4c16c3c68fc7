"""Snapshots of engines with a prefix cache: blocks that several hold count once, and newcomers find what is there.

The engine that publishes here is a replayed one with a block pool, so what a router should see is known exactly.
"""

from __future__ import annotations

import random

import pytest

from headway._core import ReplayedEngine
from headway.fleet import FleetView, LengthRule
from headway.fleet.prefix import PrefixStore
from headway.types import EngineLimits, EngineRequest, Instance, Snapshot, SnapshotRequest, StepTime
from pools import book
from replay_comparison import same_time

CLOCK = StepTime.linear(b0=0.01, b1=1e-5, b2=1e-7, b3=1e-9)
SYSTEM = list(range(1, 41))  # the blocks of a system prompt of 640 tokens


def limits_of(num_blocks: int, *, async_scheduling: bool = False) -> EngineLimits:
    return EngineLimits(
        max_num_batched_tokens=1024,
        max_num_seqs=32,
        max_model_len=4096,
        block_size=16,
        num_blocks=num_blocks,
        prefix_caching=True,
        async_scheduling=async_scheduling,
    )


def published(engine: ReplayedEngine) -> Snapshot:
    """What a publisher shows of an engine between steps, at 5 s: a shared block at each of those who hold it."""

    def row(r: EngineRequest, *, runs: bool) -> SnapshotRequest:
        return SnapshotRequest(
            r.request_id,
            r.prompt_tokens,
            r.computed_tokens,
            r.output_tokens,
            r.num_blocks or 0,
            r.target_output_tokens,
            r.priority,
            r.arrival_s or 0.0,
            r.scheduled_tokens,
            r.cached_tokens,
            0 if runs else r.shared_blocks,
        )

    state = engine.state()
    return Snapshot(
        instance_id="a",
        engine_version="vllm-0.32.0",
        engine_start=1,
        sequence=1,
        engine_s=5.0,
        limits=state.limits,
        running=[row(r, runs=True) for r in state.running],
        waiting=[row(r, runs=False) for r in state.waiting],
        free_blocks=engine.free_blocks,
    )


def fleet_of(snapshot: Snapshot) -> FleetView:
    instance = Instance(id="a", model="m", engine="vllm-0.32", limits=snapshot.limits, step_time=CLOCK)
    fleet = FleetView([instance], length_rule=LengthRule("plain"), default_output_tokens=1e6)
    fleet.observe_snapshot(snapshot, 5.0)
    fleet.age(5.0)
    return fleet


def seen(fleet: FleetView) -> ReplayedEngine:
    engine = fleet.views[0].engine
    assert engine is not None, fleet.views[0].problem
    return engine


def with_two_residents() -> ReplayedEngine:
    """Both begin with the system prompt; the second found it."""
    engine = ReplayedEngine.with_block_pool(limits_of(200), CLOCK)
    for name in "ab":
        engine.submit(EngineRequest(request_id=name, prompt_tokens=700, target_output_tokens=50, max_tokens=50), SYSTEM)
        engine.step()
    return engine


def test_blocks_that_two_hold_count_at_the_elder() -> None:
    """The snapshot shows 40 blocks twice; the replay takes them off the younger, and all blocks add up again."""
    fleet = fleet_of(published(with_two_residents()))
    first, second = seen(fleet).running
    assert (first.num_blocks, first.shared_blocks) == (44, 0)
    assert (second.num_blocks, second.shared_blocks) == (44, 40)
    assert seen(fleet).free_blocks == 199 - 44 - 4


def test_one_that_leaves_gives_back_its_own_blocks_only() -> None:
    """A released request's shared blocks stay with the other."""
    snapshot = published(with_two_residents())
    instance = Instance(id="a", model="m", engine="vllm-0.32", limits=snapshot.limits, step_time=CLOCK)
    fleet = FleetView([instance])
    book(fleet, "b", "a", prompt_tokens=700, now=4.9)
    fleet.release("b", 4.95)
    fleet.observe_snapshot(snapshot, 5.0)
    fleet.age(5.0)
    assert [r.request_id for r in seen(fleet).running] == ["a"]
    assert seen(fleet).free_blocks == 199 - 44


def test_sharing_that_nobody_explains_is_still_replayed() -> None:
    """A publisher that tells no cached tokens leaves a surplus of blocks, which is taken off the newest."""
    snapshot = published(with_two_residents())
    bare = [SnapshotRequest(*(getattr(r, name) for name in r.__struct_fields__[:9])) for r in snapshot.running]
    snapshot = Snapshot(
        **{name: getattr(snapshot, name) for name in snapshot.__struct_fields__ if name != "running"}, running=bare
    )
    assert [r.shared_blocks for r in seen(fleet_of(snapshot)).running] == [0, 40]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_with_room_for_everybody_counts_say_what_the_blocks_do(async_scheduling: bool) -> None:
    """While no block is short, a newcomer's first token by counts equals that by the blocks themselves."""
    rng = random.Random(7)
    engine = ReplayedEngine.with_block_pool(limits_of(4000, async_scheduling=async_scheduling), CLOCK)
    for number in range(120):
        start = SYSTEM[: rng.randint(0, 40)] if rng.random() < 0.7 else []
        hashes = [*start, *range(1000 * number + 1000, 1000 * number + 1060)]
        prompt = 16 * len(start) + rng.randint(1, 900)
        newcomer = EngineRequest(request_id=f"r{number}", prompt_tokens=prompt, target_output_tokens=60, max_tokens=60)
        if number % 4 == 3:
            exact = engine.replay(newcomer, hashes)
            counted = ReplayedEngine.from_state(engine.state(), CLOCK)
            cached, _ = engine.look_up(hashes, prompt)
            assert same_time(counted.first_token(prompt, cached_tokens=cached).ttft_s, exact.ttft_s)
        engine.submit(newcomer, hashes)
        engine.advance(rng.expovariate(20.0))


def test_short_of_blocks_what_residents_hold_is_no_cost_to_a_newcomer() -> None:
    """Told that its beginning is held, a newcomer gets in at once; told only that it is cached, it has to wait."""
    engine = ReplayedEngine.with_block_pool(limits_of(60), CLOCK)
    engine.submit(EngineRequest(request_id="a", prompt_tokens=700, target_output_tokens=50, max_tokens=50), SYSTEM)
    engine.step()
    engine.step()
    newcomer = EngineRequest(request_id="n", prompt_tokens=800, target_output_tokens=5, max_tokens=5)
    exact = engine.replay(newcomer, SYSTEM)
    assert exact.num_steps == 1
    counted = ReplayedEngine.from_state(engine.state(), CLOCK)
    assert same_time(counted.first_token(800, cached_tokens=640, shared_blocks=40).ttft_s, exact.ttft_s)
    assert counted.first_token(800, cached_tokens=640).num_steps > 40


def test_a_store_knows_what_requests_under_way_hold() -> None:
    """Held from booking to release, by as many as came; what was dropped meanwhile is nobody's."""
    store = PrefixStore(4)
    store.add([1, 2])
    store.add([1, 2, 3])
    assert store.num_held([1, 2, 3, 4]) == 3
    store.let_go([1, 2, 3])
    assert (store.num_held([1, 2, 3]), store.num_hits([1, 2, 3])) == (2, 3)
    store.let_go([1, 2])
    assert (store.num_held([1, 2, 3]), store.num_hits([1, 2, 3])) == (0, 3)
    store.let_go([1, 2])  # more than it ever held
    store.add([5, 6, 7, 8])
    store.let_go([1])
    assert (store.num_held([1]), store.num_held([5, 6])) == (0, 2)
    store.clear()
    store.let_go([5, 6, 7, 8])
    assert store.num_held([5]) == 0


def test_a_fleet_tells_the_replay_what_its_own_requests_hold() -> None:
    """A prompt that begins like one under way there costs an almost full engine no blocks, until that one ends."""
    instance = Instance(id="a", model="m", engine="vllm-0.32", limits=limits_of(60), step_time=CLOCK)
    fleet = FleetView([instance], length_rule=LengthRule("plain"), default_output_tokens=50)
    engine = ReplayedEngine.with_block_pool(limits_of(60), CLOCK)
    engine.submit(EngineRequest(request_id="a", prompt_tokens=700, target_output_tokens=50, max_tokens=50), SYSTEM)
    engine.step()
    engine.step()
    fleet.book(
        request_id="a",
        instance_id="a",
        prompt_tokens=700,
        predicted_output_tokens=50.0,
        max_tokens=50,
        priority=0,
        now=4.0,
        prefix_blocks=SYSTEM,
        counted_tokens=700,
    )
    fleet.observe_snapshot(published(engine), 5.0)
    fleet.age(5.0)
    (ttft_s,), _ = fleet.first_tokens([800], 0, SYSTEM, 800)
    newcomer = EngineRequest(request_id="n", prompt_tokens=800, target_output_tokens=5)
    assert ttft_s is not None
    assert same_time(ttft_s, engine.replay(newcomer, SYSTEM).ttft_s)
    (without,), _ = fleet.first_tokens([800], 0)
    assert without is not None
    assert without > 2 * ttft_s
