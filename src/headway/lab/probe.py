"""Asks every estimator about the same decisions: what each predicted for the instance that was chosen, and what came.

One estimator answers the router, the others are only asked; so all are judged on the same traffic and state. The
throughput estimate can be given the best constant that another run's data allow, because a wrong constant would be a
weak opponent. It refuses to average over models: what is easy on one is hard on another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.estimate.base import Estimator
from headway.estimate.registry import ESTIMATORS, make_estimator
from headway.fleet import FleetView
from headway.lab.metrics import Status
from headway.lab.pool import Pool
from headway.lab.simulate import simulate
from headway.lab.workload import Workload
from headway.policy.base import HoldingPolicy, Policy
from headway.types import Estimate, Instance, Outcome, Query

Column = NDArray[np.float64]

#: The estimator that answers the router while all are asked.
ANSWERING = "replay"


class Probe(Struct, frozen=True, eq=False, kw_only=True):
    """Per instance: observed TTFT of its queries in seconds, what each estimator had said, and the tokens then to
    prefill, the query's own included. ``estimate_s`` is the mean CPU time of one replay estimate, the call that asks
    for all instances divided by their number."""

    ttft_s: dict[str, Column]
    predicted_s: dict[str, dict[str, Column]]
    backlog_tokens: dict[str, Column]
    estimate_s: float


class _AskAll:
    """An estimator that asks all and answers with one."""

    name = "probe"

    def __init__(self) -> None:
        self.estimators: dict[str, Estimator] = {name: make_estimator(name) for name in ESTIMATORS}
        self.said_s: dict[str, list[list[float]]] = {name: [] for name in ESTIMATORS}
        self.backlog_tokens: list[list[int]] = []
        self.cpu_s = 0.0

    def estimate(self, query: Query, fleet: FleetView, prompt_tokens: Sequence[int], now: float) -> list[Estimate]:
        """What the answering estimator says; every other is asked too."""
        start_s = time.thread_time()
        answer = self.estimators[ANSWERING].estimate(query, fleet, prompt_tokens, now)
        self.cpu_s += time.thread_time() - start_s
        for name, estimator in self.estimators.items():
            said = answer if name == ANSWERING else estimator.estimate(query, fleet, prompt_tokens, now)
            self.said_s[name].append([one.ttft_s for one in said])
        self.backlog_tokens.append(
            [
                tokens + (0 if view.engine is None else view.engine.remaining_prefill_tokens)
                for view, tokens in zip(fleet.views, prompt_tokens, strict=True)
            ]
        )
        return answer

    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None:
        """Every estimator learns from every outcome."""
        for estimator in self.estimators.values():
            estimator.observe(outcome, instance, now)


def probe(workload: Workload, pool: Pool, *, policy: Policy | HoldingPolicy, seed: int) -> Probe:
    """Play the workload once and ask every registered estimator at every decision."""
    asked = _AskAll()
    outcomes = simulate(workload, pool, policy=policy, estimator=asked, seed=seed)
    said_s = {name: np.array(rows) for name, rows in asked.said_s.items()}
    backlog = np.array(asked.backlog_tokens, np.float64)
    ttft_s: dict[str, Column] = {}
    predicted_s: dict[str, dict[str, Column]] = {}
    backlog_tokens: dict[str, Column] = {}
    for index, name in enumerate(pool.ids):
        here = (outcomes.chosen == index) & (outcomes.status == Status.OK)
        ttft_s[name] = outcomes.ttft_s[here]
        predicted_s[name] = {estimator: rows[here, index] for estimator, rows in said_s.items()}
        backlog_tokens[name] = backlog[here, index]
    return Probe(
        ttft_s=ttft_s,
        predicted_s=predicted_s,
        backlog_tokens=backlog_tokens,
        estimate_s=asked.cpu_s / max(backlog.size, 1),
    )


def mape(predicted_s: Column, observed_s: Column) -> float | None:
    """Mean of |predicted − observed| ÷ observed over the finite predictions; None over nothing."""
    finite = np.isfinite(predicted_s)
    if not finite.any():
        return None
    return float((np.abs(predicted_s - observed_s) / observed_s)[finite].mean())


class Throughput(Struct, frozen=True, kw_only=True):
    """``L = backlog/tokens_per_s + constant_s``."""

    tokens_per_s: float
    constant_s: float

    def predict_s(self, backlog_tokens: Column) -> Column:
        """TTFT in seconds for these tokens to prefill, the query's own included."""
        return backlog_tokens / self.tokens_per_s + self.constant_s


def refit(probed: Probe, pool: Pool, *, with_decode_step: bool = False) -> dict[str, Throughput]:
    """By instance, the throughput with the least MAPE on a probe, with the calibrated T_dec or without: the better one,
    or, on request, the one with it.

    The mean of |x·s + c − y|/y over s is least at a weighted median of (y − c)/x, weights x/y; so the fit is exact.
    """
    fits = {}
    for one in pool.instances:
        name, calibration = one.instance.id, one.instance.calibration
        observed_s, tokens = probed.ttft_s[name], probed.backlog_tokens[name]
        if calibration is None or len(observed_s) == 0:
            continue
        constants_s = [calibration.decode_step_s] if with_decode_step else [calibration.decode_step_s, 0.0]
        options = [_fit(tokens, observed_s, constant_s) for constant_s in constants_s]
        errors = [mape(option.predict_s(tokens), observed_s) or 0.0 for option in options]
        fits[name] = options[int(np.argmin(errors))]
    return fits


def _fit(tokens: Column, observed_s: Column, constant_s: float) -> Throughput:
    slopes, weights = (observed_s - constant_s) / tokens, tokens / observed_s
    order = np.argsort(slopes)
    reached = np.cumsum(weights[order])
    slope = float(slopes[order][np.searchsorted(reached, reached[-1] / 2)])
    return Throughput(tokens_per_s=1.0 / max(slope, 1e-12), constant_s=constant_s)


def throughputs(fits: Mapping[str, Throughput]) -> dict[str, float]:
    """θ of each fit, in tokens per second, by instance."""
    return {name: fit.tokens_per_s for name, fit in fits.items()}
