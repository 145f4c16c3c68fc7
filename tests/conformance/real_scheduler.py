"""Runs the worker inside the conformance environment and hands its records back one by one."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from conformance.environment import clean_environment
from random_states import Workload
from recorded_runs import Record

WORKER = Path(__file__).with_name("worker.py")


def real_records(python: Path, workloads: Iterable[Workload]) -> Iterator[Record]:
    """One record per workload, in order, while the scheduler is already running the next.

    Raises:
        SystemExit: the worker failed; the end of its messages is shown.
    """
    directory = python.parents[1]
    messages = directory / "worker.log"
    with open(messages, "wb") as log:
        worker = subprocess.Popen(
            [str(python), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=clean_environment(directory),
        )
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            feeder = threading.Thread(target=_feed, args=(worker.stdin, workloads), daemon=True)
            feeder.start()
            for line in worker.stdout:
                yield msgspec.json.decode(line, type=Record)
            status = worker.wait()
        finally:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    if status != 0:
        tail = messages.read_text(errors="replace")[-3000:]
        raise SystemExit(f"conformance: the worker ended with status {status}:\n{tail}")


def _feed(pipe: IO[bytes], workloads: Iterable[Workload]) -> None:
    encoder = msgspec.json.Encoder()
    with contextlib.suppress(BrokenPipeError), pipe:  # a worker that died says why by its status
        for workload in workloads:
            pipe.write(encoder.encode(workload) + b"\n")
