"""What the router refuses and says about it, and what it does with what comes back."""

from __future__ import annotations

import pytest

from headway.errors import ConfigError, NoInstanceError, RejectedError, RequestError
from headway.estimate.queueing import QueueingEstimator
from headway.fleet import FleetView
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import Instance, ModelCard, Outcome, Prediction, Query
from pools import MODELS, SLOW, book, choice, instance, pool, query, verdicts

# ---- refusals ----------------------------------------------------------------------------------------------------


def test_reject_refuses_what_no_instance_can_do_in_time() -> None:
    """The error carries the best TTFT on offer and a Retry-After at which the replay really is in time."""
    router = pool(instance("a", step_time=SLOW), queued={"a": [20_000] * 9}, on_infeasible="reject")
    with pytest.raises(RejectedError, match="no instance is expected to give the first token within 300 ms") as caught:
        router.decide(query(target_s=0.3), 0.0)
    error = caught.value
    assert error.best_ttft_s > 5.0
    assert error.reason == "ttft_target"
    assert 1.0 < error.retry_after_s < error.best_ttft_s + 5.0
    assert router.decide(query(target_s=0.3), error.retry_after_s).slo == "met-expected"


def test_reject_lets_pass_what_some_instance_can_do() -> None:
    """A policy that then picks a late instance is its own affair; without a target nothing is rejected."""
    busy = {"a": [20_000] * 9}
    router = pool(instance("a"), instance("b"), queued=busy, on_infeasible="reject", policy="round_robin")
    assert [choice(router.decide(query(target_s=0.3), 0.0)).instance_id for _ in range(2)] == ["a", "b"]
    alone = pool(instance("a"), queued=busy, on_infeasible="reject")
    assert alone.decide(query(), 0.0).chosen == 0


def test_a_rejection_says_at_least_one_second() -> None:
    """A target missed by a hair asks for a whole second, as the header does; an impossible one for half a minute."""
    router = pool(instance("a", step_time=SLOW), queued={"a": [4000]}, on_infeasible="reject")
    with pytest.raises(RejectedError) as caught:
        router.decide(query(target_s=0.2), 0.0)
    assert caught.value.retry_after_s == 1.0
    with pytest.raises(RejectedError) as caught:
        router.decide(query(target_s=1e-4), 0.0)
    assert caught.value.retry_after_s == 30.0


def test_explain_shows_a_refusal_instead_of_raising_it() -> None:
    """Every candidate with its figures, chosen None, the reason and the Retry-After."""
    router = pool(instance("a", step_time=SLOW), queued={"a": [20_000] * 9}, on_infeasible="reject")
    decision = router.explain(query(target_s=0.3), 0.0)
    assert (decision.chosen, decision.slo, verdicts(decision)) == (None, "infeasible", {"a": "late"})
    assert decision.retry_after_s is not None
    assert decision.retry_after_s > 1.0
    assert decision.reason.startswith("no instance is expected")
    assert router.explain(query(target_s=60.0), 0.0) == router.decide(query(target_s=60.0), 0.0)


def test_no_healthy_instance_is_the_pools_fault() -> None:
    """Ill, draining and excluded instances make a 503, each named with its verdict."""
    router = pool(instance("a"), instance("b"), instance("c"))
    router.fleet.set_health("a", False)
    router.fleet.set_draining("b", True)
    with pytest.raises(NoInstanceError, match="a is unhealthy, b is draining, c is excluded"):
        router.decide(query(excluded_instances=frozenset({"c"})), 0.0)


def test_a_prompt_that_fits_nowhere_is_the_clients_fault_even_in_an_ill_pool() -> None:
    """Waiting would not help; but where it fits an ill instance, waiting would."""
    models = {**MODELS, "dear": ModelCard(name="dear", context_tokens=4096)}
    router = pool(instance("a", "cheap"), instance("b", "dear"), models=models)
    router.fleet.set_health("a", False)
    with pytest.raises(RequestError, match="40000 tokens fits no instance: the largest takes 32767") as caught:
        router.decide(query(40_000), 0.0)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(NoInstanceError):
        router.decide(query(20_000), 0.0)


def test_a_floor_or_budget_that_nobody_meets_is_named() -> None:
    """The client learns which field to relax and to what; an ill instance that would do makes it a 503 instead."""
    router = pool(instance("a", "cheap"), instance("b", "dear"))
    with pytest.raises(RequestError, match=r"quality 0.950: the best offers 0.900") as caught:
        router.decide(query(quality_min=0.95), 0.0)
    assert (caught.value.status, caught.value.param) == (400, "slo.quality_min")
    with pytest.raises(RequestError, match=r"within 1e-07 USD: the cheapest would cost 9e-05") as caught:
        router.decide(query(max_cost_usd=1e-7), 0.0)
    assert caught.value.param == "slo.max_cost_usd"
    with pytest.raises(RequestError) as caught:
        router.decide(query(quality_min=0.5, max_cost_usd=1e-4), 0.0)
    assert caught.value.param == "slo.max_cost_usd"
    router.fleet.set_health("b", False)
    with pytest.raises(NoInstanceError):
        router.decide(query(quality_min=0.5), 0.0)


def test_candidates_of_other_models_are_left_out() -> None:
    """A pinned model lists its own instances only; a model nobody knows is a 404, one without instances a 503."""
    models = {**MODELS, "other": ModelCard(name="other")}
    router = pool(instance("a", "cheap"), instance("b", "dear"), models=models)
    assert verdicts(router.decide(query(candidates=("cheap",)), 0.0)) == {"a": "feasible"}
    with pytest.raises(RequestError, match="unknown model 'gpt'") as caught:
        router.decide(query(candidates=("gpt",)), 0.0)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    with pytest.raises(NoInstanceError, match="no instance serves other"):
        router.decide(query(candidates=("other",)), 0.0)


def test_missing_figures_are_a_callers_mistake() -> None:
    """A prediction or token count that is not there is named, never taken for zero."""
    router = pool(instance("a", "cheap"), instance("b", "dear"))
    with pytest.raises(ValueError, match="predictions of query 'q' lack model 'dear'"):
        router.decide(query(), 0.0, {"cheap": Prediction(0.5, 1.0, 0.0, "x")})
    with pytest.raises(ValueError, match="prompt_tokens of query 'q' lacks model 'dear'"):
        router.decide(query(prompt_tokens={"cheap": 5}), 0.0)


def test_an_instance_of_an_unknown_model_is_refused_at_once() -> None:
    """A router is never built over a pool it cannot price."""
    with pytest.raises(ConfigError, match="instance a names unknown model 'gone'"):
        pool(instance("a", "gone"))


# ---- what comes back ---------------------------------------------------------------------------------------------


def test_outcomes_release_their_entry_once_and_teach_the_estimator() -> None:
    """The ledger is empty after the outcome, still so after a second one, and the hosted estimate has moved."""
    router = pool(Instance(id="api", model="cheap"))
    for number in range(3):
        name = f"q{number}"
        book(router.fleet, name, "api")
        outcome = Outcome(query_id=name, instance_id="api", status="ok", ttft_s=0.25, total_s=1.0)
        router.observe(outcome, 1.0)
        router.observe(outcome, 1.0)
    assert router.fleet.views[0].num_outstanding == 0
    estimate = choice(router.decide(query(), 1.0)).estimate
    assert estimate is not None
    assert (estimate.ttft_s, estimate.source) == (0.25, "history")


def test_outcomes_of_instances_that_are_gone_are_harmless() -> None:
    """A rejected query has no instance, and a removed one may still report."""
    router = pool(instance("a"))
    router.observe(Outcome(query_id="q", instance_id="", status="rejected"), 0.0)
    router.observe(Outcome(query_id="q", instance_id="removed", status="ok", ttft_s=1.0), 0.0)


def test_a_policy_that_learns_is_told_what_happened() -> None:
    """Outcomes reach a policy that has an observe of its own."""

    class Learner:
        name = "learner"

        def __init__(self) -> None:
            self.seen: list[tuple[str, float]] = []

        def choose(self, query: Query, candidates: object, now: float) -> int | None:
            return None

        def observe(self, outcome: Outcome, now: float) -> None:
            self.seen.append((outcome.query_id, now))

    learner = Learner()
    router = Router(
        fleet=FleetView([instance("a")]),
        models=MODELS,
        policy=learner,
        estimator=QueueingEstimator(),
        predictor=PriorPredictor(MODELS),
    )
    router.observe(Outcome(query_id="q7", instance_id="a", status="ok"), 2.0)
    assert learner.seen == [("q7", 2.0)]
    with pytest.raises(NoInstanceError, match="policy learner chose none of 1 instances"):
        router.decide(query(), 2.0)


def test_silent_snapshots_fall_back_in_the_open() -> None:
    """Beyond the allowed age of a busy engine's snapshot the estimate's source changes to queueing."""
    router = pool(instance("a"), queued={"a": [20_000] * 9}, stale_after_s=2.0)
    sources = []
    for now in (0.5, 60.0):
        estimate = choice(router.decide(query(), now)).estimate
        assert estimate is not None
        sources.append((estimate.source, estimate.snapshot_age_s))
    assert sources == [("replay", 0.5), ("queueing", 60.0)]


def test_deciding_books_nothing() -> None:
    """The same query at the same time has the same decision until somebody books it."""
    router = pool(instance("a"), instance("b", "dear", SLOW))
    first = router.decide(query(target_s=0.3), 0.0)
    assert router.decide(query(target_s=0.3), 0.0) == first
    assert [view.num_outstanding for view in router.fleet.views] == [0, 0]
