"""Shortest queue: the instance with the fewest requests under way.

The usual load balancer's rule and the strongest simple baseline near saturation (source: the latency-aware router's
comparison, where it counts requests resident and in the router's ledger: those that other routers sent count too, once
a snapshot shows them). It counts requests, so a queue of long prompts looks as short as one of short prompts; it
ignores quality, cost and speed of the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.fleet import FleetView
from headway.policy.base import Rotation, choosable, largest
from headway.policy.residents import Residents
from headway.types import Candidate, Query


class ShortestQueuePolicy:
    """Chooses the choosable instance with the fewest outstanding requests; equals take turns."""

    name = "shortest_queue"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rotation = Rotation(rng)
        self._residents = Residents()

    def bind(self, fleet: FleetView) -> None:
        """Count what this fleet's engines show, beside the router's own requests."""
        self._residents.bind(fleet)

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The least occupied instance."""
        indices = choosable(candidates)
        if not indices:
            return None
        counts = [-self._residents.num_requests(candidates[index]) for index in indices]
        return self._rotation.take(largest(indices, counts, 0.0))
