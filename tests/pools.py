"""Small pools of real fleets, engines and policies for tests of the decision path."""

from __future__ import annotations

from typing import Literal

import numpy as np

from headway.estimate.registry import make_estimator
from headway.fleet import FleetView
from headway.policy.registry import make_policy
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import (
    Calibration,
    Candidate,
    Decision,
    EngineLimits,
    Instance,
    ModelCard,
    ModelPrior,
    Query,
    Snapshot,
    SnapshotRequest,
    StepTime,
)

LIMITS = EngineLimits(
    max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=32768, block_size=16, num_blocks=20000
)
FAST = StepTime.linear(b0=2.788e-3, b1=2.102e-6, b2=3.936e-8, b3=3.72e-10)
SLOW = StepTime.linear(b0=1.453e-2, b1=5.310e-5, b2=4.385e-8, b3=1.721e-9)
CALIBRATION = Calibration(prefill_tokens_per_s=20_000.0, decode_step_s=0.01, service_rate_per_s=2.0)
MODELS = {
    "cheap": ModelCard(
        name="cheap", input_per_1m_usd=0.05, output_per_1m_usd=0.2, prior=ModelPrior(quality=0.4, output_tokens=200)
    ),
    "dear": ModelCard(
        name="dear", input_per_1m_usd=0.3, output_per_1m_usd=0.6, prior=ModelPrior(quality=0.9, output_tokens=200)
    ),
}


def instance(name: str, model: str = "cheap", step_time: StepTime = FAST, limits: EngineLimits = LIMITS) -> Instance:
    return Instance(
        id=name, model=model, engine="vllm-0.32", limits=limits, step_time=step_time, calibration=CALIBRATION
    )


def snapshot(name: str, *waiting_tokens: int, at_s: float = 0.0, sequence: int = 1) -> Snapshot:
    waiting = [
        SnapshotRequest(f"{name}-{number}", tokens, 0, 0, 0, 64, 0, at_s, 0)
        for number, tokens in enumerate(waiting_tokens)
    ]
    return Snapshot(
        instance_id=name,
        engine_version="vllm-0.32.0",
        engine_start=1,
        sequence=sequence,
        engine_s=at_s,
        limits=LIMITS,
        running=[],
        waiting=waiting,
        free_blocks=LIMITS.num_blocks - 1,
    )


def pool(
    *instances: Instance,
    policy: str = "bear",
    queued: dict[str, list[int]] | None = None,
    models: dict[str, ModelCard] = MODELS,
    on_infeasible: Literal["best_effort", "reject"] = "best_effort",
    default_ttft_s: float | None = None,
    lambda_per_musd: float = 5e-4,
    stale_after_s: float = 1e6,
) -> Router:
    fleet = FleetView(instances, stale_after_s=stale_after_s)
    router = Router(
        fleet=fleet,
        models=models,
        policy=make_policy(policy, rng=np.random.default_rng(1)),
        estimator=make_estimator("replay"),
        predictor=PriorPredictor(models),
        lambda_per_musd=lambda_per_musd,
        default_ttft_s=default_ttft_s,
        on_infeasible=on_infeasible,
        config_hash="c0ffee",
    )
    for one in instances:
        if one.limits is not None:
            router.observe(snapshot(one.id, *(queued or {}).get(one.id, [])), 0.0)
    return router


def query(tokens: int = 1000, *, name: str = "q", target_s: float | None = None, **fields: object) -> Query:
    counts = dict.fromkeys([*MODELS, "other"], tokens)
    known = {"id": name, "arrival_s": 0.0, "prompt_text": "Give a tip.", "prompt_tokens": counts, **fields}
    return Query(ttft_target_s=target_s, **known)  # type: ignore[arg-type]


def verdicts(decision: Decision) -> dict[str, str]:
    return {candidate.instance_id: candidate.verdict for candidate in decision.candidates}


def choice(decision: Decision) -> Candidate:
    assert decision.candidate is not None
    return decision.candidate


def book(fleet: FleetView, request_id: str, instance_id: str, *, now: float = 0.0, prompt_tokens: int = 1000) -> None:
    """Enter a request in the ledger as the gateway does after a decision."""
    fleet.book(
        request_id=request_id,
        instance_id=instance_id,
        prompt_tokens=prompt_tokens,
        predicted_output_tokens=200.0,
        max_tokens=None,
        priority=0,
        now=now,
    )


def admitted(router: Router, *queries: Query, since_s: float = 0.0) -> list[tuple[Query, float]]:
    """The queue of a holding policy: queries that the router admitted, held since ``since_s``."""
    for one in queries:
        router.admit(one, since_s)
    return [(one, since_s) for one in queries]


def release_all(router: Router, queue: list[tuple[Query, float]], now: float = 0.0) -> list[Decision]:
    """Release, book, and again until nothing comes, as the gateway does."""
    released: list[Decision] = []
    while queue and (decisions := router.release(queue, now)):
        for decision in decisions:
            assert decision.candidate is not None
            book(router.fleet, decision.query_id, decision.candidate.instance_id, now=now)
        gone = {decision.query_id for decision in decisions}
        queue[:] = [one for one in queue if one[0].id not in gone]
        released += decisions
    return released


def count_estimates(router: Router) -> list[str]:
    """The ids of the queries that are estimated from now on, as they come."""
    asked: list[str] = []
    estimate = router._estimator.estimate

    def counting(one: Query, *rest: object) -> object:
        asked.append(one.id)
        return estimate(one, *rest)  # type: ignore[arg-type]

    router._estimator.estimate = counting  # type: ignore[method-assign,assignment]
    return asked
