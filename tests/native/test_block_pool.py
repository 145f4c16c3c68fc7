"""The block pool rule by rule and by hand: what is found, what is taken first, what is lost, and who holds what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine_builders import COUNT_STEPS, fresh, limits
from headway._core import ReplayedEngine
from headway.errors import EngineInputError
from headway.types import EngineLimits, EngineRequest

#: Blocks of 10 tokens.
CACHING = limits(prefix_caching=True)
SYSTEM = [11, 12, 13]


def engine_of(under: EngineLimits = CACHING) -> ReplayedEngine:
    return ReplayedEngine.with_block_pool(under, COUNT_STEPS)


def finish(engine: ReplayedEngine, request: EngineRequest, block_hashes: Sequence[int]) -> None:
    """Let a request come, and run until nobody is left."""
    engine.submit(request, block_hashes)
    while engine.num_running or engine.num_waiting:
        engine.step()


def small(num_blocks: int) -> EngineLimits:
    return limits(prefix_caching=True, num_blocks=num_blocks + 1, max_model_len=200, reserve_full_isl=False)


def test_a_prefix_stays_to_be_found_after_its_request_has_ended() -> None:
    """The full blocks of a prompt are found by whoever begins like it, and need no prefill."""
    engine = engine_of()
    finish(engine, fresh("a", 35, 1), [*SYSTEM, 14])
    assert engine.free_blocks == 1000
    assert engine.look_up([*SYSTEM, 99], 60)[0] == 30
    engine.submit(fresh("b", 60, 1), [*SYSTEM, 99, 98, 97])
    batch = engine.step()
    assert (batch.num_scheduled_tokens, batch.cached_tokens) == ({"b": 30}, {"b": 30})
    assert batch.free_blocks == 1000 - 6


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """A prompt whose every block is cached computes its last block once more."""
    engine = engine_of()
    finish(engine, fresh("a", 35, 1), SYSTEM)
    assert engine.look_up(SYSTEM, 30)[0] == 20
    assert engine.look_up(SYSTEM, 31)[0] == 30
    engine.submit(fresh("b", 30, 1), SYSTEM)
    assert engine.step().num_scheduled_tokens == {"b": 10}


def test_residents_share_what_they_begin_with() -> None:
    """A block is found as soon as it is computed, is held by both, and comes free with the last of them."""
    engine = engine_of()
    engine.submit(fresh("a", 35, 5), SYSTEM)
    engine.step()
    engine.submit(fresh("b", 45, 2), SYSTEM)
    batch = engine.step()
    assert batch.num_scheduled_tokens == {"a": 1, "b": 15}
    assert batch.free_blocks == 1000 - 4 - 2
    first, second = engine.running
    assert (first.num_blocks, first.shared_blocks) == (4, 0)
    assert (second.num_blocks, second.shared_blocks, second.cached_tokens) == (5, 3, 30)
    assert engine.cancel("a")
    assert engine.free_blocks == 1000 - 5
    (second,) = engine.running
    assert second.shared_blocks == 0


def test_what_an_answer_fills_is_found_where_its_hashes_are_known() -> None:
    """The next turn of a conversation begins with the answer before it."""
    engine = engine_of()
    conversation = [21, 22, 23, 24]
    finish(engine, fresh("a", 15, 20), conversation)
    assert engine.look_up(conversation, 100)[0] == 30  # the 35th token was never computed
    assert engine.look_up([21, 22], 100)[0] == 20
    finish(engine, fresh("b", 15, 20), [31])  # its answer is nobody's business
    assert engine.look_up([31, 32], 100)[0] == 10


def test_the_least_recently_used_is_lost_first_and_of_a_request_its_tail() -> None:
    """Six blocks: a and b fill three each, c takes one, which was the last of a."""
    engine = engine_of(small(6))
    finish(engine, fresh("a", 30, 1), [1, 2, 3])
    finish(engine, fresh("b", 30, 1), [4, 5, 6])
    finish(engine, fresh("c", 5, 1), [])
    assert engine.look_up([1, 2, 3], 100)[0] == 20
    assert engine.look_up([4, 5, 6], 100)[0] == 30


def test_blocks_that_hold_nothing_are_taken_before_cached_ones() -> None:
    """A half-filled block goes to the front of the queue: nothing is lost while one is free."""
    engine = engine_of(small(4))
    finish(engine, fresh("a", 30, 1), [1, 2, 3])
    for number in range(5):
        finish(engine, fresh(f"c{number}", 5, 1), [])
    assert engine.look_up([1, 2, 3], 100)[0] == 30


def test_being_found_makes_blocks_recent() -> None:
    """What was found moves behind the rest when it is given back."""
    engine = engine_of(small(6))
    finish(engine, fresh("a", 30, 1), [1, 2, 3])
    finish(engine, fresh("b", 30, 1), [4, 5, 6])
    finish(engine, fresh("d", 31, 1), [1, 2, 3])  # takes b's last block for its own rest
    assert engine.look_up([4, 5, 6], 100)[0] == 20
    finish(engine, fresh("e", 15, 1), [])  # the rest's block is empty, then b's second goes
    assert engine.look_up([4, 5, 6], 100)[0] == 10
    assert engine.look_up([1, 2, 3], 100)[0] == 30


def test_a_preempted_request_finds_what_nobody_took_since() -> None:
    """Of the victim's three blocks one goes to the request that was short, and two are still there."""
    engine = engine_of(small(6))
    engine.submit(fresh("a", 29, 4), [1, 2, 3])
    engine.submit(fresh("b", 29, 4), [4, 5, 6])
    engine.step()  # both hold three blocks
    engine.step()
    engine.step()  # a needs a fourth: b is preempted, its third block (of 30 tokens, full) is taken
    (victim,) = engine.waiting
    assert (victim.request_id, victim.output_tokens, victim.cached_tokens) == ("b", 2, 20)
    engine.step()
    batch = engine.step()  # a has ended
    assert batch.num_scheduled_tokens == {"b": 11}


def test_an_asynchronous_engine_caches_a_block_when_its_last_token_is_known() -> None:
    """The token that fills a block is on its way for a step before the block can be found."""
    engine = engine_of(limits(prefix_caching=True, async_scheduling=True))
    engine.submit(fresh("a", 9, 20), [1, 2])
    engine.step()
    engine.step()  # the tenth token is computed in this batch, and becomes known with it
    assert engine.look_up([1, 2], 100)[0] == 0
    engine.step()
    assert engine.look_up([1, 2], 100)[0] == 10


def test_a_clone_has_blocks_of_its_own() -> None:
    """What happens to one does not show in the other."""
    engine = engine_of(small(6))
    finish(engine, fresh("a", 30, 1), [1, 2, 3])
    clone = engine.clone()
    finish(clone, fresh("b", 60, 1), [])
    assert clone.look_up([1, 2, 3], 100)[0] == 0
    assert engine.look_up([1, 2, 3], 100)[0] == 30


def test_an_estimate_looks_the_newcomer_up() -> None:
    """A replay on an engine with a pool finds what the newcomer would find, and changes nothing."""
    engine = engine_of()
    finish(engine, fresh("a", 150, 1), list(range(1, 15)))
    assert engine.replay(fresh("n", 220), list(range(1, 15))).num_steps == 1  # 80 tokens are left
    assert engine.replay(fresh("n", 220), [7]).num_steps == 3
    assert engine.look_up(list(range(1, 15)), 220)[0] == 140


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ReplayedEngine.with_block_pool(limits(), COUNT_STEPS), "prefix_caching"),
        (lambda: ReplayedEngine(CACHING, COUNT_STEPS).submit(fresh("a", 20), [1]), "block_hashes"),
        (lambda: ReplayedEngine(CACHING, COUNT_STEPS).replay(fresh("a", 20), [1]), "block_hashes"),
        (lambda: ReplayedEngine(CACHING, COUNT_STEPS).look_up([1], 20), "block_hashes"),
        (lambda: engine_of().submit(fresh("a", 20), [-1]), "block_hashes"),
        (lambda: engine_of().submit(fresh("a", 20), [2**64]), "block_hashes"),
        (lambda: engine_of().submit(fresh("a", 20), ["1"]), "block_hashes"),  # type: ignore[list-item]
        (lambda: engine_of().look_up([1], 0), "prompt_tokens"),
        (lambda: engine_of().submit(fresh("a", 20, cached_tokens=10)), "cached_tokens"),
        (lambda: engine_of().submit(fresh("a", 20, computed_tokens=10)), "num_blocks"),
        (lambda: ReplayedEngine(limits(), COUNT_STEPS).submit(fresh("a", 20, shared_blocks=1)), "shared_blocks"),
    ],
)
def test_what_a_pool_cannot_take_is_refused(make: Callable[[], object], field: str) -> None:
    """Hashes without a pool, counts with one, and numbers that are no hashes are named."""
    with pytest.raises(EngineInputError, match=field):
        make()
