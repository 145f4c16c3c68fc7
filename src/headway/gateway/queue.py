"""The central queue: requests that a holding policy has not released yet, bounded, in order, each with a way out.

A request leaves it by release, by shedding (the queue is full), by its time, or because its client is gone. The policy
is asked on every event that can change its mind (an arrival, an outcome, a snapshot, a change of health) and when it
asked to be. Among requests of one priority clients take turns, so that none starves another. This file refuses to
choose and to send: it hands a decision to the request, which books it at once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.errors import HeadwayError
from headway.gateway.decisions import DecisionRecord
from headway.gateway.errors import QueueFullError, QueueTimeoutError
from headway.gateway.log import logger
from headway.types import Decision, Query

if TYPE_CHECKING:
    from headway.config import QueueConfig
    from headway.gateway.state import Gateway

#: While requests wait, snapshots are looked for this often, seconds.
SNAPSHOT_POLL_S = 0.02
#: One pass works for so long before it lets others run, seconds; after it the queue rests four times as long.
PASS_S = 0.005
REST_FACTOR = 4.0
#: A policy that fails is asked again after so long, seconds.
AFTER_ERROR_S = 1.0
#: Releases of this many seconds say how fast the queue drains.
_RATE_WINDOW_S = 10.0
_UNKNOWN_RETRY_S = 30.0


class Held:
    """One request in the queue. ``take`` gets its decision at the moment of release and must book it.

    ``since_s`` is monotonic, ``client`` the name whose requests take turns with those of others.
    """

    __slots__ = ("attempt", "client", "future", "query", "request_id", "since_s", "take", "turn")

    def __init__(
        self,
        query: Query,
        *,
        request_id: str,
        attempt: int,
        client: str,
        since_s: float,
        take: Callable[[Decision], None],
    ) -> None:
        self.query, self.request_id, self.attempt = query, request_id, attempt
        self.client, self.since_s, self.take = client, since_s, take
        self.turn: tuple[int, float, int] = (query.priority, 0.0, 0)
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: Held) -> bool:
        return self.turn < other.turn


class CentralQueue:
    """Holds what the gateway's router has admitted and not released. Lives in one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._held: list[Held] = []
        self._ids: set[str] = set()
        self._turns: dict[str, float] = {}  # client -> the turn of its newest request
        self._turn_now = 0.0
        self._numbers = itertools.count()
        self._releases_s: deque[float] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._rests_until_s = 0.0
        self._policy_s = math.inf  # when the policy asked to be asked
        self._woken = False

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, query_id: str) -> bool:
        return query_id in self._ids

    @property
    def _config(self) -> QueueConfig:
        return self._gateway.config.queue

    # ---- in and out ----------------------------------------------------------------------------------------------

    def admit(self, held: Held) -> None:
        """Let a request wait; one of lower priority makes room for it where the queue is full.

        Raises:
            RequestError, NoInstanceError: no instance could run it, or none is there; as ``Router.decide``.
            QueueFullError: the queue is full of requests that come before this one.
        """
        self._gateway.router.admit(held.query, self._gateway.clock())
        if len(self._held) >= self._config.max_length:
            victim = self._victim(held)
            error = QueueFullError(
                f"{len(self._held)} requests wait, as many as may (queue.max_length)",
                retry_after_s=self._drain_time_s(),
            )
            if victim is held:
                self._gateway.telemetry.left_queue("shed", None)
                raise error
            self._remove(victim)
            self._gateway.telemetry.left_queue("shed", None)
            if not victim.future.done():
                victim.future.set_exception(error)
        first = max(self._turn_now, self._turns.get(held.client, 0.0))
        turn = first if held.attempt > 1 else first + 1.0  # who was sent once has had its turn already
        self._turns[held.client] = turn
        held.turn = (held.query.priority, turn, next(self._numbers))
        insort(self._held, held)
        self._ids.add(held.query.id)
        self.wake()

    async def wait(self, held: Held) -> None:
        """Return once ``held.take`` was given a decision.

        Raises:
            QueueFullError: others came first when the queue was full.
            HeadwayError: the router refuses it now.
            CancelledError: as any wait; the request is out of the queue then, and what ``take`` booked is its own.
        """
        try:
            await held.future
        except asyncio.CancelledError:
            if held in self._held:
                self._remove(held)
            elif not held.future.cancelled():
                held.future.exception()  # it came too late for anybody to hear of it
            raise

    def expire(self, held: Held, *, may_send: bool) -> None:
        """Its time in the queue is over, and it has left: sent to the best there is, or refused.

        Raises:
            QueueTimeoutError: ``queue.on_timeout`` is ``reject``, or ``may_send`` is false.
            NoInstanceError: no instance can take it.
        """
        gateway, now = self._gateway, self._gateway.clock()
        if may_send and self._config.on_timeout == "best_effort":
            decision = gateway.router.release_anyway(held.query, held.since_s, now)
            gateway.telemetry.left_queue("forced", now - held.since_s)
            held.take(decision)
            return
        decision = gateway.router.explain_held(held.query, held.since_s, now)
        gateway.telemetry.left_queue("timeout", None)
        raise QueueTimeoutError(
            f"held for {now - held.since_s:.1f} s and not released: {decision.reason}",
            retry_after_s=decision.retry_after_s or 1.0,
            best_ttft_s=math.inf if decision.best_ttft_s is None else decision.best_ttft_s,
        )

    def _remove(self, held: Held) -> None:
        self._held.remove(held)
        self._ids.discard(held.query.id)

    def _victim(self, newcomer: Held) -> Held:
        """Who goes when it is full: the lowest priority; of these the client with most waiting; of these the newest."""
        lowest = max(newcomer.query.priority, self._held[-1].query.priority)
        those = [one for one in (*self._held, newcomer) if one.query.priority == lowest]
        waiting = Counter(one.client for one in those)
        most = max(waiting.values())
        return max(
            (one for one in those if waiting[one.client] == most), key=lambda one: (one.since_s, one is newcomer)
        )

    def _drain_time_s(self) -> float:
        """How long the present queue takes at the present rate of releases, at least a second."""
        self._forget_releases(self._gateway.clock())
        if not self._releases_s:
            return _UNKNOWN_RETRY_S
        return max(1.0, len(self._held) * _RATE_WINDOW_S / len(self._releases_s))

    def _forget_releases(self, now: float) -> None:
        while self._releases_s and self._releases_s[0] < now - _RATE_WINDOW_S:
            self._releases_s.popleft()

    # ---- release -------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something happened that may change the policy's mind: ask it, soon."""
        self._woken = True
        if self._held:
            self._look_at(self._rests_until_s)

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, at_s: float) -> None:
        if self._timer is not None:
            if self._timer_s <= at_s:
                return
            self._timer.cancel()
        self._timer_s = at_s
        delay_s = max(0.0, at_s - self._gateway.clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        """Ask the policy where an event or its own time calls for it; then set the time of the next look."""
        self._timer = None
        if not self._held:
            return
        gateway, started_s = self._gateway, time.perf_counter()
        now = gateway.clock()
        if gateway.health.rest_ends_s() <= now:
            gateway.health.end_rests()
            self._woken = True
        try:
            if gateway.feeds.poll(now) or self._woken or now >= self._policy_s:
                self._woken = False
                finished = self._ask(started_s)
                now = gateway.clock()
                next_s = gateway.router.next_release_s(now)
                self._policy_s = now if not finished else math.inf if next_s is None else next_s
                self._rests_until_s = now + REST_FACTOR * (time.perf_counter() - started_s)
        except Exception:
            logger.exception("release_error", extra={"fields": {"held": len(self._held)}})
            self._policy_s = self._rests_until_s = now + AFTER_ERROR_S
        poll_s = now + SNAPSHOT_POLL_S if gateway.feeds.readers else math.inf
        next_s = max(min(poll_s, self._policy_s, gateway.health.rest_ends_s()), self._rests_until_s)
        if self._held and next_s < math.inf:
            self._look_at(next_s)

    def _ask(self, started_s: float) -> bool:
        """Release until the policy keeps the rest; False when that took its time and there may be more."""
        gateway = self._gateway
        while self._held:
            now = gateway.clock()
            if not gateway.router.holds:
                self._decide_first(now)
            else:
                waiting = [(held.query, held.since_s) for held in self._held]
                decisions = gateway.router.release(waiting, now)
                if not decisions:
                    return True
                by_id = {held.query.id: held for held in self._held}
                for decision in decisions:
                    self._let_go(by_id[decision.query_id], decision, now)
            if time.perf_counter() - started_s > PASS_S:
                return False
        return True

    def _decide_first(self, now: float) -> None:
        """After a change of policy nobody holds any more: the first in the queue is decided like a newcomer."""
        held = self._held[0]
        try:
            decision = self._gateway.router.decide(held.query, now)
        except HeadwayError as error:
            self._remove(held)
            if not held.future.done():
                held.future.set_exception(error)
        else:
            self._let_go(held, decision, now)

    def _let_go(self, held: Held, decision: Decision, now: float) -> None:
        self._remove(held)
        self._turn_now = max(self._turn_now, held.turn[1])
        self._turns = {client: turn for client, turn in self._turns.items() if turn > self._turn_now}
        if held.future.done():  # its client left in this very moment
            return
        self._releases_s.append(now)
        self._forget_releases(now)
        self._gateway.telemetry.left_queue("released", now - held.since_s)
        held.take(decision)
        held.future.set_result(None)

    # ---- for people ----------------------------------------------------------------------------------------------

    def explain(self, request_id: str) -> DecisionRecord | None:
        """Why a request still waits, every candidate's figures included; None when it does not."""
        held = next((one for one in self._held if request_id in (one.request_id, one.query.id)), None)
        if held is None:
            return None
        decision = self._gateway.router.explain_held(held.query, held.since_s, self._gateway.clock())
        return DecisionRecord(id=request_id, request_id=held.request_id, attempt=held.attempt, decision=decision)

    def listing(self, limit: int) -> list[dict[str, object]]:
        """The first of the queue in its order, as plain JSON values."""
        now = self._gateway.clock()
        return [
            {
                "request_id": held.request_id,
                "priority": held.query.priority,
                "client": held.client or None,
                "held_s": round(now - held.since_s, 6),
                "attempt": held.attempt,
                "reason": self._gateway.router.explain_held(held.query, held.since_s, now).reason
                if self._gateway.router.holds
                else "about to be decided",
            }
            for held in self._held[:limit]
        ]
