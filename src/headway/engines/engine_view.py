"""A simulated engine's requests as it has to publish them: right after a step was scheduled, before its update.

The replayed engine schedules and updates in one go and then shows itself between steps, so this mirror applies the two
halves of each batch apart: ``schedule`` raises computed tokens and blocks and admits or preempts, ``update`` appends
outputs and lets ended requests go when the batch ends. It decides nothing (which request runs is the replayed engine's
word) and costs one pass over the batch per half.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from headway.types import EngineLimits, SnapshotRequest


class ScheduledBatch(Protocol):
    """What ``schedule`` needs of a token batch, as after scheduling."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]: ...
    @property
    def cached_tokens(self) -> dict[str, int]: ...
    @property
    def preempted(self) -> Sequence[str]: ...
    @property
    def finished(self) -> Sequence[str]: ...
    @property
    def free_blocks(self) -> int: ...


class Resident:
    """One request inside the engine. Counts are tokens, as in :class:`headway.types.SnapshotRequest`."""

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "computed_tokens",
        "max_tokens",
        "num_blocks",
        "output_tokens",
        "priority",
        "prompt_tokens",
        "published",
        "request_id",
        "scheduled_tokens",
        "shared_blocks",
    )

    def __init__(
        self, *, request_id: str, prompt_tokens: int, max_tokens: int, priority: int, arrival_s: float
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.arrival_s = arrival_s
        self.cached_tokens = 0  # found in the prefix cache; of a waiting one, those last found there
        self.shared_blocks = 0  # of a waiting one: of these, in blocks, what residents hold
        self.computed_tokens = 0
        self.output_tokens = 0
        self.num_blocks = 0
        self.scheduled_tokens = 0
        self.published: SnapshotRequest | None = None  # kept while nothing changed, as for most of the waiting


ResidentT = TypeVar("ResidentT", bound=Resident)


class EngineView(Generic[ResidentT]):
    """Running and waiting requests in engine order, and the free blocks, as of the last half step."""

    def __init__(self, limits: EngineLimits) -> None:
        self.free_blocks = limits.num_blocks - 1
        self.running: dict[str, ResidentT] = {}
        self.waiting: list[ResidentT] = []
        self._block_size = limits.block_size
        self._by_priority = limits.policy == "priority"
        self._batch: list[ResidentT] = []
        self._finished: frozenset[str] = frozenset()

    def submit(self, resident: ResidentT) -> None:
        """Queue a new request by the engine's policy."""
        if self._by_priority:
            self._insert(resident)
        else:
            self.waiting.append(resident)

    def remove(self, resident: ResidentT, num_freed: int) -> None:
        """Take a request out, also from the batch in flight; that frees ``num_freed`` blocks at once."""
        if self.running.pop(resident.request_id, None) is not None:
            if resident.scheduled_tokens:
                self._batch.remove(resident)
        else:
            with suppress(ValueError):  # it may have ended already
                self.waiting.remove(resident)
        self.free_blocks += num_freed
        resident.num_blocks = 0

    def schedule(self, batch: ScheduledBatch) -> list[ResidentT]:
        """Apply what scheduling did; returns the requests of the batch in scheduling order."""
        for request_id in batch.preempted:
            self._preempt(self.running.pop(request_id))
        scheduled = []
        running, block_size = self.running, self._block_size
        for request_id, num_tokens in batch.num_scheduled_tokens.items():
            resident = running.get(request_id)
            if resident is None:
                resident = running[request_id] = self._admit(request_id)
                resident.shared_blocks = 0
                resident.computed_tokens = resident.cached_tokens = batch.cached_tokens.get(request_id, 0)
            computed = resident.computed_tokens + num_tokens
            resident.computed_tokens = computed
            resident.scheduled_tokens = num_tokens
            resident.shared_blocks = 0
            if resident.num_blocks * block_size < computed:
                resident.num_blocks = -(-computed // block_size)
            resident.published = None
            scheduled.append(resident)
        self.free_blocks = batch.free_blocks
        self._batch, self._finished = scheduled, frozenset(batch.finished)
        return scheduled

    def update(self, free_blocks: int) -> list[tuple[ResidentT, bool]]:
        """Apply the end of the batch in flight, which leaves so many blocks free; returns every request that got an
        output, and whether it ended."""
        produced = []
        for resident in self._batch:
            resident.scheduled_tokens = 0
            resident.published = None
            if resident.computed_tokens < resident.prompt_tokens + resident.output_tokens:
                continue
            resident.output_tokens += 1
            ended = resident.request_id in self._finished
            if ended:
                del self.running[resident.request_id]
                resident.num_blocks = 0
            produced.append((resident, ended))
        self._batch = []
        self.free_blocks = free_blocks
        return produced

    def publish(self) -> tuple[list[SnapshotRequest], list[SnapshotRequest]]:
        """The running and the waiting requests as they stand in a snapshot."""
        return (
            [resident.published or _published(resident) for resident in self.running.values()],
            [resident.published or _published(resident) for resident in self.waiting],
        )

    def _admit(self, request_id: str) -> ResidentT:
        for index, resident in enumerate(self.waiting):  # nearly always the first
            if resident.request_id == request_id:
                return self.waiting.pop(index)
        raise KeyError(request_id)

    def _preempt(self, resident: ResidentT) -> None:
        resident.computed_tokens = resident.num_blocks = resident.scheduled_tokens = resident.cached_tokens = 0
        resident.published = None
        if self._by_priority:
            self._insert(resident)
        else:
            self.waiting.insert(0, resident)

    def _insert(self, resident: ResidentT) -> None:
        self.waiting.insert(bisect_right(self.waiting, _priority_key(resident), key=_priority_key), resident)


def _priority_key(resident: Resident) -> tuple[int, float]:
    return (resident.priority, resident.arrival_s)


def _published(resident: Resident) -> SnapshotRequest:
    resident.published = SnapshotRequest(
        resident.request_id,
        resident.prompt_tokens,
        resident.computed_tokens,
        resident.output_tokens,
        resident.num_blocks,
        resident.max_tokens,
        resident.priority,
        resident.arrival_s,
        resident.scheduled_tokens,
        resident.cached_tokens,
        resident.shared_blocks,
    )
    return resident.published
