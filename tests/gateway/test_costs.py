"""What was paid, for what: every billed upstream call once, and apart what bought nobody an answer."""

from __future__ import annotations

import re

import aiohttp
import pytest

from gateway_clients import CHAT, RawClient, chat, metrics, pool_of, post, until
from headway.config import Config
from headway.testing import FakeUpstream, Reply, pool, running_gateway

#: One micro-USD per prompt token, ten per output token.
PRICE = {"input_per_1m": 1.0, "output_per_1m": 10.0}
PROMPT_TOKENS = 10


def priced(*upstreams: FakeUpstream, **rest: object) -> Config:
    plain = pool_of(*upstreams)
    instances = [{"id": one.id, "model": "m", "api_base": one.api_base} for one in plain.instances]
    return pool([{"name": "m", "price": PRICE}], instances, **rest)  # type: ignore[arg-type]


def sample(text: str, name: str, **labels: str) -> float:
    """The value of one series; 0 where it does not exist."""
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    found = re.search(rf"^{name}\{{{inside}\}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def test_an_answer_is_paid_for_once(session: aiohttp.ClientSession) -> None:
    """T27: usage that the upstream reported is counted once, streamed or not, and none of it is waste."""
    async with FakeUpstream(Reply(num_tokens=5)) as upstream, running_gateway(priced(upstream)) as gateway:
        for stream in (True, False):
            assert await post(session, gateway, stream=stream, stream_options={"include_usage": True}) == 200
        text = await metrics(session, gateway)
    each_usd = PROMPT_TOKENS * 1e-6 + 5 * 10e-6
    assert sample(text, "headway_cost_usd_total", instance="a", model="m") == pytest.approx(2 * each_usd)
    assert "headway_wasted_cost_usd_total{" not in text


async def test_failed_attempts_that_billed_nothing_cost_nothing(session: aiohttp.ClientSession) -> None:
    """T27: an attempt refused before its answer began is not billed; the one that answered is, once."""
    async with FakeUpstream(Reply(status=503)) as bad, FakeUpstream(Reply(num_tokens=5)) as good:
        config = priced(bad, good, routing={"policy": "round_robin"})
        async with running_gateway(config) as gateway:
            assert await post(session, gateway, stream=False) == 200
            text = await metrics(session, gateway)
    assert len(bad.requests) == len(good.requests) == 1
    assert sample(text, "headway_cost_usd_total", instance="a", model="m") == 0.0
    assert sample(text, "headway_cost_usd_total", instance="b", model="m") == pytest.approx(60e-6)


async def test_a_broken_stream_is_billed_and_wasted(session: aiohttp.ClientSession) -> None:
    """T27: tokens of a stream that broke were generated: they are cost, and they are waste."""
    broken = Reply(num_tokens=7, dies="after_tokens")
    async with FakeUpstream(broken) as upstream, running_gateway(priced(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            await response.read()
            decision_id = response.headers["x-headway-decision"]
        text = await metrics(session, gateway)
        async with session.get(f"{gateway.url}/decisions/{decision_id}") as response:
            outcome = (await response.json())["outcome"]
    cost_usd = sample(text, "headway_cost_usd_total", instance="a", model="m")
    assert cost_usd == pytest.approx(outcome["cost_usd"])
    assert cost_usd == pytest.approx(outcome["prompt_tokens"] * 1e-6 + 7 * 10e-6)
    assert sample(text, "headway_wasted_cost_usd_total", instance="a", model="m", status="interrupted") == cost_usd


async def test_what_a_client_left_behind_is_waste(session: aiohttp.ClientSession) -> None:
    """T27: a client that leaves in mid-stream has cost what was generated until then."""
    async with FakeUpstream(Reply(num_tokens=500, interval_s=0.01)) as upstream:
        async with running_gateway(priced(upstream)) as gateway:
            async with RawClient(gateway.url, chat()) as client:
                await client.read_until(b"tok ")
                client.hang_up()
            await until(lambda: gateway.gateway.num_inflight == 0)
            text = await metrics(session, gateway)
    cost_usd = sample(text, "headway_cost_usd_total", instance="a", model="m")
    assert 0 < cost_usd < 500 * 10e-6
    assert sample(text, "headway_wasted_cost_usd_total", instance="a", model="m", status="cancelled") == cost_usd
