"""A measured vLLM: one instance that has a core to itself, publishes its state, and logs every step with its requests.

The engine's arithmetic is bound to one core; its HTTP process, the gateway and the client share the other. Every part
of the experiment takes out of the log what was written while it ran. Nothing here judges what it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from headway.snapshot.shared_memory import SharedMemoryReader, segment_path
from headway.types import Snapshot
from real_vllm import RealVllm
from real_vllm_environment import ModelSize, ensure_model

MODEL: Final = "qwen3"
ENGINE_CORE: Final = 1
CLIENT_CORE: Final = 0
_IDLE_WITHIN_S: Final = 120.0


class Instance(RealVllm):
    """A server with its segment and its log. ``name`` is that of its directory and segment."""

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        size: ModelSize = "512x8",
        core: int = ENGINE_CORE,
        prefix_caching: bool = False,
        arguments: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.segment = f"headway-real-{os.getpid()}-{name}"
        self.step_log = directory / "steps.jsonl"
        self.core = core
        self._log_offset = 0
        caching = "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"
        super().__init__(
            model=ensure_model(size),
            directory=directory,
            served_name=MODEL,
            core=core,
            environment={
                "HEADWAY_INSTANCE": name,
                "HEADWAY_SNAPSHOT_SHARED_MEMORY": self.segment,
                "HEADWAY_STEP_LOG": str(self.step_log),
                "HEADWAY_STEP_LOG_REQUESTS": "1",
            },
            arguments=(caching, *arguments),
        )

    def bind(self, *, server_core: int = CLIENT_CORE) -> None:
        """Put the HTTP process on ``server_core`` and the engine's process on its own, threads included."""
        for pid in _group(self.pid):
            core = server_core if pid == self.pid else self.core
            for task in _tasks(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(task, {core})

    def mark(self) -> None:
        """Forget what the log holds so far."""
        self._log_offset = self.step_log.stat().st_size

    def take_log(self, path: Path) -> None:
        """Write the log's header and what came since :meth:`mark` to ``path``. The engine must be idle."""
        data = self.step_log.read_bytes()
        header = data[: data.index(b"\n") + 1]
        rest = data[max(self._log_offset, len(header)) :]
        draft = path.with_suffix(".draft")
        draft.write_bytes(header + rest)
        draft.rename(path)

    async def idle(self) -> Snapshot:
        """Wait until the engine shows that it has nothing left; its log is flushed then."""
        reader = SharedMemoryReader(self.segment, instance_id=self.name)
        until_s = time.monotonic() + _IDLE_WITHIN_S
        newest: Snapshot | None = None
        try:
            while time.monotonic() < until_s:
                newest = reader.poll() or newest
                if newest is not None and not (newest.running or newest.waiting or newest.batch_start_s is not None):
                    await asyncio.sleep(0.3)
                    return newest
                await asyncio.sleep(0.05)
        finally:
            reader.close()
        raise AssertionError(f"{self.name} is never idle; last seen {newest}")

    async def some_arrival(self) -> tuple[str, float]:
        """A request that the engine shows, with its arrival on the monotonic clock: what ties the log to that clock."""
        reader = SharedMemoryReader(self.segment, instance_id=self.name)
        try:
            while True:
                shown = reader.poll()
                for request in () if shown is None else (*shown.running, *shown.waiting):
                    return request.request_id, request.arrival_s
                await asyncio.sleep(0.02)
        finally:
            reader.close()


@contextlib.contextmanager
def instance(name: str, directory: Path, **options: object) -> Iterator[Instance]:
    """An instance that is ready, with its processes on their cores; ended on leaving."""
    made = Instance(name, directory, **options)  # type: ignore[arg-type]
    try:
        with made:
            made.bind()
            yield made
    finally:
        segment_path(made.segment).unlink(missing_ok=True)


def _group(pid: int) -> list[int]:
    """Every process of a server's group: the server leads it, and nothing else is in it."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.getpgid(int(name)) == pid:
                found.append(int(name))
    return found


def _tasks(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []
