"""How good predictions are, always within model: what is credited is telling prompts apart, not telling models apart.

Every measure takes matrices (P, M) with NaN where nothing is known. They refuse to credit a predictor that says nothing
of a known outcome: NaN predictions of known outcomes are the caller's mistake.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.train.table import Floats

Measure = Callable[[Floats, Floats], float]
_SOLVED = 0.5
_NUM_BINS = 10
_MIN_ROWS = 10


class Figure(Struct, frozen=True):
    """A measured value with the 95 % interval of a bootstrap over prompts."""

    value: float
    low: float
    high: float


def r2(actual: Floats, said: Floats, means: Floats | None = None) -> float:
    """1 − squared error ÷ squared distance from ``means`` (by default each model's own mean)."""
    centre = np.nanmean(actual, axis=0) if means is None else means
    return 1.0 - float(np.nansum(np.square(actual - said)) / max(np.nansum(np.square(actual - centre)), 1e-12))


def r2_shared(actual: Floats, said: Floats) -> float:
    """R² of a prompt's mean over the models, beyond the models' own means: how hard it is for all of them."""
    return _r2_of(*_parted(actual, said)[0])


def r2_apart(actual: Floats, said: Floats) -> float:
    """R² of what is left beyond that mean: for which model a prompt is hard, all that a router can gain by.

    NaN where no prompt has two models.
    """
    return _r2_of(*_parted(actual, said)[1])


def _parted(actual: Floats, said: Floats) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Deviations from each model's true mean of what was and of what was said, (P, M) each, 0 where unknown: the
    prompt's mean over its known models, and the rest."""
    known = ~np.isnan(actual)
    num = np.maximum(known.sum(axis=1, keepdims=True), 1)
    centre = np.nanmean(actual, axis=0)
    deviations = [np.where(known, one - centre, 0.0) for one in (actual, said)]
    shared = [np.where(known, one.sum(axis=1, keepdims=True) / num, 0.0) for one in deviations]
    (a, b), (c, d) = deviations, shared
    return (c, d), (a - c, b - d)


def _r2_of(actual: Floats, said: Floats) -> float:
    spread = float(np.square(actual).sum())
    return 1.0 - float(np.square(actual - said).sum()) / spread if spread > 1e-9 else float("nan")


def auc(actual: Floats, said: Floats) -> float:
    """Chance that a solved prompt (quality at least .5) is said to be better than an unsolved one, mean over models.

    Models that solve everything or nothing are left out; NaN where none is left.
    """
    found = []
    for y, p in _columns(actual, said):
        solved = y >= _SOLVED
        num, rest = int(solved.sum()), int((~solved).sum())
        if num and rest:
            found.append((ranks(p)[solved].sum() - num * (num + 1) / 2) / (num * rest))
    return float(np.mean(found)) if found else float("nan")


def calibration_error(actual: Floats, said: Floats) -> float:
    """Mean distance between what was said and what came, over ten equal-sized bins of what was said, all models."""
    known = ~np.isnan(actual)
    y, p = actual[known], said[known]
    order = np.argsort(p, kind="stable")
    parts = np.array_split(order, min(_NUM_BINS, len(order)))
    return float(sum(len(part) * abs(y[part].mean() - p[part].mean()) for part in parts) / len(order))


def rank_correlation(actual: Floats, said: Floats) -> float:
    """Spearman's, mean over models; a model of which always the same is said counts 0."""
    found = []
    for y, p in _columns(actual, said):
        a, b = ranks(y), ranks(p)
        spread = float(a.std() * b.std())
        found.append(float(((a - a.mean()) * (b - b.mean())).mean()) / spread if spread > 0 else 0.0)
    return float(np.mean(found)) if found else float("nan")


def mean_absolute_error(actual: Floats, said: Floats) -> float:
    """In the unit of ``actual``, over all known outcomes."""
    return float(np.nanmean(np.abs(actual - said)))


def pinball_loss(actual: Floats, said: Floats, share: float = 0.9) -> float:
    """The loss that the true ``share`` quantile has least of, in the unit of ``actual``."""
    over = actual - said
    return float(np.nanmean(np.maximum(share * over, (share - 1.0) * over)))


def coverage(actual: Floats, said: Floats) -> float:
    """Share of known outcomes at or below what was said."""
    known = ~np.isnan(actual)
    return float((actual[known] <= said[known]).mean())


def ranks(values: NDArray[np.float64]) -> Floats:
    """Ranks from 1, equal values sharing their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    shared: Floats = (last - (count - 1) / 2.0)[place]
    return shared


def _columns(actual: Floats, said: Floats) -> list[tuple[Floats, Floats]]:
    """Known outcomes of each model and what was said of them, where there are enough."""
    known = ~np.isnan(actual)
    return [
        (actual[known[:, column], column], said[known[:, column], column])
        for column in range(actual.shape[1])
        if known[:, column].sum() >= _MIN_ROWS
    ]


class Resamples:
    """Bootstrap resamples of prompts, whole groups of alike ones at a time; the same for every predictor."""

    def __init__(self, group: NDArray[np.intp], num: int, seed: int) -> None:
        names, inverse = np.unique(group, return_inverse=True)
        members: list[list[int]] = [[] for _ in names]
        for prompt, name in enumerate(inverse.tolist()):
            members[name].append(prompt)
        rng = np.random.default_rng((seed, 4))
        drawn = rng.integers(0, len(names), (num, len(names)))
        self.prompts = [
            np.array([prompt for name in row.tolist() for prompt in members[name]], np.intp) for row in drawn
        ]

    def counts(self, num_prompts: int) -> Floats:
        """How often each prompt is in each resample, (num, P)."""
        return np.array([np.bincount(one, minlength=num_prompts) for one in self.prompts], np.float64)

    def values(self, measure: Measure, actual: Floats, said: Floats) -> Floats:
        """The measure on each resample, (num,)."""
        return np.array([measure(actual[one], said[one]) for one in self.prompts])


def interval(value: float, resampled: Floats) -> Figure:
    """The value with the middle 95 % of the resampled ones."""
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return Figure(value, float(low), float(high))
