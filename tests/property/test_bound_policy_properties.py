"""What must hold of every policy on real fleets of any state: the router binds it, decides, books and reports."""

from __future__ import annotations

from typing import Literal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from headway.errors import NoInstanceError
from headway.estimate.registry import make_estimator
from headway.fleet import FleetView
from headway.policy.base import CHOOSABLE
from headway.policy.registry import POLICIES, make_policy
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import Instance, Outcome
from pools import MODELS, SLOW, book, instance, query, snapshot


class Member(Struct, frozen=True):
    """One instance of a random pool and what is done to it."""

    kind: Literal["engine", "no_clock", "hosted", "silent"]
    model: Literal["cheap", "dear"]
    queued_tokens: list[int]
    num_booked: int
    healthy: bool
    draining: bool
    stale: bool
    clock_trusted: bool


class Arrival(Struct, frozen=True):
    """One query of a random run, and how the answer to it goes; None while it is still under way."""

    prompt_tokens: int
    target_s: float | None
    excluded: frozenset[int]
    token_s: float | None


CHOOSING = sorted(name for name, row in POLICIES.items() if not row.holds)
MEMBERS = st.builds(
    Member,
    st.sampled_from(["engine", "engine", "engine", "no_clock", "hosted", "silent"]),
    st.sampled_from(["cheap", "dear"]),
    st.lists(st.integers(1, 30_000), max_size=4),
    st.integers(0, 3),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([False, False, False, True]),
    st.booleans(),
)
ARRIVALS = st.builds(
    Arrival,
    st.integers(1, 31_000),
    st.sampled_from([None, 1e-3, 0.1, 1.0, 100.0]),
    st.frozensets(st.integers(0, 3), max_size=2),
    st.sampled_from([None, 0.001, 0.02, 1.0]),
)


def _instance(index: int, member: Member) -> Instance:
    if member.kind == "hosted":
        return Instance(id=str(index), model=member.model)
    known = instance(str(index), model=member.model, **({"step_time": SLOW} if index % 2 else {}))
    return replace(known, step_time=None) if member.kind == "no_clock" else known


def _router(name: str, members: list[Member], seed: int, fallback: str) -> Router:
    options = {"fallback": fallback} if "fallback" in POLICIES[name].options else {}
    router = Router(
        fleet=FleetView([_instance(*pair) for pair in enumerate(members)], stale_after_s=1e6),
        models=MODELS,
        policy=make_policy(name, rng=np.random.default_rng(seed), options=options),
        estimator=make_estimator(POLICIES[name].estimator),
        predictor=PriorPredictor(MODELS),
    )
    for index, (member, view) in enumerate(zip(members, router.fleet.views, strict=True)):
        view.healthy, view.draining, view.clock_trusted = member.healthy, member.draining, member.clock_trusted
        if member.kind in ("engine", "no_clock"):
            at_s = -2e6 if member.stale else 0.0
            router.observe(snapshot(str(index), *member.queued_tokens, at_s=at_s), 0.0)
        for number in range(member.num_booked):
            book(router.fleet, f"{index}-{number}", str(index))
    return router


def _play(router: Router, arrivals: list[Arrival]) -> list[str | None]:
    """The instances chosen; every decision is checked, booked and, where it ends, reported."""
    chosen: list[str | None] = []
    for number, arrival in enumerate(arrivals):
        now = 0.05 * number
        excluded = frozenset(str(index) for index in arrival.excluded)
        one = query(arrival.prompt_tokens, name=f"q{number}", target_s=arrival.target_s, excluded_instances=excluded)
        try:
            decision = router.decide(one, now)
        except NoInstanceError:
            chosen.append(None)
            continue
        candidate = decision.candidate
        assert candidate is not None
        assert candidate.verdict in CHOOSABLE
        chosen.append(candidate.instance_id)
        book(router.fleet, one.id, candidate.instance_id, now=now, prompt_tokens=arrival.prompt_tokens)
        if arrival.token_s is not None:
            outcome = Outcome(
                query_id=one.id,
                instance_id=candidate.instance_id,
                status="ok",
                ttft_s=0.1,
                total_s=0.1 + 9 * arrival.token_s,
                output_tokens=10,
            )
            router.observe(outcome, now)
    return chosen


@settings(deadline=None)
@given(
    st.sampled_from(CHOOSING),
    st.lists(MEMBERS, min_size=1, max_size=4),
    st.lists(ARRIVALS, max_size=6),
    st.integers(0, 99),
    st.sampled_from(["least_ttft", "least_work"]),
)
def test_every_policy_decides_on_any_fleet(
    name: str, members: list[Member], arrivals: list[Arrival], seed: int, fallback: str
) -> None:
    """Whatever is known of the instances, a choosable one is chosen, and the same again with the same seed."""
    first, second = (_play(_router(name, members, seed, fallback), arrivals) for _ in range(2))
    assert first == second


@settings(deadline=None)
@given(st.lists(MEMBERS, min_size=1, max_size=4), st.lists(ARRIVALS, max_size=6), st.integers(0, 99))
def test_the_fallbacks_differ_only_where_nothing_is_in_time(
    members: list[Member], arrivals: list[Arrival], seed: int
) -> None:
    """While each query can be served in time somewhere, both fallbacks choose the same instances."""
    in_time = [replace(arrival, target_s=None) for arrival in arrivals]
    assert _play(_router("bear", members, seed, "least_work"), in_time) == _play(
        _router("bear", members, seed, "least_ttft"), in_time
    )
