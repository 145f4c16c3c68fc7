"""Letting time pass: ``advance`` against stepping the reference by its clock."""

from __future__ import annotations

import random

import pytest

from engine_builders import COUNT_STEPS, decoding, fresh, limits, state
from headway._core import ReplayedEngine
from headway.types import EngineRequest, StepTime
from random_states import random_case
from reference_scheduler import ReferenceEngine, Resident
from replay_comparison import same_time


class LivelockError(Exception):
    """The reference came back to an earlier state; the core stands still there, at a step of its own choosing."""


class ReferenceClock:
    """Steps the reference while time is left; the step that straddles the end is completed."""

    def __init__(self, engine: ReferenceEngine, residual_s: float) -> None:
        self.engine, self.residual_s = engine, residual_s
        self.seen: set[tuple[object, ...]] = set()
        self.num_outputs = 0

    def advance(self, seconds: float) -> int:
        """The number of steps started."""
        if seconds < self.residual_s:
            self.residual_s -= seconds
            return 0
        seconds, self.residual_s = seconds - self.residual_s, 0.0
        num_steps = 0
        while seconds > 0:
            batch = self.engine.step()
            did_anything = bool(batch.num_scheduled_tokens or batch.preempted or batch.finished)
            if not did_anything and batch.begun_s == 0.0:
                return num_steps
            self.look_for_livelock()
            num_steps += did_anything
            self.residual_s = max(batch.begun_s - seconds, 0.0)
            seconds -= batch.begun_s
        return num_steps

    def look_for_livelock(self) -> None:
        if self.engine.num_outputs != self.num_outputs:  # outputs never shrink
            self.num_outputs = self.engine.num_outputs
            self.seen.clear()
        elif (signature := self.engine.signature()) in self.seen:
            raise LivelockError
        else:
            self.seen.add(signature)


def as_seen(request: EngineRequest | Resident) -> tuple[str, int, int]:
    if isinstance(request, Resident):
        return request.request_id, request.computed, request.output
    return request.request_id, request.computed_tokens, request.output_tokens


def check_spans(seed: int) -> None:
    """Four spans of time on one random state, compared after each."""
    case = random_case(seed)
    rng = random.Random(f"advance {seed}")
    native = ReplayedEngine.from_state(case.state, case.step_time)
    reference = ReferenceEngine.from_state(case.state, case.step_time)
    clock = ReferenceClock(reference, case.state.residual_s)
    for _ in range(4):
        seconds = rng.choice([0.0, 1e-4, 2e-3, rng.uniform(0.0, 0.03), rng.uniform(0.0, 0.5)])
        assert clock.advance(seconds) == native.advance(seconds), f"seed {seed}"
        assert native.residual_s == pytest.approx(clock.residual_s, rel=1e-9, abs=1e-12), f"seed {seed}"
        assert [as_seen(r) for r in native.running] == [as_seen(r) for r in reference.running], f"seed {seed}"
        assert [as_seen(r) for r in native.waiting] == [as_seen(r) for r in reference.waiting], f"seed {seed}"
        assert native.free_blocks == reference.free_blocks, f"seed {seed}"


def test_advance_equals_stepping_the_reference() -> None:
    """Steps started, residual, queues, counts and free blocks agree on random states over several spans."""
    num_livelocks = 0
    for seed in range(2000):
        try:
            check_spans(seed)
        except LivelockError:
            num_livelocks += 1
    assert num_livelocks < 20


def test_a_batch_in_flight_at_the_end_is_completed_and_leaves_a_residual() -> None:
    """Two and a half steps of one second: three are started, half a second of the third is left."""
    engine = ReplayedEngine.from_state(state(limits(), [decoding("a", 20, 1)]), COUNT_STEPS)
    assert engine.advance(2.5) == 3
    assert (engine.residual_s, engine.running[0].output_tokens) == (0.5, 4)


def test_exactly_at_a_boundary_no_new_step_is_started() -> None:
    """After exactly two steps' time the engine stands between steps."""
    engine = ReplayedEngine.from_state(state(limits(), [decoding("a", 20, 1)]), COUNT_STEPS)
    assert engine.advance(2.0) == 2
    assert engine.residual_s == 0.0


def test_time_within_the_batch_in_flight_only_shrinks_the_residual() -> None:
    """Nothing is started before the batch in flight has ended; reaching its end exactly starts nothing either."""
    engine = ReplayedEngine.from_state(state(limits(), [decoding("a", 20, 1)], residual_s=0.75), COUNT_STEPS)
    assert engine.advance(0.5) == 0
    assert (engine.residual_s, engine.running[0].output_tokens) == (0.25, 1)
    assert engine.advance(0.25) == 0
    assert engine.residual_s == 0.0
    assert engine.advance(0.25) == 1
    assert engine.residual_s == 0.75


def test_an_idle_engine_lets_time_pass_for_nothing() -> None:
    """With nobody to serve, no step is started, and an ended batch leaves no debt."""
    engine = ReplayedEngine.from_state(state(limits(), residual_s=0.5), COUNT_STEPS)
    assert engine.advance(100.0) == 0
    assert engine.residual_s == 0.0
    engine.submit(fresh("a", 50))
    assert engine.first_token(10).ttft_s == 1.0


def test_no_time_changes_nothing() -> None:
    """Advancing by zero seconds starts no step, also between steps."""
    engine = ReplayedEngine.from_state(state(limits(), [decoding("a", 20, 1)]), COUNT_STEPS)
    before = engine.state()
    assert engine.advance(0.0) == 0
    assert engine.state() == before


def test_a_free_clock_ends_with_the_work() -> None:
    """With a clock of zero seconds per step, any time at all serves everything and then stops."""
    free = StepTime.linear(b0=0.0, b1=0.0, b2=0.0, b3=0.0)
    engine = ReplayedEngine.from_state(state(limits(), [decoding("a", 20, 1, 10)], [fresh("b", 500)]), free)
    assert engine.advance(1e-9) > 0
    assert (engine.num_running, engine.num_waiting, engine.residual_s) == (0, 0, 0.0)


@pytest.mark.parametrize("step_time", [COUNT_STEPS, StepTime.linear(b0=0.0, b1=0.0, b2=0.0, b3=0.0)])
def test_a_request_that_outgrows_the_cache_does_not_hang_the_clock(step_time: StepTime) -> None:
    """Endless self-preemption ends the advance, even on a clock that costs nothing."""
    tight = limits(num_blocks=6, reserve_full_isl=False, long_prefill_token_threshold=20)
    engine = ReplayedEngine.from_state(state(tight, [decoding("a", 40, 5)], [fresh("b", 45)]), step_time)
    engine.advance(1e6)
    assert "a" in engine


@pytest.mark.parametrize(
    "clock",
    [
        StepTime.linear(b0=1.7e-3, b1=2.3e-6, b2=4e-8, b3=2e-10, b_seq=4e-6),
        StepTime.knee(b0=1.7e-3, b1_below=2.3e-6, b1_above=3e-5, knee=33.0, b2=4e-8, b3=2e-10),
        StepTime.six_term(b0=2.6e-3, bp=2e-6, bpp=2e-10, bd=2e-5, bs=4e-8, bss=2e-13),
    ],
    ids=lambda clock: clock.form,
)
def test_long_uptime_costs_no_precision(clock: StepTime) -> None:
    """After weeks of replayed time a first token is as exact as on a fresh engine of the same state."""
    long = limits(max_num_batched_tokens=2048, max_model_len=2_000_000, block_size=16, num_blocks=2_000_000)
    engine = ReplayedEngine(long, clock)
    for day in range(30):
        engine.submit(fresh(f"r{day}", 1000, 1_900_000))
        engine.advance(86_400.0)
        engine.submit(fresh(f"s{day}", 5000, 40))
        engine.advance(0.01)
        fresh_engine = ReplayedEngine.from_state(engine.state(), clock)
        for prompt in (10, 3000):
            old, new = engine.first_token(prompt), fresh_engine.first_token(prompt)
            assert same_time(old.ttft_s, new.ttft_s), f"day {day}: {old} {new}"
            assert same_time(old.wait_s, new.wait_s), f"day {day}: {old} {new}"
