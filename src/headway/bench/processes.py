"""The processes of a measurement: started on free ports, ready before they are used, gone afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from headway.errors import HeadwayError

_LISTENING = re.compile(r"listening on (http://\S+)")
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0


class Measured:
    """A running process that serves at ``url``."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self.process = url, process

    @property
    def pid(self) -> int:
        """Its id."""
        return self.process.pid


@contextlib.contextmanager
def serving(command: Sequence[str], *, url: str | None = None) -> Iterator[Measured]:
    """A process that says where it listens, or one told to serve at ``url``, once it answers; ended on leaving.

    Raises:
        HeadwayError: it ended, or did not answer within a minute; with the last lines it wrote.
    """
    with TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            yield Measured(_ready(process, command, Path(f"/proc/self/fd/{log.fileno()}"), url), process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def headway_command(*arguments: str) -> list[str]:
    """``headway`` with these arguments, by this interpreter."""
    return [sys.executable, "-m", "headway", *arguments]


def free_port() -> int:
    """A port nobody listens on now, for programs that cannot choose one themselves."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


def _ready(process: subprocess.Popen[bytes], command: Sequence[str], log: Path, url: str | None) -> str:
    until_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until_s and process.poll() is None:
        found = _LISTENING.search(_written(log))
        at = url if url is not None else found[1] if found is not None else None
        if at is not None and _answers(at):
            return at
        time.sleep(0.05)
    raise _did_not_start(command, log)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class MeasuredAsync:
    """As :class:`Measured`, started inside an event loop."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self.url, self.process = url, process

    @property
    def pid(self) -> int:
        """Its id."""
        return self.process.pid


@contextlib.asynccontextmanager
async def serving_async(command: Sequence[str]) -> AsyncIterator[MeasuredAsync]:
    """As :func:`serving`, for use inside an event loop. What the process writes goes to a file that ends with it.

    Raises:
        HeadwayError: as :func:`serving`.
    """
    with TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        path = Path(f"/proc/self/fd/{log.fileno()}")
        try:
            yield MeasuredAsync(await _ready_async(process, command, path), process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _ready_async(process: asyncio.subprocess.Process, command: Sequence[str], log: Path) -> str:
    until_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until_s and process.returncode is None:
        found = _LISTENING.search(_written(log))
        if found is not None:
            return found[1]
        await asyncio.sleep(0.02)
    raise _did_not_start(command, log)


def _written(log: Path) -> str:
    return log.read_text(errors="replace")


def _did_not_start(command: Sequence[str], log: Path) -> HeadwayError:
    lines = "\n".join(_written(log).splitlines()[-10:])
    return HeadwayError(f"{' '.join(command[:4])} did not start:\n{lines}")
