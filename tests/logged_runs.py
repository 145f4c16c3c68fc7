"""A step log that names its requests, as a workload for a mirror of the engine and the rows it has to repeat.

Arrivals are given as the call of ``schedule()`` that first saw them and lengths are the true ones, so a mirror that
knows the rules repeats every batch. Nothing here knows clocks, and a log is never repaired to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from headway.calibrate.read_log import read_batches
from headway.engines.step_log import LoggedBatch
from headway.types import EngineLimits, EngineRequest
from random_states import Workload
from recorded_runs import Engine, run_rows


class LoggedRow(Struct, frozen=True):
    """What a log says of one batch: tokens in batch order, victims in order, free blocks after scheduling."""

    scheduled: list[tuple[str, int]]
    preempted: list[str]
    free_blocks: int


class LoggedRun(Struct, frozen=True):
    """A workload with what the real engine made of it."""

    workload: Workload
    rows: list[LoggedRow]


def load_run(path: Path) -> LoggedRun:
    """The run that a step log holds.

    Raises:
        DatasetError: the log is malformed, or names no requests.
    """
    header, batches = read_batches(path)
    limits = EngineLimits(**{name: getattr(header.limits, name) for name in EngineLimits.__struct_fields__})
    rows = [LoggedRow(list(batch.scheduled), list(batch.preempted), batch.free_blocks) for batch in batches]
    cancels = [(index, request_id) for index, batch in enumerate(batches) for request_id in batch.cancelled]
    return LoggedRun(Workload(0, limits, len(batches), _submissions(batches), cancels), rows)


def _submissions(batches: Sequence[LoggedBatch]) -> list[tuple[int, EngineRequest]]:
    lengths = {end.request_id: end.output_tokens for batch in batches for end in batch.ended}
    cached: dict[str, int] = {}
    for batch in batches:
        for request_id, tokens in batch.cached:
            cached.setdefault(request_id, tokens)
    return [
        (
            index,
            EngineRequest(
                request_id=arrival.request_id,
                prompt_tokens=arrival.prompt_tokens,
                target_output_tokens=lengths.get(arrival.request_id, arrival.max_tokens),
                max_tokens=arrival.max_tokens,
                priority=arrival.priority,
                arrival_s=arrival.arrival_s,
                cached_tokens=cached.get(arrival.request_id, 0),
            ),
        )
        for index, batch in enumerate(batches)
        for arrival in batch.arrivals
    ]


def first_difference(engine: Engine, run: LoggedRun) -> tuple[int, LoggedRow, LoggedRow] | None:
    """The first batch at which the engine leaves the log: its index, the logged row and the engine's own."""
    for index, (logged, row) in enumerate(zip(run.rows, run_rows(engine, run.workload), strict=False)):
        replayed = LoggedRow(row.num_scheduled_tokens, row.preempted, row.free_blocks)
        if logged != replayed:
            return index, logged, replayed
    return None
