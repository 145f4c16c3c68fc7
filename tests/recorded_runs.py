"""What the real scheduler did, step by step, and the comparison of any engine with it.

``conformance/worker.py`` writes these records, live or into ``recordings/``; the native core and the Python reference
are both held to them. A record is compared, never repaired: the first differing step is reported as it is.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from headway._core import ReplayedEngine
from headway.types import EngineLimits, EngineRequest, StepTime
from random_states import Workload, block_hashes
from reference_pool import ReferencePool
from reference_scheduler import ReferenceEngine

ANY_CLOCK = StepTime.linear(b0=1.0, b1=0.0, b2=0.0, b3=0.0)
RECORDINGS = Path(__file__).parent / "recordings"


class Row(Struct, frozen=True, array_like=True):
    """One step: tokens in batch order, victims in order, free blocks after scheduling; the queues after the update."""

    num_scheduled_tokens: list[tuple[str, int]]
    preempted: list[str]
    free_blocks: int
    finished: list[str]
    running: list[str]
    waiting: list[str]


class Record(Struct, frozen=True):
    """One workload as the scheduler of ``vllm`` (its version) ran it."""

    seed: int
    vllm: str
    rows: list[Row]


class Recording(Struct, frozen=True):
    """A record with the workload that made it, so that it needs no generator to be replayed."""

    workload: Workload
    record: Record


class Mismatch(Struct, frozen=True):
    """The first step at which an engine differs from the record."""

    step: int
    recorded: Row
    replayed: Row


class HasId(Protocol):
    @property
    def request_id(self) -> str: ...


class StepResult(Protocol):
    @property
    def num_scheduled_tokens(self) -> dict[str, int]: ...
    @property
    def preempted(self) -> list[str]: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def finished(self) -> list[str]: ...


class Engine(Protocol):
    """What the native core and the reference have in common."""

    def submit(self, request: EngineRequest, block_hashes: Sequence[int]) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def step(self) -> StepResult: ...
    @property
    def running(self) -> Sequence[HasId]: ...
    @property
    def waiting(self) -> Sequence[HasId]: ...


def native_engine(limits: EngineLimits) -> ReplayedEngine:
    """An empty native engine that looks prefixes up block by block where these limits say that prefixes are cached."""
    make = ReplayedEngine.with_block_pool if limits.prefix_caching else ReplayedEngine
    return make(limits, ANY_CLOCK)


def reference_engine(limits: EngineLimits) -> ReferenceEngine:
    """The same in plain Python."""
    return ReferenceEngine(limits, ANY_CLOCK, pool=ReferencePool if limits.prefix_caching else None)


def run_rows(engine: Engine, workload: Workload) -> Iterator[Row]:
    """Play a workload on an engine, without end."""
    submissions, cancels = list(workload.submissions), list(workload.cancels)
    step = 0
    while True:
        while submissions and submissions[0][0] <= step:
            request = submissions.pop(0)[1]
            engine.submit(request, block_hashes(workload, request))
        while cancels and cancels[0][0] <= step:
            engine.cancel(cancels.pop(0)[1])
        batch = engine.step()
        yield Row(
            list(batch.num_scheduled_tokens.items()),
            list(batch.preempted),
            batch.free_blocks,
            list(batch.finished),
            [request.request_id for request in engine.running],
            [request.request_id for request in engine.waiting],
        )
        step += 1


def first_mismatch(engine: Engine, workload: Workload, record: Record) -> Mismatch | None:
    """The first step at which the engine and the record differ; None when there is none."""
    for step, (recorded, replayed) in enumerate(zip(record.rows, run_rows(engine, workload), strict=False)):
        if recorded != replayed:
            return Mismatch(step, recorded, replayed)
    return None


def recordings_path(kind: str) -> Path:
    """Where the recordings of a kind of engine (``random_states.KINDS``) are kept."""
    name = "" if kind == "plain" else "-" + kind.replace(" with a ", "-").replace(" ", "-")
    return RECORDINGS / f"scheduler-vllm-0.32.0{name}.jsonl.gz"


def load_recordings(kind: str) -> list[Recording]:
    """The recordings kept in the repository."""
    with gzip.open(recordings_path(kind), "rb") as lines:
        return [msgspec.json.decode(line, type=Recording) for line in lines]
