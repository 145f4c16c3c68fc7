"""What an instance's time is worth at the moment: two simple price rules, and what any price rule is.

A price is utility per second of work. Charged for the work a query would take, it keeps an instance that others will
need for those to whom it brings most. ``kv_share`` reads the price off the instance's state, ``virtual_queue`` off the
work that was sent there; ``learned_price.py`` learns it from the queries. No rule knows the future, and none is charged
where an instance's work cannot be told: a hosted API has no queue of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.fleet import FleetView
from headway.policy.residents import Residents
from headway.types import Candidate, Query

#: Utility per second of work on an instance whose memory is full.
FULL_PRICE_PER_S = 0.6
#: Utility per second of work, for each second of work in the virtual queue.
QUEUE_PRICE_PER_S2 = 0.02
#: Share of its time that an instance of the virtual queue works.
DRAIN_SHARE = 0.85


class Price(Protocol):
    """Prices of the candidates of one query after the other. Works are in seconds, None where they are not known."""

    def bind(self, fleet: FleetView) -> None:
        """Know the engines of this fleet from now on."""
        ...

    def charges(
        self, query: Query, candidates: Sequence[Candidate], works_s: Sequence[float | None], now: float
    ) -> list[float]:
        """What the query would be charged on each candidate, in utility, at least 0. Once per query, in order."""
        ...

    def sent(self, candidate: Candidate, work_s: float | None, now: float) -> None:
        """Take note of where the query went."""
        ...


class KvSharePrice:
    """``full_price_per_s`` times the share of the instance that is taken: of its KV blocks or of its slots, the larger.

    Stateless: what it charges follows the instance's load at once, and falls back with it.
    """

    def __init__(self, full_price_per_s: float = FULL_PRICE_PER_S) -> None:
        self._full_price_per_s = full_price_per_s
        self._residents = Residents()

    def bind(self, fleet: FleetView) -> None:
        """Look at the engines of this fleet."""
        self._residents.bind(fleet)

    def charges(
        self, query: Query, candidates: Sequence[Candidate], works_s: Sequence[float | None], now: float
    ) -> list[float]:
        """Price times work."""
        price_per_s = self._full_price_per_s
        return [
            0.0 if work_s is None else price_per_s * work_s * self.share_taken(candidate)
            for candidate, work_s in zip(candidates, works_s, strict=True)
        ]

    def share_taken(self, candidate: Candidate) -> float:
        """Share in [0, 1] of the instance's KV blocks, or of its slots, that are taken; by the ledger without a replay.

        0 where the instance's limits are not known.
        """
        view = self._residents.view(candidate)
        limits = None if view is None else view.instance.limits
        if view is None or limits is None:
            return 0.0
        num_blocks = limits.num_blocks - 1
        if view.engine is not None and not view.stale:
            taken, running = num_blocks - view.engine.free_blocks, view.engine.num_running
        else:
            load = self._residents.load(candidate)
            tokens = load.context_tokens + load.prefill_tokens
            taken, running = tokens // limits.block_size, load.num_running
        return min(1.0, max(taken / num_blocks, running / limits.max_num_seqs))

    def sent(self, candidate: Candidate, work_s: float | None, now: float) -> None:
        """Nothing to note: the engine's state will show it."""


class VirtualQueuePrice:
    """``price_per_s2`` times the work waiting in a virtual queue that drains at ``drain_share`` of real time.

    ``Q ← max(0, Q − c·dt) + w`` of what was sent: a dual subgradient step of constant size for "no instance gets more
    work than c of its time". It sees nothing of the engine, so it works where none is shown.
    """

    def __init__(self, price_per_s2: float = QUEUE_PRICE_PER_S2, drain_share: float = DRAIN_SHARE) -> None:
        self._price_per_s2, self._drain_share = price_per_s2, drain_share
        self._queues: dict[str, tuple[float, float]] = {}  # instance id -> seconds of work, and when that was

    def bind(self, fleet: FleetView) -> None:
        """Start with empty queues."""
        self._queues.clear()

    def charges(
        self, query: Query, candidates: Sequence[Candidate], works_s: Sequence[float | None], now: float
    ) -> list[float]:
        """Price times work."""
        return [
            0.0 if work_s is None else self._price_per_s2 * work_s * self.queue_s(candidate.instance_id, now)
            for candidate, work_s in zip(candidates, works_s, strict=True)
        ]

    def queue_s(self, instance_id: str, now: float) -> float:
        """Seconds of work in the instance's virtual queue."""
        work_s, at_s = self._queues.get(instance_id, (0.0, now))
        return max(0.0, work_s - self._drain_share * max(now - at_s, 0.0))

    def sent(self, candidate: Candidate, work_s: float | None, now: float) -> None:
        """Add the query's work to its instance's queue."""
        if work_s is not None:
            name = candidate.instance_id
            self._queues[name] = (self.queue_s(name, now) + work_s, now)
