"""Which instances may get requests: learned from requests themselves, and from free probes of those taken out.

A failed connection takes an instance out at once; ``breaker_failures`` failures in a row (5xx, timeouts, broken
answers) open its breaker. It is then asked ``GET /health``, never for tokens, and after that gets one request to prove
itself: by the first token of a stream, or by a whole answer. Client errors say nothing about health. Nor does
back-pressure: an instance that says when to come again rests until then. This file refuses to make a request wait.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Literal

import aiohttp

from headway.fleet import FleetView
from headway.gateway.log import event
from headway.gateway.upstream import Upstreams, UpstreamTarget

BreakerState = Literal["closed", "half_open", "open"]
#: How often instances that are out are probed, seconds.
PROBE_INTERVAL_S = 0.5
_PROBE_TIMEOUT_S = 2.0
#: An instance is not left alone for longer than this, whatever it asks for, seconds.
MAX_REST_S = 60.0


class Breaker:
    """The health of one instance. ``half_open`` lets one request through and decides by it."""

    __slots__ = ("failures", "needs_trial", "opened_s", "state", "trial")

    def __init__(self) -> None:
        self.state: BreakerState = "closed"
        self.failures = 0
        self.opened_s = 0.0
        self.needs_trial = False  # opened by bad answers: a good /health alone does not close it
        self.trial: str | None = None  # the request that decides


class HealthBoard:
    """The breakers of a pool; keeps ``FleetView`` in step. ``on_change`` hears of every change of state."""

    def __init__(
        self,
        fleet: FleetView,
        *,
        failures_to_open: int,
        open_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._failures_to_open, self._open_s = failures_to_open, open_s
        self._clock = clock
        self.breakers = {view.instance.id: Breaker() for view in fleet.views}
        self._rests: dict[str, float] = {}  # instance -> when its rest ends

    def reconfigure(self, fleet: FleetView, *, failures_to_open: int, open_s: float) -> None:
        """Go on with another fleet: breakers of instances that both have are kept, others begin closed."""
        self._fleet, self._failures_to_open, self._open_s = fleet, failures_to_open, open_s
        names = [view.instance.id for view in fleet.views]
        self.breakers = {name: self.breakers.get(name) or Breaker() for name in names}
        self._rests = {name: until_s for name, until_s in self._rests.items() if name in self.breakers}
        for name, breaker in self.breakers.items():
            half_open_trial = breaker.state == "half_open" and breaker.trial is not None
            fleet.set_health(name, breaker.state != "open" and not half_open_trial)
            fleet.set_resting(name, name in self._rests)

    def dispatched(self, instance_id: str, request_id: str) -> None:
        """A request goes out; on a half-open breaker it is the one that decides, and no other may follow."""
        breaker = self.breakers.get(instance_id)
        if breaker is None:  # it was removed meanwhile
            return
        if breaker.state == "half_open" and breaker.trial is None:
            breaker.trial = request_id
            self._fleet.set_health(instance_id, False)

    def began(self, instance_id: str, request_id: str) -> None:
        """A stream gave its first token. If it is the trial that is enough: an answer may last for minutes.

        The instance is on probation then: the next failure opens its breaker again, a whole answer ends it.
        """
        breaker = self.breakers.get(instance_id)
        if breaker is None or breaker.trial != request_id:
            return
        self._set(instance_id, breaker, "closed")
        breaker.failures = self._failures_to_open - 1

    def succeeded(self, instance_id: str, request_id: str) -> None:
        """The instance gave a sane answer (any 2xx to 4xx)."""
        breaker = self.breakers.get(instance_id)
        if breaker is None:  # it was removed meanwhile
            return
        breaker.failures = 0
        if breaker.state != "closed" and breaker.trial == request_id:
            self._set(instance_id, breaker, "closed")

    def failed(self, instance_id: str, request_id: str, *, unreachable: bool = False) -> None:
        """The instance failed; ``unreachable`` when no connection could be made."""
        breaker = self.breakers.get(instance_id)
        if breaker is None:  # it was removed meanwhile
            return
        breaker.failures += 1
        if unreachable:
            self._fleet.observe_restart(instance_id, self._clock())
        deciding = breaker.trial == request_id
        if breaker.state == "open" or not (unreachable or deciding or breaker.failures >= self._failures_to_open):
            return
        breaker.needs_trial = not unreachable
        self._set(instance_id, breaker, "open")

    def neutral(self, instance_id: str, request_id: str) -> None:
        """A request ended without saying anything of the instance (client gone, back-pressure)."""
        breaker = self.breakers.get(instance_id)
        if breaker is None:  # it was removed meanwhile
            return
        if breaker.state == "half_open" and breaker.trial == request_id:
            breaker.trial = None
            self._fleet.set_health(instance_id, True)

    def rest(self, instance_id: str, seconds: float) -> None:
        """The instance asked not to be asked for so long."""
        if seconds <= 0.0 or instance_id not in self.breakers:
            return
        until_s = self._clock() + min(seconds, MAX_REST_S)
        self._rests[instance_id] = max(until_s, self._rests.get(instance_id, 0.0))
        self._fleet.set_resting(instance_id, True)
        event(logging.INFO, "resting", instance=instance_id, seconds=round(min(seconds, MAX_REST_S), 3))

    def end_rests(self) -> None:
        """Let those be asked again whose time has come. Call before a decision; costs nothing while nobody rests."""
        if not self._rests:
            return
        now = self._clock()
        for instance_id in [name for name, until_s in self._rests.items() if until_s <= now]:
            del self._rests[instance_id]
            self._fleet.set_resting(instance_id, False)

    def rest_ends_s(self, instance_ids: Iterable[str] | None = None) -> float:
        """When the first of these (of all) has rested enough, monotonic; infinite while none rests."""
        names = self._rests if instance_ids is None else instance_ids
        return min((self._rests[name] for name in names if name in self._rests), default=math.inf)

    def due(self) -> list[str]:
        """Instances whose probe is due."""
        now = self._clock()
        return [
            instance_id
            for instance_id, breaker in self.breakers.items()
            if breaker.state == "open" and (not breaker.needs_trial or now - breaker.opened_s >= self._open_s)
        ]

    def probed(self, instance_id: str, alive: bool) -> None:
        """Take in the result of a probe."""
        breaker = self.breakers.get(instance_id)
        if breaker is None:  # it was removed meanwhile
            return
        if breaker.state == "open" and alive:
            self._set(instance_id, breaker, "half_open" if breaker.needs_trial else "closed")

    def _set(self, instance_id: str, breaker: Breaker, state: BreakerState) -> None:
        breaker.state, breaker.trial = state, None
        if state == "open":
            breaker.opened_s = self._clock()
        elif state == "closed":
            breaker.failures = 0
        self._fleet.set_health(instance_id, state != "open")
        level = logging.WARNING if state == "open" else logging.INFO
        event(level, "breaker", instance=instance_id, state=state, failures=breaker.failures)


async def probe(board: HealthBoard, upstreams: Upstreams, target: UpstreamTarget) -> None:
    """Ask an instance that is out whether it is back."""
    try:
        async with upstreams.get(target.health_url, timeout_s=_PROBE_TIMEOUT_S) as response:
            # Hosted APIs have no such path: there any answer below 500 shows that somebody is at home.
            alive = response.status < 500 if target.hosted else response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        alive = False
    board.probed(target.instance_id, alive)
