"""A newcomer part of which the engine's prefix cache holds: its first token, worked out by hand.

The clock counts tokens (1 s each) and steps (1000 s each), so a time says which batches led to it.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine_builders import decoding, fresh, limits, state
from headway._core import EngineGroup, ReplayedEngine
from headway.errors import EngineInputError
from headway.types import EngineLimits, EngineRequest, EngineState, StepTime

CLOCK = StepTime.linear(b0=1000.0, b1=1.0, b2=0.0, b3=0.0)
CACHING = limits(prefix_caching=True)


def engine(caching: EngineLimits = CACHING, *running: EngineRequest) -> ReplayedEngine:
    return ReplayedEngine.from_state(EngineState(limits=caching, running=running, waiting=()), CLOCK)


@pytest.mark.parametrize(
    ("cached_tokens", "computed_tokens"),
    [(0, 95), (9, 95), (10, 85), (19, 85), (90, 5), (95, 5), (10_000, 5)],
)
def test_only_full_blocks_are_found(cached_tokens: int, computed_tokens: int) -> None:
    """Of 95 tokens in blocks of 10, nine blocks can come from the cache; a half block and more than there is do not."""
    answer = engine().first_token(95, cached_tokens=cached_tokens)
    assert (answer.ttft_s, answer.num_steps) == (1000.0 + computed_tokens, 1)


def test_the_last_token_is_always_computed() -> None:
    """A prompt of ten full blocks, all cached, still computes its last block: its last token gives the first output."""
    assert engine().first_token(100, cached_tokens=100).ttft_s == 1010.0


def test_a_long_prompt_needs_fewer_chunks() -> None:
    """250 tokens in batches of 100 take three steps, with 150 of them cached one."""
    assert engine().first_token(250).num_steps == 3
    answer = engine().first_token(250, cached_tokens=150)
    assert (answer.ttft_s, answer.num_steps) == (1100.0, 1)
    partly = engine().first_token(250, cached_tokens=100)
    assert (partly.ttft_s, partly.num_steps) == (2 * 1000.0 + 150.0, 2)


def test_without_a_prefix_cache_nothing_is_found() -> None:
    """An engine that caches nothing computes everything, whatever the count says."""
    assert engine(limits()).first_token(95, cached_tokens=90).ttft_s == 1095.0


def test_cached_blocks_are_taken_from_the_free_ones() -> None:
    """The found blocks are held like any other: a prompt waits until all its blocks are free."""
    tight = limits(prefix_caching=True, num_blocks=13)
    busy = decoding("a", 25, 4, 6)  # holds 3 of 12 blocks and ends in two steps
    assert engine(tight, busy).first_token(90, cached_tokens=80).num_steps == 1
    assert engine(tight, busy).first_token(91, cached_tokens=80).num_steps == 3


def test_a_waiting_request_uses_what_is_cached_of_it() -> None:
    """A queued request with cached tokens leaves more of the batch to those behind it, and reads back as it was."""
    queued = fresh("q", 95, 1, cached_tokens=90, num_blocks=0)
    mirror = ReplayedEngine.from_state(state(CACHING, waiting=[queued]), CLOCK)
    assert mirror.waiting == [queued]
    assert mirror.remaining_prefill_tokens == 5
    assert mirror.first_token(50).ttft_s == 1055.0
    batch = mirror.step()
    assert batch.num_scheduled_tokens == {"q": 5}
    assert batch.cached_tokens == {"q": 90}
    assert batch.free_blocks == 1000 - 10
    assert mirror.free_blocks == 1000


def test_a_preempted_request_is_taken_to_find_nothing() -> None:
    """What a preempted request finds of its own blocks is not known from counts: it computes all of itself again."""
    short = limits(prefix_caching=True, num_blocks=9)
    running = [decoding("a", 40, 1, 9), decoding("b", 40, 1, 30, cached_tokens=40)]
    mirror = ReplayedEngine.from_state(state(short, running), CLOCK)
    assert mirror.step().preempted == ["b"]
    assert mirror.waiting[0].cached_tokens == 0


def test_a_group_takes_one_count_per_engine() -> None:
    """The call for many engines gives each its own count; engines without a cache ignore theirs."""
    group = EngineGroup([engine(), engine(), engine(limits())])
    prompt, cached = np.array([95, 95, 95]), np.array([0, 90, 90])
    ttft_s, wait_s = np.zeros(3), np.zeros(3)
    group.first_tokens(prompt, ttft_s, wait_s, 0, cached)
    assert ttft_s.tolist() == [1095.0, 1005.0, 1095.0]
    group.first_tokens(prompt, ttft_s, wait_s, cached_tokens=None)
    assert ttft_s.tolist() == [1095.0, 1095.0, 1095.0]


def test_a_group_refuses_counts_that_do_not_fit() -> None:
    """Too few counts, and negative ones, are named."""
    group = EngineGroup([engine()])
    prompt, times_s = np.array([95]), np.zeros(1)
    for cached in (np.array([1, 2]), np.array([-1])):
        with pytest.raises(EngineInputError, match="cached_tokens"):
            group.first_tokens(prompt, times_s, times_s, 0, cached)
