"""Time to first token without an engine to replay: average-case queueing, or what the instance was seen to do.

Calibrated instances get the limited-processor-sharing average case: at most k requests share the engine, and a
newcomer waits ``ρ^k/(μ−α)`` on average. Of instances about which nothing is known (hosted ones), the median of recent
times to first token speaks. This is the fallback of every other estimator; it refuses to guess from one sample.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from headway.fleet import FleetView, InstanceView
from headway.types import Calibration, Estimate, Instance, Outcome, Query

#: Fewer samples than this say nothing: one slow cold start must not condemn an instance.
MIN_SAMPLES = 3
_WINDOW_SAMPLES = 64
_UNKNOWN_RATIO_P90 = 2.0
_UNKNOWN_CONCURRENCY = 25


def lps_wait_s(
    arrival_rate_per_s: float, service_rate_per_s: float, concurrency: int, variability: float = 1.0
) -> float:
    """Mean wait of limited processor sharing: ``variability · ρ^k / (μ − α)`` with ``ρ = α/μ``; infinite for ρ ≥ 1.

    ``concurrency`` is k ≥ 1 (1 is M/M/1, k → ∞ gives 0); ``variability`` is ``(ca² + cs²)/2`` of the coefficients of
    variation of arrivals and service (1 for exponential ones).
    """
    if arrival_rate_per_s >= service_rate_per_s:
        return math.inf
    rho = arrival_rate_per_s / service_rate_per_s
    return float(variability * rho**concurrency / (service_rate_per_s - arrival_rate_per_s))


class _Seen(NamedTuple):
    """What the recent outcomes of one instance amount to, until ``expires_s``."""

    ttft_s: float
    ttft_p90_s: float
    usual_outstanding: float
    expires_s: float


class _Window:
    """Recent outcomes of one instance: (end time, TTFT) and (end time, total time)."""

    def __init__(self) -> None:
        self.ttfts: deque[tuple[float, float]] = deque(maxlen=_WINDOW_SAMPLES)
        self.totals: deque[tuple[float, float]] = deque(maxlen=_WINDOW_SAMPLES)
        self.seen: _Seen | None = None

    def summarise(self, now: float, max_age_s: float) -> None:
        """Set ``seen`` from the samples not older than ``max_age_s``, or to None where they are too few."""
        fresh = sorted(ttft_s for end_s, ttft_s in self.ttfts if end_s >= now - max_age_s)
        if len(fresh) < MIN_SAMPLES:
            self.seen = None
            return
        self.seen = _Seen(
            ttft_s=fresh[(len(fresh) - 1) // 2],
            ttft_p90_s=fresh[math.ceil(0.9 * len(fresh)) - 1],
            usual_outstanding=self._usual_outstanding(now - max_age_s),
            expires_s=self.ttfts[-MIN_SAMPLES][0] + max_age_s,
        )

    def _usual_outstanding(self, since_s: float) -> float:
        """Little's law over the window: completions per second × their mean time under way."""
        fresh = [(end_s, total_s) for end_s, total_s in self.totals if end_s >= since_s]
        if not fresh:
            return 0.0
        totals = [total_s for _, total_s in fresh]
        span_s = max(fresh[-1][0] - fresh[0][0], *totals, 1e-3)
        return sum(totals) / span_s


class QueueingEstimator:
    """Average-case estimates for calibrated instances, observed ones for the rest.

    Calibrated: ``L = W + p/θ + T_dec`` with :func:`lps_wait_s` at the instance's arrival rate; ``arrival_cv`` and
    ``service_cv`` set the variability factor. Source: the latency-aware router's average case.
    Uncalibrated: the median TTFT of the last 64 outcomes within ``max_age_s``, ``default_ttft_s`` before three of them;
    each 25 requests beyond the number usually under way add it once more, so that simultaneous requests spread. A
    slow instance that gets no traffic is forgotten after ``max_age_s`` and thereby tried again.
    """

    name = "queueing"

    def __init__(
        self,
        *,
        arrival_cv: float = 1.0,
        service_cv: float = 1.0,
        default_ttft_s: float = 0.5,
        max_age_s: float = 120.0,
    ) -> None:
        self._variability = (arrival_cv**2 + service_cv**2) / 2.0
        self._default = _Seen(default_ttft_s, default_ttft_s * _UNKNOWN_RATIO_P90, 0.0, math.inf)
        self._max_age_s = max_age_s
        self._windows: dict[str, _Window] = {}

    def estimate(self, query: Query, fleet: FleetView, prompt_tokens: Sequence[int], now: float) -> list[Estimate]:
        """One estimate per instance in fleet order."""
        return [self.estimate_one(view, tokens, now) for view, tokens in zip(fleet.views, prompt_tokens, strict=True)]

    def estimate_one(self, view: InstanceView, prompt_tokens: int, now: float) -> Estimate:
        """The estimate of one instance; other estimators fall back on it."""
        calibration = view.instance.calibration
        if calibration is not None:
            return self._average_case(view, calibration, prompt_tokens, now)
        window = self._windows.get(view.instance.id)
        seen = window.seen if window is not None else None
        if seen is None or now > seen.expires_s:
            seen = self._default
        crowd = 1.0 + max(0.0, view.num_outstanding - seen.usual_outstanding) / _UNKNOWN_CONCURRENCY
        ttft_s = seen.ttft_s * crowd
        return Estimate(ttft_s, seen.ttft_p90_s * crowd, ttft_s - seen.ttft_s, "queueing", view.snapshot_age_s)

    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None:
        """Remember TTFT and time under way of an uncalibrated instance's outcome."""
        if instance.calibration is not None:
            return
        window = self._windows.setdefault(instance.id, _Window())
        ttft_s = outcome.ttft_s
        if ttft_s is None and outcome.status in ("timeout", "cancelled") and outcome.total_s is not None:
            # No token came in all that time: the TTFT is at least this, which is news only where it is slow.
            usual_s = (window.seen or self._default).ttft_s
            ttft_s = outcome.total_s if outcome.total_s > usual_s else None
        if ttft_s is not None:
            window.ttfts.append((now, ttft_s))
        if outcome.total_s is not None and outcome.status not in ("error", "rejected"):
            window.totals.append((now, outcome.total_s))
        window.summarise(now, self._max_age_s)

    def _average_case(self, view: InstanceView, calibration: Calibration, prompt_tokens: int, now: float) -> Estimate:
        wait_s = lps_wait_s(
            view.arrival_rate_at(now), calibration.service_rate_per_s, calibration.concurrency, self._variability
        )
        ttft_s = wait_s + prompt_tokens / calibration.prefill_tokens_per_s + calibration.decode_step_s
        return Estimate(ttft_s, ttft_s * calibration.ttft_ratio_p90, wait_s, "queueing", view.snapshot_age_s)
