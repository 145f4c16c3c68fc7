"""A10: the limited-processor-sharing estimate against its exact sum, an event simulation, and the engine's own waits.

The formula is exact for exponential service. With the variability factor it is a heavy-traffic rule of thumb, and an
engine is no processor-sharing queue: those rows say how far off it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from headway.calibrate.acceptance import AcceptanceRow
from headway.estimate.queueing import lps_wait_s
from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.table import Group, Results, Unit, row
from headway.lab.arrivals import poisson
from headway.lab.fluid import mean_work_s
from headway.lab.intervals import Interval, t_interval
from headway.lab.lps import Service, exact_wait, simulated_wait
from headway.lab.pool import qwen3_pool
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.lab.workload import WorkloadSpec, four_task_workload
from headway.policy.registry import make_policy

_EXACT_RHOS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99)
_EXACT_CONCURRENCIES = (1, 5, 25, 100)
_MAX_EXACT_ERROR, _MAX_HALF_WIDTH = 1e-9, 0.03
_SIMULATED = ((25, 0.9), (25, 0.95), (25, 0.97), (5, 0.5), (5, 0.6), (5, 0.7), (5, 0.8))
_QUICK_SIMULATED = ((25, 0.97), (5, 0.8))
#: One request in ten is, on average, nine times as long as the others: cs² = 4.56.
_VARIABLE = Service(long_share=0.1, long_mean=5.0)
_VARIED, _QUICK_VARIED = ((25, 0.95), (5, 0.8)), ((5, 0.8),)  # the first needs a long warm-up
_ENGINE_RHOS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


class Queue(Struct, frozen=True, kw_only=True):
    """One event simulation."""

    concurrency: int
    rho: float
    seed: int
    num_steps: int
    service: Service = Service()

    @property
    def cost(self) -> float:
        """Long: all queues at once."""
        return self.num_steps * 20.0

    def run(self) -> Interval:
        """The mean wait in mean service times."""
        rng = stream(self.seed, "lps", str(self.concurrency), str(self.rho), str(self.service.long_share))
        return simulated_wait(self.rho, self.concurrency, rng, num_steps=self.num_steps, service=self.service)


class EngineWait(Struct, frozen=True, kw_only=True):
    """The 0.6B alone under the four tasks, at a share of its capacity."""

    rho: float
    seed: int
    num_queries: int

    @property
    def cost(self) -> float:
        """Without estimates."""
        return float(self.num_queries)

    def run(self) -> tuple[float, float]:
        """(mean TTFT, the formula's mean wait) in seconds, at μ by the mean work of these very queries."""
        pool = qwen3_pool((1, 0, 0))
        (one,) = pool.instances
        spec = WorkloadSpec(seed=self.seed, models=pool.models)
        unit_s = poisson(self.num_queries, 1.0, stream(self.seed, "arrivals"))
        service_rate_per_s = 1.0 / mean_work_s(four_task_workload(unit_s, spec), one)
        rate_per_s = self.rho * service_rate_per_s
        work = four_task_workload(unit_s / rate_per_s, spec)
        policy = make_policy("round_robin", rng=stream(self.seed, "policy"))
        outcomes = simulate(work, pool, policy=policy, estimator=None, seed=self.seed)
        calibration = one.instance.calibration
        concurrency = 25 if calibration is None else calibration.concurrency
        return float(outcomes.ttft_s.mean()), lps_wait_s(rate_per_s, service_rate_per_s, concurrency)


def _queue(settings: Settings, concurrency: int, rho: float, service: Service) -> Queue:
    seed = settings.seeds[0]
    return Queue(concurrency=concurrency, rho=rho, seed=seed, num_steps=settings.lps_steps, service=service)


def _simulated(settings: Settings) -> Sequence[tuple[int, float]]:
    return _QUICK_SIMULATED if settings.name == "quick" else _SIMULATED


def _varied(settings: Settings) -> Sequence[tuple[int, float]]:
    return _QUICK_VARIED if settings.name == "quick" else _VARIED


def _engines(settings: Settings, seed: int) -> list[EngineWait]:
    return [EngineWait(rho=rho, seed=seed, num_queries=settings.num_estimate_queries) for rho in _ENGINE_RHOS]


def _needs(settings: Settings) -> Sequence[Unit[object]]:
    return [
        *(_queue(settings, k, rho, Service()) for k, rho in _simulated(settings)),
        *(_queue(settings, k, rho, _VARIABLE) for k, rho in _varied(settings)),
        *(unit for seed in settings.seeds for unit in _engines(settings, seed)),
    ]


def _rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    return [_exact_row(), *_simulated_rows(settings, results), _trend_row(settings, results)]


def _exact_row() -> AcceptanceRow:
    worst = 0.0
    for concurrency in _EXACT_CONCURRENCIES:
        for rho in _EXACT_RHOS:
            exact = exact_wait(rho, concurrency)
            if exact > 0.0:
                worst = max(worst, abs(lps_wait_s(rho, 1.0, concurrency) / exact - 1.0))
    shown = ", ".join(f"{rho:g}" for rho in _EXACT_RHOS)
    setting = f"k = {', '.join(map(str, _EXACT_CONCURRENCIES))}; rho = {shown}"
    claim = "largest relative error of the LPS formula against the exact stationary sum"
    return row("A10-exact", claim, setting, worst, at_most=_MAX_EXACT_ERROR)


def _simulated_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rows = []
    for service, cases, suffix in ((Service(), _simulated(settings), ""), (_VARIABLE, _varied(settings), "-variable")):
        factor = service.second_moment / 2.0  # (ca² + cs²)/2 with ca² = 1 and cs² = E[S²] − 1
        for concurrency, rho in cases:
            found = results.of(_queue(settings, concurrency, rho, service))
            error = _against(lps_wait_s(rho, 1.0, concurrency, factor), found)
            half_width = (error.high - error.low) / 2.0 if error.low is not None and error.high is not None else 0.0
            inside = error.low is not None and error.high is not None and error.low <= 0.0 <= error.high
            quick = "QUICK, reduced: " if settings.name == "quick" else ""
            rows.append(
                row(
                    f"A10-k{concurrency}-{rho:g}{suffix}",
                    "LPS formula over the simulated mean wait, less 1: 0 within an interval of this half-width"
                    + (", with the variability factor" if suffix else ""),
                    f"{quick}k = {concurrency}, rho = {rho:g}, cs2 = {service.second_moment - 1.0:.3g}, "
                    f"2000 queues x {settings.lps_steps} events",
                    error,
                    at_most=_MAX_HALF_WIDTH,
                    passed=inside and half_width <= _MAX_HALF_WIDTH,
                )
            )
    return rows


def _against(formula: float, simulated: Interval) -> Interval:
    """formula ÷ simulated − 1; the interval is the simulation's."""
    if simulated.low is None or simulated.high is None or simulated.low <= 0.0:
        return Interval(formula / simulated.value - 1.0, None, None)
    return Interval(formula / simulated.value - 1.0, formula / simulated.high - 1.0, formula / simulated.low - 1.0)


def _trend_row(settings: Settings, results: Results) -> AcceptanceRow:
    """Whether formula and engine agree on which load is worse: the rank correlation over rho, seed by seed."""
    correlations = []
    for seed in settings.seeds:
        measured, told = zip(*(results.of(unit) for unit in _engines(settings, seed)), strict=True)
        correlations.append(float(np.corrcoef(_ranks(measured), _ranks(told))[0, 1]))
    claim = "rank correlation over load of the engine's mean TTFT with the LPS formula"
    quick = "QUICK, reduced: " if settings.name == "quick" else ""
    setting = (
        f"{quick}0.6B alone, four tasks, rho = {', '.join(f'{rho:g}' for rho in _ENGINE_RHOS)} of its mean work, "
        f"{len(settings.seeds)} seeds x {settings.num_estimate_queries} queries"
    )
    return row("A10-trend", claim, setting, t_interval(correlations))


def _ranks(values: Sequence[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


GROUPS = (Group("A10", _needs, _rows),)
