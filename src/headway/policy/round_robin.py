"""Round robin: every instance in turn, whatever it is worth and however late it would be.

The baseline that knows nothing (FACTS of the benchmark: no estimate, cycle). The turn is kept per instance, not per
position, because the candidates of one query (one model, some unhealthy) are not those of the next: the choosable
instance that was chosen longest ago is next, which is the plain cycle while the pool stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.policy.base import choosable
from headway.types import Candidate, Query


class RoundRobinPolicy:
    """Chooses the choosable instance that was chosen longest ago; never-chosen ones first, in pool order."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The next instance in turn."""
        indices = choosable(candidates)
        if not indices:
            return None
        last_turn = self._last_turn
        chosen = min(indices, key=lambda index: last_turn.get(candidates[index].instance_id, 0))
        self._turn += 1
        last_turn[candidates[chosen].instance_id] = self._turn
        return chosen
