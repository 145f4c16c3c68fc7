"""bid_price in a running gateway: slots of engines without snapshots are planned, and every place is given back."""

from __future__ import annotations

import asyncio
import random

import aiohttp

from gateway_clients import CHAT, RawClient, chat, names, post, until
from headway.config import Config
from headway.policy.bid_price import BidPricePolicy
from headway.testing import FakeUpstream, Reply, RunningGateway, pool, running_gateway


def engine_pool(*upstreams: FakeUpstream, **bid_price: object) -> Config:
    """Engines of one slot each that show nothing, under bid prices."""
    instances: list[dict[str, object]] = [
        {
            "id": "abcdefgh"[index],
            "model": "m",
            "api_base": upstream.url,
            "engine": "vllm-0.32",
            "profile": "h100-qwen3-8b",
            "limits": {"max_num_seqs": 1},
        }
        for index, upstream in enumerate(upstreams)
    ]
    return pool([{"name": "m"}], instances, routing={"policy": "bid_price", "bid_price": bid_price})


def policy_of(gateway: RunningGateway) -> BidPricePolicy:
    policy = gateway.gateway.router._policy
    assert isinstance(policy, BidPricePolicy)
    return policy


async def test_the_shortest_answer_goes_when_a_slot_comes_free(session: aiohttp.ClientSession) -> None:
    """While the one slot is taken others wait, and of these the shortest answer goes first whatever the order."""
    async with FakeUpstream(Reply(num_tokens=1, first_token_s=0.3)) as upstream:
        async with running_gateway(engine_pool(upstream)) as gateway, asyncio.TaskGroup() as group:
            group.create_task(post(session, gateway, "first", max_tokens=100))
            await until(lambda: names(upstream) == ["first"])
            for name, tokens in (("long", 90), ("short", 10), ("middle", 50)):
                group.create_task(post(session, gateway, name, max_tokens=tokens))
            await until(lambda: len(gateway.gateway.queue) == 3)
            async with session.get(gateway.url + "/queue") as response:
                reasons = {row["reason"] for row in (await response.json())["held"]}
            assert any("no instance has room" in reason for reason in reasons)
        assert names(upstream) == ["first", "short", "middle", "long"]


async def test_every_place_is_given_back(session: aiohttp.ClientSession) -> None:
    """Of 300 requests some leave while held or under way, some fail: in the end nothing is planned anywhere."""
    rng = random.Random(3)
    script = [Reply(num_tokens=2, interval_s=0.001), Reply(status=500)]
    async with FakeUpstream(script[0]) as one, FakeUpstream(script[0]) as two:
        async with running_gateway(engine_pool(one, two)) as gateway:
            fates = [rng.random() * 0.05 if rng.random() < 0.4 else None for _ in range(300)]

            async def work() -> None:
                while fates:
                    leaves_s = fates.pop()
                    if len(fates) == 150:
                        one.script = script[1]
                    if len(fates) == 100:
                        one.script = script[0]
                    async with RawClient(gateway.url, chat(), headers={"connection": "close"}) as client:
                        if leaves_s is None:
                            await client.reader.read()
                        else:
                            await asyncio.sleep(leaves_s)

            await asyncio.gather(*(work() for _ in range(24)))
            await until(lambda: gateway.gateway.num_inflight == 0)
            plan = policy_of(gateway).control.plan
            await until(lambda: not plan.requests())
            assert plan.num_spans == [0, 0]


async def test_what_can_never_fit_is_refused_and_not_held(session: aiohttp.ClientSession) -> None:
    """A request beyond the planned horizon gets a 400 that says which option to raise."""
    async with FakeUpstream() as upstream:
        async with running_gateway(engine_pool(upstream, horizon=100)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat(stream=False)) as response:
                assert response.status == 400
                assert "routing.horizon" in (await response.json())["error"]["message"]
            assert len(gateway.gateway.queue) == 0
