"""priced_bear in a running gateway: what a decision is charged, by snapshots and by what this gateway has sent."""

from __future__ import annotations

import asyncio

import aiohttp

from gateway_clients import CHAT, chat, until
from headway.testing import Reply, running_gateway
from snapshot_engines import engines, explain, pool_of


async def test_a_waiting_request_is_protected_until_it_is_gone(session: aiohttp.ClientSession) -> None:
    """Who is booked in time stands to lose its utility by whoever makes it late, until it is cancelled."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish()
        made[0].upstream.script = Reply(num_tokens=2, first_token_s=20.0)
        async with running_gateway(pool_of(made, routing={"policy": "priced_bear"})) as gateway:
            view = gateway.gateway.fleet.views[0]
            made[0].publish(waiting=1)  # a fresh one: the gateway may have been slow to start
            first = asyncio.ensure_future(session.post(gateway.url + CHAT, json=chat(slo={"ttft_ms": 60_000})))
            await until(lambda: view.num_outstanding)
            assert view.at_risk is not None
            harms = [view.at_risk.harm(0.0, gateway.gateway.clock() + within_s) for within_s in (30.0, 90.0)]
            first.cancel()
            await until(lambda: not view.num_outstanding)
            assert view.at_risk.harm(0.0, gateway.gateway.clock() + 90.0) == 0.0
    assert harms[0] == 0.0
    assert harms[1] > 0.4


async def test_memory_that_is_taken_has_a_price(session: aiohttp.ClientSession) -> None:
    """The fuller the engine's memory, the more a query is charged; bear's decisions have neither price nor harm."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        prices = []
        for share in (0.0, 0.5):
            shown = {"free_blocks": int((made[0].limits.num_blocks - 1) * (1.0 - share))}
            made[0].publish(**shown)
            async with running_gateway(pool_of(made, routing={"policy": "priced_bear"})) as gateway:
                made[0].publish(**shown)
                decision = await explain(session, gateway)
            prices.append(decision["candidates"][0]["price"])
        async with running_gateway(pool_of(made)) as gateway:
            plain = await explain(session, gateway)
    assert prices[0] == 0.0
    assert prices[1] > 0.0
    assert (plain["candidates"][0]["price"], plain["candidates"][0]["harm"]) == (None, None)
    assert "price" not in plain["reason"]
