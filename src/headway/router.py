"""The one decision path: ``Router.decide`` turns a query into a decision, ``Router.observe`` learns what happened.

The gateway calls it for live traffic, ``headway route`` to explain a prompt, the lab in simulated time. The router
gives every candidate instance its figures and a verdict, the policy chooses among those it may choose. It refuses to
send, to book or to read a clock: the caller owns time, dispatch and the ledger entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from headway.errors import ConfigError, HeadwayError, NoInstanceError, RejectedError, RequestError, RoutingError
from headway.estimate.base import Estimator
from headway.estimate.replay import time_until_feasible
from headway.estimate.residual import ResidualGate
from headway.fleet import FleetView
from headway.policy.base import CHOOSABLE, UTILITY_TIE, Policy, ttft_s_of, utility_of
from headway.policy.verdict import Place, Worth, judge, max_prompt_tokens, worth_of
from headway.predict.base import Predictor
from headway.types import Candidate, Decision, ModelCard, Outcome, Prediction, Query, Snapshot

#: What ``Retry-After`` says where nothing can tell when capacity frees up, seconds.
_UNKNOWN_RETRY_S = 30.0


class Router:
    """Decides where a query goes.

    ``lambda_per_musd`` weighs cost in micro-USD against quality in [0, 1]. ``default_ttft_s`` is the target of queries
    that bring none. ``on_infeasible`` says what happens when no instance is expected to meet the target: the policy's
    best effort, or a rejection. A policy that has ``bind(fleet)`` is bound to ``fleet`` here.

    Raises:
        ConfigError: an instance names a model that ``models`` lacks, or an option of the policy an unknown instance.
    """

    def __init__(
        self,
        *,
        fleet: FleetView,
        models: Mapping[str, ModelCard],
        policy: Policy,
        estimator: Estimator,
        predictor: Predictor,
        lambda_per_musd: float = 5e-4,
        default_ttft_s: float | None = None,
        on_infeasible: Literal["best_effort", "reject"] = "best_effort",
        config_hash: str = "",
    ) -> None:
        self.fleet = fleet
        self.residuals = ResidualGate()
        self._models = dict(models)
        self._policy, self._estimator, self._predictor = policy, estimator, predictor
        self._lambda_per_usd = lambda_per_musd * 1e6
        self._default_ttft_s = default_ttft_s
        self._reject = on_infeasible == "reject"
        self._config_hash = config_hash
        self._places: list[Place] = []
        for index, view in enumerate(fleet.views):
            instance = view.instance
            card = self._models.get(instance.model)
            if card is None:
                raise ConfigError(f"instance {instance.id} names unknown model {instance.model!r}", key="instances")
            self._places.append(Place(index, view, instance.id, instance.model, max_prompt_tokens(instance, card)))
        self._place_models = [place.model for place in self._places]
        self._pool_models = tuple(dict.fromkeys(self._place_models))
        self._instances = {place.instance_id: place.view.instance for place in self._places}
        bind: Callable[[FleetView], None] | None = getattr(policy, "bind", None)
        if bind is not None:
            bind(fleet)
        self._policy_observe: Callable[[Outcome, float], None] | None = getattr(policy, "observe", None)

    def decide(self, query: Query, now: float, predictions: Mapping[str, Prediction] | None = None) -> Decision:
        """The decision for ``query``; ``now`` is monotonic seconds. ``predictions`` saves asking the predictor.

        Raises:
            RequestError: the prompt fits no instance's context (``context_length_exceeded``), no instance meets the
                quality floor or budget, or no such model is known.
            NoInstanceError: every instance that could serve the query is unhealthy, draining or excluded.
            RejectedError: ``on_infeasible`` is ``reject`` and no instance is expected to meet the target.
            ValueError: ``predictions`` or ``query.prompt_tokens`` lack a candidate model.
        """
        decision, refusal = self._weigh(query, now, predictions)
        if refusal is not None:
            raise refusal
        return decision

    def explain(self, query: Query, now: float, predictions: Mapping[str, Prediction] | None = None) -> Decision:
        """As :meth:`decide`, but a refusal comes back as a decision with ``chosen`` None and its reason.

        Policies that keep state move on as they do in :meth:`decide`.
        """
        return self._weigh(query, now, predictions)[0]

    def observe(self, event: Outcome | Snapshot, now: float) -> None:
        """Take in a snapshot, or the outcome of a query: releases its ledger entry and teaches estimator and policy."""
        if isinstance(event, Snapshot):
            self.fleet.observe_snapshot(event, now)
            return
        entry = self.fleet.entry(event.query_id)
        self.fleet.release(event.query_id, now)
        instance = self._instances.get(event.instance_id)
        if instance is None:
            return
        if entry is not None and entry.predicted_ttft_s is not None and event.ttft_s is not None:
            residual = self.residuals.observe(instance.id, entry.predicted_ttft_s, event.ttft_s)
            self.fleet.views[entry.index].clock_trusted = residual.trusted
        self._estimator.observe(event, instance, now)
        if self._policy_observe is not None:
            self._policy_observe(event, now)

    def _weigh(
        self, query: Query, now: float, predictions: Mapping[str, Prediction] | None
    ) -> tuple[Decision, HeadwayError | None]:
        places, models = self._places, self._pool_models
        if query.candidates is not None:
            places = [place for place in places if place.model in query.candidates]
            models = tuple(model for model in models if model in query.candidates)
        if predictions is None:
            predictions = self._predictor.predict(query)
        worths = {model: worth_of(query, model, predictions, self._lambda_per_usd) for model in models}
        target_s = query.ttft_target_s if query.ttft_target_s is not None else self._default_ttft_s
        self.fleet.age(now)
        counts = query.prompt_tokens  # an instance outside the candidates is estimated with the rest, and not looked at
        prompt_tokens = [counts.get(model, 1) for model in self._place_models]
        estimates = self._estimator.estimate(query, self.fleet, prompt_tokens, now)
        candidates = judge(query, places, worths, estimates, target_s)
        eligible = [candidate for candidate in candidates if candidate.verdict in CHOOSABLE]
        best_ttft_s: float | None = None
        refusal: HeadwayError | None
        if eligible:
            best_ttft_s = min([ttft_s_of(candidate) for candidate in eligible])
            refusal = self._rejection(places, candidates, target_s, best_ttft_s)
        else:
            refusal = self._no_candidate(query, places, worths, candidates)
        chosen = None
        if refusal is None:
            chosen = self._policy.choose(query, candidates, now)
            if chosen is None:
                refusal = NoInstanceError(f"policy {self._policy.name} chose none of {len(eligible)} instances")
        slo: Literal["met-expected", "infeasible", "none"] = "none"
        if target_s is not None:
            in_time = chosen is not None and candidates[chosen].verdict == "feasible"
            slo = "met-expected" if in_time else "infeasible"
        decision = Decision(
            query_id=query.id,
            policy=self._policy.name,
            arrival_s=query.arrival_s,
            candidates=candidates,
            chosen=chosen,
            reason=str(refusal) if chosen is None else self._reason(eligible, candidates[chosen], target_s),
            slo=slo,
            ttft_target_s=target_s,
            best_ttft_s=best_ttft_s,
            retry_after_s=refusal.retry_after_s if isinstance(refusal, RoutingError) else None,
            config_hash=self._config_hash,
        )
        return decision, refusal

    def _rejection(
        self, places: Sequence[Place], candidates: Sequence[Candidate], target_s: float | None, best_ttft_s: float
    ) -> RejectedError | None:
        if not self._reject or target_s is None or best_ttft_s <= target_s:
            return None
        waits_s = []
        for place, candidate in zip(places, candidates, strict=True):
            if candidate.verdict in CHOOSABLE:
                engine = None if place.view.stale else place.view.engine
                if engine is None:
                    waits_s.append(ttft_s_of(candidate) - target_s)
                else:
                    waits_s.append(time_until_feasible(engine, candidate.prompt_tokens or 1, target_s))
        drain_s = min(waits_s)
        retry_after_s = max(1.0, drain_s if math.isfinite(drain_s) else _UNKNOWN_RETRY_S)
        best = "every instance is saturated" if math.isinf(best_ttft_s) else f"the best offers {_ms(best_ttft_s)}"
        return RejectedError(
            f"no instance is expected to give the first token within {_ms(target_s)}: {best}; "
            f"retry in {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
            best_ttft_s=best_ttft_s,
            reason="ttft_target",
        )

    def _no_candidate(
        self, query: Query, places: Sequence[Place], worths: Mapping[str, Worth], candidates: Sequence[Candidate]
    ) -> HeadwayError:
        """Why no instance may be chosen: the request itself where waiting cannot help, else the pool."""
        if not places:
            names = query.candidates
            if names is not None and not any(name in self._models for name in names):
                listed = ", ".join(map(repr, names))
                return RequestError(f"unknown model {listed}", status=404, param="model", code="model_not_found")
            return NoInstanceError(f"no instance serves {'any model' if names is None else ', '.join(names)}")
        fitting = [place for place in places if worths[place.model].prompt_tokens <= place.max_prompt_tokens]
        if not fitting:
            longest = max(place.max_prompt_tokens for place in places)
            shortest = min(worth.prompt_tokens for worth in worths.values())
            return RequestError(
                f"the prompt of {shortest} tokens fits no instance: the largest takes {longest}",
                param="messages",
                code="context_length_exceeded",
            )
        if all(worths[place.model].refused is not None for place in fitting):
            return _unattainable(query, [worths[place.model] for place in fitting])
        verdicts = ", ".join(f"{candidate.instance_id} is {candidate.verdict}" for candidate in candidates[:8])
        return NoInstanceError(f"no instance can take the query now: {verdicts}")

    def _reason(self, eligible: Sequence[Candidate], chosen: Candidate, target_s: float | None) -> str:
        ttft_s = ttft_s_of(chosen)
        when = "saturated" if ttft_s == math.inf else f"first token expected in {_ms(ttft_s)}"
        in_time = [candidate for candidate in eligible if candidate.verdict == "feasible"]
        if target_s is None:
            goal = "no target given"
        else:
            side = "within" if chosen.verdict == "feasible" else "beyond"
            share = (
                f"{len(in_time)} of {len(eligible)} instances meet" if in_time else "no instance is expected to meet"
            )
            goal = f"{side} the target of {_ms(target_s)} that {share}"
        utility = utility_of(chosen)
        best = max([utility_of(candidate) for candidate in in_time or eligible])
        worth = "the best of them" if utility >= best - UTILITY_TIE else f"the best of them has {best:.3f}"
        return f"{self._policy.name} chose {chosen.instance_id}: {when}, {goal}; utility {utility:.3f}, {worth}"


def _unattainable(query: Query, worths: Sequence[Worth]) -> RequestError:
    """The 400 for a quality floor or budget that no fitting model meets; names the one nearest to being met."""
    good_enough = [worth for worth in worths if worth.refused == "budget"]
    if good_enough:
        cheapest = min(worth.cost_usd for worth in good_enough)
        return RequestError(
            f"no model answers this within {query.max_cost_usd:.6g} USD: the cheapest would cost {cheapest:.6g}",
            param="slo.max_cost_usd",
            code="slo_unattainable",
        )
    best = max(worth.quality for worth in worths)
    return RequestError(
        f"no model is expected to reach quality {query.quality_min:.3f}: the best offers {best:.3f}",
        param="slo.quality_min",
        code="slo_unattainable",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
