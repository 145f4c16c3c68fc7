"""Unfinished over speed: the instance with the fewest requests under way per unit of its speed.

LMDeploy's proxy balances this way (its expected-latency strategy; source: the latency-aware router's comparison, whose
speeds for Qwen3 0.6B, 8B and 32B are 4.281, 1.803 and 1.217 queries per second). A constant speed cannot know that two
queries are unlike: a story of a thousand tokens counts as much as one word. It ignores quality, cost and targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.fleet import FleetView
from headway.policy.base import Rotation, choosable, largest
from headway.policy.options import Options, by_instance, spread_over
from headway.policy.residents import Residents
from headway.types import Candidate, Query


class UnfinishedOverSpeedPolicy:
    """Smallest ``requests / speed``, in seconds; equals take turns.

    Option ``speeds``: queries per second by instance id, or by model for all of its instances. An instance it leaves
    out counts with the service rate of its calibration, and where there is none with the mean of the known ones (1 if
    none is known). Speeds are compared with each other alone, so give all of them or none.
    """

    name = "unfinished_over_speed"

    def __init__(self, rng: np.random.Generator, options: Options) -> None:
        self._rotation = Rotation(rng)
        self._residents = Residents()
        self._given = by_instance(options, "speeds")
        self._speeds_per_s: dict[str, float] = {}
        self._usual_per_s = 1.0

    def bind(self, fleet: FleetView) -> None:
        """Know the speeds of this fleet's instances.

        Raises:
            ConfigError: ``speeds`` names what is neither an instance nor a model of the fleet.
        """
        self._residents.bind(fleet)
        speeds = {
            view.instance.id: view.instance.calibration.service_rate_per_s
            for view in fleet.views
            if view.instance.calibration is not None
        }
        self._speeds_per_s = speeds | spread_over(fleet, self._given, "speeds")
        known = self._speeds_per_s.values()
        self._usual_per_s = sum(known) / len(known) if known else 1.0

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The instance that would end its requests first, were they all alike."""
        indices = choosable(candidates)
        if not indices:
            return None
        return self._rotation.take(largest(indices, [-self._unfinished_s(candidates[index]) for index in indices]))

    def _unfinished_s(self, candidate: Candidate) -> float:
        speed_per_s = self._speeds_per_s.get(candidate.instance_id, self._usual_per_s)
        return self._residents.num_requests(candidate) / speed_per_s
