"""vLLM's scheduler as a snapshot: what is read of it, and the bytes that come of that.

What a step can change is read anew for every running request, column by column, which is how Python does it fastest;
the waiting, of which most stay as they are, are encoded again only when one of them came, went or changed. What is read
is vLLM's own state, never a copy that could drift: nothing here decides, counts along or guesses. A version or feature
that the replay was not held against is named in every snapshot.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from headway.snapshot import wire
from headway.types import MAX_COUNT, EngineLimits

#: vLLM versions whose scheduler the replay was compared with, step by step (``make conformance``).
CHECKED_VERSIONS: Final = ("0.32.0",)

#: A request's row: the fields of :class:`headway.types.SnapshotRequest` in their order.
Row = Sequence[Any]
_COMPUTED, _OUTPUT, _BLOCKS, _PRIORITY, _ARRIVAL, _CACHED, _SHARED = 2, 3, 4, 6, 7, 9, 10
_FIXED = (0, 1, 5, _PRIORITY, _ARRIVAL, _CACHED)  # of a running request: id, prompt, max_tokens, priority, arrival, …

_computed_tokens = attrgetter("num_computed_tokens")
_output_tokens = attrgetter("num_output_tokens")
_ref_cnt = attrgetter("ref_cnt")
_priority_order = itemgetter(_PRIORITY, _ARRIVAL, 0)
_encode = msgspec.msgpack.Encoder().encode


class VllmRequest(Protocol):
    """What is read of vLLM's ``Request``. ``headway_row`` is ours: how the request is shown while it waits, hung on it
    so that it goes when the request goes."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    num_stale_output_tokens: int
    is_prefill_chunk: bool
    max_tokens: int
    priority: int
    arrival_time: float
    block_hashes: list[bytes]
    headway_row: list[Any]

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...


class NewRequestData(Protocol):
    """A request as it was admitted, with the tokens it had from the prefix cache."""

    req_id: str
    num_computed_tokens: int


class CachedRequestData(Protocol):
    """Requests scheduled again; those resumed after a preemption are named apart."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    num_computed_tokens: list[int]


class VllmSchedulerOutput(Protocol):
    """What is read of vLLM's ``SchedulerOutput``."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Sequence[NewRequestData]
    scheduled_cached_reqs: CachedRequestData


class VllmOutput(Protocol):
    """What is read of vLLM's ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: Sized
    finish_reason: object


class VllmStepOutputs(Protocol):
    """What is read of vLLM's ``EngineCoreOutputs``."""

    outputs: Sequence[VllmOutput]


class SchedulerState:
    """One scheduler of vLLM, read field by field.

    Raises:
        AttributeError: this vLLM keeps its state elsewhere.
    """

    def __init__(self, scheduler: Any, *, wall_offset_s: float) -> None:
        """``wall_offset_s`` is what the wall clock is ahead of the monotonic one: arrivals are told by the former."""
        self.scheduler = scheduler
        self._wall_offset_s = wall_offset_s
        manager = scheduler.kv_cache_manager
        self._caches = manager.enable_caching
        self._lookup = manager.coordinator.find_longest_cache_hit
        self._can_look_up = manager.prefix_cache_lookup_enabled
        self._free_blocks = manager.block_pool.get_num_free_blocks
        self._block_tables = [group.req_to_blocks for group in manager.coordinator.single_type_managers]
        self._by_priority = scheduler.policy.value == "priority"
        self.block_size = int(scheduler.block_size)
        self._next_lookup = 0
        self._running_requests: list[VllmRequest] = []
        self._fixed_columns: list[list[Any]] = [[] for _ in _FIXED]
        self._preempted: list[VllmRequest] = []
        self._running_changed = True
        self._waiting_sizes = 0, 0
        self._waiting_changed = True
        self._waiting: list[Row] = []

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return int(self._free_blocks())

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self.scheduler.running)

    def arrival_s(self, request: VllmRequest) -> float:
        """When a request came to the server, monotonic seconds."""
        return request.arrival_time - self._wall_offset_s

    def request(self, request_id: str) -> VllmRequest:
        """A request that is in the engine. Raises KeyError."""
        found: VllmRequest = self.scheduler.requests[request_id]
        return found

    def admitted(self, output: VllmSchedulerOutput) -> list[tuple[str, int]]:
        """(request id, tokens) of the requests admitted by this batch that were found in the prefix cache."""
        found = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        again = output.scheduled_cached_reqs
        if again.resumed_req_ids:
            counts = zip(again.req_ids, again.num_computed_tokens, strict=True)
            found += [(name, tokens) for name, tokens in counts if name in again.resumed_req_ids]
        for request_id, tokens in found:
            self._row(self.request(request_id))[_CACHED] = tokens
            self._running_changed = self._waiting_changed = True
        return [(request_id, tokens) for request_id, tokens in found if tokens]

    def queue_changed(self) -> None:
        """Note that requests came or were taken out. (Who is admitted, preempted or ends is noticed without that.)"""
        self._waiting_changed = True

    def preempted(self, request: VllmRequest) -> None:
        """Note that a request lost its blocks and waits again."""
        row = self._row(request)
        row[_COMPUTED], row[_BLOCKS] = 0, 0
        self._preempted.append(request)

    def running(self, scheduled: Mapping[str, int]) -> list[Row]:
        """The running requests in admission order; ``scheduled`` are the tokens of the batch in flight by request."""
        requests: list[VllmRequest] = self.scheduler.running
        if self._running_changed or requests != self._running_requests:
            rows = [self._row(request) for request in requests]
            self._fixed_columns = [[row[place] for row in rows] for place in _FIXED]
            self._running_requests, self._running_changed = list(requests), False
        ids, prompts, max_tokens, priorities, arrivals, cached = self._fixed_columns
        computed, outputs = map(_computed_tokens, requests), map(_output_tokens, requests)
        blocks, shares = self._num_blocks(ids), map(scheduled.get, ids, repeat(0))
        columns = (ids, prompts, computed, outputs, blocks, max_tokens, priorities, arrivals, shares, cached)
        return list(zip(*columns, strict=True))

    def waiting(self) -> list[Row]:
        """The waiting requests in the order in which they would be admitted; the same list while nothing changed.

        Most of the time nothing did, and then none of them is touched: they lie far apart in memory.
        """
        scheduler = self.scheduler
        # Those that hold blocks (loaded from elsewhere, or between two turns) are always served first.
        ahead = scheduler.kv_holding_waiting
        queue = scheduler.waiting._heap if self._by_priority else scheduler.waiting
        if self._preempted:
            self._settle()
        if self._caches and (ahead or queue):
            self._look_up([*ahead] or queue)
        sizes = len(ahead), len(queue)
        if self._waiting_changed or sizes != self._waiting_sizes:
            rows: list[Row] = [self._row(request) for request in queue]
            if self._by_priority:
                rows.sort(key=_priority_order)
            self._waiting = [*(self._row(request) for request in ahead), *rows]
            self._waiting_sizes, self._waiting_changed = sizes, False
        return self._waiting

    def _num_blocks(self, ids: Iterable[str]) -> Iterable[int]:
        tables = self._block_tables
        if len(tables) == 1:
            return map(len, map(tables[0].__getitem__, ids))
        return map(self._num_blocks_of, ids)

    def _row(self, request: VllmRequest) -> list[Any]:
        row: list[Any] | None = getattr(request, "headway_row", None)
        if row is None:
            priority = max(-MAX_COUNT, min(request.priority, MAX_COUNT))
            row = [request.request_id, request.num_prompt_tokens, request.num_computed_tokens]
            row += [request.num_output_tokens, self._num_blocks_of(request.request_id), request.max_tokens, priority]
            row += [self.arrival_s(request), 0, *self._found(request)]
            request.headway_row = row
        return row

    def _num_blocks_of(self, request_id: str) -> int:
        return sum(len(table.get(request_id, ())) for table in self._block_tables)

    def _settle(self) -> None:
        """Read the outputs of requests preempted lately: those of a batch in flight come while they wait already."""
        for request in self._preempted:
            row = self._row(request)
            row[_OUTPUT] = request.num_output_tokens
            if not request.num_computed_tokens:  # it may run again already
                row[_CACHED], row[_SHARED] = self._found(request)
        self._preempted = [request for request in self._preempted if request.num_stale_output_tokens > 0]
        self._waiting_changed = True

    def _look_up(self, requests: Sequence[VllmRequest]) -> None:
        """Look again what the prefix cache has of the first in the queue, and of one other, each time the next."""
        self._next_lookup = (self._next_lookup + 1) % len(requests)
        for request in {requests[0], requests[self._next_lookup]}:
            row, found = self._row(request), self._found(request)
            if (row[_CACHED], row[_SHARED]) != found:
                row[_CACHED], row[_SHARED] = found
                self._waiting_changed = True

    def _found(self, request: VllmRequest) -> tuple[int, int]:
        """Tokens that a waiting request would find in the prefix cache, and how many of their blocks somebody holds."""
        if not self._caches or request.num_computed_tokens or not self._can_look_up(request):
            return 0, 0
        groups, tokens, *_ = self._lookup(request.block_hashes, request.num_tokens - 1)
        # Each is asked: of equal blocks vLLM keeps several, and another one than that found may be in use.
        num_free = sum(list(map(_ref_cnt, blocks)).count(0) for blocks in groups)
        return int(tokens), sum(map(len, groups)) - num_free


class _Head(Struct):
    """The part of a :class:`headway.types.Snapshot` that seldom changes."""

    instance_id: str
    engine_version: str
    engine_start: int
    limits: EngineLimits
    unchecked: list[str]
    waiting: list[Row]


class _Tail(Struct):
    """The part that always does."""

    sequence: int = 0
    engine_s: float = 0.0
    batch_start_s: float | None = None
    free_blocks: int = 0
    running: list[Row] = []


class SnapshotEncoder:
    """Makes the bytes of one engine's snapshots: those of a whole :class:`headway.types.Snapshot`, in two parts."""

    def __init__(
        self,
        state: SchedulerState,
        *,
        instance_id: str,
        engine_version: str,
        engine_start: int,
        limits: EngineLimits,
        unchecked: list[str],
    ) -> None:
        self._state = state
        self._head = _Head(instance_id, engine_version, engine_start, limits, unchecked, [])
        self._tail = _Tail()
        self._waiting: list[Row] | None = None
        self._encoded_head, self._head_checksum = b"", 0

    @property
    def sequence(self) -> int:
        """Sequence number of the last snapshot."""
        return self._tail.sequence

    def encode(self, scheduled: Mapping[str, int], batch_start_s: float | None, engine_s: float) -> bytes:
        """The scheduler as it stands, for any transport. Times are monotonic seconds."""
        state, tail = self._state, self._tail
        waiting = state.waiting()
        if waiting is not self._waiting:
            self._encode_head(waiting)
        tail.running = state.running(scheduled)
        tail.free_blocks = state.free_blocks
        tail.batch_start_s, tail.engine_s = batch_start_s, engine_s
        tail.sequence += 1
        return wire.framed(self._encoded_head, self._head_checksum, memoryview(_encode(tail))[1:])

    def _encode_head(self, waiting: list[Row]) -> None:
        """Head and tail are two small maps; as one, their entries follow a byte that counts them all."""
        self._waiting = None
        self._head.waiting = waiting
        count = len(_Head.__struct_fields__) + len(_Tail.__struct_fields__)
        assert count < 16, "a map of up to 15 entries begins with one byte"
        self._encoded_head = bytes([0x80 | count]) + _encode(self._head)[1:]
        self._head_checksum = zlib.crc32(self._encoded_head)
        self._waiting = waiting
