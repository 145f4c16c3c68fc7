"""Time to first token without an engine to replay and without a history: average-case queueing.

Calibrated instances get the limited-processor-sharing average case: at most k requests share the engine, and a
newcomer waits ``ρ^k/(μ−α)`` on average. A plain vLLM shows how many requests wait in it: these come first, at the rate
at which it was seen, or is known, to serve. That rate is an average over requests of all lengths, so the wait can be
far off for the queue at hand. Where nothing at all is known a stated default speaks, under its own name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.fleet import FleetView, InstanceView
from headway.types import Calibration, Estimate, Instance, Outcome, Query

_UNKNOWN_RATIO_P90 = 2.0
_UNKNOWN_CONCURRENCY = 25
#: How long an answer takes on an instance of which none was seen, seconds, and the weight of the newest one seen.
_UNKNOWN_TOTAL_S, _TOTAL_WEIGHT = 5.0, 0.1


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


class QueueingEstimator:
    """Average-case estimates; the last estimator that is asked.

    Calibrated, by a profile that observed times do not contradict: ``L = W + p/θ + T_dec`` with :func:`lps_wait_s` at
    the instance's arrival rate; ``arrival_cv`` and ``service_cv`` set the variability factor. Source: the latency-aware
    router's average case. Where gauges show requests waiting, W is at least their number ÷ μ.
    Uncalibrated: ``default_ttft_s``, and the same again for each 25 requests that wait, so that simultaneous requests
    spread; with gauges, W is the requests waiting × mean time under way ÷ requests running (Little's law) on top.
    """

    name = "queueing"

    def __init__(self, *, arrival_cv: float = 1.0, service_cv: float = 1.0, default_ttft_s: float = 0.5) -> None:
        self._variability = (arrival_cv**2 + service_cv**2) / 2.0
        self._default_ttft_s = default_ttft_s
        self._totals: dict[str, float] = {}

    def estimate(self, query: Query, fleet: FleetView, prompt_tokens: Sequence[int], now: float) -> list[Estimate]:
        """One estimate per instance in fleet order."""
        return [self.estimate_one(view, tokens, now) for view, tokens in zip(fleet.views, prompt_tokens, strict=True)]

    def estimate_one(self, view: InstanceView, prompt_tokens: int, now: float) -> Estimate:
        """The estimate of one instance; other estimators fall back on it."""
        calibration = view.instance.calibration
        if calibration is not None and view.clock_trusted:
            return self._average_case(view, calibration, prompt_tokens, now)
        by_gauges_s = self._wait_by_gauges_s(view, now)
        source = "default" if by_gauges_s is None else self.name
        wait_s = self._default_ttft_s * len(view.unanswered) / _UNKNOWN_CONCURRENCY + (by_gauges_s or 0.0)
        ttft_s = wait_s + self._default_ttft_s
        return Estimate(ttft_s, ttft_s * _UNKNOWN_RATIO_P90, wait_s, source, view.snapshot_age_s)

    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None:
        """Remember how long answers of an uncalibrated instance take."""
        if instance.calibration is None and outcome.status == "ok" and outcome.total_s is not None:
            known_s = self._totals.get(instance.id, outcome.total_s)
            self._totals[instance.id] = known_s + _TOTAL_WEIGHT * (outcome.total_s - known_s)

    def _wait_by_gauges_s(self, view: InstanceView, now: float) -> float | None:
        gauges = view.gauges
        if gauges is None:
            return None
        total_s = self._totals.get(view.instance.id, _UNKNOWN_TOTAL_S)
        return num_waiting(view, now) * total_s / max(gauges.num_running, 1.0)

    def _average_case(self, view: InstanceView, calibration: Calibration, prompt_tokens: int, now: float) -> Estimate:
        wait_s = lps_wait_s(
            view.arrival_rate_at(now), calibration.service_rate_per_s, calibration.concurrency, self._variability
        )
        if view.gauges is not None:
            wait_s = max(wait_s, num_waiting(view, now) / calibration.service_rate_per_s)
        ttft_s = wait_s + prompt_tokens / calibration.prefill_tokens_per_s + calibration.decode_step_s
        return Estimate(ttft_s, ttft_s * calibration.ttft_ratio_p90, wait_s, self.name, view.snapshot_age_s)


def num_waiting(view: InstanceView, now: float) -> float:
    """Requests that wait in the engine by its gauges, and those sent since while some did. 0 without gauges."""
    gauges = view.gauges
    if gauges is None or gauges.num_waiting <= 0:
        return 0.0
    return gauges.num_waiting + sum(1 for entry in view.unanswered.values() if entry.booked_s > gauges.read_s)
