"""Policies that hold queries: what the router admits, how a queue is released, and the central-queue baselines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from headway.errors import ConfigError, NoInstanceError, RequestError, RoutingError
from headway.estimate.registry import make_estimator
from headway.fleet import FleetView
from headway.policy.base import HeldQuery, HoldingPolicy, Policy, Release
from headway.policy.registry import make_choosing_policy, make_policy
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import Decision, Outcome
from pools import LIMITS, MODELS, SLOW, admitted, book, count_estimates, instance, query, release_all, snapshot

ONE_SLOT = msgspec.structs.replace(LIMITS, max_num_seqs=1)


def release_to(held: HeldQuery, instance_id: str) -> Release:
    return Release(held.query.id, instance_id, "it was told to")


class Scripted:
    """Releases what its script says, and keeps what it saw."""

    name = "scripted"

    def __init__(self, *releases: Release) -> None:
        self.releases = list(releases)
        self.seen: list[list[HeldQuery]] = []

    def release(self, queue: Sequence[HeldQuery], fleet: FleetView, now: float) -> list[Release]:
        self.seen.append(list(queue))
        out, self.releases = self.releases, []
        return out

    def next_release_s(self, now: float) -> float | None:
        return now + 1.5


def router_of(policy: Policy | HoldingPolicy, *names: str, **options: object) -> Router:
    instances = [instance(name, limits=ONE_SLOT) for name in names]
    router = Router(
        fleet=FleetView(instances, stale_after_s=1e6),
        models=MODELS,
        policy=policy,
        estimator=make_estimator("replay"),
        predictor=PriorPredictor(MODELS),
        **options,  # type: ignore[arg-type]
    )
    for name in names:
        router.observe(msgspec.structs.replace(snapshot(name), limits=ONE_SLOT), 0.0)
    return router


def central(name: str, *names: str) -> Router:
    return router_of(make_policy(name, rng=np.random.default_rng(0)), *names)


def slow_and_behind(*waiting_tokens: int) -> Router:
    """A bear that holds what is infeasible, over one slow instance with such prompts in its queue."""
    router = Router(
        fleet=FleetView([instance("a", step_time=SLOW)], stale_after_s=1e6),
        models=MODELS,
        policy=make_policy("bear", rng=np.random.default_rng(0)),
        estimator=make_estimator("replay"),
        predictor=PriorPredictor(MODELS),
        on_infeasible="queue",
    )
    router.observe(snapshot("a", *waiting_tokens), 0.0)
    return router


def end(router: Router, query_id: str, instance_id: str, now: float) -> None:
    router.observe(Outcome(query_id=query_id, instance_id=instance_id, status="ok", ttft_s=0.1), now)


def test_central_fcfs_releases_in_order_as_slots_come_free() -> None:
    """Two slots take the first two queries; each end lets the next one go, never out of order."""
    router = central("central_fcfs", "a", "b")
    queue = admitted(router, *(query(name=f"q{number}") for number in range(4)))
    assert [decision.query_id for decision in release_all(router, queue, 0.0)] == ["q0", "q1"]
    assert router.next_release_s(0.0) is None
    end(router, "q1", "b", 1.0)
    (third,) = release_all(router, queue, 1.0)
    assert (third.query_id, third.candidate and third.candidate.instance_id, third.held_s) == ("q2", "b", 1.0)
    assert [one.id for one, _ in queue] == ["q3"]


def test_central_shortest_first_releases_the_shortest_predicted_answer() -> None:
    """Of held queries the one with the shortest predicted answer takes the slot; priority comes first."""
    router = central("central_shortest_first", "a")
    long, short = query(name="long", max_tokens=150), query(name="short", max_tokens=20)
    urgent = query(name="urgent", max_tokens=190, priority=-1)
    queue = admitted(router, long, short, urgent)
    order = []
    for now in (0.0, 1.0, 2.0):
        (decision,) = release_all(router, queue, now)
        order.append(decision.query_id)
        end(router, decision.query_id, "a", now + 0.5)
    assert order == ["urgent", "short", "long"]


def test_a_full_instance_holds_back_only_those_who_could_go_there() -> None:
    """A later query may pass one that waits for another model, not one that waits for its own."""
    router = Router(
        fleet=FleetView([instance("a", limits=ONE_SLOT), instance("b", "dear", limits=ONE_SLOT)], stale_after_s=1e6),
        models=MODELS,
        policy=make_policy("central_fcfs", rng=np.random.default_rng(0)),
        estimator=make_estimator("replay"),
        predictor=PriorPredictor(MODELS),
    )
    book(router.fleet, "resident", "a")
    cheap = [query(name=f"cheap{number}", candidates=("cheap",)) for number in range(2)]
    queue = admitted(router, cheap[0], query(name="dear", candidates=("dear",)), cheap[1])
    assert [decision.query_id for decision in release_all(router, queue, 0.0)] == ["dear"]
    assert [one.id for one, _ in queue] == ["cheap0", "cheap1"]


def test_what_can_never_run_is_refused_at_admission() -> None:
    """A prompt beyond every context, an unmet quality floor and a pool that is down are refused as by decide."""
    router = central("central_fcfs", "a")
    with pytest.raises(RequestError) as caught:
        router.admit(query(10**6), 0.0)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="quality"):
        router.admit(query(quality_min=0.99), 0.0)
    router.fleet.set_health("a", False)
    with pytest.raises(NoInstanceError):
        router.admit(query(), 0.0)


def test_a_policy_may_refuse_what_it_could_never_release() -> None:
    """Its own reason becomes a 400 at admission."""

    class Choosy(Scripted):
        def never_fits(self, held: HeldQuery) -> str | None:
            return "it is too big" if held.query.id == "big" else None

    router = router_of(Choosy(), "a")
    router.admit(query(name="small"), 0.0)
    with pytest.raises(RequestError, match="too big"):
        router.admit(query(name="big"), 0.0)


def test_targets_run_while_a_query_is_held() -> None:
    """A target of 2 s that has waited 1.9 s is a target of 0.1 s, and late where the first token takes longer."""
    policy = Scripted()
    router = router_of(policy, "a", default_ttft_s=2.0)
    queue = admitted(router, query(30_000))
    router.release(queue, 0.0)
    assert [held.candidates[0].verdict for held in policy.seen[0]] == ["feasible"]
    router.release(queue, 1.999)
    assert [held.candidates[0].verdict for held in policy.seen[1]] == ["late"]
    policy.releases = [release_to(policy.seen[1][0], "a")]
    (decision,) = router.release(queue, 1.999)
    assert decision.slo == "infeasible"
    assert decision.ttft_target_s == pytest.approx(0.001)
    assert router.next_release_s(3.0) == 4.5


@pytest.mark.parametrize(
    "releases",
    [
        [Release("nobody", "a", "")],
        [Release("q", "a", ""), Release("q", "a", "")],
        [Release("q", "nowhere", "")],
        [Release("q", "ill", "")],
    ],
)
def test_a_policy_cannot_send_where_it_may_not(releases: list[Release]) -> None:
    """What is not held, was released already, or would go to an unknown or unhealthy instance is an error."""
    router = router_of(Scripted(*releases), "a", "ill")
    router.fleet.set_health("ill", False)
    with pytest.raises(ValueError, match="policy scripted released"):
        router.release(admitted(router, query()), 0.0)


def test_holding_policies_do_not_decide_at_once() -> None:
    """decide refuses, explain says why, and only those who drive choose themselves are told at start."""
    router = central("central_fcfs", "a")
    with pytest.raises(RoutingError, match="releases them from its queue"):
        router.decide(query(), 0.0)
    decision = router.explain(query(), 0.0)
    assert decision.chosen is None
    assert decision.candidates
    with pytest.raises(ConfigError, match="holds queries"):
        make_choosing_policy("central_fcfs", rng=np.random.default_rng(0))


def test_a_held_query_can_be_explained_and_sent_anyway() -> None:
    """The reason names policy and cause; after its time it goes to the smallest TTFT."""
    router = central("central_fcfs", "a", "b")
    for name in "ab":
        book(router.fleet, name, name)
    queue = admitted(router, query(target_s=0.5))
    assert router.release(queue, 1.0) == []
    why = router.explain_held(*queue[0], 1.0)
    assert (why.chosen, why.reason, why.held_s) == (None, "held by central_fcfs: no slot is free", 1.0)
    assert why.retry_after_s is not None
    assert why.retry_after_s >= 1.0
    decision = router.release_anyway(*queue[0], 1.0)
    assert decision.candidate is not None
    assert decision.slo == "infeasible"
    assert "its time in the queue is over" in decision.reason


def test_an_infeasible_query_is_held_until_an_instance_is_in_time() -> None:
    """``on_infeasible: queue``: the choosing policy decides once a first token within the whole target is expected."""
    router = slow_and_behind(30_000, 30_000)
    assert router.holds
    queue = admitted(router, query(target_s=0.5))
    assert router.release(queue, 0.0) == []
    assert "no instance is in time: the best offers" in router.explain_held(*queue[0], 0.0).reason
    next_s = router.next_release_s(0.0)
    assert next_s is not None
    released: list[Decision] = []
    while not released and next_s < 60.0:
        released = router.release(queue, next_s)
        now, next_s = next_s, router.next_release_s(next_s) or 99.0
    assert released
    assert released[0].policy == "bear"
    candidate = released[0].candidate
    assert candidate is not None
    assert candidate.verdict == "feasible"
    assert now > 1.0
    assert released[0].slo == "infeasible"  # the client has waited longer than its target, and is told so


def test_estimates_are_made_only_for_who_is_looked_at() -> None:
    """A long queue costs an estimate per query that the policy judges, not per query that waits."""
    router = router_of(make_policy("bear", rng=np.random.default_rng(0)), "a", on_infeasible="queue")
    asked = count_estimates(router)
    queue = admitted(router, *(query(name=f"q{number}") for number in range(50)))
    router.release(queue, 0.0)
    assert set(asked) == {"q0"}


def test_a_long_queue_is_looked_at_in_turns() -> None:
    """Of a thousand infeasible queries 48 are judged per call, and every one of them before long."""
    router = slow_and_behind(*[30_000] * 8)
    asked = count_estimates(router)
    queue = admitted(router, *(query(name=f"q{number}", target_s=0.01) for number in range(1000)))
    assert router.release(queue, 0.0) == []
    assert len(asked) == 48
    for _ in range(31):
        router.release(queue, 0.0)
    assert len(set(asked)) == 1000
