"""Snapshots and bookings in, engines aged to ``now`` out: what the router knows of its instances.

What an instance last showed is completed to the end of the batch in flight, joined with the ledger (requests sent
there that nothing shows yet) and replayed forward. This file is pure: it takes ``now``, reads no clock, and refuses to
present a missing or stale state as a fresh one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway._core import EngineGroup, LengthRule, ReplayedEngine, TruthEngine
from headway.errors import EngineInputError
from headway.fleet.completion import complete, mismatch
from headway.fleet.view import (
    ARRIVAL_RATE_WINDOW_S,
    DEFAULT_OUTPUT_TOKENS,
    InstanceView,
    LedgerEntry,
)
from headway.types import EngineRequest, Instance, Snapshot, StepTime

_REMEMBER_RELEASED_S = 10.0


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
    ) -> None:
        """``default_output_tokens`` is expected of requests that other routers sent, ``length_rule`` says how long a
        resident's answer is expected to become (by default it survives its prediction).

        Without ``ageing`` engines stand still between snapshots, without ``replay_ledger`` what was sent since a
        snapshot is not replayed: both exist to show what they are worth.
        """
        self.views = [InstanceView(instance) for instance in instances]
        self._index = {instance.id: index for index, instance in enumerate(instances)}
        self._stale_after_s = stale_after_s
        self._default_output_tokens = default_output_tokens
        self._length_rule = LengthRule("survival") if length_rule is None else length_rule
        self._ageing, self._replay_ledger = ageing, replay_ledger
        self._ledger: dict[str, LedgerEntry] = {}
        self._group: EngineGroup | None = None
        self._group_members: list[int] = []
        count = len(self.views)
        self._prompt_tokens = np.zeros(count, np.int64)
        self._ttft_s = np.zeros(count, np.float64)
        self._wait_s = np.zeros(count, np.float64)

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

    def set_health(self, instance_id: str, healthy: bool) -> None:
        """Mark an instance healthy or not; unhealthy ones are not chosen."""
        self.views[self._index[instance_id]].healthy = healthy

    def set_draining(self, instance_id: str, draining: bool) -> None:
        """Mark an instance as draining: it finishes what it has and gets nothing new."""
        self.views[self._index[instance_id]].draining = draining

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
    ) -> None:
        """Enter a request that is about to be sent. Raises EngineInputError when its id is booked already.

        ``predicted_ttft_s`` is what a replay said, for the residual gate to compare with what comes.
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
            predicted_ttft_s=predicted_ttft_s,
        )
        view = self.views[index]
        if view.at_risk is not None and predicted_ttft_s is not None and predicted_wait_s is not None:
            view.at_risk.join(request_id, now + predicted_wait_s, now + predicted_ttft_s, due_s, utility)
        self._ledger[request_id] = view.ledger[request_id] = entry
        view.num_outstanding += 1
        view.arrival_rate_per_s, view.rate_at_s = view.arrival_rate_at(now) + 1 / ARRIVAL_RATE_WINDOW_S, now
        if view.is_live:
            return  # the engine shows it with the next look
        view.unseen[request_id] = entry
        if view.engine is not None:
            self._advance(view, now)
            self._submit(view, entry)

    def entry(self, request_id: str) -> LedgerEntry | None:
        """The ledger entry of a request that was booked and not released."""
        return self._ledger.get(request_id)

    def first_token_seen(self, request_id: str, now: float) -> None:
        """Note that the answer has begun, so that a later snapshot without the request means that it ended."""
        entry = self._ledger.get(request_id)
        if entry is not None and entry.first_token_s is None:
            entry.first_token_s = now
            view = self.views[entry.index]
            if view.at_risk is not None:
                view.at_risk.leave(request_id)

    def release(self, request_id: str, now: float) -> bool:
        """Take a request out of the ledger, whatever its end was. Idempotent: True only the first time."""
        entry = self._ledger.pop(request_id, None)
        if entry is None:
            return False
        view = self.views[entry.index]
        del view.ledger[request_id]
        view.unseen.pop(request_id, None)
        if view.at_risk is not None:
            view.at_risk.leave(request_id)
        view.num_outstanding -= 1
        engine_id = entry.engine_id or request_id
        if not view.is_live:
            view.released[request_id] = now
            if view.engine is not None:
                view.engine.cancel(engine_id)
        return True

    # ------------------------------------------------------------ ageing

    def age(self, now: float) -> None:
        """Replay every engine to ``now``, from its newest snapshot where one has come in."""
        members_changed = self._group is None
        for view in self.views:
            shown_s = view.shown_s
            if shown_s is None:
                continue
            if view.is_live and view.engine is not None and view.mirrored is not None:
                view.aged_to_s = view.mirrored.mirror(view.engine, self._length_rule)
                self._advance(view, now)
                continue
            had_engine = view.engine is not None
            if view.snapshot_is_new:
                self._rebuild(view, shown_s, now)
            view.snapshot_age_s = max(now - shown_s, 0.0)
            if now > view.fresh_until_s and self._is_overdue(view, now):
                view.stale, view.engine = True, None
            elif view.stale:
                view.stale = False
                self._rebuild(view, shown_s, now)
            elif now > view.aged_to_s:
                self._advance(view, now)
            members_changed |= had_engine != (view.engine is not None)
        if members_changed:
            self._regroup()

    def first_tokens(
        self, prompt_tokens: Sequence[int], priority: int
    ) -> tuple[list[float | None], list[float | None]]:
        """TTFT and wait of a newcomer on each instance, in seconds; all replays in one native call.

        None where no engine can be replayed, infinite where the newcomer cannot run. Call :meth:`age` first.
        """
        members = self._group_members
        if self._group is None or not members:
            none: list[float | None] = [None] * len(self.views)
            return none, list(none)
        count = len(members)
        whole = count == len(self.views)
        self._prompt_tokens[:count] = prompt_tokens if whole else [prompt_tokens[index] for index in members]
        self._group.first_tokens(self._prompt_tokens[:count], self._ttft_s[:count], self._wait_s[:count], priority)
        found_ttft: list[float] = self._ttft_s[:count].tolist()
        found_wait: list[float] = self._wait_s[:count].tolist()
        if whole:
            return list(found_ttft), list(found_wait)
        ttft_s: list[float | None] = [None] * len(self.views)
        wait_s: list[float | None] = [None] * len(self.views)
        for index, ttft, wait in zip(members, found_ttft, found_wait, strict=True):
            ttft_s[index], wait_s[index] = ttft, wait
        return ttft_s, wait_s

    # ------------------------------------------------------------ from a snapshot to an engine

    def _regroup(self) -> None:
        self._group_members = [index for index, view in enumerate(self.views) if view.engine is not None]
        engines = [view.engine for view in self.views if view.engine is not None]
        self._group = EngineGroup(engines)

    def _is_overdue(self, view: InstanceView, now: float) -> bool:
        # An idle engine has nothing to publish: its silence counts once a request sent to it should have shown.
        if view.mirrored is not None:
            return view.mirrored.num_running + view.mirrored.num_waiting > 0
        if view.snapshot is not None and (view.snapshot.running or view.snapshot.waiting):
            return True
        return any(now - entry.booked_s > self._stale_after_s for entry in view.unseen.values())

    def _advance(self, view: InstanceView, now: float) -> None:
        if view.engine is not None and now > view.aged_to_s and self._ageing:
            view.engine.advance(now - view.aged_to_s)
            view.aged_to_s = now

    def _rebuild(self, view: InstanceView, shown_s: float, now: float) -> None:
        view.snapshot_is_new = False
        view.fresh_until_s = shown_s + self._stale_after_s
        step_time = view.instance.step_time
        if step_time is None:
            return  # a state without a step time cannot be replayed
        _forget_before(view.released, now - _REMEMBER_RELEASED_S)
        try:
            if view.mirrored is not None:
                engine = self._load_mirror(view, view.mirrored, step_time, shown_s)
            else:
                engine = self._load_snapshot(view, step_time)
        except EngineInputError as error:
            view.engine, view.problem = None, f"the state shown cannot be replayed: {error}"
            return
        view.engine = engine
        view.fresh_until_s = max(shown_s, view.aged_to_s + engine.residual_s) + self._stale_after_s
        for entry in view.unseen.values():
            ended = entry.first_token_s is not None and shown_s > entry.first_token_s
            if not ended:
                self._advance(view, min(entry.booked_s, now))
                self._submit(view, entry)
        self._advance(view, now)

    def _load_snapshot(self, view: InstanceView, step_time: StepTime) -> ReplayedEngine:
        snapshot = view.snapshot
        assert snapshot is not None
        state = complete(view, snapshot, step_time, self._length_rule, self._default_output_tokens)
        view.aged_to_s = snapshot.engine_s if snapshot.batch_start_s is None else snapshot.batch_start_s
        if view.engine is None:
            return ReplayedEngine.from_state(state, step_time)
        view.engine.load(state)
        return view.engine

    def _load_mirror(
        self, view: InstanceView, mirrored: TruthEngine, step_time: StepTime, shown_s: float
    ) -> ReplayedEngine:
        engine = view.engine
        if engine is None:
            assert view.instance.limits is not None
            engine = ReplayedEngine(view.instance.limits, step_time)
        view.aged_to_s = mirrored.mirror(engine, self._length_rule)
        for request_id in [request_id for request_id in view.unseen if request_id in engine]:
            view.unseen.pop(request_id).engine_id = request_id
        for request_id in reversed(view.released):
            if view.released[request_id] < shown_s:
                break
            engine.cancel(request_id)
        return engine

    def _submit(self, view: InstanceView, entry: LedgerEntry) -> None:
        if view.engine is None or not self._replay_ledger:
            return
        try:
            view.engine.submit(
                EngineRequest(
                    request_id=entry.request_id,
                    prompt_tokens=entry.prompt_tokens,
                    target_output_tokens=self._length_rule.target_tokens(
                        entry.predicted_output_tokens, entry.prompt_tokens, 0, entry.max_tokens or 0
                    ),
                    max_tokens=entry.max_tokens,
                    priority=entry.priority,
                )
            )
        except EngineInputError as error:  # it stays in the ledger: the instance has it, only the replay has not
            view.problem = f"request {entry.request_id} cannot be replayed: {error}"


def _forget_before(released: dict[str, float], before_s: float) -> None:
    """Drop the releases older than ``before_s``; they stand in the order of their time."""
    while released:
        request_id = next(iter(released))
        if released[request_id] >= before_s:
            return
        del released[request_id]
