"""What a gateway sees of simulated engines that publish nothing: how far each stream is, and gauges once a second.

Counts and times are those of the tokens that were given up to now, nothing of a batch that still runs. It refuses to
show what no stream and no gauge shows: who waits, what is computed, how long an answer will be.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway._core import LengthRule, ReplayedEngine, TruthEngine
from headway.fleet import Gauges
from headway.lab.pool import Pool
from headway.router import Router

#: How often gauges are read, simulated seconds.
GAUGE_INTERVAL_S = 1.0


class Streams:
    """The streams and gauges of a fleet of simulated engines."""

    def __init__(self, pool: Pool, engines: Sequence[TruthEngine]) -> None:
        self._ids = [one.instance.id for one in pool.instances]
        self._limits = [one.truth.limits for one in pool.instances]
        self._engines = engines
        # Mirrors are read for counts alone; whose step time they have does not matter.
        self._mirrors = [ReplayedEngine(one.truth.limits, one.truth.step_time) for one in pool.instances]
        self._rule = LengthRule("plain")
        self._gauged_s = 0.0

    def show(self, routers: Sequence[Router], now: float) -> None:
        """Tell each router's ledger how far its streams are; engines must have been run up to ``now``."""
        for engine, mirror in zip(self._engines, self._mirrors, strict=True):
            began_s = engine.mirror(mirror, self._rule)
            for resident in mirror.running:
                given = resident.output_tokens - 1  # a mirror has the outcome of the batch in flight already
                for router in routers:
                    entry = router.fleet.entry(resident.request_id)
                    if entry is not None and given > entry.num_events and entry.first_token_s is not None:
                        entry.num_events, entry.last_event_s = given, min(began_s, now)
        if now >= self._gauged_s:
            self._gauged_s = now + GAUGE_INTERVAL_S
            self._show_gauges(routers, now)

    def _show_gauges(self, routers: Sequence[Router], now: float) -> None:
        for instance_id, limits, engine in zip(self._ids, self._limits, self._engines, strict=True):
            usage = 1 - engine.free_blocks / (limits.num_blocks - 1)
            gauges = Gauges(float(engine.num_running), float(engine.num_waiting), usage, now)
            for router in routers:
                router.fleet.observe_gauges(instance_id, gauges, now)
