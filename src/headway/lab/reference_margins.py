"""How far each policy is ahead of the references that cost nothing, seed by seed, at every rate.

The best run of a reference is chosen by its mean on the very seeds that are reported, which favours the reference. A
random mixture is read off the upper hull over cost at what the policy itself paid. It refuses to call a policy ahead
whose interval reaches 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from msgspec import Struct

from headway.lab.intervals import Interval, paired_interval, t_interval
from headway.lab.references import hull_at
from headway.lab.runs import Results
from headway.lab.scenario import Reference
from headway.lab.unit import Record

#: A reference's runs by label, each by seed.
Runs = dict[str, dict[int, Record]]


class ReferenceCell(Struct, frozen=True, kw_only=True):
    """The best run of one reference at one rate: of ``num_runs`` the one called ``run``."""

    reference: Reference
    rate_per_s: float
    run: str
    num_runs: int
    on_time_utility: Interval


class Margin(Struct, frozen=True, kw_only=True):
    """OnTimeUtility of one policy at one rate less that of each reference; ``beats_all`` where every interval lies
    above 0, or there is none and every difference does."""

    policy: str
    rate_per_s: float
    less: dict[Reference, Interval]
    beats_all: bool

    @property
    def nearest(self) -> Reference:
        """The reference with the smallest difference."""
        return min(self.less, key=lambda reference: self.less[reference].value)


def reference_runs(results: Results, rate_per_s: float) -> dict[Reference, Runs]:
    """The runs of every reference at one rate."""
    found: dict[Reference, Runs] = {}
    for unit, record in results.found:
        if unit.reference is not None and unit.rate_per_s == rate_per_s:
            found.setdefault(unit.reference, {}).setdefault(unit.label, {})[unit.seed] = record
    return found


def best_run(runs: Runs) -> str:
    """The label of the run with the largest mean OnTimeUtility."""
    return max(runs, key=lambda label: fmean(_utility(record) for record in runs[label].values()))


def reference_cells(results: Results, rates_per_s: Sequence[float]) -> list[ReferenceCell]:
    """The best of every reference at every rate."""
    cells = []
    for rate_per_s in rates_per_s:
        for reference, runs in reference_runs(results, rate_per_s).items():
            best = best_run(runs)
            cells.append(
                ReferenceCell(
                    reference=reference,
                    rate_per_s=rate_per_s,
                    run=best,
                    num_runs=len(runs),
                    on_time_utility=t_interval([_utility(record) for record in runs[best].values()]),
                )
            )
    return cells


def margins(results: Results, labels: Sequence[str], rates_per_s: Sequence[float]) -> list[Margin]:
    """Every policy at every rate against every reference that played the same seeds."""
    found = []
    for rate_per_s in rates_per_s:
        references = reference_runs(results, rate_per_s)
        for label in labels:
            ours = {seed: record for seed, record in results.of(label, rate_per_s).items() if record.score is not None}
            less = {
                reference: paired_interval([_utility(one) for one in ours.values()], theirs)
                for reference, runs in references.items()
                if (theirs := _theirs(reference, runs, ours)) is not None
            }
            if less:
                ahead = all((one.value if one.low is None else one.low) > 0.0 for one in less.values())
                found.append(Margin(policy=label, rate_per_s=rate_per_s, less=less, beats_all=ahead))
    return found


def _theirs(reference: Reference, runs: Runs, ours: Mapping[int, Record]) -> list[float] | None:
    """What the reference reached on our seeds; None where it did not play them all."""
    if not ours or any(not ours.keys() <= by_seed.keys() for by_seed in runs.values()):
        return None
    if reference != "random_mix":
        best = runs[best_run(runs)]
        return [_utility(best[seed]) for seed in ours]
    return [
        hull_at([(_cost(by_seed[seed]), _utility(by_seed[seed])) for by_seed in runs.values()], _cost(mine))
        for seed, mine in ours.items()
    ]


def _utility(record: Record) -> float:
    assert record.score is not None, "only the fluid bound has no score"
    return record.score.on_time_utility


def _cost(record: Record) -> float:
    assert record.score is not None, "only the fluid bound has no score"
    return record.score.mean_cost_usd or 0.0
