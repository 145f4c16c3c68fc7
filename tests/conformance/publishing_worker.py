"""Runs vLLM's real scheduler with and without Headway's publisher, inside the conformance environment.

Reads one JSON object per line from standard input and answers each with one line: ``play`` runs a workload through both
and says whether they decided alike and whether every snapshot told the truth, ``publish`` runs one with the publisher
set up as the job says (also wrongly) and says what came of it. It judges only what must be seen from inside, step by
step; everything else goes back to the caller (``tests/engines/test_vllm_scheduler.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import worker
from vllm.config import ModelConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

import headway.engines.vllm as publishing
from headway.snapshot.shared_memory import SharedMemoryReader, SharedMemoryWriter
from headway.types import Snapshot

Scheduled = dict[str, int]


class SnapshotDiffersError(Exception):
    """A snapshot does not show what the scheduler holds."""


class Observed:
    """Between the recording of a run and the publishing scheduler: reads each snapshot back, as a router would."""

    reader: SharedMemoryReader | None = None
    num_checked = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            self.in_flight.append(output.num_scheduled_tokens)
        for new in output.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        resumed = output.scheduled_cached_reqs
        for place, request_id in enumerate(resumed.req_ids):
            if request_id in resumed.resumed_req_ids:
                self.cached[request_id] = resumed.num_computed_tokens[place]
        self.check("schedule", must=len(self.in_flight) <= 1 and bool(output.num_scheduled_tokens))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        before = len(self.running)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.num_scheduled_tokens:
            self.in_flight.pop(0)
        self.check("update", must=bool(scheduler_output.num_scheduled_tokens) and len(self.running) != before)
        return outputs

    @property
    def in_flight(self) -> list[Scheduled]:
        return self.__dict__.setdefault("in_flight_batches", [])

    @property
    def cached(self) -> dict[str, int]:
        return self.__dict__.setdefault("cached_at_admission", {})

    def check(self, where: str, *, must: bool) -> None:
        """Compare the snapshot that came, if one did, with the scheduler as it stands."""
        if self.reader is None:
            return
        snapshot = self.reader.poll()
        if snapshot is None:
            if must and len(self.in_flight) <= 1:
                raise SnapshotDiffersError(f"nothing was published after this {where}")
            return
        if len(self.in_flight) > 1:
            return  # shown before this schedule(), with one batch in flight
        shown, held = as_rows(snapshot), self.rows()
        if shown != held:
            raise SnapshotDiffersError(f"after {where}:\n  shown {shown}\n  held  {held}")
        type(self).num_checked += 1

    def rows(self) -> list[Any]:
        """What a snapshot of this moment has to say, read in the plainest way."""
        share = self.in_flight[0] if self.in_flight else {}
        held = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        rows: list[Any] = [self.kv_cache_manager.block_pool.get_num_free_blocks()]
        for kind, requests in (("running", list(self.running)), ("waiting", list(self.waiting))):
            for place, request in enumerate(requests):
                cached: Any = (self.cached[request.request_id], 0) if kind == "running" else None
                if kind == "waiting" and place == 0:
                    blocks, tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
                    cached = (tokens, len([block for block in blocks.blocks[0] if block.ref_cnt]) if tokens else 0)
                # One that was preempted amid its batch waits: its share is shown no more, though its output may come.
                tokens = share.get(request.request_id, 0) if kind == "running" else 0
                rows.append(
                    (
                        kind, request.request_id, request.num_prompt_tokens, request.num_computed_tokens,
                        request.num_output_tokens, len(held.get(request.request_id, ())), request.max_tokens,
                        request.priority, tokens, cached,
                    )
                )  # fmt: skip
        return rows


def as_rows(snapshot: Snapshot) -> list[Any]:
    """The snapshot in the shape of :meth:`Observed.rows`. What others than the first would find may be old news."""
    rows: list[Any] = [snapshot.free_blocks]
    for kind, requests in (("running", snapshot.running), ("waiting", snapshot.waiting)):
        for place, r in enumerate(requests):
            cached = (r.cached_tokens, r.shared_blocks) if kind == "running" or place == 0 else None
            rows.append(
                (
                    kind, r.request_id, r.prompt_tokens, r.computed_tokens, r.output_tokens, r.num_blocks,
                    r.max_tokens, r.priority, r.scheduled_tokens, cached,
                )
            )  # fmt: skip
    return rows


class ObservedScheduler(worker.Recording, Observed, publishing.PublishingScheduler):
    """vLLM's scheduler, publishing, watched."""


class ObservedAsyncScheduler(worker.Recording, Observed, publishing.AsyncPublishingScheduler):
    """The same for the asynchronous one."""


class Warnings(logging.Handler):
    """Keeps what Headway says."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What is logged at warning or above while this lasts."""
    handler, logger = Warnings(), logging.getLogger("vllm.headway")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


def run_published(model: ModelConfig, workload: dict[str, Any], reader: SharedMemoryReader | None) -> tuple[Any, Any]:
    """The record of a run with the publisher, and the scheduler that ran it, shut down."""
    made: list[Any] = []

    def keep(kind: type[Observed]) -> type:
        class Kept(kind):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.reader = reader
                if reader is not None and reader.poll() is None:
                    raise SnapshotDiffersError("an engine that just started shows nothing")
                made.append(self)

        return Kept

    with patch.multiple(worker, Recording=keep(ObservedScheduler), RecordingAsync=keep(ObservedAsyncScheduler)):
        try:
            record = worker.run(model, workload)
        finally:
            for scheduler in made:
                scheduler.shutdown()
    return record, made[0]


def play(model: ModelConfig, job: dict[str, Any]) -> dict[str, Any]:
    """One workload, bare and published. Snapshots are checked as they come."""
    workload = job["workload"]
    bare = worker.run(model, workload)
    Observed.num_checked = ObservedScheduler.num_checked = ObservedAsyncScheduler.num_checked = 0
    segment = f"headway-conformance-{os.getpid()}"
    reader = SharedMemoryReader(segment)
    os.environ["HEADWAY_SNAPSHOT_SHARED_MEMORY"] = segment
    try:
        published, scheduler = run_published(model, workload, reader)
    finally:
        reader.close()
    publisher = scheduler._headway
    return {
        "alike": bare["rows"] == published["rows"],
        "num_steps": len(bare["rows"]),
        "num_checked": type(scheduler).num_checked,
        "num_failed": publisher.num_failed + sum(outlet.num_failed for outlet in publisher.outlets),
        "rows": bare["rows"],
        "vllm": bare["vllm"],
    }


def publish(model: ModelConfig, job: dict[str, Any]) -> dict[str, Any]:
    """One workload with the publisher set up as ``environment`` says, and what can go wrong as ``trouble`` says."""
    os.environ.update(job["environment"])
    trouble = job.get("trouble")
    with contextlib.ExitStack() as undo:
        messages = undo.enter_context(listening())
        if trouble == "no memory left":
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
            undo.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        elif trouble == "another engine":
            writer = SharedMemoryWriter(job["environment"]["HEADWAY_SNAPSHOT_SHARED_MEMORY"])
            undo.callback(writer.close)
        elif trouble == "unknown version":
            undo.enter_context(patch("vllm.__version__", "0.33.0"))
        elif trouble == "state elsewhere":
            undo.enter_context(patch("headway.engines.vllm_state._computed_tokens", lambda request: request.nonsense))
        record, scheduler = run_published(model, job["workload"], None)
    publisher = scheduler._headway
    outlets = [] if publisher is None else publisher.outlets
    return {
        "rows": record["rows"],
        "messages": messages,
        "is_publishing": publisher is not None,
        "num_failed": 0 if publisher is None else publisher.num_failed,
        "num_unsent": [outlet.num_failed for outlet in outlets],
    }


def main() -> None:
    jobs = {"play": play, "publish": publish}
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(worker.TINY_MODEL))
        model = ModelConfig(model=directory, skip_tokenizer_init=True, max_model_len=4096, dtype="bfloat16", seed=0)
        for line in sys.stdin:
            job = json.loads(line)
            for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
                del os.environ[name]
            try:
                answer = jobs[job["kind"]](model, job)
            except SnapshotDiffersError as error:
                answer = {"differs": str(error)}
            print(json.dumps(answer, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
