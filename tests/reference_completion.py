"""From a snapshot to an engine between steps, in plain Python: what the native ``load_snapshot`` is held against."""

from __future__ import annotations

from headway._core import LengthRule, batch_time_s
from headway.fleet import InstanceView
from headway.types import EngineRequest, EngineState, Snapshot, SnapshotRequest, StepTime


def complete(
    view: InstanceView, snapshot: Snapshot, step_time: StepTime, rule: LengthRule, default_output_tokens: float
) -> EngineState:
    """The state at the end of the batch in flight, whose duration is the residual; of an asynchronous engine the state
    at that batch's start.

    vLLM raises ``num_computed_tokens`` in ``schedule()`` but appends the output in the update: a request whose
    computed tokens equal its tokens gets one output here, and those that thereby end leave with their blocks.
    """
    limits, released = snapshot.limits, view.released
    in_flight = limits.async_scheduling
    chunks: list[tuple[int, int, bool]] = []
    departed: list[tuple[int, int, bool]] = []
    free_blocks = snapshot.free_blocks
    running: list[EngineRequest] = []
    for r, shared_blocks in zip(snapshot.running, _shared_blocks(snapshot), strict=True):
        output_tokens = r.output_tokens
        has_left = view.ledger_ids[r.request_id] in released
        if r.scheduled_tokens > 0 and not in_flight:
            chunks.append(_chunk(r))
            output_tokens += r.computed_tokens == r.prompt_tokens + output_tokens
        elif r.scheduled_tokens > 0 and has_left:
            departed.append(_chunk(r))
        ended = 0 < r.max_tokens <= output_tokens or r.prompt_tokens + output_tokens >= limits.max_model_len
        if has_left or (ended and not in_flight):
            free_blocks += r.num_blocks - shared_blocks
        else:
            running.append(_resident(view, r, output_tokens, rule, default_output_tokens, shared_blocks, in_flight))
    waiting = [
        _resident(view, r, r.output_tokens, rule, default_output_tokens, r.shared_blocks)
        for r in snapshot.waiting
        if view.ledger_ids[r.request_id] not in released
    ]
    return EngineState(
        limits=limits,
        running=running,
        waiting=waiting,
        residual_s=batch_time_s(step_time, chunks) if chunks else 0.0,
        free_blocks=free_blocks,
        departed=tuple(departed),
    )


def _shared_blocks(snapshot: Snapshot) -> list[int]:
    """Of each running request's blocks those that count at another one.

    A block that several requests hold is counted at each of them in a snapshot, so all blocks together are too many:
    as many too many as are shared. They count at the eldest; from the newest on they are taken off, first from those
    blocks that a request found in the prefix cache.
    """
    limits = snapshot.limits
    shared = [0] * len(snapshot.running)
    held = sum(r.num_blocks for r in snapshot.running) + sum(r.num_blocks for r in snapshot.waiting)
    surplus = held + snapshot.free_blocks - (limits.num_blocks - 1)
    if surplus <= 0 or not limits.prefix_caching:
        return shared
    for only_found in (True, False):
        for place in range(len(shared) - 1, -1, -1):
            r = snapshot.running[place]
            most = min(r.num_blocks, r.cached_tokens // limits.block_size if only_found else r.num_blocks)
            more = min(max(most - shared[place], 0), surplus)
            shared[place] += more
            surplus -= more
    return shared


def _chunk(r: SnapshotRequest) -> tuple[int, int, bool]:
    """Its share of the batch in flight: tokens, context before, whether it is a decode."""
    context = r.computed_tokens - r.scheduled_tokens
    is_decode = r.scheduled_tokens == 1 and r.output_tokens > 0 and context == r.prompt_tokens + r.output_tokens - 1
    return r.scheduled_tokens, context, is_decode


def _resident(  # noqa: PLR0917
    view: InstanceView,
    r: SnapshotRequest,
    output_tokens: int,
    rule: LengthRule,
    default_output_tokens: float,
    shared_blocks: int,
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
        shared_blocks=shared_blocks,
        cached_tokens=r.cached_tokens,
        scheduled_tokens=scheduled_tokens,
    )
