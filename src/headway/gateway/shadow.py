"""A second router that decides beside the first, so that a policy or predictor can be judged before it is trusted.

It decides a sample of the queries on the same state of the pool, right after the first router and before anything is
booked, so both saw the same. Nothing is sent by it, and nothing of it reaches a client. What it would have done is
compared in metrics: how often both agree, and what each choice loses by the other's figures.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from headway.gateway.log import event
from headway.router import Router
from headway.types import Candidate, Decision, Outcome, Prediction, Query

Agreement = Literal["same_instance", "same_model", "other_model", "only_live", "only_shadow", "neither"]

_TTFT_DIFFERENCES = (-5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LENGTH_ERRORS = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
_DECISIONS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)


class ShadowDecision(Struct, frozen=True):
    """What the second router would have done, with its own figures and its predictions of every model."""

    policy: str
    chosen: Candidate | None
    reason: str
    agreement: Agreement
    predictions: Mapping[str, Prediction]


class LivePredictor:
    """Whatever predictor ``router`` uses at the moment, so that a shadow without one of its own follows a swap."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def predict(self, query: Query) -> Mapping[str, Prediction]:
        """As the router's own."""
        return self._router.predictor.predict(query)


class Shadow:
    """Compares ``router``'s decisions with those of the live one. ``sample`` is the share of queries it decides."""

    def __init__(self, router: Router, *, sample: float, registry: CollectorRegistry, seed: int = 0) -> None:
        self.router = router
        self._sample, self._rng = sample, random.Random(seed)
        self._failing = False
        self._decisions = Counter(
            "headway_shadow_decisions", "Queries decided by a shadow too, by how both compare", ("agreement",),
            registry=registry,
        )  # fmt: skip
        self._failures = Counter("headway_shadow_failures", "Queries on which the shadow failed", registry=registry)
        self._regret = Summary(  # a histogram of values below 0 would have no sum
            "headway_shadow_regret",
            "Utility that one's choice loses against the other's. live: the live choice by the shadow's figures; "
            "shadow: the shadow's choice by the live figures; below 0 it gains",
            ("of",),
            registry=registry,
        )
        self._ttft = Histogram(
            "headway_shadow_ttft_difference_seconds", "Estimated TTFT of the shadow's choice less the live choice's",
            buckets=_TTFT_DIFFERENCES, registry=registry,
        )  # fmt: skip
        self._length = Histogram(
            "headway_shadow_length_error_tokens", "How far predicted output tokens were off, either way, on one sample",
            ("of",), buckets=_LENGTH_ERRORS, registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "headway_shadow_seconds", "What a shadow's decision costs", buckets=_DECISIONS, registry=registry
        )

    def reconfigure(self, router: Router, *, sample: float) -> None:
        """Decide by another router from now on."""
        self.router, self._sample = router, sample

    def compare(self, query: Query, live: Decision, now: float) -> ShadowDecision | None:
        """Decide ``query`` too, where the sample wants it. ``live`` is the decision taken on it at ``now``."""
        if self._rng.random() >= self._sample:
            return None
        started_s = time.perf_counter()
        try:
            if live.held_s is not None and query.ttft_target_s is not None:  # its target ran while it was held
                query = msgspec.structs.replace(query, ttft_target_s=max(query.ttft_target_s - live.held_s, 1e-6))
            predictions = self.router.predictor.predict(query)
            decision = self.router.explain(query, now, predictions)
        except Exception as error:  # whatever is wrong with it, the live decision stands
            self._failures.inc()
            if not self._failing:
                event(logging.ERROR, "shadow_failed", error=f"{type(error).__name__}: {error}")
            self._failing = True
            return None
        self._seconds.observe(time.perf_counter() - started_s)
        agreement = _agreement(live.candidate, decision.candidate)
        self._decisions.labels(agreement).inc()
        self._count_regret(live, decision)
        return ShadowDecision(decision.policy, decision.candidate, decision.reason, agreement, predictions)

    def learn(self, outcome: Outcome, now: float) -> None:
        """Let the shadow's policy and estimator see what became of a query."""
        self.router.learn(outcome, now)

    def measure(self, shadow: ShadowDecision, live: Decision, outcome: Outcome) -> None:
        """Compare both predictions of an answer's length with the answer."""
        chosen = live.candidate
        if chosen is None or outcome.status != "ok" or outcome.output_tokens is None:
            return
        prediction = shadow.predictions.get(chosen.model)
        if prediction is None or chosen.output_tokens is None:
            return
        self._length.labels("live").observe(abs(chosen.output_tokens - outcome.output_tokens))
        self._length.labels("shadow").observe(abs(prediction.output_tokens - outcome.output_tokens))

    def _count_regret(self, live: Decision, shadow: Decision) -> None:
        ours, theirs = live.candidate, shadow.candidate
        if ours is None or theirs is None:
            return
        for of, judge, lost, kept in (("live", shadow, ours, theirs), ("shadow", live, theirs, ours)):
            of_lost, of_kept = _of(judge, lost), _of(judge, kept)
            if of_lost is not None and of_kept is not None and of_lost.utility is not None:
                self._regret.labels(of).observe((of_kept.utility or 0.0) - of_lost.utility)
        mirrored = _of(live, theirs)
        if mirrored is not None and mirrored.estimate is not None and ours.estimate is not None:
            difference_s = mirrored.estimate.ttft_s - ours.estimate.ttft_s
            if abs(difference_s) < float("inf"):  # neither saturated nor unknown
                self._ttft.observe(difference_s)


def _of(decision: Decision, wanted: Candidate) -> Candidate | None:
    """The candidate of the same instance in another decision."""
    return next((one for one in decision.candidates if one.instance_id == wanted.instance_id), None)


def _agreement(live: Candidate | None, shadow: Candidate | None) -> Agreement:
    if live is None:
        return "neither" if shadow is None else "only_shadow"
    if shadow is None:
        return "only_live"
    if live.instance_id == shadow.instance_id:
        return "same_instance"
    return "same_model" if live.model == shadow.model else "other_model"
