"""Means over seeds with their intervals, and the area under a curve over rates.

Two policies are compared seed by seed, on one workload each, so that what both suffer cancels. It refuses to give an
interval of a single run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from headway.lab.beta import beta_quantile


class Interval(Struct, frozen=True):
    """A value and where it lies with the stated confidence; ``low`` and ``high`` are None for a single run."""

    value: float
    low: float | None
    high: float | None


def t_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """The mean of independent runs, by Student's t.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    checked = _checked(values)
    return _around(float(checked.mean()), checked, confidence)


def paired_interval(ours: Sequence[float], theirs: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """The mean of ours − theirs, seed by seed.

    Raises:
        ValueError: unlike numbers of seeds, none, or a value that is not finite.
    """
    differences = _checked(ours) - _checked(theirs, len(ours))
    return _around(float(differences.mean()), differences, confidence)


def paired_gain(ours: Sequence[float], theirs: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """The relative gain, mean of ours ÷ mean of theirs − 1, with the interval of the ratio estimator.

    Raises:
        ValueError: as :func:`paired_interval`, or theirs has a mean of 0 or below: then no gain has a meaning.
    """
    a, b = _checked(ours), _checked(theirs, len(ours))
    base = float(b.mean())
    if base <= 0.0:
        raise ValueError(f"a gain over a mean of {base:g} has no meaning")
    ratio = float(a.mean()) / base
    return _around(ratio - 1.0, (a - ratio * b) / base, confidence)


def bootstrap_interval(
    values: Sequence[float], rng: np.random.Generator, *, num_resamples: int = 10_000, confidence: float = 0.95
) -> Interval:
    """The mean of ``values`` with its percentile bootstrap interval; give differences for a paired one.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    checked = _checked(values)
    if len(checked) == 1:
        return Interval(float(checked[0]), None, None)
    means = checked[rng.integers(len(checked), size=(num_resamples, len(checked)))].mean(axis=1)
    low, high = np.quantile(means, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0]).tolist()
    return Interval(float(checked.mean()), low, high)


def area_under(rates_per_s: Sequence[float], values: Sequence[float]) -> float:
    """The area under a curve over rates, by trapezoids.

    Raises:
        ValueError: fewer than two rates, rates that do not rise, or not one value per rate.
    """
    rates, heights = _checked(rates_per_s), _checked(values, len(rates_per_s))
    if len(rates) < 2 or (np.diff(rates) <= 0).any():
        raise ValueError("an area needs at least two rising rates")
    return float(np.trapezoid(heights, rates))


def student_quantile(confidence: float, degrees: int) -> float:
    """t with P(|T| ≤ t) = ``confidence`` under ``degrees`` of freedom, by the incomplete beta function."""
    x = beta_quantile(1.0 - confidence, 0.5 * degrees, 0.5)
    return math.sqrt(degrees * (1.0 - x) / x)


def _around(value: float, deviations: np.ndarray[tuple[int], np.dtype[np.float64]], confidence: float) -> Interval:
    num = len(deviations)
    if num == 1:
        return Interval(value, None, None)
    half = student_quantile(confidence, num - 1) * float(deviations.std(ddof=1)) / math.sqrt(num)
    return Interval(value, value - half, value + half)


def _checked(values: Sequence[float], num: int | None = None) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    column = np.array(values, np.float64)
    if column.ndim != 1 or len(column) == 0 or (num is not None and len(column) != num):
        raise ValueError(f"needs {'at least one value' if num is None else f'{num} values'}, not {column.shape}")
    if not np.isfinite(column).all():
        raise ValueError("every value must be finite")
    return column
