"""The processes of a measurement: started on free ports, ready before they are used, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
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
        text = log.read_text(errors="replace")
        found = _LISTENING.search(text)
        at = url if url is not None else found[1] if found is not None else None
        if at is not None and _answers(at):
            return at
        time.sleep(0.05)
    lines = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise HeadwayError(f"{' '.join(command[:4])} did not start:\n{lines}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
