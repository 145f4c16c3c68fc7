"""What a stream costs that sends nothing: memory of the gateway with two thousand of them open, over none.

The upstream sends one event of each and then pauses. Files: a process needs two descriptors per stream; where the
limit is lower than that, fewer are opened and the figure is per stream all the same.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Final
from urllib.parse import urlsplit

from headway.bench.paced_client import request_bytes
from headway.bench.usage import memory_mb

NUM_STREAMS: Final = 2000
_SPARE_FILES: Final = 100
_OPENING_AT_ONCE: Final = 50


def kb_per_idle_stream(url: str, pid: int, num_streams: int = NUM_STREAMS) -> float:
    """KB of 1,024 bytes that the process ``pid`` at ``url`` takes for each open stream that pauses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return asyncio.run(_measure(url, pid, min(num_streams, hard // 2 - _SPARE_FILES)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _measure(url: str, pid: int, num_streams: int) -> float:
    place = urlsplit(url)
    request = request_bytes(url, headers="x-pause-after: 1\r\n")
    before_mb = memory_mb(pid)[0]
    gate = asyncio.Semaphore(_OPENING_AT_ONCE)

    async def opened() -> asyncio.StreamWriter:
        async with gate:
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            writer.write(request)
            await reader.readuntil(b'"content"')
            return writer

    writers = await asyncio.gather(*(opened() for _ in range(num_streams)))
    after_mb = memory_mb(pid)[0]
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)  # transports close one tick later
    return (after_mb - before_mb) * 1024 / num_streams
