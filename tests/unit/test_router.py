"""Router.decide on real fleets, engines and policies: figures, choices, verdicts and targets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from headway.estimate.queueing import QueueingEstimator
from headway.fleet import FleetView
from headway.policy.registry import make_policy
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import EngineLimits, Instance, ModelCard, ModelPrior, Prediction
from pools import FAST, LIMITS, MODELS, SLOW, book, choice, instance, pool, query, verdicts

# ---- figures and choice ------------------------------------------------------------------------------------------


def test_a_decision_lists_every_figure_of_every_candidate() -> None:
    """Quality, cost, tokens, utility, p50 and p90 TTFT, source, age, ledger and configuration hash are all there."""
    router = pool(instance("a", "cheap"), instance("b", "dear", SLOW))
    decision = router.decide(query(1000, target_s=0.5), 0.25)
    first, second = decision.candidates
    cost_usd = (1000 * 0.05 + 200 * 0.2) * 1e-6
    assert (first.instance_id, first.model, first.quality, first.output_tokens) == ("a", "cheap", 0.4, 200)
    assert (first.prompt_tokens, first.prediction, first.num_outstanding) == (1000, "prior", 0)
    assert first.cost_usd == pytest.approx(cost_usd)
    assert first.utility == pytest.approx(0.4 - 5e-4 * cost_usd * 1e6)
    assert first.estimate is not None
    assert first.estimate.ttft_s == pytest.approx(2.788e-3 + 1000 * 2.102e-6 + 3.72e-10 * 1000 * 1001 / 2)
    assert first.estimate.ttft_p90_s == pytest.approx(1.1 * first.estimate.ttft_s)
    assert (first.estimate.source, first.estimate.snapshot_age_s) == ("replay", 0.25)
    assert (decision.query_id, decision.policy, decision.config_hash) == ("q", "bear", "c0ffee")
    assert (decision.slo, decision.ttft_target_s, decision.chosen) == ("met-expected", 0.5, 1)
    assert decision.best_ttft_s == first.estimate.ttft_s
    assert second.verdict == "feasible"


def test_given_predictions_are_used_instead_of_the_predictor() -> None:
    """The caller's figures decide, and keep their source."""
    router = pool(instance("a", "cheap"), instance("b", "dear"))
    given = {"cheap": Prediction(0.95, 10.0, 0.0, "learned"), "dear": Prediction(0.1, 10.0, 0.0, "learned")}
    decision = router.decide(query(), 0.0, given)
    assert (choice(decision).instance_id, choice(decision).prediction) == ("a", "learned")


@pytest.mark.parametrize(("lambda_per_musd", "expected"), [(5e-4, "b"), (2e-3, "a")])
def test_lambda_weighs_micro_usd_against_quality(lambda_per_musd: float, expected: str) -> None:
    """The dear answer costs 330 micro-USD more: worth .5 of quality at 5e-4 per micro-USD, not at 2e-3."""
    router = pool(instance("a", "cheap"), instance("b", "dear"), lambda_per_musd=lambda_per_musd)
    assert choice(router.decide(query(), 0.0)).instance_id == expected


def test_a_tight_target_buys_the_dear_instance_and_a_loose_one_the_cheap() -> None:
    """A target that only the dear instance meets is met there; with time enough the better utility wins."""
    models = {
        "cheap": MODELS["cheap"],
        "dear": ModelCard(name="dear", input_per_1m_usd=9.0, output_per_1m_usd=9.0, prior=ModelPrior(quality=0.4)),
    }
    router = pool(instance("a", "cheap", SLOW), instance("b", "dear", FAST), models=models, queued={"a": [20_000] * 2})
    tight, loose = router.decide(query(target_s=0.3), 0.0), router.decide(query(target_s=5.0), 0.0)
    assert (choice(tight).instance_id, verdicts(tight)["a"]) == ("b", "late")
    assert choice(loose).instance_id == "a"


def test_the_replay_decides_between_a_slow_idle_and_a_fast_busy_instance() -> None:
    """With 20k tokens queued the fast instance still ends first or not as its replay says, not as its queue looks."""
    router = pool(instance("idle", step_time=SLOW), instance("busy", step_time=FAST), queued={"busy": [10_000] * 2})
    decision = router.decide(query(4000, target_s=1e-3), 0.0)
    ttft_s = {
        candidate.instance_id: candidate.estimate.ttft_s for candidate in decision.candidates if candidate.estimate
    }
    assert choice(decision).instance_id == min(ttft_s, key=ttft_s.__getitem__)
    assert ttft_s["busy"] < ttft_s["idle"]


def test_simultaneous_requests_spread_although_snapshots_stand_still() -> None:
    """A hundred requests at one instant, each booked after its decision: 25 ± 3 on each of four equal instances."""
    for policy in ("bear", "latency_agnostic", "shortest_queue", "round_robin"):
        router = pool(*[instance(name) for name in "abcd"], policy=policy)
        counts: Counter[str] = Counter()
        for number in range(100):
            request = query(name=f"q{number}", target_s=0.8)
            chosen = choice(router.decide(request, 1.0))
            counts[chosen.instance_id] += 1
            book(router.fleet, request.id, chosen.instance_id, now=1.0)
        assert all(22 <= counts[name] <= 28 for name in "abcd"), (policy, counts)


# ---- verdicts ----------------------------------------------------------------------------------------------------


def test_each_verdict_is_the_first_that_applies() -> None:
    """Excluded before draining before unhealthy before context before quality before lateness."""
    small = EngineLimits(max_num_batched_tokens=8192, max_num_seqs=8, max_model_len=512, block_size=16, num_blocks=99)
    names = ["excluded", "draining", "unhealthy", "context", "late", "feasible"]
    limits = {"excluded": small, "draining": small, "unhealthy": small, "context": small}
    router = pool(*[instance(name, limits=limits.get(name, LIMITS)) for name in names], queued={"late": [20_000] * 9})
    for name in ("excluded", "draining"):
        router.fleet.set_draining(name, True)
    for name in ("excluded", "draining", "unhealthy"):
        router.fleet.set_health(name, False)
    decision = router.decide(query(target_s=0.1, excluded_instances=frozenset({"excluded"})), 0.0)
    assert verdicts(decision) == {name: name for name in names}
    estimates = {candidate.instance_id: candidate.estimate for candidate in decision.candidates}
    assert estimates["unhealthy"] is estimates["context"] is None


def test_quality_floor_and_budget_rule_models_out() -> None:
    """A model below the floor or above the budget is listed with its figures and never chosen."""
    router = pool(instance("a", "cheap"), instance("b", "dear"))
    floor = router.decide(query(quality_min=0.5), 0.0)
    assert verdicts(floor) == {"a": "quality", "b": "feasible"}
    assert floor.candidates[0].utility is not None
    budget = router.decide(query(max_cost_usd=1e-4), 0.0)
    assert (verdicts(budget), choice(budget).instance_id) == ({"a": "feasible", "b": "budget"}, "a")


def test_a_saturated_instance_says_so_with_and_without_a_target() -> None:
    """An infinite estimate is no lateness: bear avoids it even where nothing is late."""
    router = pool(instance("a", "dear"), instance("b", "cheap"))
    silent = FleetView([router.fleet.views[0].instance, Instance(id="b", model="cheap")])
    router = Router(
        fleet=silent,
        models=MODELS,
        policy=make_policy("bear", rng=np.random.default_rng(0)),
        estimator=QueueingEstimator(),
        predictor=PriorPredictor(MODELS),
    )
    for number in range(40):
        book(silent, f"r{number}", "a")
    for target_s in (None, 0.9):
        decision = router.decide(query(target_s=target_s), 0.0)
        assert verdicts(decision) == {"a": "saturated", "b": "feasible"}
        assert choice(decision).instance_id == "b"


def test_a_long_prompt_goes_where_it_fits() -> None:
    """20k tokens never go to the 16k context, however much better it is; a prompt needs room for one output token."""
    models = {
        "cheap": ModelCard(name="cheap", context_tokens=16_384, prior=ModelPrior(quality=0.9)),
        "dear": MODELS["dear"],
    }
    router = pool(instance("a", "cheap"), instance("b", "dear", SLOW), models=models)
    for tokens, expected in ((20_000, "b"), (16_384, "b"), (16_383, "a")):
        decision = router.decide(query(tokens, target_s=9.0), 0.0)
        assert choice(decision).instance_id == expected
        assert verdicts(decision)["a"] == ("feasible" if expected == "a" else "context")


def test_a_prompt_beyond_the_key_value_blocks_does_not_fit() -> None:
    """Three usable blocks of 16 hold 48 tokens, whatever the model's context says."""
    tight = EngineLimits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=4096, block_size=16, num_blocks=4)
    router = pool(Instance(id="a", model="cheap", engine="vllm-0.32", limits=tight), Instance(id="b", model="dear"))
    assert verdicts(router.decide(query(48), 0.0))["a"] == "feasible"
    assert verdicts(router.decide(query(49), 0.0))["a"] == "context"


# ---- targets -----------------------------------------------------------------------------------------------------


def test_a_query_without_target_takes_the_default_and_its_own_goes_first() -> None:
    """default_ttft_s stands in; without either nothing is late and the SLO is none."""
    busy = {"a": [20_000] * 9}
    router = pool(instance("a"), queued=busy, default_ttft_s=0.1)
    assert router.decide(query(), 0.0).slo == "infeasible"
    assert router.decide(query(target_s=60.0), 0.0).slo == "met-expected"
    free = pool(instance("a"), queued=busy).decide(query(), 0.0)
    assert (free.slo, free.ttft_target_s, verdicts(free)) == ("none", None, {"a": "feasible"})


def test_a_late_choice_is_marked_infeasible_though_another_was_in_time() -> None:
    """The SLO mark speaks of the chosen instance: latency-agnostic routing pays for its rule in the open."""
    router = pool(
        instance("a", "dear", SLOW), instance("b", "cheap"), policy="latency_agnostic", queued={"a": [20_000] * 5}
    )
    decision = router.decide(query(target_s=0.2), 0.0)
    assert (choice(decision).instance_id, decision.slo) == ("a", "infeasible")
    assert "beyond the target of 200 ms that 1 of 2 instances meet" in decision.reason


def test_the_reason_is_a_sentence_for_people() -> None:
    """It names policy, instance, expectation, target and utility."""
    router = pool(instance("a", "cheap"), instance("b", "dear"))
    assert router.decide(query(target_s=0.3), 0.0).reason == (
        "bear chose b: first token expected in 5 ms, within the target of 300 ms that 2 of 2 instances meet; "
        "utility 0.690, the best of them"
    )
    assert ", no target given; utility 0.690" in router.decide(query(), 0.0).reason
    lone = pool(instance("a"), queued={"a": [20_000] * 9}).decide(query(target_s=0.01), 0.0)
    assert "beyond the target of 10 ms that no instance is expected to meet" in lone.reason
