"""Turns raw outputs of heads into what they claim to be: quality by isotonic regression, lengths by scale and shift.

All of it is fitted on predictions of prompts that the heads had not seen. A calibration is monotone or a constant per
model, so it changes levels and leaves the order of prompts on one model as it is.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.predict.forecast import calibrated_quality
from headway.train.heads import Objective
from headway.train.table import Floats

#: An isotonic map keeps no more knots than this; in between it is linear.
_MAX_KNOTS, _ROWS_PER_KNOT = 40, 50
#: The map that leaves everything as it is; values beyond [0, 1] are bounded when they are served.
_LINE = np.array([[-10.0, 10.0], [-10.0, 10.0]])
#: Rows of all models together that are added to a model's own when its length is scaled or shifted.
_POOLED_ROWS = 50.0


class QualityCalibration(Struct, frozen=True, eq=False):
    """``level`` (M,), ``slope`` and ``knots`` (2, n) as in ``artifact.QualityTrees``; ``isotonic`` tells whether the
    knots are an isotonic regression or a straight line."""

    level: Floats
    slope: float
    knots: Floats
    isotonic: bool

    def apply(self, raw: Floats) -> Floats:
        """Calibrated quality of raw outputs (..., M)."""
        return calibrated_quality(raw, self.level, self.slope, self.knots)


class Calibration(Struct, frozen=True, eq=False):
    """Of each head what it needs, (M,) each for lengths as in ``artifact.LengthTrees``; None for a missing head."""

    quality: QualityCalibration | None
    mean_scale: Floats | None
    p50_shift: Floats | None
    p90_shift: Floats | None


def calibrate(
    outputs: dict[Objective, Floats], quality: Floats, log_tokens: Floats, fold: NDArray[np.intp]
) -> Calibration:
    """The calibration of ``outputs`` against what happened, all (P, M); ``fold`` (P,) numbers the prompts' folds."""
    return Calibration(
        calibrate_quality(outputs["huber"], quality, fold) if "huber" in outputs else None,
        scales(outputs["mean"], log_tokens) if "mean" in outputs else None,
        shifts(outputs["p50"], log_tokens, 0.5) if "p50" in outputs else None,
        shifts(outputs["p90"], log_tokens, 0.9) if "p90" in outputs else None,
    )


def calibrate_quality(raw: Floats, target: Floats, fold: NDArray[np.intp]) -> QualityCalibration:
    """A slope towards each model's level, and an isotonic map after it where that lowers the squared error of folds it
    was not fitted on. Where it does not, or where there is but one fold, its steps only add noise to what is calibrated
    already."""
    folds = np.unique(fold)
    if len(folds) < 2:
        return _quality(raw, target, stepped=False)
    errors = {True: 0.0, False: 0.0}
    for one in folds:
        here = fold == one
        for stepped in errors:
            said = _quality(raw[~here], target[~here], stepped).apply(raw[here])
            errors[stepped] += float(np.nansum(np.square(said - target[here])))
    return _quality(raw, target, errors[True] < errors[False])


def _quality(raw: Floats, target: Floats, stepped: bool) -> QualityCalibration:
    known = ~np.isnan(target)
    num = np.maximum(known.sum(axis=0), 1)
    level = np.where(known, raw, 0.0).sum(axis=0) / num
    centre = np.where(known, target, 0.0).sum(axis=0) / num
    away = np.where(known, raw - level, 0.0)
    spread = float(np.square(away).sum())
    slope = float((away * np.where(known, target - centre, 0.0)).sum()) / spread if spread > 0.0 else 0.0
    slope = min(1.0, max(0.0, slope))
    knots = isotonic(level + slope * (raw - level), target) if stepped else _LINE
    return QualityCalibration(level, slope, knots, stepped)


def isotonic(raw: Floats, target: Floats) -> Floats:
    """The rising map of ``raw`` nearest to ``target`` in squares, on equal-sized bins, (2, n)."""
    known = ~np.isnan(target)
    order = np.argsort(raw[known], kind="stable")
    num_bins = max(1, min(_MAX_KNOTS, len(order) // _ROWS_PER_KNOT))
    x = np.array([part.mean() for part in np.array_split(raw[known][order], num_bins)])
    y = np.array([part.mean() for part in np.array_split(target[known][order], num_bins)])
    starts, means = _pool(y)
    fitted = np.repeat(means, np.diff(np.append(starts, num_bins)))
    middles, first = np.unique(x, return_index=True)
    return np.array([middles, np.clip(fitted[first], 0.0, 1.0)])


def _pool(y: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Pool adjacent violators: where each block of equal fit starts, and its mean."""
    starts: list[int] = []
    totals: list[float] = []
    counts: list[int] = []
    for index, value in enumerate(y.tolist()):
        start, total, count = index, value, 1
        while totals and totals[-1] * count >= total * counts[-1]:
            start, total, count = starts.pop(), total + totals.pop(), count + counts.pop()
        starts.append(start)
        totals.append(total)
        counts.append(count)
    return np.array(starts, np.intp), np.array(totals) / np.array(counts)


def scales(raw: Floats, log_tokens: Floats) -> Floats:
    """What exp of the mean head must be multiplied by so that each model's mean length comes out right, (M,)."""
    known = ~np.isnan(log_tokens)
    actual, said = np.where(known, np.exp(log_tokens), 0.0), np.where(known, np.exp(raw), 0.0)
    pooled = actual.sum() / max(said.sum(), 1e-9)
    typical = said.sum() / max(known.sum(), 1)
    extra = _POOLED_ROWS * typical
    scale: Floats = (actual.sum(axis=0) + pooled * extra) / (said.sum(axis=0) + extra)
    return scale


def shifts(raw: Floats, log_tokens: Floats, share: float) -> Floats:
    """What must be added to a quantile head so that it covers ``share`` of each model's answers, (M,)."""
    residual = log_tokens - raw
    pooled = float(np.nanquantile(residual, share))
    shift = np.full(raw.shape[1], pooled)
    for column, values in enumerate(residual.T):
        known = values[~np.isnan(values)]
        if len(known):
            weight = len(known) / (len(known) + _POOLED_ROWS)
            shift[column] += weight * (float(np.quantile(known, share)) - pooled)
    return shift
