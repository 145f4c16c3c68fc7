"""TTFT by replay of the engine's own token batching (the paper's batch-execution-aware estimate, BEA).

White-box: an instance's present state, shown in snapshots or kept as a shadow, is replayed natively until the
newcomer's first token. Where no state can be replayed (hosted, silent, out of step with its profile) another estimate
answers instead, and says so in ``Estimate.source``. This file refuses to guess silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway._core import ReplayedEngine, TokenBatch
from headway.estimate.base import Estimator
from headway.types import EngineRequest, EngineState, Estimate, Instance, Outcome, Query, Replay, StepTime

if TYPE_CHECKING:
    from headway.fleet import FleetView

__all__ = ["ReplayEstimator", "ReplayedEngine", "TokenBatch", "replay", "time_until_feasible"]

#: How much wider the 90 % quantile is where part of an instance's load is unknown.
WIDENED_RATIO_P90 = 2.0
_DRAIN_RESOLUTION = 1 / 64


def replay(state: EngineState, request: EngineRequest, step_time: StepTime) -> Replay:
    """When a newcomer to ``state`` gets its first token.

    The newcomer queues now, by the state's policy: last (fcfs), or by (priority, arrival, submission).

    Raises:
        EngineInputError: limits, state, request or step time that no engine could hold; ``.field`` names it.
    """
    return ReplayedEngine.from_state(state, step_time).replay(request)


def time_until_feasible(engine: ReplayedEngine, prompt_tokens: int, ttft_target_s: float) -> float:
    """Seconds from now until a newcomer of ``prompt_tokens`` would meet ``ttft_target_s``, if nobody else came.

    Found by bisection over replays of a clone, to 1/64 of its present TTFT; infinite where it can never run.
    """
    ttft_s = engine.ttft_s(prompt_tokens)
    if ttft_s <= ttft_target_s:
        return 0.0
    if ttft_s == float("inf"):
        return ttft_s
    too_early, enough = 0.0, ttft_s  # by then every resident of today is served or running
    for _ in range(10):
        later = engine.clone()
        later.advance(enough)
        if later.ttft_s(prompt_tokens) <= ttft_target_s:
            break
        too_early, enough = enough, 2 * enough
    else:
        return float("inf")
    while enough - too_early > ttft_s * _DRAIN_RESOLUTION:
        middle = (too_early + enough) / 2
        later = engine.clone()
        later.advance(middle)
        if later.ttft_s(prompt_tokens) <= ttft_target_s:
            enough = middle
        else:
            too_early = middle
    return enough


class ReplayEstimator:
    """BEA on every instance that can be replayed, ``fallback`` on the others.

    Replayed times are stretched by the instance's ``clock_scale``. Where its step times are not to be trusted the
    fallback speaks, and ``Estimate.raw_ttft_s`` goes on to say what the replay would have.
    """

    name = "replay"

    def __init__(self, fallback: Estimator) -> None:
        self._fallback = fallback

    def estimate(self, query: Query, fleet: FleetView, prompt_tokens: Sequence[int], now: float) -> list[Estimate]:
        """One estimate per instance in fleet order; all replays in one native call."""
        ttfts, waits = fleet.first_tokens(prompt_tokens, query.priority, query.prefix_blocks, query.counted_tokens)
        others: list[Estimate] | None = None
        estimates: list[Estimate] = []
        for index, view in enumerate(fleet.views):
            raw_s, wait_s = ttfts[index], waits[index]
            if raw_s is not None and wait_s is not None and view.clock_trusted:
                ttft_s = raw_s * view.clock_scale
                p90_s = ttft_s * view.ttft_ratio_p90
                if view.source == "shadow_widened":
                    p90_s *= WIDENED_RATIO_P90
                wait_s *= view.clock_scale
                estimates.append(Estimate(ttft_s, p90_s, wait_s, view.source, view.snapshot_age_s, raw_s))
                continue
            if others is None:
                others = self._fallback.estimate(query, fleet, prompt_tokens, now)
            other = others[index]
            if raw_s is not None:
                other = Estimate(
                    other.ttft_s, other.ttft_p90_s, other.wait_s, other.source, other.snapshot_age_s, raw_s
                )
            estimates.append(other)
        return estimates

    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None:
        """Hand the outcome to the fallback, which learns from it."""
        self._fallback.observe(outcome, instance, now)
