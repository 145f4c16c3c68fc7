"""RouteBalance: a weighted sum of quality, cheapness and quickness, each relative to the candidates at hand.

``T = TPOT·(d/b + L)`` is the expected end of the answer: the pending decode tokens d shared by a batch of b, then L of
its own (source: RouteBalance, arXiv 2606.17949, as the latency-aware router's comparison states it). TPOT is learned
from outcomes. Quality is what the router predicts for everyone, so that rules are compared and not predictors: give the
router a k-nearest-neighbour predictor (k = 10) for the published set-up. It ignores λ, the first token and targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headway.estimate.work import own_work
from headway.fleet import FleetView
from headway.policy.base import Rotation, break_tie, choosable, largest
from headway.policy.observed import OnlineRidge, tpot_s
from headway.policy.options import Options, number
from headway.policy.residents import Load, Residents
from headway.types import Candidate, Instance, Outcome, Query

#: Seconds per output token of an instance of which nothing is known yet.
_UNKNOWN_TPOT_S = 0.02
_LEAST_TPOT_S = 1e-4
#: Typical decodes, prefill tokens and context tokens behind one TPOT, for the regression's pull to its prior.
_SCALES = (1.0, 50.0, 5_000.0, 100_000.0)
_PRIOR_SAMPLES = 4.0
#: Queries under way of which the features are kept; beyond, the oldest is not learned from.
_MAX_PENDING = 65_536

Features = tuple[float, float, float, float]


class RouteBalancePolicy:
    """Largest ``wq·Q + wc·(1 − C/Cmax) + wt·(1 − T/Tmax)``, the maxima over the choosable candidates.

    Q is quality in [0, 1], C cost in USD, T in seconds. The d/b part is dropped where a slot is free (fewer requests
    than ``max_num_seqs``). TPOT, in seconds per token, is a ridge regression per instance on decodes, prefill tokens
    and context tokens at the time of the decision, beginning with what the step time says of a decode batch.
    Options: ``weight_quality``, ``weight_cost``, ``weight_latency`` (1/3 each).
    """

    name = "routebalance"

    def __init__(self, rng: np.random.Generator, options: Options) -> None:
        self._rotation = Rotation(rng)
        self._residents = Residents()
        self._weight_quality = number(options, "weight_quality", 1 / 3)
        self._weight_cost = number(options, "weight_cost", 1 / 3)
        self._weight_latency = number(options, "weight_latency", 1 / 3)
        self._tpots: dict[str, OnlineRidge] = {}
        self._pending: dict[str, tuple[str, Features]] = {}

    def bind(self, fleet: FleetView) -> None:
        """Know the engines of this fleet, and begin each TPOT with its step time."""
        self._residents.bind(fleet)
        for view in fleet.views:
            self._tpots[view.instance.id] = OnlineRidge(_prior(view.instance), _SCALES, strength=_PRIOR_SAMPLES)

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The instance with the largest weighted sum; equals go to fewer requests, then take turns."""
        indices = choosable(candidates)
        if not indices:
            return None
        loads = [self._residents.load(candidates[index]) for index in indices]
        ends_s = [self.end_s(candidates[index], load) for index, load in zip(indices, loads, strict=True)]
        costs_usd = [_or_infinite(candidates[index].cost_usd) for index in indices]
        quick, cheap = _relative(ends_s), _relative(costs_usd)
        scores = []
        for position, index in enumerate(indices):
            quality = candidates[index].quality
            scores.append(
                -math.inf
                if quality is None
                else self._weight_quality * quality
                + self._weight_cost * cheap[position]
                + self._weight_latency * quick[position]
            )
        chosen = break_tie(largest(indices, scores), candidates, self._rotation, by_ttft=False)
        self._remember(query.id, candidates[chosen].instance_id, _features(loads[indices.index(chosen)]))
        return chosen

    def observe(self, outcome: Outcome, now: float) -> None:
        """Learn the TPOT that came of the load at the time of the decision."""
        pending = self._pending.get(outcome.query_id)
        if pending is None or pending[0] != outcome.instance_id:
            return
        del self._pending[outcome.query_id]
        seen_s = tpot_s(outcome)
        if seen_s is not None:
            self._tpot(outcome.instance_id).observe(pending[1], seen_s)

    def end_s(self, candidate: Candidate, load: Load) -> float:
        """T: seconds to the end of the answer."""
        if candidate.output_tokens is None:
            return math.inf
        token_s = max(self._tpot(candidate.instance_id).predict(_features(load)), _LEAST_TPOT_S)
        queued_tokens = 0.0 if load.slot_free else load.decode_tokens / max(load.num_running, 1)
        return token_s * (queued_tokens + candidate.output_tokens)

    def _tpot(self, instance_id: str) -> OnlineRidge:
        tpot = self._tpots.get(instance_id)
        if tpot is None:
            tpot = OnlineRidge((_UNKNOWN_TPOT_S, 0.0, 0.0, 0.0), _SCALES, strength=_PRIOR_SAMPLES)
            self._tpots[instance_id] = tpot
        return tpot

    def _remember(self, query_id: str, instance_id: str, features: Features) -> None:
        self._pending.pop(query_id, None)  # sent again elsewhere: it is the newest now
        self._pending[query_id] = (instance_id, features)
        if len(self._pending) > _MAX_PENDING:
            del self._pending[next(iter(self._pending))]


def _features(load: Load) -> Features:
    return (1.0, float(load.num_decodes), float(load.prefill_tokens), float(load.context_tokens))


def _prior(instance: Instance) -> Features:
    """Weights that make the regression begin as the time of a decode batch, in seconds."""
    if instance.step_time is not None and instance.limits is not None:
        work = own_work(instance.step_time, instance.limits)
        return (work.step_s, work.decode_token_s, 0.0, work.decode_context_s)
    calibration = instance.calibration
    return (_UNKNOWN_TPOT_S if calibration is None else calibration.decode_step_s, 0.0, 0.0, 0.0)


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _relative(values: Sequence[float]) -> list[float]:
    """``1 − value/max`` over the finite ones; 0 for an infinite one, 1 where all are 0."""
    most = max([value for value in values if value < math.inf], default=0.0)
    return [0.0 if value == math.inf else 1.0 if most == 0.0 else 1.0 - value / most for value in values]
