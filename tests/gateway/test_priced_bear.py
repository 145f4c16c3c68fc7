"""priced_bear in a running gateway: what a decision is charged, by snapshots and by what this gateway has sent."""

from __future__ import annotations

import asyncio

import aiohttp

from gateway_clients import CHAT, chat, until
from headway.testing import Reply, running_gateway
from snapshot_engines import engines, explain, pool_of


async def test_a_waiting_request_is_protected_until_it_is_gone(session: aiohttp.ClientSession) -> None:
    """A long prompt is charged for the short one that waits in the same batch, until that one is cancelled."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish(waiting=1)  # 8,000 prompt tokens are about to be prefilled
        made[0].upstream.reply = Reply(num_tokens=2, first_token_s=20.0)
        long = {"content": "x" * 80_000, "slo": {"ttft_ms": 5000}}
        async with running_gateway(pool_of(made, routing={"policy": "priced_bear"})) as gateway:
            first = asyncio.ensure_future(session.post(gateway.url + CHAT, json=chat(slo={"ttft_ms": 600})))
            view = gateway.gateway.fleet.views[0]
            await until(lambda: view.num_outstanding)
            charged = await explain(session, gateway, **long)
            first.cancel()
            await until(lambda: not view.num_outstanding)
            free = await explain(session, gateway, **long)
    one, other = charged["candidates"][0], free["candidates"][0]
    assert one["verdict"] == other["verdict"] == "feasible"
    assert one["harm"] > 0.4
    assert other["harm"] == 0.0
    assert f"harm {one['harm']:.3f}" in charged["reason"]
    assert "no instance in time has one above 0" in charged["reason"]
    assert one["price"] == other["price"]


async def test_memory_that_is_taken_has_a_price(session: aiohttp.ClientSession) -> None:
    """The fuller the engine's memory, the more a query is charged; bear's decisions have neither price nor harm."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        prices = []
        for share in (0.0, 0.5):
            made[0].publish(free_blocks=int((made[0].limits.num_blocks - 1) * (1.0 - share)))
            async with running_gateway(pool_of(made, routing={"policy": "priced_bear"})) as gateway:
                decision = await explain(session, gateway)
            prices.append(decision["candidates"][0]["price"])
        async with running_gateway(pool_of(made)) as gateway:
            plain = await explain(session, gateway)
    assert prices[0] == 0.0
    assert prices[1] > 0.0
    assert (plain["candidates"][0]["price"], plain["candidates"][0]["harm"]) == (None, None)
    assert "price" not in plain["reason"]
