"""The figures of a comparison as tables: means over seeds, intervals, and paired differences against a baseline.

Beside every OnTimeUtility stand the things it hides: attainment per task, what answers in time that were worth less
than they cost took away, the score with negatives floored at 0, and the share refused. It refuses an interval where a
single seed was played, and a difference where the two did not play the same seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct

from headway.errors import ConfigError
from headway.lab.intervals import Interval, area_under, paired_gain, paired_interval, t_interval
from headway.lab.metrics import Score
from headway.lab.reference_margins import Margin, ReferenceCell, margins, reference_cells
from headway.lab.runs import FLUID_BOUND, Results
from headway.lab.scenario import PolicyConfig
from headway.lab.unit import Record
from headway.policy.options import unknown


class Cell(Struct, frozen=True, kw_only=True):
    """One policy at one rate. ``difference`` is the paired difference of OnTimeUtility to the baseline's."""

    policy: str
    rate_per_s: float
    num_seeds: int
    on_time_utility: Interval
    difference: Interval | None
    on_time_utility_floored: float
    on_time_negative: float
    attainment: Interval
    attainment_by_task: dict[str, float]
    refused: float
    failed: float
    mean_utility: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    late_ttft_p50_s: dict[str, float]


class Area(Struct, frozen=True, kw_only=True):
    """Mean OnTimeUtility over all rates (its area by trapezoids ÷ their range), and the relative gain over the
    baseline's; None where there is one rate, or no gain has a meaning."""

    policy: str
    mean_on_time_utility: Interval | None
    gain: Interval | None


class Comparison(Struct, frozen=True, kw_only=True):
    """Every policy at every rate, in the scenario's order. ``num_missing`` units have no result yet, ``oracles`` were
    shown truth."""

    scenario: str
    baseline: str
    num_queries: int
    num_missing: int
    oracles: list[str]
    cells: list[Cell]
    areas: list[Area]
    fluid_bound: dict[str, Interval]
    references: list[ReferenceCell]
    margins: list[Margin]


class Table(Struct, frozen=True):
    """Text in rows; all columns but the first are numbers. Where ``ranked``, the largest of a column is the best of it,
    among the rows that are not ``unranked``."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    ranked: bool = False
    unranked: tuple[str, ...] = ()


def compare(results: Results, baseline: str | None = None) -> Comparison:
    """The comparison of all that was found so far.

    Raises:
        ConfigError: no policy is called ``baseline``, or nothing was found yet.
    """
    plan = results.plan
    base = plan.baseline if baseline is None else baseline
    if base not in plan.labels:
        raise ConfigError(unknown("policy", base, plan.labels), key="--baseline")
    if not results.found:
        raise ConfigError("holds no result yet: run the scenario first", key="results.jsonl")
    rates = plan.scenario.rates_per_s
    cells = [
        cell
        for label in plan.labels
        for rate_per_s in rates
        if (cell := _cell(label, rate_per_s, results.of(label, rate_per_s), results.of(base, rate_per_s))) is not None
    ]
    return Comparison(
        scenario=plan.scenario.name,
        baseline=base,
        num_queries=plan.scenario.num_queries,
        num_missing=results.num_missing,
        oracles=[label for label, row in zip(plan.labels, plan.scenario.policies, strict=True) if _is_oracle(row)],
        cells=cells,
        areas=[_area(results, label, base) for label in plan.labels],
        fluid_bound={
            f"{rate_per_s:g}": t_interval([record.bound for record in found.values() if record.bound is not None])
            for rate_per_s in rates
            if (found := results.of(FLUID_BOUND, rate_per_s))
        },
        references=reference_cells(results, rates),
        margins=margins(results, plan.labels, rates),
    )


def _is_oracle(row: str | PolicyConfig) -> bool:
    return not isinstance(row, str) and (row.clock == "exact" or row.sees in ("true_lengths", "truth"))


def utilities(records: Mapping[int, Record]) -> dict[int, float]:
    """OnTimeUtility by seed."""
    return {seed: record.score.on_time_utility for seed, record in records.items() if record.score is not None}


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """The paired difference, or None where the two did not play the same seeds."""
    if not ours or ours.keys() != theirs.keys():
        return None
    return paired_interval(list(ours.values()), [theirs[seed] for seed in ours])


def _cell(label: str, rate_per_s: float, ours: Mapping[int, Record], base: Mapping[int, Record]) -> Cell | None:
    scores = [record.score for record in ours.values() if record.score is not None]
    if not scores:
        return None
    return Cell(
        policy=label,
        rate_per_s=rate_per_s,
        num_seeds=len(scores),
        on_time_utility=t_interval([one.on_time_utility for one in scores]),
        difference=difference(utilities(ours), utilities(base)),
        on_time_utility_floored=fmean(one.on_time_utility_floored for one in scores),
        on_time_negative=fmean(one.on_time_negative for one in scores),
        attainment=t_interval([one.attainment for one in scores]),
        attainment_by_task=_by_task(scores, lambda score, task: score.tasks[task].attainment),
        refused=fmean(one.refused for one in scores),
        failed=fmean(one.failed for one in scores),
        mean_utility=fmean(one.mean_utility for one in scores),
        ttft_p50_s=_mean([one.ttft_p50_s for one in scores]),
        ttft_p99_s=_mean([one.ttft_p99_s for one in scores]),
        late_ttft_p50_s=_by_task(scores, lambda score, task: score.tasks[task].late_ttft_p50_s),
    )


def _by_task(scores: Sequence[Score], figure: Callable[[Score, str], float | None]) -> dict[str, float]:
    tasks = dict.fromkeys(task for score in scores for task in score.tasks)
    means = {task: _mean([figure(score, task) for score in scores if task in score.tasks]) for task in tasks}
    return {task: mean for task, mean in means.items() if mean is not None}


def _area(results: Results, label: str, base: str) -> Area:
    rates = results.plan.scenario.rates_per_s
    ours, theirs = (_areas_by_seed(results, name) for name in (label, base))
    width = rates[-1] - rates[0]
    gain = None
    if ours and ours.keys() == theirs.keys() and fmean(theirs.values()) > 0:
        gain = paired_gain(list(ours.values()), [theirs[seed] for seed in ours])
    return Area(
        policy=label,
        mean_on_time_utility=t_interval([area / width for area in ours.values()]) if ours else None,
        gain=gain,
    )


def _areas_by_seed(results: Results, label: str) -> dict[int, float]:
    """The area of every seed that was played at every rate; nothing where there is one rate only."""
    rates = results.plan.scenario.rates_per_s
    curves = [utilities(results.of(label, rate_per_s)) for rate_per_s in rates]
    if len(rates) < 2:
        return {}
    seeds = [seed for seed in curves[0] if all(seed in curve for curve in curves)]
    return {seed: area_under(rates, [curve[seed] for curve in curves]) for seed in seeds}


def utility_table(comparison: Comparison) -> Table:
    """OnTimeUtility of policies by rates, with its 95 % interval."""
    rates, cells = _grid(comparison)
    bound = [_value(comparison.fluid_bound[f"{rate:g}"]) for rate in rates if f"{rate:g}" in comparison.fluid_bound]
    rows = [
        [
            area.policy,
            *(_of(cells, area.policy, rate, lambda cell: _value(cell.on_time_utility)) for rate in rates),
            _value(area.mean_on_time_utility),
        ]
        for area in comparison.areas
    ]
    if len(bound) == len(rates):
        rows.append([FLUID_BOUND, *bound, ""])
    known = _reference_rows(comparison, rates)
    rows += known
    columns, rows = _without_empty(["policy", *(f"{rate:g} qps" for rate in rates), "mean"], rows)
    note = f"Mean over seeds ± half of its 95 % interval; {comparison.num_queries} queries a seed."
    if known:
        note += " Below: the best run of each reference at each rate, whatever it costs."
    unranked = (FLUID_BOUND, *comparison.oracles, *(row[0] for row in known))
    return Table("OnTimeUtility", columns, rows, note, ranked=True, unranked=unranked)


def _reference_rows(comparison: Comparison, rates: Sequence[float]) -> list[list[str]]:
    """The references by rates, each with the number of runs that its best one was chosen from."""
    found = {(cell.reference, cell.rate_per_s): cell for cell in comparison.references}
    rows = []
    for reference in dict.fromkeys(cell.reference for cell in comparison.references):
        cells = [found.get((reference, rate)) for rate in rates]
        number = max(cell.num_runs for cell in cells if cell is not None)
        name = f"reference {reference}" + (f", best of {number}" if number > 1 else "")
        rows.append([name, *("" if cell is None else _value(cell.on_time_utility) for cell in cells), ""])
    return rows


def reference_table(comparison: Comparison) -> Table | None:
    """What each policy is ahead of the nearest reference, by rates; None where no reference was played."""
    rates, _ = _grid(comparison)
    found = {(margin.policy, margin.rate_per_s): margin for margin in comparison.margins}
    if not found:
        return None
    rows = []
    for policy in dict.fromkeys(margin.policy for margin in comparison.margins):
        known = [found.get((policy, rate)) for rate in rates]
        beaten = sum(one is not None and one.beats_all for one in known)
        cells = ["" if one is None else f"{_signed(one.less[one.nearest])} {one.nearest}" for one in known]
        rows.append([policy, *cells, f"{beaten} of {sum(one is not None for one in known)}"])
    columns = ["policy", *(f"{rate:g} qps" for rate in rates), "rates ahead of all"]
    note = (
        "OnTimeUtility less that of the reference that comes nearest, seed by seed, ± half of the 95 % interval; ahead "
        "where the whole interval is. No router deserves praise that is not.\n"
        "task_label: the best model by the task's means alone. two_model: the best of every two models with one "
        "threshold on the predicted gain. random_mix: the upper hull over cost of random mixtures of two models, at "
        "what the policy itself paid. None looks at an engine; the best is chosen on these very seeds, in its favour."
    )
    return Table("Against what costs nothing", columns, rows, note)


def difference_table(comparison: Comparison) -> Table:
    """Paired differences of OnTimeUtility to the baseline's, by rates."""
    rates, cells = _grid(comparison)
    rows = [
        [
            area.policy,
            *(_of(cells, area.policy, rate, lambda cell: _signed(cell.difference)) for rate in rates),
            "" if area.gain is None else f"{area.gain.value:+.1%}{_half(area.gain, 100, 1)}",
        ]
        for area in comparison.areas
        if area.policy != comparison.baseline
    ]
    columns, rows = _without_empty(["policy", *(f"{rate:g} qps" for rate in rates), "gain of area"], rows)
    note = "Seed by seed on the same queries, ± half of the 95 % interval."
    return Table(f"OnTimeUtility less that of {comparison.baseline}", columns, rows, note)


def parts_table(comparison: Comparison, rate_per_s: float) -> Table:
    """What stands behind each OnTimeUtility at one rate."""
    cells = [cell for cell in comparison.cells if cell.rate_per_s == rate_per_s]
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.attainment_by_task))
    columns = [
        "policy",
        "OnTimeUtility",
        "floored at 0",
        "on-time negatives",
        "in time",
        *(f"{t} in time" for t in tasks),
    ]
    rows = [
        [
            cell.policy,
            _value(cell.on_time_utility),
            f"{cell.on_time_utility_floored:.3f}",
            f"{cell.on_time_negative:+.4f}",
            f"{cell.attainment.value:.1%}{_half(cell.attainment, 100, 1)}",
            *(f"{cell.attainment_by_task[task]:.1%}" if task in cell.attainment_by_task else "" for task in tasks),
            f"{cell.refused:.1%}",
            f"{cell.failed:.1%}",
            _seconds(cell.ttft_p50_s),
            _seconds(cell.ttft_p99_s),
            _seconds(max(cell.late_ttft_p50_s.values(), default=None)),
        ]
        for cell in cells
    ]
    columns += ["refused", "failed", "TTFT p50", "TTFT p99", "worst task's late p50"]
    note = (
        "Shares are of all queries (of the task); TTFTs in seconds over answered ones. Late: answers past their target."
    )
    return Table(f"What stands behind it at {rate_per_s:g} qps", columns, rows, note)


def failures_table(results: Results) -> Table | None:
    """Three known failures of learned routers, by policy, at the focus rate on the first seed; None where none was
    judged."""
    rate_per_s, seed = results.plan.focus_rate_per_s, results.plan.scenario.seeds[0]
    found = [
        (label, one)
        for label in results.plan.labels
        if (record := results.of(label, rate_per_s).get(seed)) is not None
        for one in record.failures
    ]
    if not found:
        return None
    rows = [
        [
            label,
            one.name,
            "yes" if one.has_it else "no",
            f"{one.value:.3f}",
            "" if one.interval.low is None or one.interval.high is None else _between(one.interval),
            "" if one.reference is None else f"{one.reference:.3f}",
        ]
        for label, one in found
    ]
    said = {one.name: one for _, one in found}
    notes = [
        f"{name.capitalize()}: {one.measure}; {one.judged}. Reference: {one.reference_of}. Limits: {one.limits}."
        for name, one in said.items()
    ]
    notes += [
        "Intervals resample blocks of this one run's queries and say nothing of other seeds.",
        "A fourth, roster suboptimality, takes runs on smaller pools: python -m headway.lab.failures plays them.",
    ]
    columns = ["policy", "failure", "has it", "value", "95 % interval", "reference"]
    title = f"Known failures of learned routers at {rate_per_s:g} qps, seed {seed}"
    return Table(title, columns, rows, "\n".join(notes))


def _without_empty(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns that say something: a single rate has neither mean nor area."""
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    return [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]


def _grid(comparison: Comparison) -> tuple[list[float], dict[tuple[str, float], Cell]]:
    cells = {(cell.policy, cell.rate_per_s): cell for cell in comparison.cells}
    return sorted({rate for _, rate in cells}), cells


def _of(cells: Mapping[tuple[str, float], Cell], label: str, rate: float, shown: Callable[[Cell], str]) -> str:
    cell = cells.get((label, rate))
    return "" if cell is None else shown(cell)


def _value(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.value:.3f}{_half(interval, 1, 3)}"


def _between(interval: Interval) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}"


def _signed(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.value:+.3f}{_half(interval, 1, 3)}"


def _half(interval: Interval, scale: float, digits: int) -> str:
    return "" if interval.high is None else f" ±{(interval.high - interval.value) * scale:.{digits}f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
