"""The residual gate: whether an instance's clock can be trusted, told by predicted against observed TTFT.

A wrong profile makes every replay wrong by one factor. That shows in the ratio of observed to predicted TTFT, and the
rules that would pile queries up by such a clock must then stand back. The gate corrects nothing and hides nothing: it
says trusted or not, and why in numbers.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from msgspec import Struct

#: Pairs in which neither time reaches this say more about the network than about the clock, seconds.
FLOOR_S = 0.05


class Residual(Struct, frozen=True):
    """The median of observed ÷ predicted TTFT over the last pairs; ``ratio`` is None before there are enough."""

    ratio: float | None
    num_pairs: int
    trusted: bool


class ResidualGate:
    """Watches each instance's ratio of observed to predicted TTFT over a window of pairs.

    Trust is lost when the median leaves [1/band, band], and regained when it is back inside; before ``min_pairs`` an
    instance is trusted. The median, so that some stalls or a burst that joined a batch condemn nobody.
    """

    def __init__(self, *, band: float = 4.0, window: int = 32, min_pairs: int = 8) -> None:
        self._band, self._window, self._min_pairs = band, window, min_pairs
        self._ratios: dict[str, deque[float]] = {}

    def observe(self, instance_id: str, predicted_s: float, observed_s: float) -> Residual:
        """Take a pair of an answered query, and say how the instance stands."""
        ratios = self._ratios.setdefault(instance_id, deque(maxlen=self._window))
        if math.isfinite(predicted_s) and predicted_s > 0 and max(predicted_s, observed_s) >= FLOOR_S:
            ratios.append(observed_s / predicted_s)
        return self.residual(instance_id)

    def residual(self, instance_id: str) -> Residual:
        """How the instance stands now."""
        ratios = self._ratios.get(instance_id, ())
        if len(ratios) < self._min_pairs:
            return Residual(None, len(ratios), True)
        ratio = median(ratios)
        return Residual(ratio, len(ratios), 1 / self._band <= ratio <= self._band)
