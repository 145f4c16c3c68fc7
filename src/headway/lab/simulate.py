"""Plays a workload on a fleet of simulated engines, through the same Router as the gateway.

One event loop in simulated time. It touches an engine only when something is decided or due: at an arrival every engine
is run up to it, natively; what happened since is told to the router in order, the router decides, and the query joins
the engine that was chosen. Where the policy holds queries, they wait in a central queue that is looked at on every
outcome, within :data:`TICK_S`. The router sees predictions and mirrors of the engines; true lengths and qualities stay
on this side.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Literal, cast

import numpy as np
from msgspec import Struct

from headway._core import TruthEngine
from headway.errors import ConfigError, NoInstanceError, RejectedError
from headway.estimate.base import Estimator
from headway.fleet import FleetView, LengthRule
from headway.lab.metrics import Outcomes, Status
from headway.lab.pool import LabInstance, Pool
from headway.lab.streams import Streams
from headway.lab.workload import Workload
from headway.policy.base import HoldingPolicy, Policy
from headway.predict.base import cost_usd
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import Decision, Estimate, Instance, Outcome, Prediction, Query

#: While queries are held, engines run this far at a time, seconds: a release is at most so much late.
TICK_S = 0.005
_SLICE = 4096


class Sight(Struct, frozen=True, kw_only=True):
    """What the router sees of the engines.

    ``interval_s`` 0: their state at every decision; else snapshots this far apart. ``ageing`` replays a snapshot
    forward to the decision; ``ledger`` counts what was sent since. Both off shows what they are worth.
    ``every_step`` shows, in the place of the state at a decision, the one in which the present step began: what an
    engine's publisher shows. ``exact_lengths`` takes the predicted lengths for certain, which only an oracle's are.
    ``shadow``: nothing is shown at all; engines are replayed from what was sent, what the streams show of each answer,
    and gauges once a second, as a gateway sees them.
    """

    interval_s: float = 0.0
    ageing: bool = True
    ledger: bool = True
    every_step: bool = False
    exact_lengths: bool = False
    shadow: bool = False


def truth_engine(instance: LabInstance, seed: int) -> TruthEngine:
    """The engine behind an instance, with its own noise."""
    truth = instance.truth
    return TruthEngine(
        truth.limits,
        truth.step_time,
        noise=truth.step_noise,
        stall_probability=truth.stall_probability,
        stall_mean_s=truth.stall_mean_s,
        gap_low_s=truth.host_gap_s[0],
        gap_high_s=truth.host_gap_s[1],
        seed=seed,
    )


def simulate(
    workload: Workload,
    pool: Pool,
    *,
    policy: Policy | HoldingPolicy,
    estimator: Estimator | None,
    seed: int,
    sight: Sight | None = None,
    on_infeasible: Literal["best_effort", "reject", "queue"] = "best_effort",
    num_routers: int = 1,
    length_rule: LengthRule | None = None,
    max_held_s: float = 30.0,
    correcting: bool = False,
    router: type[Router] = Router,
) -> Outcomes:
    """What ``policy`` makes of ``workload`` on ``pool``. Same arguments and seed, same outcomes.

    ``estimator`` None is for policies that look at no engine (round robin, random, latency agnostic): no
    engine is mirrored, no TTFT predicted, and overloaded runs are ten times as fast.
    ``seed`` draws the engines' step noise only; queries and answers are the workload's. Several routers get the queries
    in turn, each with its own ledger and its own copy of policy and estimator; what one sends, the others see only in
    snapshots. ``length_rule`` is how long routers expect residents to go on, ``router`` may be a class that measures.
    A query that is held for ``max_held_s`` is refused. ``correcting`` lets routers stretch replayed times by what they
    observe, as the gateway does.
    Costs a few tens of microseconds of CPU per query on three instances, linear in queries and in instances.

    Raises:
        ConfigError: no router, several that would see each query at once, or lengths that are not certain.
    """
    sight = Sight() if sight is None else sight
    if num_routers < 1 or (num_routers > 1 and sight.interval_s == 0 and not sight.every_step):
        raise ConfigError(f"must be 1, or above it with every_step or interval_s, not {num_routers}", key="num_routers")
    if sight.exact_lengths and (workload.predicted_output_tokens != workload.true_output_tokens).any():
        raise ConfigError("needs a workload that predicts the true lengths", key="sight.exact_lengths")
    routed = [(policy, estimator), *(deepcopy((policy, estimator)) for _ in range(num_routers - 1))]
    run = _Run(
        workload,
        pool,
        sight,
        seed,
        routed=routed,
        on_infeasible=on_infeasible,
        length_rule=length_rule,
        correcting=correcting,
        router=router,
    )
    run.max_held_s = max_held_s
    run.play()
    return run.outcomes


class _Run:
    """The state of one simulation; its methods are the events."""

    def __init__(
        self,
        workload: Workload,
        pool: Pool,
        sight: Sight,
        seed: int,
        *,
        routed: Sequence[tuple[Policy | HoldingPolicy, Estimator | None]],
        on_infeasible: Literal["best_effort", "reject", "queue"],
        length_rule: LengthRule | None,
        correcting: bool,
        router: type[Router],
    ) -> None:
        self.workload, self.sight = workload, sight
        self.is_shown = routed[0][1] is not None and not sight.shadow
        self.is_live = self.is_shown and sight.interval_s == 0 and not sight.every_step
        self.ids = [one.instance.id for one in pool.instances]
        self.columns = [workload.models.index(one.instance.model) for one in pool.instances]
        self.cards = [pool.cards[one.instance.model] for one in pool.instances]
        self.model_cards = [pool.cards[model] for model in workload.models]
        seeds = np.random.SeedSequence(seed).generate_state(len(self.ids), np.uint64).tolist()
        self.engines = [truth_engine(one, own) for one, own in zip(pool.instances, seeds, strict=True)]
        self.routers = [
            router(
                fleet=FleetView(
                    [one.instance for one in pool.instances],
                    stale_after_s=float("inf"),
                    length_rule=length_rule,
                    ageing=sight.ageing,
                    replay_ledger=sight.ledger,
                    shadowed=self.ids if sight.shadow else (),
                ),
                models=pool.cards,
                policy=policy,
                estimator=estimator or _NoEstimator(),
                predictor=PriorPredictor(pool.cards),  # never asked: predictions come with the queries
                lambda_per_musd=workload.lambda_per_musd,
                on_infeasible=on_infeasible,
                explaining=False,
                correcting=correcting,
            )
            for policy, estimator in routed
        ]
        self.held: list[list[tuple[Query, float]]] = [[] for _ in routed]  # each router's queue, in order of arrival
        self.max_held_s = float("inf")
        self.events: list[tuple[float, bool, int, str]] = []  # (time_s, ended, instance, request id), a heap
        self.shown_s = -float("inf")
        self.shown_steps = [-1] * len(self.ids)
        self.streams = Streams(pool, self.engines) if sight.shadow else None
        if self.is_live:
            for index, engine in enumerate(self.engines):
                self._show(index, engine, 0.0)
        self.outcomes = Outcomes.empty(len(workload.arrival_s))
        self.filled = _Filled(self.outcomes)
        self.true_output_tokens, self.prompt_tokens = workload.true_output_tokens.data, workload.prompt_tokens.data
        self.arrivals: list[float] = workload.arrival_s.tolist()

    def play(self) -> None:
        """Every query in order of arrival, then whatever is still running."""
        queries = self._queries()
        now = 0.0
        for number, arrival_s in enumerate(self.arrivals):
            self._work_off(now, arrival_s)
            now = arrival_s
            self._run_engines(now)
            self._tell(now)
            if self.streams is not None:
                self.streams.show(self.routers, now)
            query, predictions = next(queries)
            self._decide(number, query, predictions, now)
        self._work_off(now, float("inf"))
        self._run_engines(float("inf"))
        self._tell(float("inf"))

    def _work_off(self, now: float, until_s: float) -> None:
        """Run on to ``until_s`` tick by tick while queries are held, and release what may go."""
        while any(self.held) and now + TICK_S < until_s:
            now += TICK_S
            self._run_engines(now)
            if self._tell(now):
                self._release(now)
            for router, queue in zip(self.routers, self.held, strict=True):
                if queue and now - queue[0][1] > self.max_held_s:
                    del queue[0]  # refused: nobody took it
                next_s = router.next_release_s(now) if queue else None
                if next_s is not None and next_s <= now + TICK_S:
                    self._release(now)

    def _release(self, now: float) -> None:
        for router, queue in zip(self.routers, self.held, strict=True):
            while queue and (decisions := router.release(queue, now)):
                gone = {decision.query_id for decision in decisions}
                queue[:] = [one for one in queue if one[0].id not in gone]
                for decision in decisions:
                    self._send(router, int(decision.query_id), decision, now)

    def _run_engines(self, now: float) -> None:
        interval_s = self.sight.interval_s
        if self.is_shown and interval_s > 0 and now < float("inf"):
            tick_s = (now // interval_s) * interval_s
            if tick_s > self.shown_s:
                self._advance_engines(tick_s)
                self.shown_s = tick_s
                for index, engine in enumerate(self.engines):
                    self._show(index, engine.clone(), tick_s)
        self._advance_engines(now)
        if self.is_shown and self.sight.every_step and now < float("inf"):
            for index, engine in enumerate(self.engines):
                if engine.num_steps != self.shown_steps[index]:  # what joins during a step is shown with the next one
                    self.shown_steps[index] = engine.num_steps
                    self._show(index, engine.clone(), now)

    def _show(self, index: int, engine: TruthEngine, shown_s: float) -> None:
        for router in self.routers:
            router.fleet.observe_mirror(self.ids[index], engine, shown_s, live=self.is_live)

    def _advance_engines(self, now: float) -> None:
        events = self.events
        for index, engine in enumerate(self.engines):
            for time_s, request_id, ended in engine.run_until(now):
                heapq.heappush(events, (time_s, ended, index, request_id))

    def _tell(self, now: float) -> bool:
        """Tell the router what happened up to ``now``, in order; whether any query ended."""
        events, outcomes = self.events, self.filled
        any_ended = False
        while events and events[0][0] <= now:
            time_s, ended, index, request_id = heapq.heappop(events)
            number = int(request_id)
            router = self.routers[number % len(self.routers)]
            latency_s = time_s - self.arrivals[number]
            if not ended:
                outcomes.ttft_s[number] = latency_s
                router.fleet.first_token_seen(request_id, time_s)
                continue
            output_tokens = self.true_output_tokens[number, self.columns[index]]
            prompt_tokens = self.prompt_tokens[number]
            outcomes.total_s[number] = latency_s
            outcomes.output_tokens[number] = output_tokens
            outcomes.status[number] = Status.OK
            router.observe(
                Outcome(
                    query_id=request_id,
                    instance_id=self.ids[index],
                    status="ok",
                    ttft_s=outcomes.ttft_s[number],
                    total_s=latency_s,
                    prompt_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                    cost_usd=cost_usd(self.cards[index], prompt_tokens, output_tokens),
                ),
                time_s,
            )
            any_ended = True
        return any_ended

    def _decide(self, number: int, query: Query, predictions: Mapping[str, Prediction], now: float) -> None:
        router = self.routers[number % len(self.routers)]
        try:
            if router.holds:
                router.admit(query, now, predictions)
                self.held[number % len(self.routers)].append((query, now))
                self._release(now)
                return
            decision = router.decide(query, now, predictions)
        except (NoInstanceError, RejectedError):
            return
        self._send(router, number, decision, now)

    def _send(self, router: Router, number: int, decision: Decision, now: float) -> None:
        index, candidate = decision.chosen, decision.candidate
        assert index is not None
        assert candidate is not None
        outcomes = self.filled
        outcomes.chosen[number] = index
        outcomes.status[number] = Status.FAILED  # until its end comes
        outcomes.feasible[number] = candidate.verdict == "feasible"
        if candidate.estimate is not None:
            outcomes.predicted_ttft_s[number] = candidate.estimate.ttft_s + (decision.held_s or 0.0)
        prompt_tokens = candidate.prompt_tokens or 1
        predicted_tokens = candidate.output_tokens or 1.0
        true_tokens = self.true_output_tokens[number, self.columns[index]]
        max_tokens = true_tokens if self.sight.exact_lengths else self.workload.max_tokens
        router.fleet.book(
            request_id=decision.query_id,
            instance_id=candidate.instance_id,
            prompt_tokens=prompt_tokens,
            predicted_output_tokens=predicted_tokens,
            max_tokens=max_tokens,
            priority=0,
            now=now,
            predicted_ttft_s=None if candidate.estimate is None else candidate.estimate.ttft_s,
            raw_ttft_s=None if candidate.estimate is None else candidate.estimate.raw_ttft_s,
            predicted_wait_s=None if candidate.estimate is None else candidate.estimate.wait_s,
            due_s=None if decision.ttft_target_s is None else now + decision.ttft_target_s,
            utility=candidate.utility,
        )
        self.engines[index].submit(
            decision.query_id,
            prompt_tokens=prompt_tokens,
            target_output_tokens=true_tokens,
            predicted_output_tokens=predicted_tokens,
            max_tokens=max_tokens,
            now=now,
        )

    def _queries(self) -> Iterator[tuple[Query, dict[str, Prediction]]]:
        """The queries as the router sees them, with its predictions; rows of the workload's columns."""
        w = self.workload
        models = w.models
        cards = [(one.input_per_1m_usd * 1e-6, one.output_per_1m_usd * 1e-6) for one in self.model_cards]
        columns = (w.arrival_s, w.prompt_tokens, w.ttft_target_s, w.predicted_output_tokens, w.predicted_quality)
        for first in range(0, len(w.arrival_s), _SLICE):  # as lists a million rows would take hundreds of megabytes
            rows = zip(*(column[first : first + _SLICE].tolist() for column in columns), strict=True)
            for number, (arrival_s, prompt_tokens, target_s, lengths, qualities) in enumerate(rows, first):
                predictions = {
                    model: Prediction(quality, length, prompt_tokens * price_in + length * price_out, "lab")
                    for model, quality, length, (price_in, price_out) in zip(
                        models, qualities, lengths, cards, strict=True
                    )
                }
                query = Query(
                    id=str(number),
                    arrival_s=arrival_s,
                    prompt_text="",
                    prompt_tokens=dict.fromkeys(models, prompt_tokens),
                    max_tokens=w.max_tokens,
                    candidates=None if w.candidates is None else w.candidates[number],
                    ttft_target_s=target_s,
                )
                yield query, predictions


class _Filled:
    """The columns of the outcomes, to be written one by one: as arrays they would box every value."""

    def __init__(self, outcomes: Outcomes) -> None:
        self.chosen, self.status = outcomes.chosen.data, outcomes.status.data
        self.output_tokens, self.feasible = (
            outcomes.output_tokens.data,
            cast("memoryview[bool]", outcomes.feasible.data),
        )
        self.ttft_s, self.total_s = (
            cast("memoryview[float]", column.data) for column in (outcomes.ttft_s, outcomes.total_s)
        )
        self.predicted_ttft_s = cast("memoryview[float]", outcomes.predicted_ttft_s.data)


class _NoEstimator:
    """Says nothing of any instance, so that every one counts as feasible."""

    name = "none"

    def estimate(self, query: Query, fleet: FleetView, prompt_tokens: Sequence[int], now: float) -> list[Estimate]:
        return [_UNKNOWN] * len(fleet.views)

    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None:
        """Nothing to learn."""


_UNKNOWN = Estimate(float("nan"), float("nan"), float("nan"), "none")
