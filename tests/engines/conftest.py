"""Fixtures around simulated engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from headway.snapshot.shared_memory import segment_path
from served_engines import EngineProcess, ServedEngine, serving_engine


@pytest_asyncio.fixture
async def served() -> AsyncIterator[ServedEngine]:
    """An engine served inside this process."""
    async with serving_engine() as engine:
        yield engine


@pytest.fixture
def start_engine() -> Iterator[Callable[..., EngineProcess]]:
    """Starts engine processes and ends them with the test."""
    started: list[EngineProcess] = []

    def start(*options: str) -> EngineProcess:
        started.append(EngineProcess(*options))
        return started[-1]

    yield start
    for engine in started:
        if engine.process.poll() is None:
            engine.process.kill()
            engine.process.communicate()
        segment_path(engine.segment).unlink(missing_ok=True)
