"""Fixtures of the gateway tests: a client session, and a policy that lets requests wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest

from headway.policy.central_queue import CentralQueuePolicy
from headway.policy.options import Options
from headway.policy.registry import POLICIES, PolicyRow


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without limits of its own that shows bytes as they came."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(total=30)
    ) as client:
        yield client
    await asyncio.sleep(0)  # transports close one tick later


@pytest.fixture
def one_slot(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Registers ``one_slot`` as any policy is, and chooses it: first come first served, one request per instance."""

    def make(rng: np.random.Generator, options: Options) -> CentralQueuePolicy:
        return CentralQueuePolicy("fcfs", {"hosted_slots": 1.0})

    monkeypatch.setitem(POLICIES, "one_slot", PolicyRow(make, "one at a time", holds=True))
    return {"routing": {"policy": "one_slot"}}
