"""First tokens of newcomers: published check values, what the wait means, and newcomers that never run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine_builders import COUNT_STEPS, decoding, fresh, limits, state
from headway import replay
from headway._core import EngineGroup, ReplayedEngine
from headway.types import EngineLimits, EngineState, StepTime

SERVER = EngineLimits(
    max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=32768, block_size=16, num_blocks=4096
)
CLOCK = StepTime.linear(b0=1.759e-3, b1=2.295e-6, b2=3.99e-8, b3=2.22e-10)


@pytest.mark.parametrize(
    ("prompt", "residual_s", "num_steps", "wait_s", "ttft_s"),
    [(1200, 0.0, 1, 0.0, 0.0047111782), (3000, 0.003, 2, 0.003, 0.0144787829)],
)
def test_the_published_check_values(
    prompt: int, residual_s: float, num_steps: int, wait_s: float, ttft_s: float
) -> None:
    """One decoding resident, a newcomer of one chunk and one of two behind a batch in flight."""
    resident = decoding("a", 900, 1, target_output_tokens=200)
    before = EngineState(limits=SERVER, running=[resident], waiting=[], residual_s=residual_s)
    result = replay(before, fresh("n", prompt), CLOCK)
    assert result.num_steps == num_steps
    assert result.wait_s == pytest.approx(wait_s, rel=1e-12)
    assert result.ttft_s == pytest.approx(ttft_s, abs=5e-11)


def test_the_wait_ends_where_the_first_chunk_starts() -> None:
    """A newcomer behind two steps of prefill waits two steps and the batch in flight, then takes its own chunk."""
    before = state(limits(), [], [fresh("a", 200)], residual_s=0.25)
    result = replay(before, fresh("n", 50), COUNT_STEPS)
    assert (result.wait_s, result.ttft_s, result.num_steps) == (2.25, 3.25, 3)


def test_the_wait_may_end_long_before_the_first_token() -> None:
    """A newcomer chunked over two steps waits for the first of them only."""
    result = replay(state(limits(), [decoding("a", 20, 1)]), fresh("n", 150), COUNT_STEPS)
    assert (result.wait_s, result.ttft_s, result.num_steps) == (0.0, 2.0, 2)


def test_a_newcomer_preempted_in_its_prefill_starts_over() -> None:
    """Its wait stays that of its first chunk, its first token comes after the recompute."""
    tight = limits(num_blocks=12, reserve_full_isl=False, long_prefill_token_threshold=30)
    # Eleven blocks: the resident grows from 2 to 6 blocks, the newcomer wants 10.
    before = state(tight, [decoding("a", 20, 1, target_output_tokens=40)])
    result = replay(before, fresh("n", 100), COUNT_STEPS)
    assert result.wait_s == 0.0
    assert result.num_steps > 39  # after the resident ended


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_newcomer_that_never_fits_gets_infinite_times(policy: str) -> None:
    """Blocks that somebody else holds for ever leave the newcomer waiting for ever."""
    result = replay(state(limits(policy=policy), free_blocks=4), fresh("n", 50), COUNT_STEPS)
    assert (result.ttft_s, result.wait_s) == (math.inf, math.inf)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_newcomer_behind_a_stalled_head_gets_infinite_times(policy: str) -> None:
    """A head of the queue that can never be admitted blocks everybody behind it."""
    before = state(limits(policy=policy), [], [fresh("head", 90, priority=-1)], free_blocks=4)
    result = replay(before, fresh("n", 5), COUNT_STEPS)
    assert (result.ttft_s, result.wait_s) == (math.inf, math.inf)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_resident_that_outgrows_the_whole_cache_does_not_hang_the_replay(policy: str) -> None:
    """A request that preempts itself again and again never ends; a newcomer behind it has no first token."""
    tight = limits(num_blocks=6, reserve_full_isl=False, long_prefill_token_threshold=20, policy=policy)
    before = state(tight, [decoding("a", 40, 5, target_output_tokens=400, priority=-1)])
    result = replay(before, fresh("n", 45), COUNT_STEPS)
    assert result.ttft_s == math.inf


def test_two_requests_that_preempt_each_other_for_ever_do_not_hang_the_replay() -> None:
    """Equal keys make the older one the victim, and each undoes the other's prefill: found as a cycle."""
    tight = limits(
        max_num_batched_tokens=256,
        max_num_seqs=5,
        max_model_len=1343,
        block_size=64,
        num_blocks=22,
        long_prefill_token_threshold=1,
        policy="priority",
        reserve_full_isl=False,
    )
    resident = fresh("a", 1237, 105, computed_tokens=654, output_tokens=100, priority=-1, arrival_s=9.0)
    result = replay(state(tight, [resident]), fresh("n", 982, priority=-1, arrival_s=9.0), COUNT_STEPS)
    assert (result.ttft_s, result.wait_s) == (math.inf, 0.0)


def test_a_second_question_gets_the_same_answer() -> None:
    """The kept trajectory answers like the first replay, for newcomers of any length."""
    before = state(limits(), [decoding("a", 20, 1)], [fresh("b", 250), fresh("c", 30)])
    engine = ReplayedEngine.from_state(before, CLOCK)
    first = {prompt: engine.first_token(prompt) for prompt in (1, 10, 99, 150, 500)}
    assert {prompt: engine.first_token(prompt) for prompt in first} == first
    for prompt, result in first.items():
        assert replay(before, fresh("n", prompt), CLOCK) == result
        assert engine.ttft_s(prompt) == result.ttft_s


def test_a_replay_changes_nothing() -> None:
    """Asking for first tokens leaves the engine's state as it was."""
    before = state(limits(), [decoding("a", 20, 1)], [fresh("b", 250)], residual_s=0.5)
    engine = ReplayedEngine.from_state(before, CLOCK)
    untouched = engine.state()
    engine.first_token(300)
    engine.first_token(30, priority=-1)
    assert engine.state() == untouched


def test_one_call_asks_many_engines() -> None:
    """A group fills one row per engine with what each engine alone would say, infinities included."""
    engines = [
        ReplayedEngine(limits(), CLOCK),
        ReplayedEngine.from_state(state(limits(), [], [fresh("b", 250)]), CLOCK),
        ReplayedEngine.from_state(state(limits(), free_blocks=0), CLOCK),
    ]
    ttft_s, wait_s = np.zeros(3), np.zeros(3)
    EngineGroup(engines).first_tokens(np.array([30, 70, 40]), ttft_s, wait_s)
    expected = [engine.first_token(prompt) for engine, prompt in zip(engines, (30, 70, 40), strict=True)]
    assert list(ttft_s) == [result.ttft_s for result in expected]
    assert list(wait_s) == [result.wait_s for result in expected]
    assert ttft_s[2] == math.inf
