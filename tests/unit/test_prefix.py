"""Prefixes: the same beginnings have the same names, each instance remembers what it was sent, estimates know it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway._core import ReplayedEngine
from headway.estimate.registry import make_estimator
from headway.fleet import FleetView, Gauges
from headway.fleet.prefix import PrefixStore
from headway.predict.prefix import MAX_BLOCKS, prefix_blocks
from headway.predict.tokens import prompt_tokens_of
from headway.types import EngineState, Query
from pools import LIMITS, SLOW, instance

CACHING = replace(LIMITS, prefix_caching=True)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


# ---- names -------------------------------------------------------------------------------------------------------


@given(shared=st.text(max_size=300), one=st.text(max_size=200), other=st.text(max_size=200))
def test_prompts_share_the_names_of_the_blocks_they_share(shared: str, one: str, other: str) -> None:
    """As many leading names are equal as full blocks of bytes are, whatever stands behind; there is one per block."""
    first, second = prefix_blocks(chat(shared + one), 16), prefix_blocks(chat(shared + other), 16)
    a, b = (shared + one).encode(), (shared + other).encode()
    equal = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b))) // 64
    assert first[:equal] == second[:equal]
    assert not set(first[equal:]) & set(second[equal:])
    assert len(first) == len(a) // 64


def test_a_name_depends_on_everything_before_it() -> None:
    """The same block of text behind another beginning has another name."""
    assert prefix_blocks(chat("a" * 64 + "z" * 64), 16)[1] != prefix_blocks(chat("b" * 64 + "z" * 64), 16)[1]


def test_conversations_begin_like_their_earlier_turns() -> None:
    """A further turn keeps the names of those before it, and tool definitions come first."""
    system, user = {"role": "system", "content": "s" * 640}, {"role": "user", "content": "u" * 640}
    answer, more = {"role": "assistant", "content": "a" * 640}, {"role": "user", "content": "m" * 640}
    turn, next_turn = {"messages": [system, user]}, {"messages": [system, user, answer, more]}
    known = prefix_blocks(turn, 16)
    assert prefix_blocks(next_turn, 16)[: len(known)] == known
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert prefix_blocks({**turn, "tools": tools}, 16)[0] != known[0]


@pytest.mark.parametrize(
    ("body", "num_blocks"),
    [
        ({"prompt": "x" * 640}, 10),
        ({"prompt": ["x" * 640]}, 10),
        ({"prompt": list(range(160))}, 10),
        ({"prompt": [list(range(160))]}, 10),
        ({"prompt": ["x" * 640, "y" * 640]}, 0),
        ({"prompt": [[1, 2], [3]]}, 0),
        ({"input": "x" * 640, "instructions": "y" * 64}, 11),
        ({"input": [{"role": "user", "content": "x" * 640}]}, 10),
        (chat("x" * 63), 0),
        (chat("é" * 32), 1),
        (chat("x" * (64 * MAX_BLOCKS + 640)), MAX_BLOCKS),
    ],
)
def test_every_kind_of_prompt_is_named(body: dict[str, Any], num_blocks: int) -> None:
    """Text by its bytes, token ids one by one; several prompts, which an engine takes apart, not at all."""
    blocks = prefix_blocks(body, 16)
    assert len(blocks) == num_blocks
    assert all(0 <= block < 2**64 for block in blocks)
    assert len(blocks) <= prompt_tokens_of(body) // 16


# ---- the store ---------------------------------------------------------------------------------------------------


def test_the_longest_unused_go_first_the_end_of_a_prompt_before_its_beginning() -> None:
    """Beyond its capacity the store loses the oldest prompt's last blocks, unless they were used again."""
    store = PrefixStore(10)
    store.add([1, 2, 3, 4, 5])
    store.add([11, 12, 13, 14, 15])
    assert (store.num_hits([1, 2, 3, 4, 5]), len(store)) == (5, 10)
    store.add([21, 22])
    assert store.num_hits([1, 2, 3, 4, 5]) == 3
    store.add([1, 2, 3])
    store.add_anonymous(5)
    assert (store.num_hits([1, 2, 3]), store.num_hits([11, 12])) == (3, 0)
    store.clear()
    assert (store.num_hits([1]), len(store)) == (0, 0)


@given(st.lists(st.lists(st.integers(0, 30), max_size=12, unique=True), max_size=40), st.integers(1, 20))
def test_the_store_is_bounded_and_hits_are_prefixes(prompts: list[list[int]], capacity: int) -> None:
    """Never more blocks than the capacity; the newest prompt is there as far as it fits."""
    store = PrefixStore(capacity)
    for prompt in prompts:
        store.add(prompt)
        assert len(store) <= capacity
        assert store.num_hits(prompt) == min(len(prompt), capacity)
    store.add_anonymous(10**9)
    assert len(store) == capacity


# ---- the fleet ---------------------------------------------------------------------------------------------------


def fleet_of(*names: str) -> FleetView:
    return FleetView([instance(name, step_time=SLOW, limits=CACHING) for name in names], shadowed=names)


def query_of(text: str, *, ratio: float = 1.0) -> Query:
    body = chat(text)
    counted = prompt_tokens_of(body)
    return Query(
        id="q", arrival_s=0.0, prompt_text="", prompt_tokens={"cheap": round(counted * ratio)},
        prefix_blocks=prefix_blocks(body, 16), counted_tokens=counted,
    )  # fmt: skip


def send(fleet: FleetView, name: str, query: Query, *, now: float = 0.0, to: str = "a") -> None:
    fleet.book(
        request_id=name, instance_id=to, prompt_tokens=query.prompt_tokens["cheap"], predicted_output_tokens=1.0,
        max_tokens=1, priority=0, now=now, prefix_blocks=query.prefix_blocks, counted_tokens=query.counted_tokens,
    )  # fmt: skip
    fleet.first_token_seen(name, now + 0.5)
    fleet.release(name, now + 0.5, 1)


def ttfts(fleet: FleetView, query: Query, now: float) -> list[float]:
    fleet.age(now)
    tokens = [query.prompt_tokens["cheap"]] * len(fleet.views)
    return [one.ttft_s for one in make_estimator("replay").estimate(query, fleet, tokens, now)]


def idle_ttft_s(tokens: int, cached: int) -> float:
    engine = ReplayedEngine.from_state(EngineState(limits=CACHING, running=[], waiting=[]), SLOW)
    return engine.first_token(tokens, cached_tokens=cached).ttft_s


def test_an_instance_that_was_sent_a_prefix_prefills_the_rest_of_it() -> None:
    """The estimate there is that of a prompt of which the shared full blocks are cached; elsewhere nothing is."""
    fleet = fleet_of("a", "b")
    assert fleet.prefix_block_tokens == 16
    send(fleet, "r1", query_of("s" * 16_000 + "x" * 100))
    newcomer = query_of("s" * 16_000 + "y" * 4000)
    assert ttfts(fleet, newcomer, 1.0) == pytest.approx([idle_ttft_s(5000, 4000), idle_ttft_s(5000, 0)])
    same = query_of("s" * 16_000 + "x" * 100)
    assert ttfts(fleet, same, 1.0)[0] == pytest.approx(idle_ttft_s(4025, 4016))


def test_a_corrected_count_makes_blocks_longer() -> None:
    """Where a model takes 1.5 tokens for each counted one, a block of sixteen stands for twenty-four of its tokens."""
    fleet = fleet_of("a")
    send(fleet, "r1", query_of("s" * 16_000, ratio=1.5))
    newcomer = query_of("s" * 16_000 + "y" * 8000, ratio=1.5)
    assert ttfts(fleet, newcomer, 1.0)[0] == pytest.approx(idle_ttft_s(9000, 6000))


def test_a_queued_request_brings_its_cached_tokens() -> None:
    """Of two equal prompts sent one after the other the second adds next to nothing to the queue."""
    fleet = fleet_of("a")
    for name in ("r1", "r2"):
        one = query_of("s" * 32_000)
        fleet.book(
            request_id=name, instance_id="a", prompt_tokens=8000, predicted_output_tokens=9.0, max_tokens=None,
            priority=0, now=0.0, prefix_blocks=one.prefix_blocks, counted_tokens=8000,
        )  # fmt: skip
    second = fleet.entry("r2")
    assert second is not None
    assert second.cached_tokens == 8000
    wait_s = ttfts(fleet, query_of("t" * 400), 0.0)[0]
    assert wait_s < idle_ttft_s(8000, 0) + 2 * idle_ttft_s(100, 0)


@pytest.mark.parametrize("how", ["counter", "gone"])
def test_a_restarted_engine_has_an_empty_cache(how: str) -> None:
    """Nothing is cached after a restart, whether the engine's counter shows it or a refused connection."""
    fleet = fleet_of("a")
    query = query_of("s" * 16_000)
    send(fleet, "r1", query)
    if how == "counter":
        for tokens in (500.0, 2.0):
            fleet.observe_gauges("a", Gauges(0, 0, 0.0, 1.0, generated_tokens=tokens), 1.0)
    else:
        fleet.observe_restart("a", 1.0)
    assert ttfts(fleet, query, 2.0)[0] == pytest.approx(idle_ttft_s(4000, 0))


def test_answers_push_prompts_out_of_the_cache() -> None:
    """Blocks of answers take room: after enough of them an old prompt is gone."""
    small = replace(CACHING, num_blocks=2000)
    fleet = FleetView([instance("a", step_time=SLOW, limits=small)], shadowed=["a"])
    old = query_of("s" * 64_000)
    send(fleet, "r1", old)
    for number in range(20):
        name = f"other{number}"
        one = query_of(f"{number:04d}" * 400)
        fleet.book(
            request_id=name, instance_id="a", prompt_tokens=400, predicted_output_tokens=9.0, max_tokens=None,
            priority=0, now=1.0, prefix_blocks=one.prefix_blocks, counted_tokens=400,
        )  # fmt: skip
        fleet.release(name, 1.0, 1600)
    store = fleet.views[0].prefixes
    assert store is not None
    assert store.num_hits(old.prefix_blocks) == 0
    assert len(store) == 1999


def test_pools_without_prefix_caches_name_nothing() -> None:
    """No instance with prefix_caching, no blocks; with two block sizes the prompt is cut so that both can be told."""
    assert FleetView([instance("a")]).prefix_block_tokens is None
    wide = replace(CACHING, block_size=24)
    assert FleetView([instance("a", limits=CACHING), instance("b", limits=wide)]).prefix_block_tokens == 8
