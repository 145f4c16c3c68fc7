"""A7, A9, A16: BEAR against all eight baselines, on average, under bursts, and never below any of them.

The best baseline is chosen per rate (or cell) by its mean on the evaluation seeds themselves, which favours it. Beside
the claims stand the references that no router should be praised for not beating.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.settings import DEFAULT_FALLBACK, SLOPES, Settings
from headway.lab.acceptance.table import Grid, Group, Results, floored, on_time, row
from headway.lab.acceptance.units import BASELINES, LATENCY_AWARE, Maker, Play, bear, grid, play, pool_of, workload_of
from headway.lab.intervals import Interval, paired_gain, paired_interval, t_interval
from headway.lab.metrics import Score
from headway.lab.references import gain_thresholds, hull_at, model_pairs

_HIGHEST_PER_S = 9.5
_MIN_GAIN_ALL, _MIN_GAIN_AWARE = 0.12, 0.55
#: Baselines in forms that no claim is judged by.
_EXTRA = ("score_literal", "bear_throughput")
#: Shares of queries that go to the second, or strong, model of a pair.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_BURST_RATIOS, _BURST_RATES_PER_S = (3.0, 6.0), (6.0, 7.0, 8.0)


# ------------------------------------------------------------ A7: on average over rates


def _average_needs(settings: Settings) -> list[Play]:
    makers = [bear(settings), bear(settings, knowledge="label"), *_others(settings).values()]
    everywhere = grid(makers, settings.rates_to(_HIGHEST_PER_S), settings.seeds)
    return everywhere + _reference_needs(settings)


def _others(settings: Settings) -> dict[str, Maker]:
    makers = {name: play(settings, name) for name in (*BASELINES, *_EXTRA)}
    makers["bear_throughput"] = play(settings, "bear_throughput", options=(("fallback", DEFAULT_FALLBACK),))
    makers["task_label"] = play(settings, "latency_agnostic", knowledge="label")
    return makers


def best_per_rate(grids: dict[str, Grid], names: Iterable[str]) -> tuple[Grid, list[str]]:
    """At each rate the runs of the baseline with the largest mean there, of shape (rates, seeds), and its name."""
    candidates = list(names)
    means = np.array([grids[name].mean(axis=1) for name in candidates])
    winners = [candidates[place] for place in means.argmax(axis=0)]
    return np.array([grids[name][place] for place, name in enumerate(winners)]), winners


def _average_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rates, seeds = settings.rates_to(_HIGHEST_PER_S), settings.seeds
    setting = settings.describe(f"mean over {rates[0]:g}...{rates[-1]:g} qps, fallback {DEFAULT_FALLBACK}")
    ours = results.figures(bear(settings), rates, seeds)
    grids = {name: results.figures(make, rates, seeds) for name, make in _others(settings).items()}
    rows = []
    for suffix, names, bound in (("all", BASELINES, _MIN_GAIN_ALL), ("aware", LATENCY_AWARE, _MIN_GAIN_AWARE)):
        best, winners = best_per_rate(grids, names)
        claim = f"OnTimeUtility of bear over the best of {len(names)} baselines per rate"
        which = f"; best: {', '.join(dict.fromkeys(winners))}"
        rows.append(row(f"A7-{suffix}", claim + which, setting, _gain(ours, best), at_least=bound))
    literal = [name for name in (*LATENCY_AWARE, "score_literal") if name != "score"]
    best, winners = best_per_rate(grids, literal)
    claim = f"the same as A7-aware, with SCORE in its literal form; best: {', '.join(dict.fromkeys(winners))}"
    rows.append(row("A7-aware-literal", claim, setting, _gain(ours, best)))
    floors = {name: results.figures(play(settings, name), rates, seeds, floored) for name in BASELINES}
    best, _ = best_per_rate(floors, BASELINES)
    gain = _gain(results.figures(bear(settings), rates, seeds, floored), best)
    rows.append(row("A7-all-floored", "the same as A7-all, negatives floored at 0", setting, gain))
    rows.append(row("A7-bear", "OnTimeUtility of bear", setting, t_interval(ours.mean(axis=0).tolist())))
    refused = results.figures(bear(settings), rates, seeds, _refused)
    rows.append(row("A7-refused", "share of bear's queries refused or failed", setting, float(refused.mean())))
    for name, theirs in grids.items():
        rows.append(row(f"A7-{name}", f"OnTimeUtility of bear over {name}", setting, _gain(ours, theirs)))
    label = results.figures(bear(settings, knowledge="label"), rates, seeds)
    claim = "OnTimeUtility of bear over bear with utilities from the task label only"
    rows.append(row("A7-bear_task_label", claim, setting, _gain(ours, label)))
    return rows + _reference_rows(settings, results)


def _gain(ours: Grid, theirs: Grid) -> Interval:
    return paired_gain(ours.mean(axis=0).tolist(), theirs.mean(axis=0).tolist())


def _refused(one: Score) -> float:
    return one.refused + one.failed


# ------------------------------------------------------------ references at one rate


def _mixes(settings: Settings) -> list[Maker]:
    """Random mixtures of every two models, the pure ones once."""
    models = pool_of().models
    inner = [(pair, share) for pair in model_pairs(models) for share in _SHARES if 0.0 < share < 1.0]
    pure = [((models[0], model), float(place > 0)) for place, model in enumerate(models)]
    return [play(settings, "random_mix", pair=pair, options=(("share", share),)) for pair, share in (*inner, *pure)]


def _thresholds(settings: Settings) -> list[Maker]:
    """Two-model routers of every pair, each at thresholds set on a tuning seed."""
    sample = Play(policy="two_model", rate_per_s=8.0, seed=settings.tuning_seeds[0], num_queries=settings.num_queries)
    work, pool = workload_of(sample), pool_of()
    return [
        play(settings, "two_model", pair=(weak, strong), options=(("threshold", threshold),))
        for weak, strong in model_pairs(pool.models)
        for threshold in gain_thresholds(work, pool, weak, strong, _SHARES[1:-1])
    ]


def _reference_needs(settings: Settings) -> list[Play]:
    rates = [settings.nearest(8.0)]
    return [
        *grid([*_mixes(settings), *_thresholds(settings)], rates, settings.seeds),
        *grid(_thresholds(settings), rates, settings.tuning_seeds),
    ]


def _reference_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rate, seeds = settings.nearest(8.0), settings.seeds
    setting = settings.describe(f"{rate:g} qps, fallback {DEFAULT_FALLBACK}")
    bears = results.scores(bear(settings), rate, seeds)
    ours = [on_time(one) for one in bears]
    mixes = [results.scores(make, rate, seeds) for make in _mixes(settings)]
    hull = [
        hull_at([(mix[place].mean_cost_usd or 0.0, on_time(mix[place])) for mix in mixes], one.mean_cost_usd or 0.0)
        for place, one in enumerate(bears)
    ]
    tuned = [
        float(np.mean([on_time(one) for one in results.scores(make, rate, settings.tuning_seeds)]))
        for make in _thresholds(settings)
    ]
    best = _thresholds(settings)[int(np.argmax(tuned))]
    pair = best(rate, seeds[0]).pair or ("", "")
    two = [on_time(one) for one in results.scores(best, rate, seeds)]
    mix_claim = "OnTimeUtility of bear over the hull of random two-model mixtures at its own mean cost"
    two_claim = (
        f"OnTimeUtility of bear over the best pair with one threshold ({' | '.join(pair)}, chosen on other seeds)"
    )
    return [
        row("A7-random_mix", mix_claim, setting, paired_gain(ours, hull), at_least=0.0),
        row("A7-two_model", two_claim, setting, paired_gain(ours, two), at_least=0.0),
    ]


# ------------------------------------------------------------ A9: bursts


def _burst_makers(settings: Settings, ratio: float) -> dict[str, Maker]:
    makers = {name: play(settings, name, burst_ratio=ratio) for name in BASELINES}
    return {"bear": bear(settings, burst_ratio=ratio), **makers}


def _burst_needs(settings: Settings) -> list[Play]:
    return [
        unit
        for ratio in _BURST_RATIOS
        for unit in grid(_burst_makers(settings, ratio).values(), _BURST_RATES_PER_S, settings.seeds)
    ]


def _burst_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rows = []
    for ratio in _BURST_RATIOS:
        makers = _burst_makers(settings, ratio)
        for rate in _BURST_RATES_PER_S:
            runs = {
                name: [on_time(one) for one in results.scores(make, rate, settings.seeds)]
                for name, make in makers.items()
            }
            best = BASELINES[int(np.argmax([np.mean(runs[name]) for name in BASELINES]))]
            setting = settings.describe(f"MMPP-2 r = {ratio:g}, mean {rate:g} qps, fallback {DEFAULT_FALLBACK}")
            claim = f"OnTimeUtility of bear over the best of {len(BASELINES)} baselines ({best})"
            gain = paired_gain(runs["bear"], runs[best])
            rows.append(row(f"A9-r{ratio:g}-{rate:g}", claim, setting, gain, at_least=0.0, passed=gain.value > 0.0))
    return rows


# ------------------------------------------------------------ A16: never below


_FALLBACKS = (DEFAULT_FALLBACK, "least_ttft")
_LOADED_PER_S, _OVERLOADED_PER_S = 8.0, (10.0, 12.0)


def _never_below_needs(settings: Settings) -> list[Play]:
    makers = [*(bear(settings, fallback) for fallback in _FALLBACKS), *(play(settings, name) for name in BASELINES)]
    printed = [bear(settings, fallback, slope=slope) for slope in SLOPES for fallback in _FALLBACKS]
    return [
        *grid(makers, settings.rates_per_s, settings.seeds),
        *grid(printed, [settings.nearest(_LOADED_PER_S)], settings.seeds),
    ]


def _never_below_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rates, seeds = settings.rates_per_s, settings.seeds
    theirs = {name: results.figures(play(settings, name), rates, seeds) for name in BASELINES}
    rows = []
    for fallback in _FALLBACKS:
        ours = results.figures(bear(settings, fallback), rates, seeds)
        margins = {name: ours - values for name, values in theirs.items()}
        nearest = BASELINES[int(np.argmin([margins[name].min() for name in BASELINES]))]
        place = int(margins[nearest].min(axis=1).argmin())
        claim = (
            f"smallest margin of bear's OnTimeUtility over any baseline, seed by seed ({nearest} at {rates[place]:g})"
        )
        setting = settings.describe(f"{rates[0]:g}...{rates[-1]:g} qps, fallback {fallback}")
        name = "A16" if fallback == DEFAULT_FALLBACK else f"A16-{fallback}"
        rows.append(row(name, claim, setting, float(margins[nearest].min()), at_least=0.0 if name == "A16" else None))
    rows += _victim_rows(settings, results)
    for rate in [rate for rate in rates if rate in _OVERLOADED_PER_S]:
        runs = {fallback: results.scores(bear(settings, fallback), rate, seeds) for fallback in _FALLBACKS}
        rows += _overload_rows(settings, rate, runs)
    return rows


def _victim_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    """Below saturation: what each fallback does to those that were given up, under both target slopes."""
    rate, rows = settings.nearest(_LOADED_PER_S), []
    for slope in SLOPES:
        for fallback in _FALLBACKS:
            scores = results.scores(bear(settings, fallback, slope=slope), rate, settings.seeds)
            setting = settings.describe(f"{rate:g} qps, slope {slope:g}, fallback {fallback}")
            for name, claim, values in (
                ("utility", "OnTimeUtility", [on_time(one) for one in scores]),
                ("floored", "OnTimeUtility, negatives floored at 0", [floored(one) for one in scores]),
                ("in_time", "share answered in time", [one.attainment for one in scores]),
                ("p99", "TTFT of the slowest in a hundred, seconds", [one.ttft_p99_s or 0.0 for one in scores]),
            ):
                rows.append(row(f"A16-{fallback}-{rate:g}-{slope:g}-{name}", claim, setting, t_interval(values)))
    return rows


def _overload_rows(settings: Settings, rate: float, runs: dict[str, list[Score]]) -> list[AcceptanceRow]:
    """Beyond saturation: what the fallback is worth, and what its victims wait."""
    setting = settings.describe(f"{rate:g} qps")
    ours, theirs = runs[DEFAULT_FALLBACK], runs["least_ttft"]
    gain = paired_interval([on_time(one) for one in ours], [on_time(one) for one in theirs])
    claim = f"OnTimeUtility of fallback {DEFAULT_FALLBACK} less that of least_ttft"
    rows = [row(f"A16-gain-{rate:g}", claim, setting, gain)]
    for fallback, scores in runs.items():
        name = f"A16-{fallback}-{rate:g}"
        rows.append(
            row(name, f"OnTimeUtility of fallback {fallback}", setting, t_interval([on_time(one) for one in scores]))
        )
        for task in scores[0].tasks:
            waits = [one.tasks[task].late_ttft_p50_s for one in scores]
            known = [wait for wait in waits if wait is not None]
            missed = t_interval([1.0 - one.tasks[task].attainment for one in scores])
            rows.append(row(f"{name}-{task}-missed", f"share of {task} that misses its target", setting, missed))
            if len(known) == len(waits):
                claim = f"median TTFT of {task} that misses its target, seconds"
                rows.append(row(f"{name}-{task}-late", claim, setting, t_interval(known)))
    return rows


GROUPS = (
    Group("A7", _average_needs, _average_rows),
    Group("A9", _burst_needs, _burst_rows),
    Group("A16", _never_below_needs, _never_below_rows),
)
