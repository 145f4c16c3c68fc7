"""The fleet as the router knows it: one replayed engine per instance, aged to ``now``.

What an instance last showed (its newest snapshot) is completed to the end of the batch in flight, joined with the
ledger (requests sent there that no snapshot shows yet) and replayed forward. This file is pure: it takes ``now``,
reads no clock, and refuses to present a missing or stale state as a fresh one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import numpy as np
from msgspec import Struct

from headway._core import EngineGroup, ReplayedEngine, batch_time_s
from headway.errors import EngineInputError
from headway.types import EngineRequest, EngineState, Instance, Snapshot, SnapshotRequest, StepTime

#: Output tokens expected of a request of which nothing is known.
DEFAULT_OUTPUT_TOKENS = 256.0
#: Observed ÷ estimated TTFT at the 90 % quantile, for an instance whose profile does not say.
DEFAULT_TTFT_RATIO_P90 = 1.1

_ARRIVAL_RATE_WINDOW_S = 10.0
_REMEMBER_RELEASED_S = 10.0
_ENGINE_ID_PREFIXES = ("chatcmpl-", "cmpl-")


def survival_target_tokens(predicted_tokens: float, output_tokens: int, max_tokens: int | None) -> int:
    """The whole answer expected of a request that has given ``output_tokens`` so far.

    Remaining = max(predicted − done, max(64, done/4)): a request that outlives its prediction is expected to go on,
    never to end at once, because a phantom end would free KV blocks that are not free.
    """
    remaining = max(predicted_tokens - output_tokens, 64.0, output_tokens / 4)
    target = output_tokens + math.ceil(remaining)
    return target if max_tokens is None or max_tokens <= 0 else max(min(target, max_tokens), output_tokens + 1)


class LedgerEntry(Struct):
    """A request that was sent to an instance and has not ended yet."""

    request_id: str
    index: int
    prompt_tokens: int
    predicted_output_tokens: float
    max_tokens: int | None
    priority: int
    booked_s: float
    first_token_s: float | None = None
    engine_id: str | None = None  # its id inside the engine, once a snapshot showed it


class InstanceView:
    """One instance as it stands. Owned by :class:`FleetView`; read by estimators and the router.

    ``engine`` is None while nothing can be replayed; ``stale`` tells that state was there but is too old;
    ``problem`` says in words what is wrong with the state, for people.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.engine: ReplayedEngine | None = None
        self.stale = False
        self.problem: str | None = None
        self.snapshot: Snapshot | None = None
        self.snapshot_age_s: float | None = None
        self.num_outstanding = 0
        self.healthy = True
        self.draining = False
        self.arrival_rate_per_s = 0.0
        calibration = instance.calibration
        self.ttft_ratio_p90 = DEFAULT_TTFT_RATIO_P90 if calibration is None else calibration.ttft_ratio_p90
        self.ledger: dict[str, LedgerEntry] = {}
        self.released: dict[str, float] = {}
        self.aged_to_s = 0.0
        self.fresh_until_s = 0.0
        self.snapshot_is_new = False
        self.rate_at_s = 0.0
        self.ledger_ids: dict[str, str | None] = {}  # engine id -> ledger id, of the requests last shown

    def arrival_rate_at(self, now: float) -> float:
        """Bookings per second, averaged over the last ten seconds or so; fades while nothing is booked."""
        return self.arrival_rate_per_s * math.exp(-max(now - self.rate_at_s, 0.0) / _ARRIVAL_RATE_WINDOW_S)


class FleetView:
    """Snapshots and bookings in, engines aged to ``now`` out."""

    def __init__(
        self,
        instances: Sequence[Instance],
        *,
        stale_after_s: float = 2.0,
        default_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
    ) -> None:
        """``default_output_tokens`` is expected of requests that other routers sent."""
        self.views = [InstanceView(instance) for instance in instances]
        self._index = {instance.id: index for index, instance in enumerate(instances)}
        self._stale_after_s = stale_after_s
        self._default_output_tokens = default_output_tokens
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
        view.snapshot = snapshot
        view.snapshot_is_new = True
        view.problem = _mismatch(view.instance, snapshot)

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
    ) -> None:
        """Enter a request that is about to be sent. Raises EngineInputError when its id is booked already."""
        if request_id in self._ledger:
            raise EngineInputError("request_id", f"'{request_id}' is booked already")
        index = self._index[instance_id]
        entry = LedgerEntry(
            request_id, index, prompt_tokens, predicted_output_tokens, max_tokens, priority, booked_s=now
        )
        view = self.views[index]
        self._ledger[request_id] = view.ledger[request_id] = entry
        view.num_outstanding += 1
        view.arrival_rate_per_s, view.rate_at_s = view.arrival_rate_at(now) + 1 / _ARRIVAL_RATE_WINDOW_S, now
        if view.engine is not None:
            self._advance(view, now)
            self._submit(view, entry)

    def first_token_seen(self, request_id: str, now: float) -> None:
        """Note that the answer has begun, so that a later snapshot without the request means that it ended."""
        entry = self._ledger.get(request_id)
        if entry is not None and entry.first_token_s is None:
            entry.first_token_s = now

    def release(self, request_id: str, now: float) -> bool:
        """Take a request out of the ledger, whatever its end was. Idempotent: True only the first time."""
        entry = self._ledger.pop(request_id, None)
        if entry is None:
            return False
        view = self.views[entry.index]
        del view.ledger[request_id]
        view.num_outstanding -= 1
        engine_id = entry.engine_id or request_id
        view.released[request_id] = now
        if view.engine is not None:
            view.engine.cancel(engine_id)
        return True

    # ------------------------------------------------------------ ageing

    def age(self, now: float) -> None:
        """Replay every engine to ``now``, from its newest snapshot where one has come in."""
        members_changed = self._group is None
        for view in self.views:
            snapshot = view.snapshot
            if snapshot is None:
                continue
            had_engine = view.engine is not None
            if view.snapshot_is_new:
                self._rebuild(view, snapshot, now)
            view.snapshot_age_s = max(now - snapshot.engine_s, 0.0)
            if now > view.fresh_until_s and self._is_overdue(view, snapshot, now):
                view.stale, view.engine = True, None
            elif view.stale:
                view.stale = False
                self._rebuild(view, snapshot, now)
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

    def _is_overdue(self, view: InstanceView, snapshot: Snapshot, now: float) -> bool:
        # An idle engine has nothing to publish: its silence counts once a request sent to it should have shown.
        if snapshot.running or snapshot.waiting:
            return True
        return any(
            entry.engine_id is None and now - entry.booked_s > self._stale_after_s for entry in view.ledger.values()
        )

    def _advance(self, view: InstanceView, now: float) -> None:
        if view.engine is not None and now > view.aged_to_s:
            view.engine.advance(now - view.aged_to_s)
            view.aged_to_s = now

    def _rebuild(self, view: InstanceView, snapshot: Snapshot, now: float) -> None:
        view.snapshot_is_new = False
        start_s = snapshot.engine_s if snapshot.batch_start_s is None else snapshot.batch_start_s
        view.fresh_until_s = snapshot.engine_s + self._stale_after_s
        step_time = view.instance.step_time
        if step_time is None:
            return  # a state without a step time cannot be replayed
        _forget_before(view.released, now - _REMEMBER_RELEASED_S)
        try:
            state = self._complete(view, snapshot, step_time)
            if view.engine is None:
                view.engine = ReplayedEngine.from_state(state, step_time)
            else:
                view.engine.load(state)
        except EngineInputError as error:
            view.engine, view.problem = None, f"snapshot {snapshot.sequence} cannot be replayed: {error}"
            return
        view.aged_to_s = start_s
        view.fresh_until_s = max(snapshot.engine_s, start_s + state.residual_s) + self._stale_after_s
        for entry in view.ledger.values():
            ended = entry.first_token_s is not None and snapshot.engine_s > entry.first_token_s
            if entry.engine_id is None and not ended:
                self._advance(view, min(entry.booked_s, now))
                self._submit(view, entry)
        self._advance(view, now)

    def _submit(self, view: InstanceView, entry: LedgerEntry) -> None:
        if view.engine is None:
            return
        try:
            view.engine.submit(
                EngineRequest(
                    request_id=entry.request_id,
                    prompt_tokens=entry.prompt_tokens,
                    target_output_tokens=survival_target_tokens(entry.predicted_output_tokens, 0, entry.max_tokens),
                    max_tokens=entry.max_tokens,
                    priority=entry.priority,
                )
            )
        except EngineInputError as error:  # it stays in the ledger: the instance has it, only the replay has not
            view.problem = f"request {entry.request_id} cannot be replayed: {error}"

    def _complete(self, view: InstanceView, snapshot: Snapshot, step_time: StepTime) -> EngineState:
        """The state at the end of the batch in flight, whose duration is the residual.

        vLLM raises ``num_computed_tokens`` in ``schedule()`` but appends the output in the update: a request whose
        computed tokens equal its tokens gets one output here, and those that thereby end leave with their blocks.
        """
        self._match_ledger(view, snapshot)
        max_model_len = snapshot.limits.max_model_len
        chunks: list[tuple[int, int, bool]] = []
        free_blocks = snapshot.free_blocks
        running: list[EngineRequest] = []
        for r in snapshot.running:
            output_tokens = r.output_tokens
            tokens = r.prompt_tokens + output_tokens
            if r.scheduled_tokens > 0:
                context = r.computed_tokens - r.scheduled_tokens
                chunks.append((r.scheduled_tokens, context, output_tokens > 0 and context == tokens - 1))
                if r.computed_tokens == tokens:
                    output_tokens += 1
                    tokens += 1
            ended = 0 < r.max_tokens <= output_tokens or tokens >= max_model_len
            if ended or view.ledger_ids[r.request_id] in view.released:
                free_blocks += r.num_blocks
            else:
                running.append(self._resident(view, r, output_tokens))
        waiting = [
            self._resident(view, r, r.output_tokens)
            for r in snapshot.waiting
            if view.ledger_ids[r.request_id] not in view.released
        ]
        return EngineState(
            limits=snapshot.limits,
            running=running,
            waiting=waiting,
            residual_s=batch_time_s(step_time, chunks) if chunks else 0.0,
            free_blocks=free_blocks,
        )

    def _match_ledger(self, view: InstanceView, snapshot: Snapshot) -> None:
        """Find the ledger's names of the requests shown; names once found are kept while they are shown."""
        known, found = view.ledger_ids, {}
        for r in (*snapshot.running, *snapshot.waiting):
            engine_id = r.request_id
            ledger_id = known.get(engine_id)
            if ledger_id is None:
                ledger_id = _ledger_id(engine_id, view.ledger, view.released)
                entry = view.ledger.get(ledger_id) if ledger_id is not None else None
                if entry is not None:
                    entry.engine_id = engine_id
            found[engine_id] = ledger_id
        view.ledger_ids = found

    def _resident(self, view: InstanceView, r: SnapshotRequest, output_tokens: int) -> EngineRequest:
        ledger_id = view.ledger_ids[r.request_id]
        entry = view.ledger.get(ledger_id) if ledger_id is not None else None
        predicted_tokens = self._default_output_tokens if entry is None else entry.predicted_output_tokens
        return EngineRequest(
            request_id=r.request_id,
            prompt_tokens=r.prompt_tokens,
            computed_tokens=r.computed_tokens,
            output_tokens=output_tokens,
            target_output_tokens=survival_target_tokens(predicted_tokens, output_tokens, r.max_tokens),
            max_tokens=r.max_tokens or None,
            priority=r.priority,
            arrival_s=r.arrival_s,
            num_blocks=r.num_blocks,
        )


def _forget_before(released: dict[str, float], before_s: float) -> None:
    """Drop the releases older than ``before_s``; they stand in the order of their time."""
    while released:
        request_id = next(iter(released))
        if released[request_id] >= before_s:
            return
        del released[request_id]


def _ledger_id(engine_id: str, *ledgers: Container[str]) -> str | None:
    """The ledger's name of a request that the engine calls ``cmpl-<name>-0`` or the like."""
    name = engine_id
    for prefix in _ENGINE_ID_PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    for candidate in (engine_id, name, name.rpartition("-")[0], name.rpartition("-")[0].rpartition("-")[0]):
        for ledger in ledgers:
            if candidate in ledger:
                return candidate
    return None


def _mismatch(instance: Instance, snapshot: Snapshot) -> str | None:
    """What the snapshot says of the engine that the configuration does not, in words."""
    if instance.limits is not None and instance.limits != snapshot.limits:
        differing = [
            name
            for name in snapshot.limits.__struct_fields__
            if getattr(snapshot.limits, name) != getattr(instance.limits, name)
        ]
        return f"the engine's limits differ from the configured ones: {', '.join(differing)}"
    if not f"{snapshot.engine_version}.".startswith(f"{instance.engine}."):  # vllm-0.32 covers vllm-0.32.0
        return f"the engine is {snapshot.engine_version}, the configuration says {instance.engine}"
    return None
