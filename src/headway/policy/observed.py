"""What policies learn from outcomes: time per output token, percentiles of the recent past, a regression that grows.

Small state machines without a clock; several baselines share them. They refuse to learn from answers that failed or
broke off: half an answer has no length.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np

from headway.types import Outcome

#: Weight of the newest sample in an exponentially weighted average.
EWMA_WEIGHT = 0.3


def tpot_s(outcome: Outcome) -> float | None:
    """Seconds per output token after the first; None where the answer failed or had fewer than two."""
    if outcome.status != "ok" or outcome.output_tokens is None or outcome.output_tokens < 2:
        return None
    if outcome.ttft_s is None or outcome.total_s is None:
        return None
    return max(outcome.total_s - outcome.ttft_s, 0.0) / (outcome.output_tokens - 1)


class RecentSamples:
    """The newest samples of one quantity and their percentiles: O(log n) to find, O(n) moves of memory to add."""

    def __init__(self, window: int, *, min_samples: int = 3) -> None:
        """Percentiles over the last ``window`` samples; below ``min_samples`` of them the average speaks."""
        self._window: deque[float] = deque()
        self._sorted: list[float] = []
        self._size, self._min_samples = window, min_samples
        self._average = math.nan

    def add(self, value: float) -> None:
        """Take in a sample; the oldest beyond the window leaves."""
        self._average = value if math.isnan(self._average) else self._average + EWMA_WEIGHT * (value - self._average)
        if len(self._window) == self._size:
            oldest = self._window.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._window.append(value)
        insort(self._sorted, value)

    def percentile(self, share: float) -> float | None:
        """The smallest sample that at least ``share`` of the window does not exceed; None before the first one.

        Below ``min_samples`` it is the exponentially weighted average instead.
        """
        count = len(self._sorted)
        if count < self._min_samples:
            return None if count == 0 else self._average
        return self._sorted[max(math.ceil(share * count) - 1, 0)]


class OnlineRidge:
    """Linear regression over a stream, pulled towards prior weights.

    Minimises ``Σ (y − w·x)² + strength·Σ ((w − prior)·scale)²``: ``scales`` are typical sizes of the features, which
    makes the pull alike on each. Strength counts in samples of typical size.
    """

    def __init__(self, prior: Sequence[float], scales: Sequence[float], *, strength: float) -> None:
        self._scales = np.asarray(scales, np.float64)
        self._inverse = np.eye(len(prior)) / strength
        self._weights = np.asarray(prior, np.float64) * self._scales
        self.weights: list[float] = list(prior)

    def predict(self, features: Sequence[float]) -> float:
        """w·x."""
        return sum([weight * value for weight, value in zip(self.weights, features, strict=True)])

    def observe(self, features: Sequence[float], value: float) -> None:
        """Learn from one sample; O(features²)."""
        x = np.asarray(features, np.float64) / self._scales
        gain = self._inverse @ x
        gain /= 1.0 + x @ gain
        self._weights += gain * (value - x @ self._weights)
        self._inverse -= np.outer(gain, x @ self._inverse)
        self.weights = (self._weights / self._scales).tolist()
