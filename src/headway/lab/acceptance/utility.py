"""A4, A5, A6: BEAR against the three simple policies, over rates, at one rate, and at equal mean TTFT."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from headway.calibrate.acceptance import AcceptanceRow
from headway.estimate.registry import make_estimator
from headway.lab.acceptance.settings import DEFAULT_FALLBACK, SLOPES, Settings
from headway.lab.acceptance.table import Figure, Group, Results, Unit, floored, on_time, row
from headway.lab.acceptance.units import SIMPLE, Maker, Play, bear, grid, play, pool_of, workload_of
from headway.lab.intervals import area_under, paired_gain, t_interval
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.policy.registry import make_policy

#: δ of the sweep, utility per millisecond.
DELTAS_PER_MS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3)
_MIN_GAIN = 0.40
#: Up to which rate each fallback is judged.
_HIGHEST_PER_S = {"least_ttft": 8.6, DEFAULT_FALLBACK: 9.5}
_OVER_SIMPLE = "over the best of round robin, shortest queue and latency agnostic"


def _area_needs(settings: Settings) -> list[Play]:
    units = []
    for fallback, highest in _HIGHEST_PER_S.items():
        makers = [bear(settings, fallback, slope=slope) for slope in SLOPES] + [play(settings, name) for name in SIMPLE]
        units += grid(makers, settings.rates_to(highest), settings.seeds)
    return units


def _areas(settings: Settings, results: Results, make: Maker, highest: float, figure: Figure) -> list[float]:
    """The area under a figure over the rates up to one, seed by seed."""
    rates = settings.rates_to(highest)
    return [area_under(rates, column) for column in results.figures(make, rates, settings.seeds, figure).T.tolist()]


def _area_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rows = []
    for fallback, highest in _HIGHEST_PER_S.items():
        for slope in SLOPES:
            ours = bear(settings, fallback, slope=slope)
            theirs = {name: play(settings, name, slope=slope) for name in SIMPLE}
            for figure in (on_time, floored):
                areas = {name: _areas(settings, results, make, highest, figure) for name, make in theirs.items()}
                best = _best(areas)
                gain = paired_gain(_areas(settings, results, ours, highest, figure), areas[best])
                suffix, addition = ("", "") if figure is on_time else ("-floored", ", negatives floored at 0")
                rows.append(
                    row(
                        f"A4-{fallback}-{slope:g}{suffix}",
                        f"OnTimeUtility AUC of bear {_OVER_SIMPLE} ({best}){addition}",
                        settings.describe(
                            f"{settings.rates_to(highest)[0]:g}...{settings.rates_to(highest)[-1]:g} qps, "
                            f"slope {slope:g}, fallback {fallback}"
                        ),
                        gain,
                        at_least=_MIN_GAIN if figure is on_time else None,
                    )
                )
    return rows


def _best(by_name: dict[str, list[float]]) -> str:
    """The name with the largest mean over seeds."""
    means = {name: float(np.mean(values)) for name, values in by_name.items()}
    return max(means, key=means.__getitem__)


def _one_rate_needs(settings: Settings) -> list[Play]:
    makers = [bear(settings, slope=slope) for slope in SLOPES] + [play(settings, name) for name in SIMPLE]
    return grid(makers, [settings.nearest(5.0)], settings.seeds)


def _one_rate_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rate, rows = settings.nearest(5.0), []
    for slope in SLOPES:
        ours = results.scores(bear(settings, slope=slope), rate, settings.seeds)
        theirs = {
            name: [on_time(one) for one in results.scores(play(settings, name, slope=slope), rate, settings.seeds)]
            for name in SIMPLE
        }
        best = _best(theirs)
        gain = paired_gain([on_time(one) for one in ours], theirs[best])
        name, setting = (
            f"A5-{slope:g}",
            settings.describe(f"{rate:g} qps, slope {slope:g}, fallback {DEFAULT_FALLBACK}"),
        )
        refused = t_interval([one.refused + one.failed for one in ours])
        negative = t_interval([one.on_time_negative for one in ours])
        rows += [
            row(name, f"OnTimeUtility of bear {_OVER_SIMPLE} ({best})", setting, gain, at_least=_MIN_GAIN),
            row(f"{name}-refused", "share of bear's queries refused or failed (counted in N)", setting, refused),
            row(f"{name}-negative", "what on-time answers of negative utility take from it", setting, negative),
        ]
    return rows


class SameDecisions(Struct, frozen=True, kw_only=True):
    """The share of queries that δ = 0 and latency-agnostic routing send to unlike instances, both by replay."""

    rate_per_s: float
    seed: int
    num_queries: int

    @property
    def cost(self) -> float:
        """An overloaded replay takes long."""
        return self.num_queries * 40.0

    def run(self) -> float:
        """In [0, 1]; 1 as well where a time differs though no decision does."""
        work, pool = workload_of(_at(self)), pool_of()
        ours, theirs = (
            simulate(
                work,
                pool,
                policy=make_policy(name, rng=stream(self.seed, "policy")),
                estimator=make_estimator("replay"),
                seed=self.seed,
            )
            for name in ("bear_lagrangian", "latency_agnostic")
        )
        differ = float((ours.chosen != theirs.chosen).mean())
        return differ if differ > 0.0 or (ours.ttft_s == theirs.ttft_s).all() else 1.0


def _at(unit: SameDecisions) -> Play:
    return Play(policy="bear", rate_per_s=unit.rate_per_s, seed=unit.seed, num_queries=unit.num_queries)


def _same(settings: Settings) -> list[SameDecisions]:
    rate, num = settings.nearest(8.0), max(settings.num_queries // 8, 500)
    return [SameDecisions(rate_per_s=rate, seed=seed, num_queries=num) for seed in settings.seeds]


def _sweep(settings: Settings) -> list[Maker]:
    return [play(settings, "bear_lagrangian", options=(("delta_per_ms", delta),)) for delta in DELTAS_PER_MS]


def _equal_ttft_needs(settings: Settings) -> Sequence[Unit[object]]:
    makers = [*_sweep(settings), play(settings, "shortest_queue")]
    return [*grid(makers, [settings.nearest(8.0)], settings.seeds), *_same(settings)]


def utility_at(ttft_s: float, points: Sequence[tuple[float, float]]) -> float:
    """What a sweep reaches at a mean TTFT in seconds: (TTFT, utility) points, linear in log TTFT between them."""
    ordered = sorted(points)
    return float(np.interp(np.log(ttft_s), np.log([at for at, _ in ordered]), [value for _, value in ordered]))


def _equal_ttft_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rate, seeds = settings.nearest(8.0), settings.seeds
    queue = results.scores(play(settings, "shortest_queue"), rate, seeds)
    sweep = [results.scores(make, rate, seeds) for make in _sweep(settings)]
    times_s = [one.ttft_mean_s or 0.0 for one in queue]
    ours = [
        utility_at(time_s, [(of_delta[place].ttft_mean_s or 0.0, of_delta[place].mean_utility) for of_delta in sweep])
        for place, time_s in enumerate(times_s)
    ]
    setting = settings.describe(f"{rate:g} qps, delta sweep of {len(DELTAS_PER_MS)} values")
    same = _same(settings)
    claim = "utility (late answers counted) of the delta curve at shortest queue's mean TTFT, over shortest queue's"
    return [
        row("A6-gain", claim, setting, paired_gain(ours, [one.mean_utility for one in queue]), at_least=_MIN_GAIN),
        row("A6-ttft", "mean TTFT of shortest queue, seconds", setting, t_interval(times_s)),
        row(
            "A6-identical",
            "share of decisions in which delta = 0 differs from latency agnostic",
            replace(settings, num_queries=same[0].num_queries).describe(f"{rate:g} qps, both by replay"),
            max(results.of(unit) for unit in same),
            at_most=0.0,
        ),
    ]


GROUPS = (
    Group("A4", _area_needs, _area_rows),
    Group("A5", _one_rate_needs, _one_rate_rows),
    Group("A6", _equal_ttft_needs, _equal_ttft_rows),
)
