"""Pictures of single runs: predicted against observed TTFT, where each task went, and how long queries waited.

All are of one rate, the scenario's focus. Points are a sample of the first seed's queries; shares and quantiles are
over all queries of every seed. It refuses to hide queries that never got a first token: they are past the last point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from headway.lab.drawing import INK, Drawing, legend, logarithmic, look, panels
from headway.lab.intervals import Interval, t_interval
from headway.lab.runs import Results
from headway.lab.unit import QUANTILES
from headway.policy.registry import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from headway.lab.metrics import TaskScore
    from headway.lab.scenario import PolicyConfig


def run_figures(results: Results) -> Iterator[Drawing]:
    """All of them, where the results hold what they show."""
    for drawing in (_shares(results), _quantiles(results), _predictions(results), *_mean_predictions(results)):
        if drawing is not None:
            yield drawing


def estimators(results: Results) -> dict[str, str]:
    """Each estimator of the scenario, in its order, and the first policy that was run on it (oracles come last)."""
    rows = [one if not isinstance(one, str) else None for one in results.plan.scenario.policies]
    named: dict[str, str] = {}
    for label, row in zip(results.plan.labels, rows, strict=True):
        if row is not None and (row.clock == "exact" or row.sees != "scenario"):
            continue
        named.setdefault(_estimator(label, row), label)
    return named


def _estimator(label: str, row: PolicyConfig | None) -> str:
    policy = label if row is None else row.policy
    return (row.estimator if row is not None else None) or POLICIES[policy].estimator


def _predictions(results: Results) -> Drawing | None:
    """A row per estimator, a column per model: observed TTFT over predicted, both logarithmic."""
    rate_per_s, seed = results.plan.focus_rate_per_s, results.plan.scenario.seeds[0]
    models = list(dict.fromkeys(results.plan.instances.values()))
    rows = {
        name: found[seed]
        for name, label in estimators(results).items()
        if seed in (found := results.of(label, rate_per_s))
    }
    if not rows:
        return None
    figure, grid = panels(len(rows) * len(models), columns=len(models), width=2.9 * len(models) + 0.4, height=2.9)
    told: list[str] = []
    for number, axes in enumerate(grid):
        name, model = list(rows)[number // len(models)], models[number % len(models)]
        pairs, score = rows[name].pairs.get(model, []), rows[name].score
        error = None if score is None else score.ttft_mape_by_model.get(model)
        _scatter(axes, pairs, number % len(models))
        words = "no answer" if error is None else f"mean error {error:.1%}"
        told.append(f"{name} on {model}: {words}")
        axes.set_title(f"{name}\n{model}, {words}")
        if number % len(models) == 0:
            axes.set_ylabel("observed TTFT (s)")
        if number >= len(models) * (len(rows) - 1):
            axes.set_xlabel("predicted TTFT (s)")
    return Drawing(
        name="predictions",
        title=f"Predicted and observed time to first token at {rate_per_s:g} queries/s",
        caption="A sample of one seed's queries under the first policy of each estimator; on the line it was "
        "right. The mean error is over all answers of at least 50 ms.",
        alt="Scatter of observed over predicted time to first token. " + "; ".join(told) + ".",
        figure=figure,
    )


def _scatter(axes: Axes, pairs: list[tuple[float, float]], index: int) -> None:
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        logarithmic(axis)
    if pairs:
        low = min(min(pair) for pair in pairs if min(pair) > 0)
        high = max(max(pair) for pair in pairs)
        axes.plot([low, high], [low, high], color=INK, linewidth=1.0)
        predicted_s, observed_s = zip(*pairs, strict=True)
        axes.scatter(predicted_s, observed_s, s=7, alpha=0.45, linewidths=0, color=look(index).colour)
        axes.set_aspect("equal", adjustable="datalim")


def _mean_predictions(results: Results) -> Iterator[Drawing]:
    """Mean predicted and mean observed TTFT of each model over rates, a panel per estimator."""
    rates = results.plan.scenario.rates_per_s
    named = estimators(results)
    if len(rates) < 2:
        return
    models = list(dict.fromkeys(results.plan.instances.values()))
    figure, grid = panels(len(named), columns=3, width=3.4 * min(3, len(named)) + 1.8, height=3.3)
    for axes, (name, label) in zip(grid, named.items(), strict=True):
        for index, model in enumerate(models):
            _mean_lines(axes, results, label, model, index)
        axes.set_yscale("log")
        logarithmic(axes.yaxis)
        axes.set_title(f"{name}\nunder {label}")
        axes.set_xlabel("mean arrival rate (queries per second)")
    grid[0].set_ylabel("mean time to first token (s)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    yield Drawing(
        name="mean_predictions",
        title="Mean predicted and observed time to first token over the arrival rate",
        caption="Full lines are observed, dotted ones predicted; predictions without bound are left out. Geometric "
        "means over seeds with 95 % intervals.",
        alt="Mean time to first token over the arrival rate, observed and predicted, one panel per estimator: "
        + ", ".join(named)
        + ".",
        figure=figure,
    )


def _mean_lines(axes: Axes, results: Results, label: str, model: str, index: int) -> None:
    for field, dash, marker in (("observed_mean_s", "-", "o"), ("predicted_mean_s", ":", "x")):
        x, values = [], []
        for rate_per_s in results.plan.scenario.rates_per_s:
            records = results.of(label, rate_per_s).values()
            means = [getattr(r.ttft_by_model[model], field) for r in records if model in r.ttft_by_model]
            known = [mean for mean in means if mean is not None]
            if known:
                x.append(rate_per_s)
                values.append(_geometric(known))
        if x:
            y = [value.value for value in values]
            above = [0.0 if value.high is None else value.high - value.value for value in values]
            below = [0.0 if value.low is None else value.value - value.low for value in values]
            colour, word = look(index).colour, field.split("_", maxsplit=1)[0]
            axes.errorbar(
                x,
                y,
                yerr=[below, above],
                color=colour,
                linestyle=dash,
                marker=marker,
                capsize=2,
                label=f"{model}, {word}",
            )


def _shares(results: Results) -> Drawing | None:
    """A panel per policy: a bar per task, cut into models, with what missed its target hatched."""
    rate_per_s = results.plan.focus_rate_per_s
    tasks = {label: _task_scores(results, label, rate_per_s) for label in results.plan.labels}
    shown = {label: rows for label, rows in tasks.items() if rows}
    if not shown:
        return None
    models = list(dict.fromkeys(results.plan.instances.values()))
    figure, grid = panels(len(shown), columns=3, width=9.6, height=2.2)
    for number, (axes, (label, rows)) in enumerate(zip(grid, shown.items(), strict=True)):
        _stack(axes, rows, models, with_names=number % 3 == 0)
        axes.set_title(label)
        if number >= len(shown) - 3:
            axes.set_xlabel("share of the task's queries (%)")
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=look(index).colour, label=model) for index, model in enumerate(models)]
    handles += [Patch(facecolor="#c8ccd1", edgecolor=INK, hatch="////", label="target missed")]
    handles += [Patch(facecolor="none", edgecolor="#8b949e", label="refused")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return Drawing(
        name="routing_shares",
        title=f"Where each task's queries went at {rate_per_s:g} queries/s",
        caption="Hatched: sent there and answered past the target, or failed. Means over all seeds.",
        alt="Stacked bars per policy and task: the share of queries that each model took, and the part that missed.",
        figure=figure,
    )


def _task_scores(results: Results, label: str, rate_per_s: float) -> dict[str, list[TaskScore]]:
    """The scores of each task, one per seed."""
    found: dict[str, list[TaskScore]] = {}
    for record in results.of(label, rate_per_s).values():
        for task, score in record.score.tasks.items() if record.score is not None else ():
            found.setdefault(task, []).append(score)
    return found


def _stack(axes: Axes, rows: dict[str, list[TaskScore]], models: list[str], *, with_names: bool) -> None:
    names = list(rows)
    for place, scores in enumerate(rows.values()):
        left = 0.0
        for index, model in enumerate(models):
            share = 100.0 * fmean(score.shares.get(model, 0.0) for score in scores)
            missed = 100.0 * fmean(score.missed_shares.get(model, 0.0) for score in scores)
            axes.barh(place, share - missed, left=left, height=0.7, color=look(index).colour)
            left += share - missed
            axes.barh(
                place,
                missed,
                left=left,
                height=0.7,
                color=look(index).colour,
                edgecolor="white",
                hatch="////",
                linewidth=0,
            )
            left += missed
        axes.barh(place, 100.0 - left, left=left, height=0.7, facecolor="none", edgecolor="#8b949e", linewidth=0.8)
    axes.set_yticks(range(len(names)), names if with_names else [""] * len(names))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")


def _quantiles(results: Results) -> Drawing | None:
    """TTFT over the share of queries that wait longer, both logarithmic, so that the tail is seen."""
    rate_per_s = results.plan.focus_rate_per_s
    figure, (axes,) = panels(1, width=9.2, height=4.8)
    shares = [100.0 * (1.0 - quantile) for quantile in QUANTILES]
    ends: dict[str, float] = {}
    for index, label in enumerate(results.plan.labels):
        rows = [record.ttft_quantiles_s for record in results.of(label, rate_per_s).values()]
        columns = [[row[place] for row in rows] for place in range(len(shares))] if rows else []
        points = [(share, column) for share, column in zip(shares, columns, strict=False) if None not in column]
        if points:
            x = [share for share, _ in points]
            values = [_geometric([value for value in column if value is not None]) for _, column in points]
            one = look(index)
            ends[label] = values[-1].value
            y = [value.value for value in values]
            low = [value.value if value.low is None else value.low for value in values]
            high = [value.value if value.high is None else value.high for value in values]
            axes.plot(x, y, color=one.colour, linestyle=one.dash, linewidth=2.4 if index == 0 else 1.3, label=label)
            axes.fill_between(x, low, high, color=one.colour, alpha=0.13, linewidth=0)
    if not ends:
        return None
    axes.set_xscale("log")
    axes.set_yscale("log")
    logarithmic(axes.yaxis)
    axes.invert_xaxis()
    ticks = [90, 50, 20, 10, 5, 2, 1, 0.5, 0.1]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("share of queries that wait longer (%)")
    axes.set_ylabel("time to first token (s)")
    legend(figure, axes, ends)
    return Drawing(
        name="ttft_quantiles",
        title=f"Time to first token at {rate_per_s:g} queries/s",
        caption="At 1 %, the 99th percentile. Geometric means over seeds with 95 % intervals; a line ends where some "
        "queries got no first token.",
        alt="Quantiles of the time to first token, one line per policy.",
        figure=figure,
    )


def _geometric(values: list[float]) -> Interval:
    """The geometric mean over seeds, with the interval that fits a logarithmic axis."""
    of_logs = t_interval([math.log(max(value, 1e-6)) for value in values])
    ends = [None if end is None else math.exp(end) for end in (of_logs.low, of_logs.high)]
    return Interval(math.exp(of_logs.value), ends[0], ends[1])
