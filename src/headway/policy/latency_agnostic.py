"""Latency-agnostic: the largest utility, however late the answer would come.

``argmax U`` with ``U = quality − λ·cost``: what a router does that weighs accuracy against cost alone (source: the
latency-aware router's baseline, its Lagrangian rule at δ = 0). It looks at no estimate, not even to break a tie:
equals go to the one with fewer outstanding requests, then take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.policy.base import Rotation, break_tie, choosable, largest, utility_of
from headway.types import Candidate, Query


class LatencyAgnosticPolicy:
    """Chooses the choosable instance with the largest utility."""

    name = "latency_agnostic"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rotation = Rotation(rng)

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The most useful instance, late or not."""
        indices = choosable(candidates)
        if not indices:
            return None
        tied = largest(indices, [utility_of(candidates[index]) for index in indices])
        return break_tie(tied, candidates, self._rotation, by_ttft=False)
