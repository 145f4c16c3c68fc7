"""Shortest queue: the instance with the fewest requests under way.

The usual load balancer's rule and the strongest simple baseline near saturation (source: the latency-aware router's
comparison, where it counts requests resident and in the router's ledger). It counts requests, so a queue of long
prompts looks as short as one of short prompts; it ignores quality, cost and speed of the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.policy.base import Rotation, choosable, fewest_outstanding
from headway.types import Candidate, Query


class ShortestQueuePolicy:
    """Chooses the choosable instance with the fewest outstanding requests; equals take turns."""

    name = "shortest_queue"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rotation = Rotation(rng)

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The least occupied instance."""
        indices = choosable(candidates)
        return self._rotation.take(fewest_outstanding(indices, candidates)) if indices else None
