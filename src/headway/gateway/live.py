"""What the page at ``/`` shows, as one stream of server-sent events: the pool, decisions as they fall, and what came.

Everything is read from what the gateway keeps anyway (fleet, breakers, the last decisions), so that the request path
pays nothing for being watched and a page that nobody opens costs nothing. Timelines are replays of a few instances at a
time under a budget of CPU time. Neither prompts nor keys pass here; what is shown of a decision are its figures.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from headway.errors import RoutingError
from headway.gateway.decisions import DecisionRecord

if TYPE_CHECKING:
    from headway.fleet import InstanceView
    from headway.gateway.state import Gateway

#: Pages that may watch at once.
MAX_WATCHERS: Final = 16
#: How often decisions are sent, and how many of these ticks lie between two looks at the pool.
TICK_S: Final = 0.25
TICKS_PER_POOL: Final = 4
#: The replayed future: so far ahead, at so many points.
HORIZON_S: Final = 8.0
NUM_POINTS: Final = 16
#: CPU time that one tick may spend on timelines, seconds. With many or busy instances they are renewed in turn.
TIMELINE_BUDGET_S: Final = 0.004
#: Decisions that a page gets when it opens.
NUM_RECENT: Final = 200


class LiveFeed:
    """What all pages see. One per gateway; timelines are computed once, however many watch."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._num_watchers = 0
        self._timelines: dict[str, list[tuple[int, int, float]]] = {}
        self._next_timeline = 0
        self._timelines_at_s = -math.inf

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events until the client leaves or the gateway drains.

        Events: ``pool`` (every second), ``decisions`` (new ones, oldest first), ``outcomes`` (what came of them).

        Raises:
            RoutingError: enough pages are watching already.
        """
        if self._num_watchers >= MAX_WATCHERS:
            raise RoutingError(f"{MAX_WATCHERS} pages are watching already", retry_after_s=5.0)
        self._num_watchers += 1
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        store = self._gateway.decisions
        try:
            yield b"retry: 2000\n\n"
            seen = max(store.num_added - NUM_RECENT, 0)
            open_records: dict[str, DecisionRecord] = {}
            tick = 0
            while not self._gateway.draining:
                self._renew_timelines()
                if tick % TICKS_PER_POOL == 0:
                    yield _event("pool", self.pool())
                fresh, now = store.since(seen), self._gateway.clock()
                seen = store.num_added
                if fresh:
                    yield _event("decisions", [digest(record, now) for record in fresh])
                    open_records.update((record.id, record) for record in fresh if record.decision.chosen is not None)
                ended = [record for record in open_records.values() if record.outcome is not None]
                if ended:
                    yield _event("outcomes", [_came(record) for record in ended])
                    for record in ended:
                        del open_records[record.id]
                for name in list(open_records)[: max(len(open_records) - store.capacity, 0)]:
                    del open_records[name]
                tick += 1
                await asyncio.sleep(TICK_S)
        finally:
            self._num_watchers -= 1

    # ---- the pool ------------------------------------------------------------------------------------------------

    def pool(self) -> dict[str, object]:
        """The pool and the score of the decisions kept, as plain JSON values."""
        gateway = self._gateway
        now = gateway.clock()
        gateway.feeds.poll(now)
        gateway.fleet.age(now)
        return {
            "policy": gateway.config.routing.policy,
            "config_hash": gateway.config.config_hash,
            "uptime_s": round(now - gateway.started_s, 1),
            "inflight": gateway.num_inflight,
            "horizon_s": HORIZON_S,
            "score": score(gateway.decisions.since(0), self._dearest()),
            "instances": [self._instance(view) for view in gateway.fleet.views],
        }

    def _dearest(self) -> str:
        """The largest model: most parameters, then the dearest output."""
        cards = self._gateway.cards.values()
        return max(cards, key=lambda card: (card.parameters or 0.0, card.output_per_1m_usd)).name

    def _instance(self, view: InstanceView) -> dict[str, object]:
        gateway, engine, instance = self._gateway, view.engine, view.instance
        breaker = gateway.health.breakers.get(instance.id)
        gauges = gateway.feeds.gauges.get(instance.id)
        residual = gateway.router.residuals.residual(instance.id)
        running: float | None = None
        waiting: float | None = None
        kv: float | None = None
        if engine is not None and instance.limits is not None:
            running, waiting, kv = engine.num_running, engine.num_waiting, _kv_share(view, engine.free_blocks)
        elif gauges is not None:
            running, waiting, kv = gauges.num_running, gauges.num_waiting, gauges.kv_cache_usage
        return {
            "id": instance.id,
            "model": instance.model,
            "profile": instance.profile,
            "health": _health(view, "closed" if breaker is None else breaker.state),
            "outstanding": view.num_outstanding,
            "running": running,
            "waiting": waiting,
            "max_running": None if instance.limits is None else instance.limits.max_num_seqs,
            "kv": None if kv is None else round(kv, 4),
            "snapshot_age_s": None if view.snapshot is None else round(view.snapshot_age_s or 0.0, 3),
            "residual": None if residual.ratio is None else round(residual.ratio, 3),
            "trusted": view.clock_trusted,
            "problem": gateway.feeds.errors.get(instance.id) or view.problem,
            "timeline": self._timelines.get(instance.id) if engine is not None else None,
        }

    def _renew_timelines(self) -> None:
        """Replay some instances forward, in turn, until the budget of this tick is spent."""
        gateway = self._gateway
        now = gateway.clock()
        if now - self._timelines_at_s < TICK_S / 2:  # another page's tick has just done it
            return
        self._timelines_at_s = now
        views = gateway.fleet.views
        until_s = time.thread_time() + TIMELINE_BUDGET_S
        for _ in range(len(views)):
            self._next_timeline = (self._next_timeline + 1) % len(views)
            view = views[self._next_timeline]
            if view.engine is None:
                self._timelines.pop(view.instance.id, None)
                continue
            self._timelines[view.instance.id] = timeline(view)
            if time.thread_time() > until_s:
                break


def timeline(view: InstanceView) -> list[tuple[int, int, float]]:
    """(running, waiting, share of KV in use) at ``NUM_POINTS`` + 1 times from now, if nothing new came."""
    assert view.engine is not None
    engine = view.engine.clone()
    points = [(engine.num_running, engine.num_waiting, _kv_share(view, engine.free_blocks))]
    for _ in range(NUM_POINTS):
        engine.advance(HORIZON_S / NUM_POINTS)
        points.append((engine.num_running, engine.num_waiting, _kv_share(view, engine.free_blocks)))
    return points


def _kv_share(view: InstanceView, free_blocks: int) -> float:
    assert view.instance.limits is not None
    usable = view.instance.limits.num_blocks - 1
    return round(1.0 - free_blocks / usable, 4)


def _health(view: InstanceView, breaker: str) -> str:
    if view.draining:
        return "draining"
    if breaker != "closed":
        return f"breaker {breaker.replace('_', ' ')}"
    if not view.healthy:
        return "unhealthy"
    return "stale" if view.stale else "ok"


# ---- decisions ---------------------------------------------------------------------------------------------------


def digest(record: DecisionRecord, now: float) -> dict[str, object]:
    """One decision in a line: who was chosen, why, and what is expected. ``age_s`` is how long ago the query came."""
    decision = record.decision
    chosen = decision.candidate
    estimate = None if chosen is None else chosen.estimate
    return {
        "id": record.id,
        "request_id": record.request_id,
        "attempt": record.attempt,
        "age_s": round(now - decision.arrival_s, 3),
        "instance": None if chosen is None else chosen.instance_id,
        "model": None if chosen is None else chosen.model,
        "reason": decision.reason,
        "slo": decision.slo,
        "target_ms": _milliseconds(decision.ttft_target_s),
        "predicted_ms": _milliseconds(None if estimate is None else estimate.ttft_s),
        "source": None if estimate is None else estimate.source,
    }


def _came(record: DecisionRecord) -> dict[str, object]:
    outcome = record.outcome
    assert outcome is not None
    return {
        "id": record.id,
        "status": outcome.status,
        "ttft_ms": _milliseconds(outcome.ttft_s),
        "cost_usd": outcome.cost_usd,
        "output_tokens": outcome.output_tokens,
    }


def score(records: Iterable[DecisionRecord], dearest: str) -> dict[str, object]:
    """What the decisions came to: targets met, cost, and what ``dearest`` alone would have cost.

    What ``dearest`` would have cost is its predicted cost on each answered query that could have gone there, the real
    one where it did; both sums run over the same queries. Answers that were cut short are left out of both.
    """
    num, num_with_target, num_in_time = 0, 0, 0
    num_priced, cost_usd, dearest_usd = 0, 0.0, 0.0
    for record in records:
        outcome, decision = record.outcome, record.decision
        if outcome is None or outcome.status == "cancelled":
            continue
        num += 1
        if decision.ttft_target_s is not None:
            num_with_target += 1
            num_in_time += outcome.ttft_s is not None and outcome.ttft_s <= decision.ttft_target_s
        if outcome.status == "ok" and outcome.cost_usd is not None:
            there_usd = _cost_at(record, dearest)
            if there_usd is not None:
                num_priced += 1
                cost_usd += outcome.cost_usd
                dearest_usd += there_usd
    return {
        "num": num,
        "num_with_target": num_with_target,
        "num_in_time": num_in_time,
        "num_priced": num_priced,
        "cost_per_1000_usd": 1e3 * cost_usd / num_priced if num_priced else None,
        "dearest_per_1000_usd": 1e3 * dearest_usd / num_priced if num_priced else None,
        "dearest": dearest,
    }


def _cost_at(record: DecisionRecord, model: str) -> float | None:
    """What the query cost at ``model``, or is predicted to cost there; None where that model was no candidate."""
    decision = record.decision
    if decision.candidate is not None and decision.candidate.model == model and record.outcome is not None:
        return record.outcome.cost_usd
    return next((one.cost_usd for one in decision.candidates if one.model == model), None)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1e3, 2)


def _event(name: str, value: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))
