"""BEAR: the most useful instance among those that give the first token in time.

Hard rule (the latency-aware router's section on targets): among instances with ``L ≤ τ`` the largest U; if there is
none, the smallest L. Without a target every instance is in time. Lagrangian rule, for a given δ per millisecond:
``argmax U − δ·L`` over all instances, no target needed; at δ = 0 it *is* latency-agnostic routing, tie rule included.
It refuses to price the future: a query is judged alone, not by what it does to those behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headway.errors import ConfigError
from headway.policy.base import (
    Rotation,
    break_tie,
    choosable,
    fewest_outstanding,
    largest,
    smallest_ttft,
    ttft_s_of,
    utility_of,
)
from headway.types import Candidate, Query


class BearPolicy:
    """Largest utility among the feasible; where none is, the smallest estimated TTFT, equals by utility."""

    name = "bear"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rotation = Rotation(rng)

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The most useful instance in time, else the soonest."""
        feasible = [index for index, candidate in enumerate(candidates) if candidate.verdict == "feasible"]
        if feasible:
            tied = largest(feasible, [utility_of(candidates[index]) for index in feasible])
            return break_tie(tied, candidates, self._rotation)
        indices = choosable(candidates)
        if not indices:
            return None
        tied = smallest_ttft(indices, candidates)
        if len(tied) > 1 and math.isfinite(ttft_s_of(candidates[tied[0]])):
            tied = largest(tied, [utility_of(candidates[index]) for index in tied])
        # All saturated: counting requests spreads them, where the largest utility would pile them up on one instance.
        return self._rotation.take(fewest_outstanding(tied, candidates))


class LagrangianBearPolicy:
    """Largest ``U − δ·L`` over all choosable instances, L in milliseconds.

    Raises:
        ConfigError: ``delta_per_ms`` is negative or not finite.
    """

    name = "bear"

    def __init__(self, rng: np.random.Generator, *, delta_per_ms: float) -> None:
        if not math.isfinite(delta_per_ms) or delta_per_ms < 0:
            raise ConfigError(f"must be finite and at least 0, not {delta_per_ms!r}", key="routing.delta_per_ms")
        self._rotation = Rotation(rng)
        self._delta_per_s = delta_per_ms * 1e3

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The instance with the best trade of utility against waiting."""
        indices = choosable(candidates)
        if not indices:
            return None
        delta = self._delta_per_s
        if delta == 0.0:  # 0·∞ is no number, and the limit must equal latency-agnostic routing exactly
            scores = [utility_of(candidates[index]) for index in indices]
        else:
            scores = [utility_of(candidates[index]) - delta * ttft_s_of(candidates[index]) for index in indices]
        return break_tie(largest(indices, scores), candidates, self._rotation, by_ttft=delta > 0.0)
