"""Power of two choices: of two instances drawn at random, the one with fewer requests under way.

The load balancer's rule that nearly equals the shortest queue without looking at every instance, and does not herd when
several routers share a pool with old counts (source: Mitzenmacher, "The power of two choices in randomized load
balancing", 2001). It counts requests and nothing else, as ``shortest_queue`` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.fleet import FleetView
from headway.policy.base import choosable
from headway.policy.residents import Residents
from headway.types import Candidate, Query


class PowerOfTwoPolicy:
    """Draws two different choosable instances and takes the one with fewer requests; the first drawn between equals."""

    name = "power_of_two"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._residents = Residents()

    def bind(self, fleet: FleetView) -> None:
        """Count what this fleet's engines show, beside the router's own requests."""
        self._residents.bind(fleet)

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The less occupied of two; draws twice per query with a choice."""
        indices = choosable(candidates)
        if len(indices) < 2:
            return indices[0] if indices else None
        place = int(self._rng.integers(len(indices)))
        first = indices.pop(place)
        second = indices[int(self._rng.integers(len(indices)))]
        count = self._residents.num_requests
        return second if count(candidates[second]) < count(candidates[first]) else first
