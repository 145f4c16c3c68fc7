"""A2, A3: how well each estimator foretells the time to first token, on the same decisions, and what an estimate costs.

Errors are over every answer, the shortest included, which is hard on all: of 20 ms one batch is a third. The throughput
estimate stands here with the authors' θ, and with the θ that is best on a run of its own.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from headway.calibrate.acceptance import AcceptanceRow
from headway.estimate.registry import ESTIMATORS
from headway.lab.acceptance.settings import DEFAULT_FALLBACK, Settings
from headway.lab.acceptance.table import Group, Results, row
from headway.lab.arrivals import poisson
from headway.lab.intervals import Interval, t_interval
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.probe import ANSWERING, Probe, Throughput, mape, probe, refit
from headway.lab.truth import Task, stream
from headway.lab.workload import EQUAL_SHARES, WorkloadSpec, four_task_workload
from headway.policy.registry import make_policy

_ALONE_RATE_PER_S, _POOL_RATE_PER_S = 0.87, 8.0
_MAX_MAPE, _MIN_RATIO, _MAX_ESTIMATE_S = 0.08, 3.0, 1e-4
REFITTED = "prefill_throughput_refitted"


class Asked(Struct, frozen=True, kw_only=True):
    """Every estimator asked about one run: of the 0.6B alone under report summaries, or of the pool."""

    alone: bool
    rate_per_s: float
    seed: int
    num_queries: int

    @property
    def cost(self) -> float:
        """Several estimates per decision."""
        return self.num_queries * 6.0

    def run(self) -> Probe:
        """What each said, and what came."""
        shares: dict[Task, float] = {"gov_report": 1.0} if self.alone else EQUAL_SHARES
        pool = pool_asked(self.alone)
        arrival_s = poisson(self.num_queries, self.rate_per_s, stream(self.seed, "arrivals"))
        work = four_task_workload(arrival_s, WorkloadSpec(seed=self.seed, models=pool.models), shares=shares)
        policy = make_policy("bear", rng=stream(self.seed, "policy"), options={"fallback": DEFAULT_FALLBACK})
        return probe(work, pool, policy=policy, seed=self.seed)


@lru_cache(maxsize=2)
def pool_asked(alone: bool) -> Pool:
    """The 0.6B alone, or the three models."""
    return qwen3_pool((1, 0, 0)) if alone else qwen3_pool()


def _asked(settings: Settings, alone: bool, seed: int) -> Asked:
    rate = _ALONE_RATE_PER_S if alone else _POOL_RATE_PER_S
    num = settings.num_estimate_queries if alone else settings.num_queries
    return Asked(alone=alone, rate_per_s=rate, seed=seed, num_queries=num)


def _needs(settings: Settings, alone: bool) -> list[Asked]:
    return [_asked(settings, alone, seed) for seed in (*settings.seeds, settings.tuning_seeds[0])]


def errors_of(probed: Probe, fits: dict[str, Throughput], instance_id: str) -> dict[str, float | None]:
    """MAPE of every estimator on one instance, the refitted throughput included."""
    observed_s = probed.ttft_s[instance_id]
    errors = {name: mape(said_s, observed_s) for name, said_s in probed.predicted_s[instance_id].items()}
    errors[REFITTED] = mape(fits[instance_id].predict_s(probed.backlog_tokens[instance_id]), observed_s)
    return errors


def _errors(settings: Settings, results: Results, alone: bool) -> dict[str, dict[str, list[float]]]:
    """By instance and estimator, the MAPE of each evaluation seed."""
    pool = pool_asked(alone)
    fits = refit(results.of(_asked(settings, alone, settings.tuning_seeds[0])), pool)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in pool.ids}
    for seed in settings.seeds:
        probed = results.of(_asked(settings, alone, seed))
        for name in pool.ids:
            for estimator, error in errors_of(probed, fits, name).items():
                found[name].setdefault(estimator, []).append(float("nan") if error is None else error)
    return found


def _alone_needs(settings: Settings) -> list[Asked]:
    return _needs(settings, alone=True)


def _alone_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    (errors,) = _errors(settings, results, alone=True).values()
    setting = _describe(settings, "0.6B alone, GovReport prompts", _ALONE_RATE_PER_S, settings.num_estimate_queries)
    ratios = [theirs / ours for theirs, ours in zip(errors[REFITTED], errors[ANSWERING], strict=True)]
    rows = [
        row("A2-replay", "TTFT MAPE of the replay", setting, _mean(errors[ANSWERING]), at_most=_MAX_MAPE),
        row(
            "A2-ratio",
            "TTFT MAPE of the throughput estimate with its own refitted theta, over the replay's",
            setting,
            _mean(ratios),
            at_least=_MIN_RATIO,
        ),
    ]
    others = (REFITTED, *(name for name in ESTIMATORS if name != ANSWERING))
    return rows + [row(f"A2-{name}", f"TTFT MAPE of {_told(name)}", setting, _mean(errors[name])) for name in others]


def _pool_needs(settings: Settings) -> list[Asked]:
    return _needs(settings, alone=False)


def _pool_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    found = _errors(settings, results, alone=False)
    setting = _describe(settings, "three models, bear", _POOL_RATE_PER_S, settings.num_queries)
    rows = []
    for instance_id, errors in found.items():
        means = {name: float(np.mean(values)) for name, values in errors.items()}
        rivals = {name: value for name, value in means.items() if name != ANSWERING}
        best = min(rivals, key=rivals.__getitem__)
        claim = f"TTFT MAPE of the replay on {instance_id}, against the best other estimator's ({best})"
        rows.append(
            row(f"A3-{instance_id}", claim, setting, _mean(errors[ANSWERING]), at_most=float(f"{rivals[best]:.6g}"))
        )
        for name in rivals:
            claim = f"TTFT MAPE of {_told(name)} on {instance_id}"
            rows.append(row(f"A3-{instance_id}-{name}", claim, setting, _mean(errors[name])))
        endless = [_endless(results.of(_asked(settings, False, seed)), instance_id) for seed in settings.seeds]
        claim = f"share of queries for which the queueing estimate sees no bound on {instance_id}, left out above"
        rows.append(row(f"A3-{instance_id}-queueing-saturated", claim, setting, t_interval(endless)))
    times_s = t_interval([results.of(_asked(settings, False, seed)).estimate_s for seed in settings.seeds])
    claim = "mean CPU time of one replay estimate, seconds (all instances in a call, divided by their number)"
    rows.append(row("A3-time", claim, setting, times_s, at_most=_MAX_ESTIMATE_S))
    return rows


def _endless(probed: Probe, instance_id: str) -> float:
    return float(np.isinf(probed.predicted_s[instance_id]["queueing"]).mean())


def _told(name: str) -> str:
    known = {
        REFITTED: "the throughput estimate, theta refitted on another seed",
        "prefill_throughput": "the throughput estimate, authors' theta",
        "prefill_throughput_bare": "the throughput estimate, authors' theta, without T_dec",
    }
    return known.get(name, name)


def _mean(values: list[float]) -> Interval:
    """The mean with its interval; no interval where an estimate was infinite."""
    return t_interval(values) if np.isfinite(values).all() else Interval(float(np.mean(values)), None, None)


def _describe(settings: Settings, what: str, rate: float, num: int) -> str:
    sized = replace(settings, num_queries=num)
    return sized.describe(f"{what}, {rate:g} qps, every answer counted")


GROUPS = (Group("A2", _alone_needs, _alone_rows), Group("A3", _pool_needs, _pool_rows))
