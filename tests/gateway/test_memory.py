"""What the gateway keeps is bounded, and large requests do not stand in the way of small ones."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import time
from pathlib import Path

import aiohttp

from gateway_clients import CHAT, chat, metrics, pool_of, post
from headway.testing import FakeUpstream, Reply, running_gateway

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / 1e6


async def test_unique_prompts_leave_nothing_behind(session: aiohttp.ClientSession) -> None:
    """T35: after thousands of prompts of 100 kB that never repeat, memory is within 5 % of what it was after the first.

    Nor has it grown by a third of what was sent: a copy of each would show whatever else the process holds.
    ``FakeUpstream.requests`` keeps every body, and is cleared.
    """
    async with FakeUpstream(Reply(num_tokens=1)) as upstream, running_gateway(pool_of(upstream)) as gateway:

        async def ask(count: int, first: int, repeats: int = 12_500) -> None:
            for number in range(first, first + count):
                content = f"{number:08d}" * repeats
                body = chat(content=content, stream=number % 2 == 0)
                async with session.post(gateway.url + CHAT, json=body, headers={"x-session-id": str(number)}) as answer:
                    await answer.read()
                    assert answer.status == 200
                upstream.requests.clear()

        await ask(1050, 0, repeats=10)  # more than the store of decisions holds
        await ask(50, 2000)
        before_mb = rss_mb()
        await ask(600, 3000)
        after_mb = rss_mb()
        num_series = len((await metrics(session, gateway)).splitlines())
        await ask(50, 9000)
        assert len((await metrics(session, gateway)).splitlines()) == num_series
    sent_mb = 600 * 100_000 / 1e6
    assert after_mb - before_mb < min(before_mb * 0.05, sent_mb / 3)


async def test_large_bodies_do_not_hold_up_small_requests(session: aiohttp.ClientSession) -> None:
    """T36: while bodies of 10 MB come in, are read and passed on, the loop is never held up for long."""
    content = "many words of a long document. " * 340_000
    async with FakeUpstream(Reply(num_tokens=1)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        longest_s, last_s = 0.0, time.monotonic()

        async def watch() -> None:
            nonlocal longest_s, last_s
            while True:
                await asyncio.sleep(0.001)
                now = time.monotonic()
                longest_s, last_s = max(longest_s, now - last_s), now

        async def large() -> None:
            async with session.post(gateway.url + CHAT, data=io.BytesIO(body), headers=json_type) as response:
                await response.read()
                assert response.status == 400  # 2.6 million tokens fit no context; the body is read all the same

        body = b'{"model":"auto","messages":[{"role":"user","content":"' + content.encode() + b'"}]}'
        json_type = {"content-type": "application/json"}
        watching = asyncio.create_task(watch())
        last_s = time.monotonic()
        statuses, *_ = await asyncio.gather(
            asyncio.gather(*(post(session, gateway) for _ in range(50))), *(large() for _ in range(8))
        )
        watching.cancel()
    assert statuses == [200] * 50
    assert longest_s < 0.5
