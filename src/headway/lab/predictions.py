"""Predictions as good as asked: quality and answer length of every query on every model, as a router would see them.

A prediction is the mean of what could still come, given a signal that explains the share R² of the variance within a
task; the errors of two models hang together as their truths do, so that predictions of several models are jointly
calibrated too. R² = 0 leaves the task's mean (what the task label alone tells), R² = 1 the truth itself. Loops, answers
that never end, come as a surprise at every R² below 1; the mean knows how often they come. It refuses to look at a
truth but through that signal.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.lab.beta import Column, normal_cdf_column
from headway.lab.truth import (
    BETA_NU,
    COMPLETION_CAP_TOKENS,
    LOG_SD,
    MEDIAN_TOKENS,
    SHARED_LENGTH,
    model_truth,
    natural_length,
    per_task,
    scores,
)

#: Correlation of two models' quality errors: that of their qualities, which as skewed Betas show .34 to .56 of the
#: copula's .6. So a predicted gain of one model over another is about the gain to expect.
_SHARED_ERROR = 0.5


class PredictorQuality(Struct, frozen=True, kw_only=True):
    """How good a predictor is: R² of quality over all answers of a task (to about .06: what would leave [0, 1] is cut),
    and R² of the signal of log length over those that end by themselves.

    With the default .30, and loops counted in, log R² within a task is .10, .23 and .28 on the three models: what was
    measured of trained predictors. ``length`` predicts the mean or the median of what could still come.

    Raises:
        ConfigError: an R² outside [0, 1].
    """

    quality_r2: float = 0.06
    length_log_r2: float = 0.30
    length: Literal["mean", "median"] = "mean"

    def __post_init__(self) -> None:
        for name in ("quality_r2", "length_log_r2"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"must lie between 0 and 1, not {value!r}", key=f"predictor.{name}")
        if self.length not in ("mean", "median"):
            raise ConfigError(f"must be 'mean' or 'median', not {self.length!r}", key="predictor.length")


#: What the task label alone tells.
TASK_LABEL = PredictorQuality(quality_r2=0.0, length_log_r2=0.0)
#: True qualities and lengths.
PERFECT = PredictorQuality(quality_r2=1.0, length_log_r2=1.0)


def predict_quality(seed: int, mean: Column, true: Column, model: str, r2: float) -> Column:
    """Predicted qualities on one model, of R² ``r2`` around ``mean`` (each query's task mean); within [0, 1]."""
    if r2 == 1.0:
        return true.copy()
    noise = scores(seed, "quality error", model, len(true), _SHARED_ERROR)
    sd = np.sqrt(mean * (1.0 - mean) / (BETA_NU + 1.0))
    predicted = mean + r2 * (true - mean) + math.sqrt(r2 * (1.0 - r2)) * sd * noise
    return np.clip(predicted, 0.0, 1.0, out=predicted)


def predict_length(
    seed: int,
    tasks: NDArray[np.int8],
    true: NDArray[np.int32],
    model: str,
    predictor: PredictorQuality,
    *,
    max_tokens: int,
) -> Column:
    """Predicted answer lengths on one model in tokens, at least 1; a length of four-task answers."""
    if predictor.length_log_r2 == 1.0:
        return true.astype(np.float64)
    truth = model_truth(model)
    typical = np.log(truth.verbosity * per_task(MEDIAN_TOKENS, tasks))
    natural, log_sd = np.log(natural_length(seed, tasks, model)), per_task(LOG_SD, tasks)
    signal = log_signal(seed, model, natural, typical=typical, log_sd=log_sd, r2=predictor.length_log_r2)
    rest_sd = log_sd * math.sqrt(1.0 - predictor.length_log_r2)
    limit = float(min(max_tokens, COMPLETION_CAP_TOKENS))
    if predictor.length == "median":
        return np.clip(np.exp(signal), 1.0, limit)
    loops = per_task(truth.loop_probability, tasks)
    return np.maximum((1.0 - loops) * mean_below(signal, rest_sd, limit) + loops * limit, 1.0)


def log_signal(seed: int, model: str, log_length: Column, *, typical: Column, log_sd: Column, r2: float) -> Column:
    """What is known of each log length: its mean, given a signal that explains ``r2`` of its variance ``log_sd²``."""
    noise = scores(seed, "length error", model, len(log_length), SHARED_LENGTH)
    known: Column = typical + r2 * (log_length - typical) + math.sqrt(r2 * (1.0 - r2)) * log_sd * noise
    return known


def mean_below(log_mean: Column, log_sd: Column, limit: float) -> Column:
    """The mean of a lognormal variate cut at ``limit``."""
    to_limit = (math.log(limit) - log_mean) / log_sd
    below = np.exp(log_mean + 0.5 * log_sd**2) * normal_cdf_column(to_limit - log_sd)
    mean: Column = below + limit * normal_cdf_column(-to_limit)
    return mean
