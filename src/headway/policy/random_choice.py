"""Random: every choosable instance with the same probability.

The other baseline that knows nothing. Its draws come from the generator it is given, so that one seed gives one run.
It refuses to weigh: an instance that is late or dear is as likely as any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.policy.base import choosable
from headway.types import Candidate, Query


class RandomPolicy:
    """Chooses uniformly among the choosable instances."""

    name = "random"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """A uniformly drawn instance; draws once per query with a choice."""
        indices = choosable(candidates)
        if not indices:
            return None
        return indices[int(self._rng.integers(len(indices)))]
