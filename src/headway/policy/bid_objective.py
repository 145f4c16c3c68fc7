"""What a release is worth: the weighted objectives of the online linear program, between 0 and 1.

Paper: ``r = α·min(ô, R) + β·(R − ô)₊ + γ·R + σ + ζ1·1{w + ô < t1} + ζ2·1{w < t2}`` with ô the predicted periods, w
those waited and R those left of the run (arXiv 2607.03948). A service has no end, so here R is fixed, about the longest
answer; the first three terms are counted in R and the sum in weights: rewards spread over [0, 1] whatever the weights.
Unscaled, a reward is some thousand, and clipped to 1 all are the same. A further weight takes what the answer
is worth on that instance. It refuses weights that ask for nothing, or for the contrary.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from headway.errors import ConfigError

#: Thresholds of the paper's setting, in seconds: 49 periods of 30 ms of waiting; of the whole answer (ours).
WAIT_SLO_S, LATENCY_SLO_S = 1.47, 15.36
_WEIGHTS = ("alpha", "beta", "gamma", "sigma", "zeta1", "zeta2", "quality")


class Objective(Struct, frozen=True, kw_only=True):
    """Weights, at least 0 and not all 0, and thresholds in seconds above 0.

    ``alpha`` rewards tokens, ``beta`` an early end, ``gamma`` an early start, ``sigma`` each release, ``zeta1`` an
    answer that ends within ``latency_slo_s`` of its arrival, ``zeta2`` a wait below ``wait_slo_s``, ``quality`` the
    answer's utility on the instance.

    Raises:
        ConfigError: a weight that is negative or no number, all of them 0, or a threshold that is no time.
    """

    alpha: float = 0.0
    beta: float = 1.0
    gamma: float = 1.0
    sigma: float = 0.0
    zeta1: float = 0.0
    zeta2: float = 0.0
    quality: float = 0.0
    latency_slo_s: float = LATENCY_SLO_S
    wait_slo_s: float = WAIT_SLO_S

    def __post_init__(self) -> None:
        for key in _WEIGHTS:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
                raise ConfigError(f"must be finite and at least 0, not {value!r}", key=f"routing.{key}")
        if self.total == 0.0:
            raise ConfigError(f"one of the weights {', '.join(_WEIGHTS)} must be above 0", key="routing.alpha")
        for key in ("latency_slo_s", "wait_slo_s"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
                raise ConfigError(f"must be finite and above 0, not {value!r}", key=f"routing.{key}")

    @property
    def total(self) -> float:
        """The sum of the weights, by which rewards are divided."""
        return float(sum(getattr(self, key) for key in _WEIGHTS))

    def rewards(
        self,
        durations: ArrayLike,
        waited: ArrayLike,
        *,
        reward_periods: int,
        period_s: float,
        wait_slo_s: ArrayLike | None = None,
        values: ArrayLike | None = None,
    ) -> NDArray[np.float64]:
        """The reward in [0, 1] of starting each request now, all shapes broadcast: requests × devices.

        ``durations`` (predicted) and ``waited`` (since arrival) are in periods, ``values`` in [0, 1] (clipped).
        ``wait_slo_s`` stands in for the objective's own where requests bring theirs.
        """
        length, wait = np.asarray(durations, np.float64), np.asarray(waited, np.float64)
        found = (self.gamma + self.sigma) + 0.0 * wait  # of the shape of what is added below
        if self.alpha:
            found = found + self.alpha * np.minimum(length, reward_periods) / reward_periods
        if self.beta:
            found = found + self.beta * np.maximum(reward_periods - length, 0.0) / reward_periods
        if self.zeta1:
            found = found + self.zeta1 * (wait + length < self.latency_slo_s / period_s)
        if self.zeta2:
            slo_s = self.wait_slo_s if wait_slo_s is None else np.asarray(wait_slo_s, np.float64)
            found = found + self.zeta2 * (wait < slo_s / period_s)
        if self.quality:
            found = found + self.quality * np.clip(0.0 if values is None else np.asarray(values), 0.0, 1.0)
        normed: NDArray[np.float64] = found / self.total
        return normed
