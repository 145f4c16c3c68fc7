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

from headway.types import EngineRequest
from random_states import Workload

RECORDINGS = Path(__file__).parent / "recordings" / "scheduler-vllm-0.32.0.jsonl.gz"


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

    def submit(self, request: EngineRequest) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def step(self) -> StepResult: ...
    @property
    def running(self) -> Sequence[HasId]: ...
    @property
    def waiting(self) -> Sequence[HasId]: ...


def run_rows(engine: Engine, workload: Workload) -> Iterator[Row]:
    """Play a workload on an engine, without end."""
    submissions, cancels = list(workload.submissions), list(workload.cancels)
    step = 0
    while True:
        while submissions and submissions[0][0] <= step:
            engine.submit(submissions.pop(0)[1])
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


def load_recordings(path: Path = RECORDINGS) -> list[Recording]:
    """The recordings kept in the repository."""
    with gzip.open(path, "rb") as lines:
        return [msgspec.json.decode(line, type=Recording) for line in lines]
