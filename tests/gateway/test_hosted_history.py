"""Hosted APIs of which nothing is known but what came back: routed by their times to first token, not by load."""

from __future__ import annotations

import asyncio

import aiohttp

from gateway_clients import CHAT, chat, pool_of, until
from headway.testing import FakeUpstream, Reply, running_gateway
from snapshot_engines import explain


async def send(session: aiohttp.ClientSession, url: str, target_ms: int | None = None) -> str:
    """Send a stream and read it; the instance that answered."""
    headers = {} if target_ms is None else {"x-slo-ttft-ms": str(target_ms)}
    async with session.post(url + CHAT, json=chat(model="m"), headers=headers) as response:
        await response.read()
        return response.headers.get("x-headway-instance", "")


async def test_long_answers_do_not_hide_a_short_time_to_first_token(session: aiohttp.ClientSession) -> None:
    """T1: A begins after 0.2 s and talks on, B after 0.4 s and is brief: with a 300 ms target A gets nearly all."""
    quick = FakeUpstream(Reply(first_token_s=0.2, num_tokens=30, interval_s=0.02))
    brief = FakeUpstream(Reply(first_token_s=0.4, num_tokens=2))
    async with quick, brief:
        async with running_gateway(pool_of(quick, brief)) as gateway:
            for _ in range(3):  # three times to first token of each
                await asyncio.gather(*(send(session, gateway.url) for _ in range(4)))
            requests = []
            for _ in range(100):
                requests.append(asyncio.create_task(send(session, gateway.url, 300)))
                await asyncio.sleep(0.02)
            chosen = await asyncio.gather(*requests)
            estimates = {
                one["instance_id"]: one["estimate"]
                for one in (await explain(session, gateway, model="m"))["candidates"]
            }
    assert chosen.count("a") >= 95
    assert {one["source"] for one in estimates.values()} == {"history"}
    assert 0.2 < estimates["a"]["ttft_s"] < 0.4 < estimates["b"]["ttft_s"]


async def test_one_slow_cold_answer_condemns_nobody(session: aiohttp.ClientSession) -> None:
    """An instance whose first answer took ten times as long is back among the quick ones after two more."""
    cold = FakeUpstream([Reply(first_token_s=1.0, num_tokens=1), Reply(first_token_s=0.05, num_tokens=1)])
    steady = FakeUpstream(Reply(first_token_s=0.15, num_tokens=1))
    async with cold, steady:
        async with running_gateway(pool_of(cold, steady)) as gateway:
            view = gateway.gateway.fleet.views[0]
            while len(cold.requests) < 3:
                await send(session, gateway.url)
                await until(lambda: view.num_outstanding == 0)
            chosen = [await send(session, gateway.url) for _ in range(10)]
    assert chosen == ["a"] * 10


async def test_an_instance_that_never_answers_gets_nothing_more(session: aiohttp.ClientSession) -> None:
    """T10: it accepts everything and says nothing; after its first few it is as slow as its silence, and left alone."""
    stuck, fine = FakeUpstream(Reply(hangs="before_headers")), FakeUpstream(Reply(first_token_s=0.02, num_tokens=2))
    async with stuck, fine:
        config = pool_of(stuck, fine, resilience={"first_byte_timeout_s": 2.0, "breaker_failures": 1000})
        async with running_gateway(config) as gateway:
            requests = []
            for _ in range(100):
                requests.append(asyncio.create_task(send(session, gateway.url)))
                await asyncio.sleep(0.02)
            first = len(stuck.requests)
            for _ in range(50):
                requests.append(asyncio.create_task(send(session, gateway.url)))
                await asyncio.sleep(0.02)
            chosen = await asyncio.gather(*requests)
    assert set(chosen) == {"b"}
    assert first < 25
    assert len(stuck.requests) == first
