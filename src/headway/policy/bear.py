"""BEAR: the most useful instance among those that give the first token in time.

Hard rule (the latency-aware router's section on targets): among instances with ``L ≤ τ`` the largest U; if there is
none, the smallest L, or on request the least own work (``least_work.py``). Without a target every instance is in time.
Lagrangian rule, for a given δ per millisecond: ``argmax U − δ·L`` over all instances, no target needed; at δ = 0 it
*is* latency-agnostic routing, tie rule included. What L means is the estimator's business: with the throughput
estimate instead of the replay this is the ablation ``bear_throughput``.
It refuses to price the future: a query is judged alone, not by what it does to those behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headway.errors import ConfigError
from headway.fleet import FleetView
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
from headway.policy.least_work import LeastWork
from headway.types import Candidate, Query


class BearPolicy:
    """Largest utility among the feasible; where none is, the smallest estimated TTFT in seconds, equals by utility.

    With ``least_work`` a query that no instance can answer in time goes where it is the least own work; the smallest
    TTFT remains where no work can be told or trusted.
    """

    def __init__(self, rng: np.random.Generator, *, name: str = "bear", least_work: LeastWork | None = None) -> None:
        self.name = name
        self._rotation = Rotation(rng)
        self._least_work = least_work

    def bind(self, fleet: FleetView) -> None:
        """Know the engines of this fleet, for the least own work."""
        if self._least_work is not None:
            self._least_work.bind(fleet)

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The most useful instance in time, else the soonest."""
        feasible = [index for index, candidate in enumerate(candidates) if candidate.verdict == "feasible"]
        if feasible:
            tied = largest(feasible, [utility_of(candidates[index]) for index in feasible])
            return tied[0] if len(tied) == 1 else break_tie(tied, candidates, self._rotation)
        indices = choosable(candidates)
        if not indices:
            return None
        if self._least_work is not None and (tied := self._least_work.choose(indices, candidates)):
            return break_tie(tied, candidates, self._rotation)
        tied = smallest_ttft(indices, candidates)
        if len(tied) > 1 and math.isfinite(ttft_s_of(candidates[tied[0]])):
            tied = largest(tied, [utility_of(candidates[index]) for index in tied])
        # All saturated: counting requests spreads them, where the largest utility would pile them up on one instance.
        return self._rotation.take(fewest_outstanding(tied, candidates))


class LagrangianBearPolicy:
    """Largest ``U − δ·L`` over all choosable instances, L in milliseconds, δ in utility per millisecond.

    Raises:
        ConfigError: ``delta_per_ms`` is negative or not finite.
    """

    def __init__(self, rng: np.random.Generator, *, delta_per_ms: float, name: str = "bear_lagrangian") -> None:
        if not math.isfinite(delta_per_ms) or delta_per_ms < 0:
            raise ConfigError(f"must be finite and at least 0, not {delta_per_ms!r}", key="routing.delta_per_ms")
        self.name = name
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
