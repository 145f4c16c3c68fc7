"""From what an instance shows to a replayed engine at a moment: a snapshot, a mirror of the lab, or a shadow.

Each source gives the engine a state; requests sent since are submitted to it, and it is replayed forward to now. A
snapshot that is too old, or a shadow that has lost its engine, leaves no engine at all, so that another estimate has to
speak. This file refuses to present a missing or stale state as a fresh one.
"""

from __future__ import annotations

from headway._core import LengthRule, ReplayedEngine, TruthEngine
from headway.errors import EngineInputError
from headway.fleet.completion import load
from headway.fleet.gauges import stand_ins
from headway.fleet.shadow import Shadow, request_of
from headway.fleet.view import InstanceView, LedgerEntry
from headway.types import EngineRequest, StepTime

REMEMBER_RELEASED_S = 10.0
#: A shadow is looked at anew this often at most, seconds, and the less often the more requests are under way.
_LOOK_S, _LOOK_S_PER_REQUEST = 0.002, 1e-4


class Ageing:
    """The rules by which the engines of a fleet follow their instances. See ``FleetView`` for the arguments."""

    def __init__(
        self, rule: LengthRule, *, default_output_tokens: float, stale_after_s: float, ageing: bool, replay_ledger: bool
    ) -> None:
        self.rule = rule
        self._default_output_tokens = default_output_tokens
        self._stale_after_s = stale_after_s
        self._is_on, self._replay_ledger = ageing, replay_ledger

    def age(self, view: InstanceView, now: float) -> bool:
        """Bring the instance's engine to ``now``; whether it has gained or lost its engine."""
        shown_s = view.shown_s
        had_engine = view.engine is not None
        if shown_s is None:
            if view.shadow is None:
                return False
            self._look_at_shadow(view, view.shadow, now)
            return had_engine != (view.engine is not None)
        if view.is_live and view.engine is not None and view.mirrored is not None:
            aged_to_s = view.mirrored.mirror(view.engine, self.rule)
            if now > aged_to_s and self._is_on:  # as in advance(), without its question after a batch in flight
                view.engine.advance((now - aged_to_s) / view.clock_scale)
                aged_to_s = now
            view.aged_to_s = aged_to_s
            return False
        if view.snapshot_is_new:
            self._rebuild(view, shown_s, now)
        view.snapshot_age_s = max(now - shown_s, 0.0)
        if now > view.fresh_until_s and self._is_overdue(view, now):
            view.stale, view.engine = True, None
        elif view.stale:
            view.stale = False
            self._rebuild(view, shown_s, now)
        elif now > view.aged_to_s:
            self.advance(view, now)
        return had_engine != (view.engine is not None)

    def advance(self, view: InstanceView, now: float) -> None:
        """Replay the engine, where there is one, to ``now``.

        Not past the end of the batch that the last snapshot shows, for as long again as the batch was to take: an
        engine shows each batch, so that one still runs.
        """
        ends_s = view.batch_ends_s
        if ends_s < now <= ends_s + view.batch_s:
            now = ends_s
        if view.engine is not None and now > view.aged_to_s and self._is_on:
            view.engine.advance((now - view.aged_to_s) / view.clock_scale)
            view.aged_to_s = now

    def submit(self, view: InstanceView, entry: LedgerEntry) -> None:
        """Let a request that was sent join the engine, where there is one."""
        if view.engine is None or not self._replay_ledger:
            return
        target = self.rule.target_tokens(entry.predicted_output_tokens, entry.prompt_tokens, 0, entry.max_tokens or 0)
        try:
            view.engine.submit(request_of(entry, target))
        except EngineInputError as error:  # it stays in the ledger: the instance has it, only the replay has not
            view.problem = f"request {entry.request_id} cannot be replayed: {error}"

    # ------------------------------------------------------------ from a shadow

    def _look_at_shadow(self, view: InstanceView, shadow: Shadow, now: float) -> None:
        if now < view.look_s and view.engine is not None:
            self.advance(view, now)
            return
        view.look_s = now + max(_LOOK_S, _LOOK_S_PER_REQUEST * len(view.ledger))
        shadow.clock_scale = view.clock_scale
        view.stale = shadow.has_given_up(now) or view.agreement.is_hopeless
        if view.stale:
            view.engine = None
            return
        view.source = "shadow" if view.agreement.holds else "shadow_widened"
        try:
            state = shadow.state(self.rule, now, self._stand_ins(view, shadow))
            if view.engine is None:
                view.engine = ReplayedEngine.from_state(state, shadow.step_time)
            else:
                view.engine.load(state)
        except EngineInputError as error:
            view.engine, view.problem = None, f"the shadow cannot be replayed: {error}"
        view.aged_to_s = now

    def _stand_ins(self, view: InstanceView, shadow: Shadow) -> tuple[list[EngineRequest], list[EngineRequest]]:
        if view.gauges is None or view.agreement.num_foreign == 0:
            return [], []
        output_tokens = round(self._default_output_tokens)
        return stand_ins(view.gauges, view.agreement, shadow.limits, shadow.own(), output_tokens=output_tokens)

    # ------------------------------------------------------------ from a snapshot

    def _is_overdue(self, view: InstanceView, now: float) -> bool:
        # An idle engine has nothing to publish: its silence counts once a request sent to it should have shown.
        if view.mirrored is not None:
            return view.mirrored.num_running + view.mirrored.num_waiting > 0
        if view.snapshot is not None and (view.snapshot.running or view.snapshot.waiting):
            return True
        return any(now - entry.booked_s > self._stale_after_s for entry in view.unseen.values())

    def _rebuild(self, view: InstanceView, shown_s: float, now: float) -> None:
        view.snapshot_is_new = False
        view.fresh_until_s = shown_s + self._stale_after_s
        step_time = view.instance.step_time
        if step_time is None:
            return  # a state without a step time cannot be replayed
        forget_before(view.released, now - REMEMBER_RELEASED_S)
        try:
            if view.mirrored is not None:
                engine = self._load_mirror(view, view.mirrored, step_time, shown_s)
            else:
                engine = self._load_snapshot(view, step_time)
        except EngineInputError as error:
            view.engine, view.problem = None, f"the state shown cannot be replayed: {error}"
            return
        view.engine = engine
        in_flight_s = engine.residual_s * view.clock_scale
        view.fresh_until_s = max(shown_s, view.aged_to_s + in_flight_s) + self._stale_after_s
        if view.mirrored is None:
            view.batch_s, view.batch_ends_s = in_flight_s, view.aged_to_s + in_flight_s
        for entry in view.unseen.values():
            ended = entry.first_token_s is not None and shown_s > entry.first_token_s
            if not ended:
                self.advance(view, min(entry.booked_s, now))
                self.submit(view, entry)
        self.advance(view, now)

    def _load_snapshot(self, view: InstanceView, step_time: StepTime) -> ReplayedEngine:
        snapshot = view.snapshot
        assert snapshot is not None
        engine = load(view, snapshot, step_time, self.rule, self._default_output_tokens)
        view.aged_to_s = snapshot.engine_s if snapshot.batch_start_s is None else snapshot.batch_start_s
        engine.start_batch()
        return engine

    def _load_mirror(
        self, view: InstanceView, mirrored: TruthEngine, step_time: StepTime, shown_s: float
    ) -> ReplayedEngine:
        engine = view.engine
        if engine is None:
            assert view.instance.limits is not None
            engine = ReplayedEngine(view.instance.limits, step_time)
        view.aged_to_s = mirrored.mirror(engine, self.rule)
        for request_id in [request_id for request_id in view.unseen if request_id in engine]:
            view.unseen.pop(request_id).engine_id = request_id
        for request_id in reversed(view.released):
            if view.released[request_id] < shown_s:
                break
            engine.cancel(request_id)
        return engine


def forget_before(released: dict[str, float], before_s: float) -> None:
    """Drop the releases older than ``before_s``; they stand in the order of their time."""
    while released:
        request_id = next(iter(released))
        if released[request_id] >= before_s:
            return
        del released[request_id]
