"""The curves of a comparison: over rates, and over what a sweep varied, each point with its 95 % interval.

Every function returns a drawing, or None where the results hold nothing to draw. Pictures of single runs are in
``run_figures``. It refuses to smooth, to extrapolate and to leave out a policy that does badly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from headway.lab.drawing import Drawing, curve, legend, logarithmic, look, panels
from headway.lab.intervals import Interval, paired_gain, t_interval
from headway.lab.reference_margins import reference_cells
from headway.lab.runs import FLUID_BOUND, Results
from headway.lab.tables import difference, utilities

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from headway.lab.metrics import Score
    from headway.lab.scenario import SweepOf
    from headway.lab.unit import Record

Curve = tuple[list[float], list[Interval]]
_RATE = "mean arrival rate (queries per second)"
#: The upper edge of everything that costs nothing.
BEST_REFERENCE = "best cheap reference"
_BARS = "Bars are 95 % intervals over seeds."
_EDGES = " Only an oracle can pass the fluid bound; a router that is not above the best cheap reference is no use."

#: What a sweep varied, as the axis says it, and whether its axis is logarithmic beyond the smallest value above 0.
_SWEEP_AXES: dict[SweepOf, tuple[str, bool]] = {
    "lambda_per_musd": ("λ, utility lost per micro-USD", True),
    "delta_per_ms": ("δ, utility lost per millisecond", True),
    "snapshot_interval_ms": ("interval between snapshots (ms)", True),
    "burst_ratio": ("ratio of the high to the low arrival rate", False),
}


def rate_figures(results: Results, baseline: str) -> Iterator[Drawing]:
    """OnTimeUtility, its paired difference to the baseline, and attainment, over rates."""
    if len(results.plan.scenario.rates_per_s) < 2:
        return
    yield _over_rates(
        results,
        "on_time_utility",
        "OnTimeUtility over the arrival rate",
        "OnTimeUtility (mean utility per query, late ones 0)",
        lambda score: score.on_time_utility,
        bound=True,
    )
    yield _differences(results, baseline)
    yield _over_rates(
        results,
        "attainment",
        "Queries answered in time",
        "share of queries with first token in time (%)",
        lambda score: 100.0 * score.attainment,
        limits=(0.0, 102.0),
    )


def sweep_figures(results: Results) -> Iterator[Drawing]:
    """One drawing per sweep of the scenario."""
    for sweep in results.plan.scenario.sweeps:
        rate_per_s = sweep.rate_per_s or results.plan.focus_rate_per_s
        if sweep.of == "delta_per_ms":
            drawing = _delta(results, rate_per_s)
        elif sweep.of == "snapshot_interval_ms":
            drawing = _staleness(results, sweep.values, rate_per_s)
        else:
            drawing = _sweep(results, sweep.of, sweep.values, rate_per_s)
        if drawing is not None:
            yield drawing


def _over_rates(
    results: Results,
    name: str,
    title: str,
    axis: str,
    figure_of: Callable[[Score], float],
    *,
    bound: bool = False,
    limits: tuple[float, float] | None = None,
) -> Drawing:
    figure, (axes,) = panels(1, width=9.2, height=4.8)
    rates = results.plan.scenario.rates_per_s
    ends: dict[str, float] = {FLUID_BOUND: float("inf")}
    for index, label in enumerate(results.plan.labels):
        x, values = _curve(rates, partial(results.of, label), figure_of)
        if x:
            ends[label] = values[-1].value
            curve(axes, x, values, label, index)
    if bound:
        _draw_bound(results, axes)
        _draw_reference(results, axes, ends)
    axes.set_xlabel(_RATE)
    axes.set_ylabel(axis)
    if limits is not None:
        axes.set_ylim(*limits)
    legend(figure, axes, ends)
    return Drawing(
        name=name,
        title=title,
        caption=_BARS + (_EDGES if bound else ""),
        alt=f"{title}, one line per policy. {_ranking(results, figure_of)}",
        figure=figure,
    )


def _draw_bound(results: Results, axes: Axes) -> None:
    rates = results.plan.scenario.rates_per_s
    found = {rate: results.of(FLUID_BOUND, rate) for rate in rates}
    points = [(rate, [r.bound for r in records.values() if r.bound is not None]) for rate, records in found.items()]
    x = [rate for rate, bounds in points if bounds]
    if x:
        y = [sum(bounds) / len(bounds) for _, bounds in points if bounds]
        axes.plot(x, y, color="#8b949e", linestyle=(0, (1, 1)), linewidth=2.0, label=FLUID_BOUND)


def _draw_reference(results: Results, axes: Axes, ends: dict[str, float]) -> None:
    """The best at each rate of all that costs nothing."""
    best: dict[float, float] = {}
    for cell in reference_cells(results, results.plan.scenario.rates_per_s):
        best[cell.rate_per_s] = max(cell.on_time_utility.value, best.get(cell.rate_per_s, -float("inf")))
    if best:
        ends[BEST_REFERENCE] = list(best.values())[-1]
        axes.plot(
            list(best), list(best.values()), color="#57606a", linestyle=(0, (5, 2)), linewidth=2.0, label=BEST_REFERENCE
        )


def _differences(results: Results, baseline: str) -> Drawing:
    figure, (axes,) = panels(1, width=9.2, height=4.8)
    rates = results.plan.scenario.rates_per_s
    base = {rate: utilities(results.of(baseline, rate)) for rate in rates}
    ends: dict[str, float] = {}
    for index, label in enumerate(results.plan.labels):
        found = {rate: difference(utilities(results.of(label, rate)), base[rate]) for rate in rates}
        points = {rate: value for rate, value in found.items() if value is not None}
        if points and label != baseline:
            ends[label] = list(points.values())[-1].value
            curve(axes, list(points), list(points.values()), label, index)
    axes.axhline(0.0, color="#8b949e", linewidth=1.4)
    axes.set_xlabel(_RATE)
    axes.set_ylabel(f"OnTimeUtility less that of {baseline}")
    legend(figure, axes, ends)
    return Drawing(
        name="difference",
        title=f"Against {baseline}, seed by seed",
        caption="Paired on the same queries. " + _BARS,
        alt=f"Paired difference of OnTimeUtility to {baseline} over the arrival rate, one line per policy.",
        figure=figure,
    )


def _sweep(results: Results, of: SweepOf, values: list[float], rate_per_s: float) -> Drawing | None:
    figure, (axes,) = panels(1, width=9.2, height=4.6)
    axis, logarithmic = _SWEEP_AXES[of]
    ends: dict[str, float] = {}
    for index, label in enumerate(results.plan.labels):
        x, found = _curve(values, partial(results.swept, of, label), lambda score: score.on_time_utility)
        if x:
            curve(axes, x, found, label, index)
            ends[label] = found[-1].value
    if not ends:
        return None
    _scale(axes, values, logarithmic)
    axes.set_xlabel(axis)
    axes.set_ylabel("OnTimeUtility (mean utility per query, late ones 0)")
    legend(figure, axes, ends)
    title = f"OnTimeUtility over {axis.split(',')[0].split(' (')[0]} at {rate_per_s:g} queries/s"
    return Drawing(name=of, title=title, caption=_BARS, alt=f"{title}, one line per policy.", figure=figure)


def _staleness(results: Results, values: list[float], rate_per_s: float) -> Drawing | None:
    """Loss against the smallest interval, seed by seed."""
    figure, (axes,) = panels(1, width=9.2, height=4.6)
    ends: dict[str, float] = {}
    for index, label in enumerate(results.plan.labels):
        fresh = utilities(results.swept("snapshot_interval_ms", label, values[0]))
        points: dict[float, Interval] = {}
        for value in values:
            stale = utilities(results.swept("snapshot_interval_ms", label, value))
            if stale and stale.keys() == fresh.keys() and sum(fresh.values()) > 0:
                gain = paired_gain(list(stale.values()), [fresh[seed] for seed in stale])
                points[value] = _scaled(gain, 100.0)
        if points:
            curve(axes, list(points), list(points.values()), label, index)
            ends[label] = list(points.values())[-1].value
    if not ends:
        return None
    _scale(axes, values, logarithmic=True)
    axes.axhline(0.0, color="#8b949e", linewidth=1.4)
    axes.set_xlabel("interval between snapshots (ms)")
    axes.set_ylabel(f"change of OnTimeUtility against {values[0]:g} ms (%)")
    legend(figure, axes, ends)
    title = f"What old snapshots cost at {rate_per_s:g} queries/s"
    return Drawing(
        name="staleness",
        title=title,
        caption="Paired on the same queries. " + _BARS,
        alt=f"{title}: change of OnTimeUtility over the interval between snapshots, one line per policy.",
        figure=figure,
    )


def _delta(results: Results, rate_per_s: float) -> Drawing | None:
    """Mean utility against mean TTFT, along δ, with the other policies as points."""
    values = next(sweep.values for sweep in results.plan.scenario.sweeps if sweep.of == "delta_per_ms")
    figure, (axes,) = panels(1, width=9.2, height=4.8)
    drawn = False
    for index, label in enumerate(results.plan.labels):
        path = [(value, _point(results.swept("delta_per_ms", label, value))) for value in values]
        known = [(value, point) for value, point in path if point is not None]
        if known:
            drawn = True
            _trade(axes, [point for _, point in known], f"{label}, δ varied", index, "-")
            for value, (ttft_s, utility) in known:
                place = (ttft_s.value, utility.value)
                axes.annotate(f"δ={value:g}", place, xytext=(5, 5), textcoords="offset points", fontsize=7.5)
        elif (point := _point(results.of(label, rate_per_s))) is not None:
            _trade(axes, [point], label, index, "none")
    if not drawn:
        return None
    axes.set_xscale("log")
    logarithmic(axes.xaxis)
    axes.set_xlabel("mean time to first token (s, logarithmic)")
    axes.set_ylabel("mean utility per query, late answers counted")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    title = f"Utility against time to first token at {rate_per_s:g} queries/s"
    return Drawing(
        name="delta_per_ms",
        title=title,
        caption="Up and left is better. δ is the utility that a millisecond costs. " + _BARS,
        alt=f"{title}: a line along δ, and one point for every other policy.",
        figure=figure,
    )


def _trade(axes: Axes, points: list[tuple[Interval, Interval]], label: str, index: int, line: str) -> None:
    one = look(index)
    errors = [[_half(point[side]) for point in points] for side in (0, 1)]
    axes.errorbar(
        [ttft_s.value for ttft_s, _ in points],
        [utility.value for _, utility in points],
        # A lower end at or below 0 has no place on a logarithmic axis.
        xerr=[[min(half, 0.999 * t.value) for half, (t, _) in zip(errors[0], points, strict=True)], errors[0]],
        yerr=errors[1],
        label=label,
        color=one.colour,
        marker=one.marker,
        linestyle=line,
        capsize=2.5,
        elinewidth=1.0,
    )


def _point(records: Mapping[int, Record]) -> tuple[Interval, Interval] | None:
    scores = [record.score for record in records.values() if record.score is not None]
    times = [score.ttft_mean_s for score in scores if score.ttft_mean_s is not None]
    if not scores or len(times) < len(scores):
        return None
    return t_interval(times), t_interval([score.mean_utility for score in scores])


def _curve(
    x: list[float], records_at: Callable[[float], Mapping[int, Record]], figure_of: Callable[[Score], float]
) -> Curve:
    """Where there are results, and their intervals."""
    places: list[float] = []
    values: list[Interval] = []
    for place in x:
        scores = [record.score for record in records_at(place).values() if record.score is not None]
        if scores:
            places.append(place)
            values.append(t_interval([figure_of(score) for score in scores]))
    return places, values


def _scale(axes: Axes, values: list[float], logarithmic: bool) -> None:
    """The axis of a sweep, with a tick at every value that was played."""
    above = [value for value in values if value > 0]
    if logarithmic and len(above) > 1:
        if values[0] == 0:
            axes.set_xscale("symlog", linthresh=above[0])
        else:
            axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def _half(interval: Interval) -> float:
    return 0.0 if interval.high is None else interval.high - interval.value


def _scaled(interval: Interval, by: float) -> Interval:
    ends = [None if end is None else end * by for end in (interval.low, interval.high)]
    return Interval(interval.value * by, ends[0], ends[1])


def _ranking(results: Results, figure_of: Callable[[Score], float]) -> str:
    """Best to worst at the focus rate, in words."""
    rate_per_s = results.plan.focus_rate_per_s
    means: dict[str, float] = {}
    for label in results.plan.labels:
        _, values = _curve([rate_per_s], partial(results.of, label), figure_of)
        if values:
            means[label] = values[0].value
    ranked = sorted(means, key=lambda label: -means[label])
    return f"At {rate_per_s:g} queries/s: " + ", ".join(f"{label} {means[label]:.3g}" for label in ranked) + "."
