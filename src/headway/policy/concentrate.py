"""One place for what is given up: the instance where such queries are the least work on average.

A query's own least work (``least_work.py``) differs from query to query, so that some of what is given up lands on an
instance that the others need. Once its memory is full of late work, it cannot get out: whatever is sent there is late,
and more of it is. The mean over those given up so far names one place, and keeps to it. It refuses to act on a clock
that is not trusted, as that rule does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.fleet import FleetView
from headway.policy.base import largest
from headway.policy.least_work import WORK_TIE_S, LeastWork
from headway.types import Candidate

#: Weight of the newest query in the mean: about fifty count.
_WEIGHT = 0.02


class LeastMeanWork(LeastWork):
    """The least geometric mean of the work in seconds, over the queries given up so far and the one at hand.

    The first query counts alone; replicas always tie.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log_means: dict[str, float] = {}

    def bind(self, fleet: FleetView) -> None:
        """Know the engines of this fleet from now on, and forget what was given up."""
        super().bind(fleet)
        self._log_means.clear()

    def choose(self, indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
        """Those of ``indices`` with the least mean work; empty where no work can be told or trusted."""
        found: list[int] = []
        means: list[float] = []
        for index in indices:
            work_s = self.work_s(candidates[index])
            if work_s is not None:
                found.append(index)
                means.append(self._take(candidates[index].instance_id, work_s))
        return largest(found, [-mean for mean in means], WORK_TIE_S) if found else []

    def _take(self, instance_id: str, work_s: float) -> float:
        log = math.log(max(work_s, WORK_TIE_S))
        mean = self._log_means.get(instance_id, log)
        mean += _WEIGHT * (log - mean)
        self._log_means[instance_id] = mean
        return mean
