"""Fixtures of the gateway tests: a client session, and a client that can hang up whenever it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without limits of its own that shows bytes as they came."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(total=30)
    ) as client:
        yield client
    await asyncio.sleep(0)  # transports close one tick later
