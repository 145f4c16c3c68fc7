"""Snapshots and bookings in, engines aged to ``now`` out: what the router knows of its instances.

What an instance last showed is completed to the end of the batch in flight, joined with the ledger (requests sent
there that nothing shows yet) and replayed forward; one that shows nothing may have a shadow instead. This file keeps
the ledger and takes in the world; it is pure: it takes ``now`` and reads no clock, and refuses to lose a request.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence

import numpy as np

from headway._core import EngineGroup, LengthRule, TruthEngine
from headway.errors import EngineInputError
from headway.fleet.ageing import REMEMBER_RELEASED_S, Ageing, forget_before
from headway.fleet.completion import mismatch
from headway.fleet.gauges import SETTLE_S, Gauges
from headway.fleet.prefix import PrefixStore
from headway.fleet.shadow import Shadow
from headway.fleet.view import (
    ARRIVAL_RATE_WINDOW_S,
    DEFAULT_OUTPUT_TOKENS,
    InstanceView,
    LedgerEntry,
)
from headway.types import Instance, Snapshot


class FleetView:
    """Snapshots and bookings in, engines aged to ``now`` out."""

    def __init__(
        self,
        instances: Sequence[Instance],
        *,
        stale_after_s: float = 2.0,
        default_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
        length_rule: LengthRule | None = None,
        ageing: bool = True,
        replay_ledger: bool = True,
        shadowed: Collection[str] = (),
    ) -> None:
        """``default_output_tokens`` is expected of requests that other routers sent, ``length_rule`` says how long a
        resident's answer is expected to become (by default it survives its prediction). The ``shadowed`` instances are
        replayed from what is sent there; they need limits and a step time.

        Without ``ageing`` engines stand still between snapshots, without ``replay_ledger`` what was sent since a
        snapshot is not replayed: both exist to show what they are worth.
        """
        self.views = [InstanceView(instance) for instance in instances]
        self._index = {instance.id: index for index, instance in enumerate(instances)}
        self._ageing = Ageing(
            LengthRule("survival") if length_rule is None else length_rule,
            default_output_tokens=default_output_tokens,
            stale_after_s=stale_after_s,
            ageing=ageing,
            replay_ledger=replay_ledger,
        )
        for view in self.views:
            limits, step_time = view.instance.limits, view.instance.step_time
            if limits is not None and limits.prefix_caching:
                view.prefixes = PrefixStore(limits.num_blocks - 1)
            if view.instance.id in shadowed and limits is not None and step_time is not None:
                view.shadow, view.source = Shadow(limits, step_time), "shadow"
        #: Tokens per block of the prompt that a query should name; None where no instance has a prefix cache.
        self.prefix_block_tokens = _common_block_tokens(self.views)
        self._ledger: dict[str, LedgerEntry] = {}
        self._group: EngineGroup | None = None
        self._group_members: list[int] = []
        count = len(self.views)
        self._prompt_tokens = np.zeros(count, np.int64)
        self._ttft_s = np.zeros(count, np.float64)
        self._wait_s = np.zeros(count, np.float64)
        self._cached_tokens = np.zeros(count, np.int64)
        self._shared_blocks = np.zeros(count, np.int64)

    def index(self, instance_id: str) -> int:
        """Position of an instance in ``views``. Raises KeyError."""
        return self._index[instance_id]

    # ------------------------------------------------------------ what comes back from the world

    def observe_snapshot(self, snapshot: Snapshot, now: float) -> None:
        """Take a snapshot as the newest state of its instance; an older one of the same engine start is ignored."""
        view = self.views[self._index[snapshot.instance_id]]
        known = view.snapshot
        if known is not None and known.engine_start == snapshot.engine_start and snapshot.sequence <= known.sequence:
            return
        if known is not None and known.engine_start != snapshot.engine_start and view.prefixes is not None:
            view.prefixes.clear()
        view.snapshot, view.shown_s = snapshot, snapshot.engine_s
        view.snapshot_is_new = True
        view.problem = mismatch(view.instance, snapshot)

    def observe_mirror(self, instance_id: str, engine: TruthEngine, now: float, *, live: bool = False) -> None:
        """Take a simulated engine, or a copy of one, as the state its instance shows at ``now``.

        The lab's snapshot without a wire: only what a snapshot would say is read of it (``TruthEngine.mirror``). With
        ``live`` it is the engine itself, and is looked at anew whenever the fleet is aged.
        """
        view = self.views[self._index[instance_id]]
        view.mirrored, view.is_live, view.shown_s = engine, live, now
        view.snapshot_age_s = 0.0
        view.snapshot_is_new = True

    def observe_gauges(self, instance_id: str, gauges: Gauges | None, now: float) -> None:
        """Take in an engine's gauges; None where they could not be read, which proves nothing either way."""
        view = self.views[self._index[instance_id]]
        before_s = math.inf if view.gauges is None else view.gauges.read_s
        view.gauges = gauges
        if gauges is None:
            return
        if gauges.generated_tokens is not None:
            if gauges.generated_tokens < view.generated_tokens:  # a counter that only rises while its engine lives
                self.observe_restart(instance_id, now, sent_before_s=before_s)
            view.generated_tokens = gauges.generated_tokens
        limits = view.instance.limits
        since_s = gauges.read_s - SETTLE_S
        view.agreement.read(
            gauges.num_running + gauges.num_waiting,
            num_settled=sum(1 for entry in view.ledger.values() if entry.booked_s < since_s),
            num_possible=len(view.ledger) + sum(1 for ended_s in view.released.values() if ended_s >= since_s),
        )
        if view.shadow is not None:
            view.shadow.gauged(round(gauges.kv_cache_usage * (view.shadow.limits.num_blocks - 1)), gauges.read_s)
        problem = None if limits is None else gauges.unlike(limits)
        view.problem = problem or (None if view.shadow is None else view.agreement.in_words())

    def observe_restart(self, instance_id: str, now: float, *, sent_before_s: float = math.inf) -> None:
        """Note that an engine is gone, or came back without what it had been sent before ``sent_before_s``."""
        view = self.views[self._index[instance_id]]
        if view.prefixes is not None:
            view.prefixes.clear()
        if view.shadow is not None:
            view.shadow.restart(now, sent_before_s)
            view.look_s = now

    def set_health(self, instance_id: str, healthy: bool) -> None:
        """Mark an instance healthy or not; unhealthy ones are not chosen."""
        self.views[self._index[instance_id]].healthy = healthy

    def set_draining(self, instance_id: str, draining: bool) -> None:
        """Mark an instance as draining: it finishes what it has and gets nothing new."""
        self.views[self._index[instance_id]].draining = draining

    def set_resting(self, instance_id: str, resting: bool) -> None:
        """Mark an instance as one that asked to be left alone for a while; it is not chosen meanwhile."""
        self.views[self._index[instance_id]].resting = resting

    def adopt(self, earlier: FleetView, now: float) -> list[str]:
        """Take over what ``earlier`` knew of the instances that both have; the ids of those whose state began anew.

        An instance described as before keeps its state and its requests. One on other terms (limits, step time, how it
        is watched) that is still the same server keeps its requests, marks and health; its state begins anew. The
        requests of an instance that is gone are forgotten: their ends will mean nothing here. ``earlier`` is used up.
        """
        begun: list[str] = []
        for index, new in enumerate(self.views):
            known = earlier._index.get(new.instance.id)
            if known is None:
                begun.append(new.instance.id)
                continue
            old = earlier.views[known]
            if old.instance == new.instance and (old.shadow is None) == (new.shadow is None):
                self.views[index] = old
            else:
                begun.append(new.instance.id)
                if (old.instance.api_base, old.instance.model) == (new.instance.api_base, new.instance.model):
                    _hand_over(old, new, now)
            for entry in self.views[index].ledger.values():
                entry.index = index
                self._ledger[entry.request_id] = entry
        self._group = None
        return begun

    # ------------------------------------------------------------ the ledger

    def __contains__(self, request_id: str) -> bool:
        """Whether this request is booked and not yet released."""
        return request_id in self._ledger

    def book(
        self,
        *,
        request_id: str,
        instance_id: str,
        prompt_tokens: int,
        predicted_output_tokens: float,
        max_tokens: int | None,
        priority: int,
        now: float,
        predicted_ttft_s: float | None = None,
        predicted_wait_s: float | None = None,
        due_s: float | None = None,
        utility: float | None = None,
        raw_ttft_s: float | None = None,
        is_streamed: bool = True,
        prefix_blocks: Sequence[int] = (),
        counted_tokens: int = 0,
    ) -> None:
        """Enter a request that is about to be sent. Raises EngineInputError when its id is booked already.

        ``predicted_ttft_s`` is what a replay said, ``raw_ttft_s`` the same before any correction (None: there was
        none), for the residuals to compare with what comes, but not where it has to wait for room. Where not
        ``is_streamed``, nothing of the answer is seen before its end. ``prefix_blocks`` and ``counted_tokens`` are of
        the query.
        ``predicted_wait_s``, until its prefill starts, ``due_s``, when its first token is due (monotonic), and its
        ``utility`` tell what it stands to lose by those who come after it.
        """
        if request_id in self._ledger:
            raise EngineInputError("request_id", f"'{request_id}' is booked already")
        index = self._index[instance_id]
        entry = LedgerEntry(
            request_id,
            index,
            prompt_tokens,
            predicted_output_tokens,
            max_tokens,
            priority,
            booked_s=now,
            raw_ttft_s=predicted_ttft_s if raw_ttft_s is None else raw_ttft_s,
            is_streamed=is_streamed,
        )
        view = self.views[index]
        if view.waits_for_room(prompt_tokens):
            entry.raw_ttft_s = None
        if view.at_risk is not None and predicted_ttft_s is not None and predicted_wait_s is not None:
            view.at_risk.join(request_id, now + predicted_wait_s, now + predicted_ttft_s, due_s, utility)
        self._ledger[request_id] = view.ledger[request_id] = entry
        view.unanswered[request_id] = entry
        view.num_outstanding += 1
        if view.prefixes is not None and prefix_blocks:
            found = self._cached(view, prompt_tokens, prefix_blocks, counted_tokens)
            entry.cached_tokens, entry.shared_blocks = found
            entry.prefix_blocks = tuple(prefix_blocks)
            view.prefixes.add(prefix_blocks)
        view.arrival_rate_per_s, view.rate_at_s = view.arrival_rate_at(now) + 1 / ARRIVAL_RATE_WINDOW_S, now
        if view.is_live:
            return  # the engine shows it with the next look
        if view.shadow is None:
            view.unseen[request_id] = entry
        else:
            try:
                view.shadow.sent(entry, now)
            except EngineInputError as error:
                view.problem = f"request {request_id} cannot be replayed: {error}"
        if view.engine is not None:
            self._ageing.advance(view, now)
            self._ageing.submit(view, entry)

    def entry(self, request_id: str) -> LedgerEntry | None:
        """The ledger entry of a request that was booked and not released."""
        return self._ledger.get(request_id)

    def first_token_seen(self, request_id: str, now: float) -> None:
        """Note that the answer has begun: a later snapshot without the request then means that it ended."""
        entry = self._ledger.get(request_id)
        if entry is not None and entry.first_token_s is None:
            view = self.views[entry.index]
            if view.at_risk is not None:
                view.at_risk.leave(request_id)
            if view.shadow is not None:
                view.shadow.first_token(entry, now)
            entry.first_token_s = view.answered_s = now
            view.unanswered.pop(request_id, None)

    def release(self, request_id: str, now: float, output_tokens: int | None = None) -> bool:
        """Take a request out of the ledger, whatever its end was. Idempotent: True only the first time.

        ``output_tokens`` are those that the engine reported, None where it did not.
        """
        entry = self._ledger.pop(request_id, None)
        if entry is None:
            return False
        view = self.views[entry.index]
        del view.ledger[request_id]
        view.unseen.pop(request_id, None)
        if view.at_risk is not None:
            view.at_risk.leave(request_id)
        view.unanswered.pop(request_id, None)
        view.num_outstanding -= 1
        if view.prefixes is not None and view.instance.limits is not None:
            view.prefixes.let_go(entry.prefix_blocks)
            view.prefixes.add_anonymous((output_tokens or 0) // view.instance.limits.block_size)
        if view.shadow is not None:
            view.shadow.ended(entry, now, output_tokens)
        engine_id = entry.engine_id or request_id
        if not view.is_live:
            view.released[request_id] = now
            forget_before(view.released, now - REMEMBER_RELEASED_S)
            if view.engine is not None:
                view.engine.cancel(engine_id)
        return True

    # ------------------------------------------------------------ engines at a time

    def age(self, now: float) -> None:
        """Replay every engine to ``now``, from its newest state where one has come in."""
        members_changed = self._group is None
        for view in self.views:
            members_changed |= self._ageing.age(view, now)
        if members_changed:
            self._regroup()

    def first_tokens(
        self,
        prompt_tokens: Sequence[int],
        priority: int,
        prefix_blocks: Sequence[int] = (),
        counted_tokens: int = 0,
    ) -> tuple[list[float | None], list[float | None]]:
        """TTFT and wait of a newcomer on each instance, in seconds; all replays in one native call.

        ``prefix_blocks`` and ``counted_tokens`` are those of the query. None where no engine can be replayed, infinite
        where the newcomer cannot run. Times are by the engines' step times as they are configured (``clock_scale`` is
        left out). Call :meth:`age` first.
        """
        members = self._group_members
        if self._group is None or not members:
            none: list[float | None] = [None] * len(self.views)
            return none, list(none)
        count = len(members)
        whole = count == len(self.views)
        self._prompt_tokens[:count] = prompt_tokens if whole else [prompt_tokens[index] for index in members]
        cached = shared = None
        if prefix_blocks:
            cached, shared = self._cached_tokens[:count], self._shared_blocks[:count]
            for place, index in enumerate(members):
                found = self._cached(self.views[index], prompt_tokens[index], prefix_blocks, counted_tokens)
                cached[place], shared[place] = found
        self._group.first_tokens(
            self._prompt_tokens[:count], self._ttft_s[:count], self._wait_s[:count], priority, cached, shared
        )
        found_ttft: list[float] = self._ttft_s[:count].tolist()
        found_wait: list[float] = self._wait_s[:count].tolist()
        if whole:
            return list(found_ttft), list(found_wait)
        ttft_s: list[float | None] = [None] * len(self.views)
        wait_s: list[float | None] = [None] * len(self.views)
        for index, ttft, wait in zip(members, found_ttft, found_wait, strict=True):
            ttft_s[index], wait_s[index] = ttft, wait
        return ttft_s, wait_s

    def _cached(
        self, view: InstanceView, prompt_tokens: int, prefix_blocks: Sequence[int], counted_tokens: int
    ) -> tuple[int, int]:
        """Tokens of a prompt that the instance's prefix cache should hold, its own count of them, full blocks or not;
        and how many of the engine's blocks of them requests under way hold.

        Named blocks are of counted tokens: where a model's count is corrected, a block is that much longer.
        """
        limits = view.instance.limits
        if view.prefixes is None or self.prefix_block_tokens is None or limits is None:
            return 0, 0
        scale = prompt_tokens / counted_tokens if counted_tokens > 0 else 1.0
        hits = int(view.prefixes.num_hits(prefix_blocks) * self.prefix_block_tokens * scale)
        held = int(view.prefixes.num_held(prefix_blocks) * self.prefix_block_tokens * scale)
        return min(hits, prompt_tokens), min(held, prompt_tokens) // limits.block_size

    def _regroup(self) -> None:
        self._group_members = [index for index, view in enumerate(self.views) if view.engine is not None]
        engines = [view.engine for view in self.views if view.engine is not None]
        self._group = EngineGroup(engines)


def _common_block_tokens(views: Sequence[InstanceView]) -> int | None:
    """Tokens per block that every prefix cache of the pool can be told in."""
    sizes = [view.instance.limits.block_size for view in views if view.prefixes is not None and view.instance.limits]
    return math.gcd(*sizes) if sizes else None


def _hand_over(old: InstanceView, new: InstanceView, now: float) -> None:
    """What does not depend on how an instance is described goes from one view of it to the next."""
    new.healthy, new.draining, new.resting = old.healthy, old.draining, old.resting
    new.ledger, new.released, new.num_outstanding = old.ledger, old.released, old.num_outstanding
    new.unanswered = old.unanswered
    new.arrival_rate_per_s, new.rate_at_s = old.arrival_rate_per_s, old.rate_at_s
    if new.shadow is None:
        new.unseen = dict(new.ledger)
        return
    for entry in new.ledger.values():
        with contextlib.suppress(EngineInputError):  # what the new limits do not take is not replayed
            new.shadow.take_over(entry, now)
