"""Starts and ends real vLLM servers: one object per process, with its port, its log and its end in one hand.

``RealVllm(model=ensure_model("512x8"), directory=tmp_path, core=1)`` as a context manager starts the server, waits
until it answers and leaves no process behind, whatever happened in between. A server that dies while it starts, or does
not answer in time, raises with the end of its log. The server runs in a process group of its own, so that it can be
ended with its engine process and nothing else is. See ``real_vllm_environment`` for what must be there first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from real_vllm_environment import engine_environment, ensure_python

PUBLISHING: Final = "headway.engines.vllm.PublishingScheduler"

#: What every instance is started with unless told otherwise: small enough for three at once in 7 GB.
DEFAULT_ARGUMENTS: Final = (
    "--enforce-eager",
    "--kv-cache-memory-bytes=134217728",
    "--dtype=bfloat16",
    "--max-model-len=4096",
    "--disable-uvicorn-access-log",
)
#: From the start to the first answer; 20 to 40 s on an idle machine.
READY_WITHIN_S: Final = 480.0
_POLL_S = 0.25
_LOG_TAIL_BYTES = 4000


class EngineStartError(Exception):
    """A server did not come up; the message holds the end of its log."""


class RealVllm:
    """One vLLM server on 127.0.0.1. ``url`` is its OpenAI base address, ``pid`` that of the server process."""

    def __init__(
        self,
        *,
        model: Path,
        directory: Path,
        served_name: str = "model",
        core: int | None = None,
        scheduler_class: str | None = PUBLISHING,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        """Nothing is started yet.

        ``model`` is a model directory; ``directory`` (made where needed) takes the log and what Headway needs inside;
        ``core`` binds the model's arithmetic to one processor core. ``scheduler_class`` None runs vLLM's own scheduler.
        ``environment`` adds variables, such as ``HEADWAY_SNAPSHOT_SHARED_MEMORY``; ``arguments`` come after
        :data:`DEFAULT_ARGUMENTS`, and the last one wins. ``port`` None takes a free one, kept over restarts.
        """
        self.model = model
        self.directory = directory
        self.served_name = served_name
        self.port = free_port() if port is None else port
        self.log = directory / "vllm.log"
        self._core = core
        self._environment = dict(environment or {})
        scheduler = [] if scheduler_class is None else [f"--scheduler-cls={scheduler_class}"]
        self._arguments = [*DEFAULT_ARGUMENTS, *scheduler, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def root_url(self) -> str:
        """The server's address without a path: ``/metrics`` and ``/health`` are there."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The server's OpenAI base address, an ``api_base`` of a configuration."""
        return f"{self.root_url}/v1"

    @property
    def pid(self) -> int:
        """The process id of the server, which is also that of its process group."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and come back at once. The log of an earlier start is kept; the new one follows it."""
        assert not self.is_running, "runs already"
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [str(ensure_python()), "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--model={self.model}", f"--served-model-name={self.served_name}", "--host=127.0.0.1"]
        command += [f"--port={self.port}", *self._arguments]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(self.directory, core=self._core) | self._environment,
                cwd=self.directory,
                start_new_session=True,
            )

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> None:
        """Wait until the server says that it is healthy.

        Raises:
            EngineStartError: it ended, or did not answer in time.
        """
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if not self.is_running:
                raise EngineStartError(f"vLLM ended while it started:\n{self.log_tail()}")
            if self.is_healthy():
                return
            time.sleep(_POLL_S)
        raise EngineStartError(f"vLLM did not answer within {within_s:.0f} s:\n{self.log_tail()}")

    def is_healthy(self) -> bool:
        """Whether ``GET /health`` answers 200 within a second."""
        try:
            with urllib.request.urlopen(f"{self.root_url}/health", timeout=1.0) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def stop(self, within_s: float = 30.0) -> None:
        """End the server as an operator would (SIGTERM), and by force what is left after ``within_s`` seconds."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(within_s)
        self.kill()

    def kill(self) -> None:
        """End the server and its engine process as a crash would (SIGKILL to their process group)."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _wait_for_group(process.pid)

    def log_tail(self) -> str:
        """The last lines of the log."""
        data = self.log.read_bytes() if self.log.exists() else b""
        return data[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _wait_for_group(group: int, within_s: float = 10.0) -> None:
    """Until no process of a killed group is left: their memory and their ports are free then."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)
