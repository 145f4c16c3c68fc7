"""Instances that say when to come again are left alone until then, and nobody multiplies retries."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from gateway_clients import CHAT, chat, metrics, pool_of, post, until
from headway.gateway.errors import retry_after_of
from headway.testing import FakeUpstream, Reply, running_gateway

STRICT = {"breaker_failures": 1}


def busy(seconds: str, status: int = 429, name: str = "retry-after") -> Reply:
    return Reply(status=status, body=b'{"error":{"message":"slow down"}}', headers={name: seconds})


@pytest.mark.parametrize("status", [429, 503])
async def test_who_says_when_is_left_alone_until_then(session: aiohttp.ClientSession, status: int) -> None:
    """429 and 503 with Retry-After are back-pressure: the others serve meanwhile, and the breaker stays closed."""
    async with FakeUpstream([busy("1", status), Reply()]) as first, FakeUpstream() as second:
        config = pool_of(first, second, resilience=STRICT, routing={"policy": "round_robin"})
        async with running_gateway(config) as gateway:
            assert [await post(session, gateway) for _ in range(6)] == [200] * 6
            assert len(first.requests) == 1
            assert gateway.gateway.health.breakers["a"].state == "closed"
            async with session.post(gateway.url + "/v1/route", json=chat()) as response:
                verdicts = {one["instance_id"]: one["verdict"] for one in (await response.json())["candidates"]}
            assert verdicts == {"a": "resting", "b": "feasible"}
            await asyncio.sleep(1.0)
            assert [await post(session, gateway) for _ in range(2)] == [200] * 2
            assert len(first.requests) == 2


async def test_all_who_could_serve_rest(session: aiohttp.ClientSession) -> None:
    """The first 429 passes as it came; then the gateway answers itself with what is left of the time, asking nobody."""
    async with FakeUpstream(busy("30")) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "30")
            assert response.headers["x-headway-reason"] == "upstream"
            assert await response.read() == busy("30").body
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert response.status == 429
            assert 25 <= int(response.headers["retry-after"]) <= 30
            assert response.headers["x-headway-reason"] == "upstream_resting"
            assert (await response.json())["error"]["code"] == "upstream_resting"
        assert 'headway_rejected_total{reason="upstream_resting"} 1.0' in await metrics(session, gateway)
        assert len(upstream.requests) == 1


async def test_a_503_without_a_time_is_a_failure(session: aiohttp.ClientSession) -> None:
    """Nobody knows when such an instance is back: its breaker opens as after any 5xx."""
    async with FakeUpstream(Reply(status=503)) as upstream:
        async with running_gateway(pool_of(upstream, resilience=STRICT | {"attempts": 1})) as gateway:
            assert await post(session, gateway) == 503
            assert gateway.gateway.health.breakers["a"].state == "open"


async def test_the_queue_waits_for_who_rests(session: aiohttp.ClientSession, one_slot: dict[str, object]) -> None:
    """Under a holding policy a request for an instance that rests waits, and goes the moment its time is over."""
    async with FakeUpstream([busy("300", name="retry-after-ms"), Reply()]) as upstream:
        async with running_gateway(pool_of(upstream, **one_slot, resilience={"attempts": 1})) as gateway:
            assert await post(session, gateway) == 429
            asking = asyncio.create_task(post(session, gateway))
            await until(lambda: len(gateway.gateway.queue) == 1)
            async with session.get(gateway.url + "/queue") as response:
                assert (await response.json())["held"][0]["reason"] == (
                    "held by central_fcfs: no instance can take it now"
                )
            assert await asking == 200
    assert len(upstream.requests) == 2


@pytest.mark.parametrize(("retried", "calls"), [(None, 3), ("0", 3), ("1", 2), ("2", 1), ("9", 1), ("nonsense", 3)])
async def test_an_sdks_retries_come_out_of_the_same_budget(
    session: aiohttp.ClientSession, retried: str | None, calls: int
) -> None:
    """T25: x-stainless-retry-count says how often the SDK has tried; what is left is at least one upstream call."""
    headers = {} if retried is None else {"x-stainless-retry-count": retried}
    async with FakeUpstream(Reply(status=500)) as one, FakeUpstream(Reply(status=500)) as two:
        async with FakeUpstream(Reply(status=500)) as three:
            config = pool_of(one, two, three, resilience={"attempts": 3, "breaker_failures": 100})
            async with running_gateway(config) as gateway:
                async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                    assert response.status == 500
                    assert response.headers["x-should-retry"] == "false"
            assert sum(len(upstream.requests) for upstream in (one, two, three)) == calls


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({b"Retry-After": b"7"}, 7.0),
        ({b"retry-after": b"7", b"Retry-After-Ms": b" 250 "}, 0.25),
        ({b"retry-after": b"Thu, 01 Jan 1970 00:01:40 GMT"}, 40.0),
        ({b"retry-after": b"Thu, 01 Jan 1970 00:00:10 GMT"}, 0.0),
        ({b"retry-after": b"-3"}, 0.0),
        ({b"retry-after": b"soon"}, None),
        ({b"retry-after": b"\xff"}, None),
        ({b"retry-after": b"inf"}, None),
        ({}, None),
    ],
)
def test_every_way_of_saying_when(headers: dict[bytes, bytes], seconds: float | None) -> None:
    """Seconds, milliseconds and HTTP dates are understood; what is neither says nothing."""
    assert retry_after_of(headers.items(), wall_s=60.0) == seconds
