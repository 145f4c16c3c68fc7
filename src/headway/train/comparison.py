"""Predictors side by side on the same outcomes: every measure of each, and what one of them is ahead by.

A measure is left out for a predictor that says nothing of what it needs, and for all of them where it is undefined.
Differences are paired over the same resamples of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headway.train.measures import (
    Figure,
    Measure,
    Resamples,
    auc,
    calibration_error,
    coverage,
    interval,
    mean_absolute_error,
    pinball_loss,
    r2,
    r2_apart,
    r2_shared,
    rank_correlation,
)
from headway.train.rivals import Predicted
from headway.train.table import Floats

#: Measures of quality by name, and of lengths with what they look at (``log_p50``: log1p of the median).
QUALITY_MEASURES: dict[str, Measure] = {
    "r2": r2,
    "r2_shared": r2_shared,
    "r2_apart": r2_apart,
    "auc": auc,
    "calibration_error": calibration_error,
}
LENGTH_MEASURES: dict[str, tuple[str, Measure]] = {
    "length_log_r2": ("log_p50", r2),
    "length_mae_tokens": ("p50_tokens", mean_absolute_error),
    "length_rank_correlation": ("p50_tokens", rank_correlation),
    "p90_coverage": ("p90_tokens", coverage),
    "p90_pinball_tokens": ("p90_tokens", pinball_loss),
}

Figures = dict[str, dict[str, Figure]]


def compare(
    quality: Floats, tokens: Floats, predictions: Mapping[str, Predicted], resamples: Resamples, *, ours: str
) -> tuple[Figures, Figures]:
    """Figures by predictor and measure; and by predictor and measure, how much larger the measure is for ``ours``."""
    figures: Figures = {name: {} for name in predictions}
    above: Figures = {name: {} for name in predictions if name != ours}
    for measure, how in QUALITY_MEASURES.items():
        said = {name: one.quality for name, one in predictions.items()}
        _add(figures, above, measure, how, (quality, said, resamples, ours))
    for measure, (field, how) in LENGTH_MEASURES.items():
        logarithmic = field == "log_p50"
        said = {
            name: np.log1p(one.p50_tokens) if logarithmic else getattr(one, field) for name, one in predictions.items()
        }
        _add(figures, above, measure, how, (np.log1p(tokens) if logarithmic else tokens, said, resamples, ours))
    return figures, above


def _add(
    figures: Figures,
    above: Figures,
    measure: str,
    how: Measure,
    asked: tuple[Floats, Mapping[str, Floats], Resamples, str],
) -> None:
    actual, said_by, resamples, ours = asked
    known = ~np.isnan(actual)
    able = {name: said for name, said in said_by.items() if known.any() and not np.isnan(said[known]).any()}
    points = {name: how(actual, said) for name, said in able.items()}
    if any(np.isnan(list(points.values()))):
        return
    spreads = {name: resamples.values(how, actual, said) for name, said in able.items()}
    for name, point in points.items():
        figures[name][measure] = interval(point, spreads[name])
        if name != ours and ours in able:
            above[name][measure] = interval(points[ours] - point, spreads[ours] - spreads[name])
