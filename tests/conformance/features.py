"""Which rules of the scheduler a recorded run really exercised.

A limit counts as exercised where taking it away changes what happens: the Python reference, given the same workload
under the neutral limit, leaves the record. A comparison over workloads that never reach a rule would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from conformance.pool_rules import POOLS
from headway.types import EngineLimits, EngineRequest
from random_states import Workload
from recorded_runs import ANY_CLOCK, Record, Row, run_rows
from reference_pool import ReferencePool
from reference_scheduler import ReferenceEngine

AMPLE = 1 << 20
AMPLE_BLOCKS = 1 << 15  # more than all requests of a workload fill

FEATURES = (
    "block shortage",
    "null block",
    "cancel",
    "arrivals over time",
    "chunked prefill off",
    "fcfs",
    "long prefill threshold",
    "long prefill threshold ignored by a lone request",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "preemption (fcfs)",
    "preemption (priority)",
    "priority",
    "recompute after preemption",
    "reserve_full_isl off",
    "reserve_full_isl on",
    "several victims in one step",
    "step that only preempts",
    "stop by target",
    "watermark",
)

#: Those that only a prefix cache has.
CACHE_FEATURES = tuple(POOLS)

#: Those that only an asynchronous scheduler has.
ASYNC_FEATURES = (
    "a batch is scheduled before the outcome of the one before it",
    "an end by max_tokens is foreseen",
    "an end by a stop token is not",
    "an output comes after its request was preempted",
    "a request ends after it was preempted",
)


def features_of(limits: EngineLimits) -> tuple[str, ...]:
    """Every feature that an engine of this kind has."""
    own = ASYNC_FEATURES if limits.async_scheduling else ()
    return (*FEATURES, *own, *(CACHE_FEATURES if limits.prefix_caching else ()))


def exercised(workload: Workload, record: Record) -> set[str]:
    """The features without which this record would look different, or which it shows."""
    found = set(_seen(workload, record))
    pool = ReferencePool if workload.limits.prefix_caching else None
    for feature, variant in _without(workload):
        if _leaves(record, variant, pool):
            found.add(feature)
    if pool is not None:
        found.update(feature for feature, lacking in POOLS.items() if _leaves(record, workload, lacking))
    return found


def _leaves(record: Record, workload: Workload, pool: type[ReferencePool] | None) -> bool:
    """Whether the reference, given this workload and pool, does something else than was recorded."""
    rows = run_rows(ReferenceEngine(workload.limits, ANY_CLOCK, pool=pool), workload)
    return any(_decisions(real) != _decisions(row) for real, row in zip(record.rows, rows, strict=False))


def _decisions(row: Row) -> Row:
    """A row without the number of free blocks, which differs trivially where there are more blocks."""
    return msgspec.structs.replace(row, free_blocks=0)


def _seen(workload: Workload, record: Record) -> Iterator[str]:
    limits = workload.limits
    threshold = limits.long_prefill_token_threshold
    preempted: set[str] = set()
    before: set[str] = set()
    for row in record.rows:
        if limits.async_scheduling and before & set(row.preempted):
            yield "an output comes after its request was preempted"
        if set(row.preempted) & set(row.finished):
            yield "a request ends after it was preempted"
        before = {request_id for request_id, _ in row.num_scheduled_tokens}
        if row.preempted:
            yield f"preemption ({limits.policy})"
        if len(row.preempted) > 1:
            yield "several victims in one step"
        if row.preempted and not row.num_scheduled_tokens:
            yield "step that only preempts"
        if any(request_id in preempted for request_id, _ in row.num_scheduled_tokens):
            yield "recompute after preemption"
        if threshold and any(num_tokens > threshold for _, num_tokens in row.num_scheduled_tokens):
            yield "long prefill threshold ignored by a lone request"
        preempted.update(row.preempted)


def _without(workload: Workload) -> Iterator[tuple[str, Workload]]:
    limits = workload.limits

    def under(**changes: object) -> Workload:
        return msgspec.structs.replace(workload, limits=msgspec.structs.replace(limits, **changes))

    def with_requests(change: Callable[[EngineRequest], EngineRequest]) -> Workload:
        changed = [(step, change(request)) for step, request in workload.submissions]
        return msgspec.structs.replace(workload, submissions=changed)

    if limits.async_scheduling:
        yield "a batch is scheduled before the outcome of the one before it", under(async_scheduling=False)
        yield "an end by max_tokens is foreseen", with_requests(_stopped_by_token)
        yield "an end by a stop token is not", with_requests(_stopped_by_limit)
    other = {"fcfs": "priority", "priority": "fcfs"}
    yield limits.policy, under(policy=other[limits.policy])
    yield "block shortage", under(num_blocks=AMPLE_BLOCKS)
    yield "null block", under(num_blocks=limits.num_blocks + 1)
    yield "max_num_seqs", under(max_num_seqs=AMPLE)
    yield "max_num_batched_tokens", under(max_num_batched_tokens=AMPLE)
    yield (
        "reserve_full_isl " + ("on" if limits.reserve_full_isl else "off"),
        under(reserve_full_isl=not limits.reserve_full_isl),
    )
    if limits.watermark:
        yield "watermark", under(watermark=0.0)
    if limits.long_prefill_token_threshold:
        yield "long prefill threshold", under(long_prefill_token_threshold=0)
    if not limits.chunked_prefill:
        yield "chunked prefill off", under(chunked_prefill=True)
    else:
        yield "max_model_len", under(max_model_len=AMPLE)
    if workload.cancels:
        yield "cancel", msgspec.structs.replace(workload, cancels=[])
    yield (
        "arrivals over time",
        msgspec.structs.replace(workload, submissions=[(0, request) for _, request in workload.submissions]),
    )
    yield "stop by target", with_requests(lambda request: msgspec.structs.replace(request, target_output_tokens=AMPLE))


def _stopped_by_token(request: EngineRequest) -> EngineRequest:
    """The same answer, which nothing but its stop token ends."""
    length = min(request.target_output_tokens, request.max_tokens or AMPLE)
    return msgspec.structs.replace(request, target_output_tokens=length, max_tokens=None)


def _stopped_by_limit(request: EngineRequest) -> EngineRequest:
    """The same answer, ended by ``max_tokens``."""
    length = min(request.target_output_tokens, request.max_tokens or AMPLE)
    return msgspec.structs.replace(request, max_tokens=length)
