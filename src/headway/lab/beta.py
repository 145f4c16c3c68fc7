"""Beta and normal distributions, as far as truth and intervals need them, without scipy.

Two forms of one computation: exact numbers one at a time, and a table for a million of them. It refuses to be a
statistics library.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

_Z_LIMIT, _Z_STEPS = 8.0, 4096  # the normal variate's grid of a table; beyond the limit lies 1e-15
_LOGIT_LIMIT, _LOGIT_STEPS = 20.0, 4000  # the quantile's grid, dense at both ends where a skewed Beta lives


def normal_cdf(z: float) -> float:
    """Φ(z)."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def beta_quantile(probability: float, a: float, b: float) -> float:
    """The value below which a Beta(a, b) variate lies with ``probability``, to about 1e-9 (by bisection)."""
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = 0.5 * (low + high)
        if beta_cdf(middle, a, b) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below the mean
        return 1.0 - beta_cdf(1.0 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _beta_fraction(x, a, b))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """``1 + d1/(1 + d2/(1 + …))`` evaluated forwards (Wallis ratios rescaled by the modified Lentz recurrence)."""
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1, 300):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / (1.0 + term * d)
        c = 1.0 + term / c
        value *= c * d
        if abs(c * d - 1.0) < 1e-13:
            break
    return value


def normal_cdf_column(z: Column) -> Column:
    """Φ of every element, to 1e-6."""
    grid, values = _normal_table()
    return np.interp(z, grid, values)


def beta_of_normal(z: Column, a: float, b: float) -> Column:
    """The Beta(a, b) quantile at probability Φ(z), element by element, to about 1e-5; the table is built once."""
    grid, _ = _normal_table()
    return np.interp(z, grid, _beta_table(a, b))


@functools.cache
def _normal_table() -> tuple[Column, Column]:
    grid = np.linspace(-_Z_LIMIT, _Z_LIMIT, _Z_STEPS + 1)
    return grid, np.array([normal_cdf(z) for z in grid.tolist()])


@functools.lru_cache(maxsize=64)
def _beta_table(a: float, b: float) -> Column:
    """The quantile at Φ of every grid point, by turning the distribution function around."""
    logits = np.linspace(-_LOGIT_LIMIT, _LOGIT_LIMIT, _LOGIT_STEPS + 1)
    x = np.concatenate(([0.0], 1.0 / (1.0 + np.exp(-logits)), [1.0]))
    cdf = np.array([beta_cdf(value, a, b) for value in x.tolist()])
    _, probabilities = _normal_table()
    return np.interp(probabilities, cdf, x)
