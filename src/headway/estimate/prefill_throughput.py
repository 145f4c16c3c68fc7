"""Time to first token from one constant: everything still to prefill, divided by the prefill throughput θ.

``L = (Σ remaining prefill of residents + own)/θ + T_dec`` (source: the latency-aware router's baseline). It counts
tokens, so it sees neither batches, blocks, decode load nor the queue's order; the replay exists because of that. One
decode step T_dec on top biases it on engines that give the first token in the batch that ends prefill: report it with
and without (``include_decode_step``).
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.estimate.history import Fallback
from headway.estimate.queueing import QueueingEstimator
from headway.fleet import FleetView, InstanceView
from headway.types import Estimate, Instance, Outcome, Query


class PrefillThroughputEstimator:
    """Remaining prefill over throughput; the ``fallback`` speaks where state or calibration is missing or stale."""

    name = "prefill_throughput"

    def __init__(self, *, include_decode_step: bool = True, fallback: Fallback | None = None) -> None:
        self._include_decode_step = include_decode_step
        self._fallback: Fallback = fallback if fallback is not None else QueueingEstimator()

    def estimate(self, query: Query, fleet: FleetView, prompt_tokens: Sequence[int], now: float) -> list[Estimate]:
        """One estimate per instance in fleet order."""
        return [self.estimate_one(view, tokens, now) for view, tokens in zip(fleet.views, prompt_tokens, strict=True)]

    def estimate_one(self, view: InstanceView, prompt_tokens: int, now: float) -> Estimate:
        """The estimate of one instance."""
        calibration, engine = view.instance.calibration, view.engine
        if calibration is None or engine is None or view.stale:
            return self._fallback.estimate_one(view, prompt_tokens, now)
        wait_s = engine.remaining_prefill_tokens / calibration.prefill_tokens_per_s
        ttft_s = wait_s + prompt_tokens / calibration.prefill_tokens_per_s
        if self._include_decode_step:
            ttft_s += calibration.decode_step_s
        return Estimate(ttft_s, ttft_s * calibration.ttft_ratio_p90, wait_s, self.name, view.snapshot_age_s)

    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None:
        """Nothing is learned here; the fallback learns."""
        self._fallback.observe(outcome, instance, now)
