"""Each policy's rule, the tie rule, and the registry."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from headway.errors import ConfigError
from headway.policy.base import Policy
from headway.policy.bear import BearPolicy, LagrangianBearPolicy
from headway.policy.registry import POLICIES, make_choosing_policy
from headway.types import Candidate, Estimate, Query, Verdict

CHOOSING = sorted(name for name, row in POLICIES.items() if not row.holds)
QUERY = Query(id="q", arrival_s=0.0, prompt_text="", prompt_tokens={})


def candidate(
    name: str, utility: float, ttft_s: float = 0.1, *, verdict: Verdict = "feasible", outstanding: int = 0
) -> Candidate:
    estimate = Estimate(ttft_s, ttft_s, 0.0, "replay")
    return Candidate(name, "m", verdict, utility, estimate=estimate, num_outstanding=outstanding)


def make(name: str, seed: int = 0, **options: float) -> Policy:
    return make_choosing_policy(name, rng=np.random.default_rng(seed), options=options)


def chosen(policy: Policy, *candidates: Candidate) -> str | None:
    index = policy.choose(QUERY, candidates, 0.0)
    return None if index is None else candidates[index].instance_id


def test_bear_takes_the_most_useful_instance_in_time() -> None:
    """The largest utility among the feasible wins, although a late one is worth more."""
    pool = [candidate("small", 0.3, 0.1), candidate("mid", 0.6, 0.25), candidate("big", 0.9, 0.9, verdict="late")]
    assert chosen(make("bear"), *pool) == "mid"


def test_bear_takes_the_soonest_where_none_is_in_time() -> None:
    """With every instance late the smallest estimated TTFT wins, whatever it is worth."""
    pool = [candidate("big", 0.9, 0.9, verdict="late"), candidate("small", 0.1, 0.5, verdict="late")]
    assert chosen(make("bear"), *pool, candidate("full", 1.0, math.inf, verdict="saturated")) == "small"


def test_bear_spreads_by_count_where_everything_is_saturated() -> None:
    """Without any bound on waiting, the fewest requests under way win, not the largest utility."""
    pool = [
        candidate("a", 0.9, math.inf, verdict="saturated", outstanding=5),
        candidate("b", 0.1, math.inf, verdict="saturated", outstanding=4),
    ]
    assert chosen(make("bear"), *pool) == "b"


def test_bear_prefers_the_better_of_two_equally_late() -> None:
    """The same finite estimate leaves utility to decide."""
    pool = [candidate("a", 0.1, 0.9, verdict="late"), candidate("b", 0.4, 0.9, verdict="late")]
    assert chosen(make("bear"), *pool) == "b"


def test_latency_agnostic_ignores_estimates_altogether() -> None:
    """The largest utility wins though late; between equals fewer requests win, though slower."""
    pool = [candidate("small", 0.3, 0.1), candidate("big", 0.9, 9.0, verdict="late")]
    assert chosen(make("latency_agnostic"), *pool) == "big"
    assert chosen(make("latency_agnostic"), candidate("a", 0.5, 0.1, outstanding=1), candidate("b", 0.5, 5.0)) == "b"


def test_shortest_queue_counts_requests_under_way() -> None:
    """Fewest outstanding wins, late or not, whatever its utility."""
    pool = [candidate("a", 0.9, 0.1, outstanding=2), candidate("b", 0.1, 9.0, verdict="late", outstanding=1)]
    assert chosen(make("shortest_queue"), *pool) == "b"


def test_round_robin_cycles_and_skips_what_it_may_not_choose() -> None:
    """Instances come in pool order; an ill one is left out and its turn does not count against the others."""
    policy = make("round_robin")
    pool = [candidate(name, 0.5) for name in "abc"]
    assert "".join(chosen(policy, *pool) or "-" for _ in range(6)) == "abcabc"
    ill = [pool[0], candidate("b", 0.5, verdict="unhealthy"), pool[2]]
    assert "".join(chosen(policy, *ill) or "-" for _ in range(4)) == "acac"


def test_round_robin_keeps_the_turn_of_each_instance_when_the_candidates_change() -> None:
    """Queries pinned to one model do not take a turn from the other's instances."""
    policy = make("round_robin")
    pool = [candidate(name, 0.5) for name in "ab"]
    assert [chosen(policy, *pool), chosen(policy, pool[0]), chosen(policy, *pool)] == ["a", "a", "b"]


def test_random_is_even_and_repeatable() -> None:
    """Every choosable instance gets its share; the same seed gives the same sequence."""
    pool = [candidate("a", 0.9), candidate("b", 0.1, verdict="late"), candidate("c", 0.5, verdict="draining")]
    first, second = make("random", seed=4), make("random", seed=4)
    picks = [chosen(first, *pool) for _ in range(2000)]
    assert picks == [chosen(second, *pool) for _ in range(2000)]
    counts = Counter(picks)
    assert set(counts) == {"a", "b"}
    assert abs(counts["a"] - 1000) < 120


def test_ties_go_to_the_sooner_then_the_emptier_then_in_turn() -> None:
    """Utilities within 1e-12 are equal; then TTFT decides, then the ledger, then a rotation."""
    near = 0.5 + 5e-13
    assert chosen(make("bear"), candidate("a", near, 0.2), candidate("b", 0.5, 0.1, outstanding=9)) == "b"
    assert chosen(make("bear"), candidate("a", near, 0.1, outstanding=1), candidate("b", 0.5, 0.1)) == "b"
    assert chosen(make("bear"), candidate("a", 0.5 + 1e-9, 0.2), candidate("b", 0.5, 0.1)) == "a"
    policy = make("bear")
    twins = [candidate("a", 0.5), candidate("b", 0.5)]
    assert Counter(chosen(policy, *twins) for _ in range(10)) == {"a": 5, "b": 5}


def test_the_rotation_starts_where_its_seed_says() -> None:
    """Two routers with unlike seeds need not begin with the same replica."""
    twins = [candidate("a", 0.5), candidate("b", 0.5)]
    assert {chosen(make("bear", seed=seed), *twins) for seed in range(8)} == {"a", "b"}


@pytest.mark.parametrize("name", ["bear", "latency_agnostic", "shortest_queue", "round_robin"])
def test_simultaneous_requests_spread_over_equal_instances(name: str) -> None:
    """A hundred requests at one instant, each booked before the next is decided: 25 ± 3 on each of four equals."""
    policy, counts = make(name), [0, 0, 0, 0]
    for _ in range(100):
        pool = [candidate(str(index), 0.7, outstanding=count) for index, count in enumerate(counts)]
        index = policy.choose(QUERY, pool, 0.0)
        assert index is not None
        counts[index] += 1
    assert all(abs(count - 25) <= 3 for count in counts)


def test_the_lagrangian_trades_utility_against_milliseconds() -> None:
    """A point of utility per 1/δ ms: the slower, better instance wins only while δ is small."""
    pool = [candidate("fast", 0.5, 0.1, verdict="late"), candidate("good", 0.7, 1.1)]
    assert chosen(make("bear", delta_per_ms=1e-4), *pool) == "good"
    assert chosen(make("bear", delta_per_ms=3e-4), *pool) == "fast"


def test_a_saturated_instance_never_beats_a_finite_wait_under_the_lagrangian() -> None:
    """An infinite wait costs infinitely much, and two of them are a tie that does not crash."""
    full = candidate("full", 1.0, math.inf, verdict="saturated")
    assert chosen(make("bear", delta_per_ms=1e-9), full, candidate("a", -5.0, 900.0, verdict="late")) == "a"
    assert chosen(make("bear", delta_per_ms=1e-9), full) == "full"


@pytest.mark.parametrize("name", CHOOSING)
def test_nothing_choosable_gives_none(name: str) -> None:
    """Every policy answers None for an empty list and for one where every instance is ruled out."""
    ruled_out: list[Verdict] = ["context", "unhealthy", "draining", "quality", "budget", "excluded"]
    assert make(name).choose(QUERY, [], 0.0) is None
    assert make(name).choose(QUERY, [candidate(verdict, 0.9, verdict=verdict) for verdict in ruled_out], 0.0) is None


@pytest.mark.parametrize("name", CHOOSING)
def test_a_policy_knows_its_registered_name(name: str) -> None:
    """The name in the registry is the one in every decision, and has a description."""
    assert make(name).name == name
    assert POLICIES[name].description


def test_delta_chooses_the_rule_of_bear() -> None:
    """No δ, or 0, is the hard target; a positive one the Lagrangian."""
    assert isinstance(make("bear"), BearPolicy)
    assert isinstance(make("bear", delta_per_ms=0.0), BearPolicy)
    assert isinstance(make("bear", delta_per_ms=1e-5), LagrangianBearPolicy)


@pytest.mark.parametrize(
    ("build", "key", "words"),
    [
        (lambda: make("baer"), "routing.policy", "did you mean 'bear'"),
        (lambda: make("x"), "routing.policy", "known: bear, bear_lagrangian"),
        (lambda: make("bear", delta_perms=1.0), "routing.delta_perms", "did you mean 'delta_per_ms'"),
        (lambda: make("bear", delta_per_ms=-1.0), "routing.delta_per_ms", "at least 0"),
        (lambda: make("bear", delta_per_ms=math.nan), "routing.delta_per_ms", "finite"),
        (lambda: make("random", delta_per_ms=1e-5), "routing.delta_per_ms", "random does not take it"),
    ],
)
def test_a_wrong_name_or_option_is_refused(build: Callable[[], Policy], key: str, words: str) -> None:
    """The error names the key and the nearest thing that exists."""
    with pytest.raises(ConfigError, match=words) as caught:
        build()
    assert caught.value.key == key


def test_a_candidate_without_figures_never_wins() -> None:
    """Unknown utility or estimate counts as worst, so a hole in the figures cannot attract traffic."""
    hollow = msgspec.structs.replace(candidate("hollow", 0.9), utility=None, estimate=None)
    assert chosen(make("bear"), hollow, candidate("a", -3.0)) == "a"
    assert chosen(make("latency_agnostic"), hollow, candidate("a", -3.0)) == "a"
