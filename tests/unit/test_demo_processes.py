"""Child processes of the demo: what a failed start says, and that the end always comes."""

from __future__ import annotations

import asyncio
import sys

import pytest

from headway.demo.processes import Child, RunningPool
from headway.errors import HeadwayError


async def _child(program: str) -> Child:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    return Child("engine x", process)


async def test_a_child_says_where_it_listens_and_ends_when_asked() -> None:
    """The address comes from the line that announces it, and a child that is asked to end is gone."""
    child = await _child("import time; print('hello\\n\\nlistening on http://127.0.0.1:5', flush=True); time.sleep(60)")
    assert await child.url() == "http://127.0.0.1:5"
    child.ask_to_end()
    await child.ended()
    child.kill()  # harmless by now


async def test_a_failed_start_shows_the_last_lines() -> None:
    """A child that ends before it listens raises an error with its name and what it wrote last."""
    child = await _child("raise SystemExit('port 80 is taken')")
    with pytest.raises(HeadwayError, match=r"(?s)engine x did not start.*port 80 is taken"):
        await child.url()
    await child.ended()


async def test_a_death_during_the_run_is_an_error() -> None:
    """Whoever waits for a pool's death hears which process ended, with which code."""
    dying = await _child("import time; print('listening on http://x', flush=True); raise SystemExit(3)")
    living = await _child("import time; time.sleep(60)")
    with pytest.raises(HeadwayError, match="engine x ended with code 3 during the run"):
        await RunningPool("", [dying, living]).wait_for_death()
    for child in (dying, living):
        child.ask_to_end()
        await child.ended()


async def test_a_child_that_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM may be ignored; the end comes all the same."""
    monkeypatch.setattr("headway.demo.processes._STOP_TIMEOUT_S", 0.1)
    child = await _child(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print('listening on http://x', flush=True); time.sleep(60)"
    )
    await child.url()
    child.ask_to_end()
    await child.ended()
