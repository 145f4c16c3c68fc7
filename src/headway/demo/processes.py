"""Starts the demo's engines and its gateway as processes, and stops whatever it started, however the run ends.

Children run in sessions of their own, so that Ctrl-C reaches only the demo, which then stops them in order. It refuses
to leave anything behind: a child that ignores the request to end is killed, a segment it could not unlink is unlinked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from headway.demo.pool import POOL, PoolModel, RunningEngine, gateway_config
from headway.errors import HeadwayError
from headway.snapshot.shared_memory import segment_path

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_LISTENING = re.compile(r"listening on (http://\S+)")
_KEPT_LINES = 20


class RunningPool(Struct, frozen=True):
    """A gateway that is ready, and every process behind it."""

    url: str
    children: list[Child]

    async def wait_for_death(self) -> None:
        """Return never, unless a process ends.

        Raises:
            HeadwayError: one did; the message holds its last lines.
        """
        waits = [asyncio.ensure_future(child.wait_for_death()) for child in self.children]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()


class Child:
    """One child process; the last lines of its output are kept for the error message that may need them."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Follow the output to its end, which comes when the process ends."""
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            if (match := _LISTENING.search(line)) and not self._url.done():
                self._url.set_result(match[1])
        if not self._url.done():
            self._url.set_exception(HeadwayError(f"{self.name} did not start:\n" + "\n".join(self._lines)))

    async def url(self) -> str:
        """Where it listens, once it says so.

        Raises:
            HeadwayError: it ended or stayed silent for a minute instead.
        """
        try:
            return await asyncio.wait_for(asyncio.shield(self._url), _START_TIMEOUT_S)
        except TimeoutError as error:
            raise HeadwayError(f"{self.name} did not start within {_START_TIMEOUT_S:g} s") from error

    async def wait_for_death(self) -> None:
        """Raise HeadwayError when the process ends."""
        code = await self._process.wait()
        raise HeadwayError(f"{self.name} ended with code {code} during the run:\n" + "\n".join(self._lines))

    def ask_to_end(self) -> None:
        """Send SIGTERM, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> None:
        """Return when the process is gone; after a while without an end it is killed."""
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        if self._url.done() and not self._url.cancelled():
            self._url.exception()  # seen: a start that failed has been reported by whoever waited for it
        self._url.cancel()


@contextlib.asynccontextmanager
async def running_pool(policy: str, seed: int, predictor: Path | None = None) -> AsyncIterator[RunningPool]:
    """Three fresh engines and a gateway that routes by ``policy``, ready; all gone again on leaving.

    ``predictor`` is a trained artifact for the gateway to predict by.

    Raises:
        HeadwayError: a process did not start.
    """
    children: list[Child] = []
    segments = {model.name: f"headway-demo-{os.getpid()}-{model.instance}" for model in POOL}
    try:
        for number, model in enumerate(POOL):
            arguments = _engine_arguments(model, segments[model.name], seed * len(POOL) + number)
            children.append(await _start(model.instance, arguments))
        urls = await asyncio.gather(*(child.url() for child in children))
        engines = {model.name: RunningEngine(url, segments[model.name]) for model, url in zip(POOL, urls, strict=True)}
        with TemporaryDirectory(prefix=f"headway-demo-{os.getpid()}-") as directory:
            path = Path(directory) / "gateway.yaml"
            path.write_text(gateway_config(policy, engines, predictor), encoding="utf-8")
            children.append(await _start("gateway", ("serve", str(path))))
            yield RunningPool(await children[-1].url(), children)
    finally:
        try:
            await asyncio.shield(_stop(children))
        finally:  # also when a second Ctrl-C breaks off the orderly way
            for child in children:
                child.kill()
            for segment in segments.values():
                segment_path(segment).unlink(missing_ok=True)


async def _start(name: str, arguments: Sequence[str]) -> Child:
    """Start ``python -m headway`` with ``arguments``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headway",
        *arguments,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    return Child(name, process)


def _engine_arguments(model: PoolModel, segment: str, seed: int) -> tuple[str, ...]:
    return (
        "engine",
        *("--profile", model.profile),
        *("--port", "0"),
        *("--model", model.name),
        *("--shared-memory", segment),
        *("--seed", str(seed)),
    )


async def _stop(children: Sequence[Child]) -> None:
    """End all children, the gateway first, so that it does not see its engines vanish."""
    for child in reversed(children):
        child.ask_to_end()
    await asyncio.gather(*(child.ended() for child in children))
