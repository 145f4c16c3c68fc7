"""An append-only file of JSON lines that survives a kill: what was acknowledged is on the disk.

Lines that wait together are written and flushed to the disk together, off the event loop, so that many endpoints share
one ``fsync``. A line torn by a crash of the machine is cut off when the file is opened again. It refuses two writers
of one file.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from headway.config.lines import cut_torn_line
from headway.errors import ConfigError, HeadwayError


class Journal:
    """A file of lines, opened for appending. Use as an async context manager.

    ``num_cut_bytes`` tells how much of a torn last line was cut off on opening.

    Raises:
        ConfigError: the path is that of a compressed file, or cannot be opened.
        HeadwayError: another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix == ".gz":
            raise ConfigError("rows are appended one by one, so the file cannot be compressed", path=str(path))
        self.path = path
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None
        try:
            is_new = not path.exists()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", path=str(path)) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise HeadwayError(f"{path}: another run writes to this file") from error
        self.num_cut_bytes = cut_torn_line(self._file)
        if is_new:
            _sync_directory(path.parent)

    async def append(self, line: bytes) -> None:
        """Write ``line``, which ends in a line feed. Returns once it is on the disk.

        Raises:
            HeadwayError: the disk is full or broken.
        """
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((line, written))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await asyncio.shield(written)

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            failure: HeadwayError | None = None
            try:
                await asyncio.to_thread(self._write, b"".join(line for line, _ in batch))
            except OSError as error:
                failure = HeadwayError(f"{self.path}: cannot be written: {error.strerror}")
            for _, written in batch:
                if written.cancelled():
                    continue
                if failure is None:
                    written.set_result(None)
                else:
                    written.set_exception(failure)
        self._flushing = None

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        os.fsync(self._file)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._flushing is not None:
            await asyncio.wait({self._flushing})  # what was paid for is kept, also when the run is cancelled
        os.close(self._file)


def _sync_directory(path: Path) -> None:
    """Make a new file's name as durable as its bytes."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
