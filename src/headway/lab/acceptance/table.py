"""How results become rows: what a group of rows is, how it looks up its units, and how a number becomes a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.units import Maker, Play, shared
from headway.lab.intervals import Interval
from headway.lab.metrics import Score

Result_co = TypeVar("Result_co", covariant=True)


class Unit(Hashable, Protocol[Result_co]):
    """Something that is run once, in a process of its own, and found again by its value."""

    @property
    def cost(self) -> float:
        """Relative duration; infinite for what is timed, which runs before all others, alone."""
        ...

    def run(self) -> Result_co:
        """What rows are made of; same unit, same result."""
        ...


Grid = NDArray[np.float64]
#: One number of a run's figures.
Figure = Callable[[Score], float]


def on_time(one: Score) -> float:
    """OnTimeUtility."""
    return one.on_time_utility


def floored(one: Score) -> float:
    """OnTimeUtility with each query's negative utility taken as 0."""
    return one.on_time_utility_floored


class Results:
    """What the units of a run came to."""

    def __init__(self, found: Mapping[Hashable, object]) -> None:
        self._found = found

    def of(self, unit: Unit[Result_co]) -> Result_co:
        """The result of one unit."""
        return cast("Result_co", self._found[unit])

    def score(self, unit: Play) -> Score:
        """The figures of one simulation, under its target slope."""
        return self.of(shared(unit))[unit.slope]

    def scores(self, make: Maker, rate_per_s: float, seeds: Sequence[int]) -> list[Score]:
        """The figures at one rate, seed by seed."""
        return [self.score(make(rate_per_s, seed)) for seed in seeds]

    def figures(
        self, make: Maker, rates_per_s: Sequence[float], seeds: Sequence[int], figure: Figure = on_time
    ) -> Grid:
        """One figure of every run, of shape (rates, seeds); OnTimeUtility by default."""
        return np.array([[figure(self.score(make(rate, seed))) for seed in seeds] for rate in rates_per_s])


class Group(NamedTuple):
    """The rows of one claim: the units they need, and how they are made of them."""

    claim_id: str
    needs: Callable[[Settings], Sequence[Unit[object]]]
    rows: Callable[[Settings, Results], list[AcceptanceRow]]


def row(
    row_id: str,
    claim: str,
    setting: str,
    value: Interval | float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    passed: bool | None = None,
) -> AcceptanceRow:
    """One row; without a bound or a verdict it is only reported. Numbers are given to six digits.

    ``passed`` decides where the verdict is more than one comparison; the bound is then what it goes by.
    """
    interval = value if isinstance(value, Interval) else Interval(value, None, None)
    threshold = at_least if at_least is not None else at_most
    if passed is None and at_least is not None:
        passed = interval.value >= at_least
    elif passed is None and at_most is not None:
        passed = interval.value <= at_most
    ci95 = None
    if interval.low is not None and interval.high is not None:
        ci95 = (_rounded(interval.low), _rounded(interval.high))
    return AcceptanceRow(
        id=row_id,
        claim=claim,
        setting=setting,
        value=_rounded(interval.value),
        ci95=ci95,
        threshold=threshold,
        passed=passed,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}") + 0.0 if math.isfinite(value) else value  # no negative zero
