"""The one decision path: ``Router.decide`` turns a query into a decision, ``Router.observe`` learns what happened.

The gateway calls it for live traffic, ``headway route`` to explain a prompt, the lab in simulated time. The router
gives every candidate instance its figures and a verdict, the policy chooses among those it may choose. Where the policy
holds queries in a queue, ``admit`` and ``release`` stand in the place of ``decide``. It refuses to send, to book, to
keep the queue or to read a clock: the caller owns time, dispatch, the queue and the ledger entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, overload

import msgspec

from headway.errors import ConfigError, HeadwayError, NoInstanceError, RequestError, RoutingError
from headway.estimate.base import Estimator
from headway.estimate.residual import ResidualGate
from headway.fleet import FleetView
from headway.policy.base import (
    CHOOSABLE,
    HeldQuery,
    HoldingPolicy,
    Policy,
    Release,
    choosable,
    smallest_ttft,
    ttft_s_of,
)
from headway.policy.hold_infeasible import HoldInfeasible
from headway.policy.refusal import Weighed, drain_time_s, milliseconds, no_candidate, reason_of, rejection_of
from headway.policy.verdict import Place, judge, max_prompt_tokens, worths_of
from headway.predict.base import Predictor
from headway.types import Candidate, Decision, Estimate, ModelCard, Outcome, Prediction, Query, Snapshot

#: Stands in for an estimate that a holding policy does not want: nothing is late by it.
_NOT_ESTIMATED = Estimate(math.nan, math.nan, math.nan, "none")


class Router:
    """Decides where a query goes.

    ``lambda_per_musd`` weighs cost in micro-USD against quality in [0, 1]. ``default_ttft_s`` is the target of queries
    that bring none. ``on_infeasible`` says what happens when no instance is expected to meet the target: the policy's
    best effort, a rejection, or (``queue``) holding the query until one is. A policy that has ``bind(fleet)`` is bound
    to ``fleet`` here. ``correcting`` stretches replayed times by what observed ones say (``estimate.residual``).
    Without ``explaining`` decisions carry no sentence that tells their reason: nobody reads a million of them.

    Raises:
        ConfigError: an instance names a model that ``models`` lacks, or an option of the policy an unknown instance.
    """

    def __init__(
        self,
        *,
        fleet: FleetView,
        models: Mapping[str, ModelCard],
        policy: Policy | HoldingPolicy,
        estimator: Estimator,
        predictor: Predictor,
        lambda_per_musd: float = 5e-4,
        default_ttft_s: float | None = None,
        on_infeasible: Literal["best_effort", "reject", "queue"] = "best_effort",
        config_hash: str = "",
        correcting: bool = True,
        explaining: bool = True,
    ) -> None:
        self.fleet = fleet
        self.residuals = ResidualGate(correcting=correcting)
        self._models = dict(models)
        if on_infeasible == "queue" and not isinstance(policy, HoldingPolicy):
            policy = HoldInfeasible(policy)
        self._holding = policy if isinstance(policy, HoldingPolicy) else None
        self._policy, self._estimator, self._predictor = policy, estimator, predictor
        self._held_predictions: dict[str, Mapping[str, Prediction]] = {}
        self._lambda_per_usd = lambda_per_musd * 1e6
        self._default_ttft_s = default_ttft_s
        self._reject = on_infeasible == "reject"
        self._config_hash = config_hash
        self._explaining = explaining
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
        self._choose: Callable[[Query, Sequence[Candidate], float], int | None] | None
        self._choose = getattr(policy, "choose", None)
        self._policy_observe: Callable[[Outcome, float], None] | None = getattr(policy, "observe", None)
        self._charged: Callable[[tuple[Candidate, ...]], tuple[Candidate, ...]] | None
        self._charged = getattr(policy, "charged", None)

    @property
    def holds(self) -> bool:
        """Whether queries wait in a queue: :meth:`admit` and :meth:`release` then take the place of :meth:`decide`."""
        return self._holding is not None

    def adopt(self, earlier: Router, begun: Collection[str]) -> None:
        """Go on with what ``earlier`` learned of observed against replayed times, but for the instances ``begun``."""
        self.residuals = earlier.residuals
        for instance_id in begun:
            self.residuals.forget(instance_id)

    @property
    def estimator(self) -> Estimator:
        """What estimates times to first token."""
        return self._estimator

    @property
    def predictor(self) -> Predictor:
        """What predicts at the moment."""
        return self._predictor

    def use_predictor(self, predictor: Predictor) -> None:
        """Predict with another predictor from the next query on."""
        self._predictor = predictor

    def decide(self, query: Query, now: float, predictions: Mapping[str, Prediction] | None = None) -> Decision:
        """The decision for ``query``; ``now`` is monotonic seconds. ``predictions`` saves asking the predictor.

        Raises:
            RequestError: the prompt fits no instance's context (``context_length_exceeded``), no instance meets the
                quality floor or budget, or no such model is known.
            NoInstanceError: every instance that could serve the query is unhealthy, draining or excluded.
            RejectedError: ``on_infeasible`` is ``reject`` and no instance is expected to meet the target.
            RoutingError: the policy holds queries in a queue and chooses none by itself.
            ValueError: ``predictions`` or ``query.prompt_tokens`` lack a candidate model.
        """
        decision, refusal = self._weigh(query, now, predictions)
        if refusal is not None:
            raise refusal
        return decision

    def admit(self, query: Query, now: float, predictions: Mapping[str, Prediction] | None = None) -> None:
        """Check that ``query`` may wait in the queue: some instance could run it, and is there. Changes nothing else.

        Raises:
            RequestError, NoInstanceError, ValueError: as :meth:`decide`.
        """
        if predictions is None:
            predictions = self._predictor.predict(query)
        weighed = self._judge(query, predictions, None, self._no_estimates())
        if weighed.best_ttft_s is None and not any(one.verdict == "resting" for one in weighed.candidates):
            raise no_candidate(query, weighed, self._models)
        never_fits: Callable[[HeldQuery], str | None] | None = getattr(self._policy, "never_fits", None)
        why = None if never_fits is None else never_fits(HeldQuery(query, weighed.candidates, now))
        if why is not None:
            raise RequestError(why, param="messages", code="context_length_exceeded")
        self._held_predictions[query.id] = predictions

    def release(self, queue: Sequence[tuple[Query, float]], now: float) -> list[Decision]:
        """The decisions on those queries that the policy lets go now, in its order; the others stay held.

        ``queue`` holds each admitted query and since when it waits (monotonic seconds), in the order of service. Book
        what was released and call again, until nothing comes back. Costs an estimate per query that the policy looks
        at. ``queue`` must be the whole queue: what was predicted for queries not in it is forgotten.

        Raises:
            ValueError: the policy released what is not in the queue, released it twice, or to where it may not go.
        """
        assert self._holding is not None, "only a holding policy has a queue"
        self.fleet.age(now)
        lined_up = _Queue(self, queue, now)
        self._held_predictions = {query.id: self._predictions_of(query) for query, _ in queue}
        released = self._holding.release(lined_up, self.fleet, now)
        if not released:
            return []
        numbers = {query.id: number for number, (query, _) in enumerate(queue)}
        decisions = []
        for one in released:
            number = numbers.pop(one.query_id, None)
            if number is None:
                raise ValueError(f"policy {self._policy.name} released {one.query_id!r}, which is not held")
            decisions.append(self._released(*queue[number], one, now))
        return decisions

    def release_anyway(self, query: Query, held_since_s: float, now: float) -> Decision:
        """The best there is for a query that the policy still holds: its own choice, else the smallest TTFT.

        Raises:
            NoInstanceError: no instance can take it now.
        """
        self.fleet.age(now)
        weighed = self._judge_held(query, held_since_s, now, estimated=True)
        candidates = weighed.candidates
        indices = choosable(candidates)
        if not indices:
            raise no_candidate(query, weighed, self._models)
        chosen = None if self._choose is None else self._choose(query, candidates, now)
        if chosen is None:
            chosen = smallest_ttft(indices, candidates)[0]
        best_effort = Release(query.id, candidates[chosen].instance_id, "its time in the queue is over")
        return self._released(query, held_since_s, best_effort, now)

    def explain_held(self, query: Query, held_since_s: float, now: float) -> Decision:
        """Why the policy still holds a query: a decision without a choice, and when a newcomer should do better."""
        self.fleet.age(now)
        weighed = self._judge_held(query, held_since_s, now, estimated=True)
        why: Callable[[HeldQuery, float], str] | None = getattr(self._policy, "why_held", None)
        held = HeldQuery(query, weighed.candidates, held_since_s)
        reason = f"held by {self._policy.name}" + (f": {why(held, now)}" if why is not None else "")
        decision = self._decision(query, weighed, None, reason, held_s=now - held_since_s)
        return msgspec.structs.replace(decision, retry_after_s=max(1.0, drain_time_s(weighed)))

    def next_release_s(self, now: float) -> float | None:
        """When to call :meth:`release` even if nothing happens until then (monotonic); None: on events only."""
        return None if self._holding is None else self._holding.next_release_s(now)

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
        self.fleet.release(event.query_id, now, event.output_tokens)
        instance = self._instances.get(event.instance_id)
        if instance is None:
            return
        if entry is not None and entry.raw_ttft_s is not None and event.ttft_s is not None:
            residual = self.residuals.observe(instance.id, entry.raw_ttft_s, event.ttft_s)
            view = self.fleet.views[entry.index]
            view.clock_trusted, view.clock_scale = residual.trusted, residual.correction
        self.learn(event, now)

    def learn(self, outcome: Outcome, now: float) -> None:
        """Teach estimator and policy what became of a query, and leave the fleet alone: it may be another router's."""
        instance = self._instances.get(outcome.instance_id)
        if instance is None:
            return
        self._estimator.observe(outcome, instance, now)
        if self._policy_observe is not None:
            self._policy_observe(outcome, now)

    def sources(self, now: float) -> list[str]:
        """Which estimate speaks for each instance now, in fleet order."""
        self.fleet.age(now)
        short = Query(id="", arrival_s=now, prompt_text="", prompt_tokens={})
        return [estimate.source for estimate in self._estimates(short, now)]

    def _weigh(
        self, query: Query, now: float, predictions: Mapping[str, Prediction] | None
    ) -> tuple[Decision, HeadwayError | None]:
        if predictions is None:
            predictions = self._predictor.predict(query)
        target_s = query.ttft_target_s if query.ttft_target_s is not None else self._default_ttft_s
        self.fleet.age(now)
        weighed = self._judge(query, predictions, target_s, self._estimates(query, now))
        candidates = weighed.candidates
        refusal: HeadwayError | None
        if weighed.best_ttft_s is not None:
            refusal = rejection_of(weighed) if self._reject else None
        else:
            refusal = no_candidate(query, weighed, self._models)
        chosen = None
        if refusal is None:
            if self._choose is None:
                refusal = RoutingError(f"policy {self._policy.name} holds queries and releases them from its queue")
            elif (chosen := self._choose(query, candidates, now)) is None:
                refusal = NoInstanceError(f"policy {self._policy.name} chose none of {len(weighed.eligible)} instances")
        if chosen is not None and self._charged is not None and self._explaining:
            weighed = weighed._replace(candidates=self._charged(candidates))
        reason = str(refusal) if chosen is None else self._reason(weighed, chosen)
        decision = self._decision(query, weighed, chosen, reason)
        if isinstance(refusal, RoutingError):
            decision = msgspec.structs.replace(decision, retry_after_s=refusal.retry_after_s)
        return decision, refusal

    def _reason(self, weighed: Weighed, chosen: int) -> str:
        return reason_of(self._policy.name, weighed, chosen) if self._explaining else ""

    def _estimates(self, query: Query, now: float) -> Sequence[Estimate]:
        counts = query.prompt_tokens  # an instance outside the candidates is estimated with the rest, and not looked at
        prompt_tokens = [counts.get(model, 1) for model in self._place_models]
        return self._estimator.estimate(query, self.fleet, prompt_tokens, now)

    def _judge(
        self,
        query: Query,
        predictions: Mapping[str, Prediction],
        target_s: float | None,
        estimates: Sequence[Estimate],
    ) -> Weighed:
        places, models = self._places, self._pool_models
        if query.candidates is not None:
            places = [place for place in places if place.model in query.candidates]
            models = tuple(model for model in models if model in query.candidates)
        worths = worths_of(query, models, predictions, self._lambda_per_usd)
        candidates, best_ttft_s = judge(query, places, worths, estimates, target_s)
        return Weighed(places, worths, candidates, best_ttft_s, target_s)

    def _decision(
        self, query: Query, weighed: Weighed, chosen: int | None, reason: str, held_s: float | None = None
    ) -> Decision:
        candidates, target_s = weighed.candidates, weighed.target_s
        slo: Literal["met-expected", "infeasible", "none"] = "none"
        if target_s is not None:
            in_time = chosen is not None and candidates[chosen].verdict == "feasible"
            slo = "met-expected" if in_time else "infeasible"
        return Decision(
            query_id=query.id,
            policy=self._policy.name,
            arrival_s=query.arrival_s,
            candidates=candidates,
            chosen=chosen,
            reason=reason,
            slo=slo,
            ttft_target_s=target_s,
            best_ttft_s=weighed.best_ttft_s,
            config_hash=self._config_hash,
            held_s=held_s,
        )

    # ---- the queue -----------------------------------------------------------------------------------------------

    def _predictions_of(self, query: Query) -> Mapping[str, Prediction]:
        known = self._held_predictions.get(query.id)
        return self._predictor.predict(query) if known is None else known

    def _no_estimates(self) -> Sequence[Estimate]:
        return [_NOT_ESTIMATED] * len(self._places)

    def _judge_held(self, query: Query, held_since_s: float, now: float, *, estimated: bool) -> Weighed:
        """The query as it stands now; its target has been running since it came, but where the policy restarts it."""
        target_s = query.ttft_target_s if query.ttft_target_s is not None else self._default_ttft_s
        if target_s is not None and not getattr(self._policy, "target_restarts", False):
            target_s = max(target_s - (now - held_since_s), 0.0)
        estimates = self._estimates(query, now) if estimated else self._no_estimates()
        return self._judge(query, self._predictions_of(query), target_s, estimates)

    def _held(self, query: Query, held_since_s: float, now: float, *, estimated: bool) -> HeldQuery:
        weighed = self._judge_held(query, held_since_s, now, estimated=estimated)
        return HeldQuery(query, weighed.candidates, held_since_s)

    def _released(self, query: Query, held_since_s: float, release: Release, now: float) -> Decision:
        weighed = self._judge_held(query, held_since_s, now, estimated=True)
        names = [candidate.instance_id for candidate in weighed.candidates]
        chosen = names.index(release.instance_id) if release.instance_id in names else None
        if chosen is None or weighed.candidates[chosen].verdict not in CHOOSABLE:
            raise ValueError(
                f"policy {self._policy.name} released {query.id!r} to {release.instance_id!r}, where it may not go"
            )
        reason = self._reason(weighed, chosen)
        held_s = now - held_since_s
        decision = self._decision(
            query, weighed, chosen, f"{reason}; held {milliseconds(held_s)} until {release.reason}", held_s=held_s
        )
        target_s = query.ttft_target_s if query.ttft_target_s is not None else self._default_ttft_s
        if target_s is not None and held_s + ttft_s_of(weighed.candidates[chosen]) > target_s:
            decision = msgspec.structs.replace(decision, slo="infeasible")  # a restarted target is only the policy's
        return decision


class _Queue(Sequence[HeldQuery]):
    """The queue as a policy sees it: each query is judged when it is looked at, and once."""

    def __init__(self, router: Router, queue: Sequence[tuple[Query, float]], now: float) -> None:
        self._router, self._queue, self._now = router, queue, now
        self._estimated: bool = getattr(router._policy, "needs_estimates", True)
        self._judged: list[HeldQuery | None] = [None] * len(queue)

    def __len__(self) -> int:
        return len(self._queue)

    @overload
    def __getitem__(self, index: int) -> HeldQuery: ...
    @overload
    def __getitem__(self, index: slice) -> list[HeldQuery]: ...
    def __getitem__(self, index: int | slice) -> HeldQuery | list[HeldQuery]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        held = self._judged[index]
        if held is None:
            query, since_s = self._queue[index]
            held = self._judged[index] = self._router._held(query, since_s, self._now, estimated=self._estimated)
        return held

    def __iter__(self) -> Iterator[HeldQuery]:
        return (self[index] for index in range(len(self)))
