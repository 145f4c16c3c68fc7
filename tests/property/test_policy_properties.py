"""What must hold of every policy on any list of candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.base import CHOOSABLE, UTILITY_TIE
from headway.policy.bear import BearPolicy, LagrangianBearPolicy
from headway.policy.latency_agnostic import LatencyAgnosticPolicy
from headway.policy.registry import POLICIES, make_choosing_policy
from headway.types import Candidate, Estimate, Query, Verdict

CHOOSING = sorted(name for name, row in POLICIES.items() if not row.holds)
QUERY = Query(id="q", arrival_s=0.0, prompt_text="", prompt_tokens={})
UTILITIES = st.one_of(st.sampled_from([-0.5, 0.0, 0.3, 0.3 + 4e-13, 0.8]), st.floats(-2, 1))
TTFTS_S = st.one_of(st.sampled_from([0.05, 0.3, 0.300001, math.inf]), st.floats(0, 1e4))


@st.composite
def candidate_lists(draw: st.DrawFn, verdicts: Sequence[Verdict] = get_args(Verdict)) -> list[Candidate]:
    return [
        Candidate(
            f"i{index}",
            "m",
            draw(st.sampled_from(verdicts)),
            draw(UTILITIES),
            estimate=Estimate(draw(TTFTS_S), 1.0, 0.0, "replay"),
            num_outstanding=draw(st.integers(0, 3)),
        )
        for index in range(draw(st.integers(0, 6)))
    ]


def utility(candidate: Candidate) -> float:
    assert candidate.utility is not None
    return candidate.utility


def ttft_s(candidate: Candidate) -> float:
    assert candidate.estimate is not None
    return candidate.estimate.ttft_s


@given(st.sampled_from(CHOOSING), candidate_lists(), st.integers(0, 99))
def test_a_policy_chooses_exactly_when_it_may(name: str, candidates: list[Candidate], seed: int) -> None:
    """None comes back exactly when nothing is choosable; else the index of a choosable candidate."""
    index = make_choosing_policy(name, rng=np.random.default_rng(seed)).choose(QUERY, candidates, 0.0)
    if index is None:
        assert not any(candidate.verdict in CHOOSABLE for candidate in candidates)
    else:
        assert type(index) is int
        assert candidates[index].verdict in CHOOSABLE


@given(st.sampled_from(CHOOSING), st.lists(candidate_lists(), max_size=6), st.integers(0, 99))
def test_the_same_seed_decides_the_same(name: str, queries: list[list[Candidate]], seed: int) -> None:
    """A run of decisions is a function of seed and candidates alone."""
    first, second = (make_choosing_policy(name, rng=np.random.default_rng(seed)) for _ in range(2))
    for candidates in queries:
        assert first.choose(QUERY, candidates, 0.0) == second.choose(QUERY, candidates, 0.0)


@given(candidate_lists(), st.integers(0, 99))
def test_bear_is_the_hard_rule(candidates: list[Candidate], seed: int) -> None:
    """No feasible instance is worth more than the chosen one; with none feasible, no choosable one is sooner."""
    index = BearPolicy(np.random.default_rng(seed)).choose(QUERY, candidates, 0.0)
    if index is None:
        return
    feasible = [candidate for candidate in candidates if candidate.verdict == "feasible"]
    if feasible:
        assert candidates[index].verdict == "feasible"
        best = max(utility(candidate) for candidate in feasible)
        assert utility(candidates[index]) >= best - UTILITY_TIE
        tied = [candidate for candidate in feasible if utility(candidate) >= best - UTILITY_TIE]
        soonest = min(ttft_s(candidate) for candidate in tied)
        assert ttft_s(candidates[index]) == soonest or ttft_s(candidates[index]) <= soonest + 1e-9
    else:
        soonest = min(ttft_s(candidate) for candidate in candidates if candidate.verdict in CHOOSABLE)
        assert ttft_s(candidates[index]) == soonest or ttft_s(candidates[index]) <= soonest + 1e-9


@given(st.lists(candidate_lists(), max_size=6), st.integers(0, 99))
def test_the_lagrangian_at_zero_is_latency_agnostic(queries: list[list[Candidate]], seed: int) -> None:
    """At δ = 0 both choose the same instance on every query of a run, rotations included."""
    lagrangian = LagrangianBearPolicy(np.random.default_rng(seed), delta_per_ms=0.0)
    agnostic = LatencyAgnosticPolicy(np.random.default_rng(seed))
    for candidates in queries:
        assert lagrangian.choose(QUERY, candidates, 0.0) == agnostic.choose(QUERY, candidates, 0.0)


@given(candidate_lists(verdicts=("feasible",)), st.integers(0, 99))
def test_with_everything_in_time_bear_is_worth_as_much_as_latency_agnostic(
    candidates: list[Candidate], seed: int
) -> None:
    """An idle pool is routed by utility alone: both rules reach the same utility."""
    bear = BearPolicy(np.random.default_rng(seed)).choose(QUERY, candidates, 0.0)
    agnostic = LatencyAgnosticPolicy(np.random.default_rng(seed)).choose(QUERY, candidates, 0.0)
    if bear is not None and agnostic is not None:
        assert abs(utility(candidates[bear]) - utility(candidates[agnostic])) <= 2 * UTILITY_TIE
    else:
        assert bear is agnostic is None


@given(candidate_lists(), st.integers(0, 99))
def test_what_cannot_be_chosen_does_not_sway_the_choice(candidates: list[Candidate], seed: int) -> None:
    """Leaving out every ruled-out instance changes no policy's decision."""
    allowed = [candidate for candidate in candidates if candidate.verdict in CHOOSABLE]
    for name in CHOOSING:
        whole = make_choosing_policy(name, rng=np.random.default_rng(seed)).choose(QUERY, candidates, 0.0)
        part = make_choosing_policy(name, rng=np.random.default_rng(seed)).choose(QUERY, allowed, 0.0)
        assert (None if whole is None else candidates[whole].instance_id) == (
            None if part is None else allowed[part].instance_id
        )
