"""From a snapshot taken mid-batch to an engine between steps.

An engine publishes while a batch is in flight. Here that batch is brought to its end, the requests shown are matched
with the ledger, and each resident gets the length it is expected to have. Nothing is guessed that the snapshot says.

An asynchronous engine publishes before it schedules the next batch beside the one in flight, and schedules that without
the outcome. So its batch is left in the state (``EngineRequest.scheduled_tokens``); ``ReplayedEngine.start_batch`` then
does what the engine does next, and what comes after the snapshot waits for the batch after that.
"""

from __future__ import annotations

from collections.abc import Container

from headway._core import LengthRule, batch_time_s
from headway.fleet.view import InstanceView
from headway.types import EngineRequest, EngineState, Instance, Snapshot, SnapshotRequest, StepTime

_ENGINE_ID_PREFIXES = ("chatcmpl-", "cmpl-")


def complete(
    view: InstanceView, snapshot: Snapshot, step_time: StepTime, rule: LengthRule, default_output_tokens: float
) -> EngineState:
    """The state at the end of the batch in flight, whose duration is the residual; of an asynchronous engine the state
    at that batch's start.

    vLLM raises ``num_computed_tokens`` in ``schedule()`` but appends the output in the update: a request whose
    computed tokens equal its tokens gets one output here, and those that thereby end leave with their blocks.
    """
    _match_ledger(view, snapshot)
    if snapshot.limits.async_scheduling:
        return _at_start_of_batch(view, snapshot, rule, default_output_tokens)
    max_model_len = snapshot.limits.max_model_len
    chunks: list[tuple[int, int, bool]] = []
    free_blocks = snapshot.free_blocks
    running: list[EngineRequest] = []
    for r in snapshot.running:
        output_tokens = r.output_tokens
        tokens = r.prompt_tokens + output_tokens
        if r.scheduled_tokens > 0:
            chunks.append(_chunk(r))
            if r.computed_tokens == tokens:
                output_tokens += 1
                tokens += 1
        ended = 0 < r.max_tokens <= output_tokens or tokens >= max_model_len
        if ended or view.ledger_ids[r.request_id] in view.released:
            free_blocks += r.num_blocks
        else:
            running.append(_resident(view, r, output_tokens, rule, default_output_tokens))
    return EngineState(
        limits=snapshot.limits,
        running=running,
        waiting=_waiting(view, snapshot, rule, default_output_tokens),
        residual_s=batch_time_s(step_time, chunks) if chunks else 0.0,
        free_blocks=free_blocks,
    )


def _at_start_of_batch(
    view: InstanceView, snapshot: Snapshot, rule: LengthRule, default_output_tokens: float
) -> EngineState:
    free_blocks = snapshot.free_blocks
    running: list[EngineRequest] = []
    departed: list[tuple[int, int, bool]] = []
    for r in snapshot.running:
        if view.ledger_ids[r.request_id] not in view.released:
            running.append(_resident(view, r, r.output_tokens, rule, default_output_tokens, in_flight=True))
            continue
        free_blocks += r.num_blocks
        if r.scheduled_tokens > 0:
            departed.append(_chunk(r))
    return EngineState(
        limits=snapshot.limits,
        running=running,
        waiting=_waiting(view, snapshot, rule, default_output_tokens),
        free_blocks=free_blocks,
        departed=tuple(departed),
    )


def _waiting(
    view: InstanceView, snapshot: Snapshot, rule: LengthRule, default_output_tokens: float
) -> list[EngineRequest]:
    return [
        _resident(view, r, r.output_tokens, rule, default_output_tokens)
        for r in snapshot.waiting
        if view.ledger_ids[r.request_id] not in view.released
    ]


def _chunk(r: SnapshotRequest) -> tuple[int, int, bool]:
    """Its share of the batch in flight: tokens, context before, whether it is a decode."""
    context = r.computed_tokens - r.scheduled_tokens
    is_decode = r.scheduled_tokens == 1 and r.output_tokens > 0 and context == r.prompt_tokens + r.output_tokens - 1
    return r.scheduled_tokens, context, is_decode


def _match_ledger(view: InstanceView, snapshot: Snapshot) -> None:
    """Find the ledger's names of the requests shown; names once found are kept while they are shown."""
    known, found = view.ledger_ids, {}
    for r in (*snapshot.running, *snapshot.waiting):
        engine_id = r.request_id
        ledger_id = known.get(engine_id)
        if ledger_id is None:
            ledger_id = _ledger_id(engine_id, view.ledger, view.released)
            entry = view.unseen.pop(ledger_id, None) if ledger_id is not None else None
            if entry is not None:
                entry.engine_id = engine_id
        found[engine_id] = ledger_id
    view.ledger_ids = found


def _resident(
    view: InstanceView,
    r: SnapshotRequest,
    output_tokens: int,
    rule: LengthRule,
    default_output_tokens: float,
    *,
    in_flight: bool = False,
) -> EngineRequest:
    ledger_id = view.ledger_ids[r.request_id]
    entry = view.ledger.get(ledger_id) if ledger_id is not None else None
    predicted_tokens = default_output_tokens if entry is None else entry.predicted_output_tokens
    scheduled_tokens = r.scheduled_tokens if in_flight else 0
    comes = scheduled_tokens > 0 and r.computed_tokens == r.prompt_tokens + output_tokens  # with the batch in flight
    target_tokens = rule.target_tokens(predicted_tokens, r.prompt_tokens, output_tokens + comes, r.max_tokens)
    return EngineRequest(
        request_id=r.request_id,
        prompt_tokens=r.prompt_tokens,
        computed_tokens=r.computed_tokens,
        output_tokens=output_tokens,
        target_output_tokens=target_tokens,
        max_tokens=r.max_tokens or None,
        priority=r.priority,
        arrival_s=r.arrival_s,
        num_blocks=r.num_blocks,
        cached_tokens=r.cached_tokens,
        scheduled_tokens=scheduled_tokens,
    )


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


def mismatch(instance: Instance, snapshot: Snapshot) -> str | None:
    """What the snapshot says of the engine that the configuration, or the replay, does not; in words."""
    found = []
    if instance.limits is not None and instance.limits != snapshot.limits:
        differing = [
            name
            for name in snapshot.limits.__struct_fields__
            if getattr(snapshot.limits, name) != getattr(instance.limits, name)
        ]
        found.append(f"the engine's limits differ from the configured ones: {', '.join(differing)}")
    if not f"{snapshot.engine_version}.".startswith(f"{instance.engine}."):  # vllm-0.32 covers vllm-0.32.0
        found.append(f"the engine is {snapshot.engine_version}, the configuration says {instance.engine}")
    if snapshot.unchecked:
        found.append(f"the replay was never checked on {', '.join(snapshot.unchecked)}")
    return "; ".join(found) or None
