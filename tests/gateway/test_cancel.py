"""A client that leaves, at any moment: the upstream hears of it, the ledger forgets it, the log knows it."""

from __future__ import annotations

import asyncio
import logging
import random
import time

import aiohttp
import pytest

from gateway_clients import CHAT, RawClient, chat, pool_of, until
from headway.testing import FakeUpstream, Received, Reply, RunningGateway, running_gateway

#: What PAIN allows between hanging up and the upstream noticing, plus what a busy two-core machine may add.
LIMIT_S = 0.1
SLACK_S = 0.2


async def gone(upstream: FakeUpstream, gateway: RunningGateway, hung_up_s: float, number: int = 0) -> None:
    """The upstream call ended in time, and nothing is booked any more."""
    await until(lambda: upstream.requests[number].disconnected_s is not None)
    disconnected_s = upstream.requests[number].disconnected_s
    assert disconnected_s is not None
    assert disconnected_s - hung_up_s < LIMIT_S + SLACK_S
    await until(lambda: gateway.gateway.num_inflight == 0)
    assert all(view.num_outstanding == 0 for view in gateway.gateway.fleet.views)


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_before_the_first_token(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """T21: leaving before the first token, streaming or not, cancels the upstream within 100 ms; 499 is logged."""
    with caplog.at_level(logging.INFO, "headway"):
        async with FakeUpstream(Reply(delay_s=30)) as upstream, running_gateway(pool_of(upstream)) as gateway:
            async with RawClient(gateway.url, chat(stream=stream)) as client:
                await until(lambda: upstream.num_open == 1)
                assert gateway.gateway.fleet.views[0].num_outstanding == 1
                await gone(upstream, gateway, client.hang_up())
    logged = [record.fields for record in caplog.records if record.message == "request"]
    assert [entry["status"] for entry in logged] == [499]


async def test_hanging_up_in_mid_stream(session: aiohttp.ClientSession) -> None:
    """T21: disconnecting in mid-stream cancels the upstream within 100 ms and is counted as 499."""
    async with FakeUpstream(Reply(num_tokens=1000, interval_s=0.02)) as upstream:
        async with running_gateway(pool_of(upstream)) as gateway:
            async with RawClient(gateway.url, chat()) as client:
                await client.read_until(b"tok ")
                await gone(upstream, gateway, client.hang_up())
            async with session.get(gateway.url + "/metrics") as response:
                text = await response.text()
    assert 'headway_requests_total{instance="a",model="m",status="499"} 1.0' in text
    assert 'headway_inflight{instance="a"} 0.0' in text


async def test_hanging_up_while_a_stream_is_silent() -> None:
    """T21: also a stream that says nothing at the moment is cancelled at once."""
    async with FakeUpstream(Reply(num_tokens=3, interval_s=30)) as upstream:
        async with running_gateway(pool_of(upstream)) as gateway:
            async with RawClient(gateway.url, chat()) as client:
                await client.read_until(b"assistant")
                await asyncio.sleep(0.05)
                await gone(upstream, gateway, client.hang_up())


async def test_hanging_up_in_back_off() -> None:
    """T21: a client that leaves between two attempts causes no second one."""
    async with FakeUpstream(Reply(status=503)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with RawClient(gateway.url, chat()) as client:
            await until(lambda: len(upstream.requests) == 1 and upstream.num_open == 0)
            client.hang_up()
            await until(lambda: gateway.gateway.num_inflight == 0, within_s=0.2)
        await asyncio.sleep(0.3)
        assert len(upstream.requests) == 1
        assert gateway.gateway.fleet.views[0].num_outstanding == 0


async def test_hanging_up_during_a_second_attempt() -> None:
    """T21: the attempt that is under way is the one that is cancelled."""
    script = [Reply(status=503), Reply(delay_s=30)]
    async with FakeUpstream(script) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with RawClient(gateway.url, chat()) as client:
            await until(lambda: len(upstream.requests) == 2)
            await gone(upstream, gateway, client.hang_up(), number=1)


async def test_hanging_up_while_sending_the_body() -> None:
    """A client that leaves before its body is complete costs nothing."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await until(lambda: gateway.gateway.num_inflight == 1)
        writer.transport.abort()
        await until(lambda: gateway.gateway.num_inflight == 0)
        assert upstream.requests == []


async def test_hanging_up_says_nothing_of_health() -> None:
    """However often clients leave, the instance stays in."""
    async with FakeUpstream(Reply(delay_s=30)) as upstream:
        async with running_gateway(pool_of(upstream, resilience={"breaker_failures": 1})) as gateway:
            for number in range(4):
                async with RawClient(gateway.url, chat()) as client:
                    await until(lambda count=number: len(upstream.requests) == count + 1)
                    client.hang_up()
            await until(lambda: gateway.gateway.num_inflight == 0)
            assert gateway.gateway.fleet.views[0].healthy


async def test_ten_thousand_requests_leave_nothing_behind(session: aiohttp.ClientSession) -> None:
    """T6: of 10,000 requests 30 % leave at random points, 10 % fail; every gauge is 0 at the end and never below."""
    rng = random.Random(5)
    num_requests, num_workers = 10_000, 64

    def script(received: Received) -> Reply:
        draw = received.headers["x-draw"]
        if draw == "error":
            return Reply(status=500, body=b"{}")
        return Reply(num_tokens=3, interval_s=0.002 if draw.startswith("leave") else 0.0)

    async with FakeUpstream(script) as one, FakeUpstream(script) as two, FakeUpstream(script) as three:
        config = pool_of(one, two, three, resilience={"attempts": 1, "breaker_failures": 1_000_000})
        async with running_gateway(config) as gateway:
            views = gateway.gateway.fleet.views
            fates = ["leave"] * 3000 + ["error"] * 1000 + ["stay"] * 6000
            rng.shuffle(fates)
            assert len(fates) == num_requests
            lowest = 0

            async def serve(fate: str) -> None:
                nonlocal lowest
                client = RawClient(gateway.url, chat(), headers={"x-draw": fate, "connection": "close"})
                async with client:
                    if fate == "leave":
                        await asyncio.sleep(rng.random() * 0.02)
                    else:
                        await client.reader.read()
                lowest = min(lowest, *(view.num_outstanding for view in views), gateway.gateway.num_inflight)

            async def work() -> None:
                while fates:
                    await serve(fates.pop())

            await asyncio.gather(*(work() for _ in range(num_workers)))
            await until(lambda: gateway.gateway.num_inflight == 0)
            assert lowest == 0
            assert [view.num_outstanding for view in views] == [0, 0, 0]
            assert all(not view.ledger for view in views)
            async with session.get(gateway.url + "/metrics") as response:
                text = await response.text()
    for instance in "abc":
        assert f'headway_inflight{{instance="{instance}"}} 0.0' in text
    assert "headway_requests_inflight 0.0" in text


async def test_a_client_that_stops_reading_is_gone() -> None:
    """A client that reads nothing for the idle limit ends like one that hung up; the instance is not blamed for it."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"z" * 100_000 + b'"}}]}\n\n'
    endless = Reply(chunks=(event,) * 400)
    async with FakeUpstream(endless) as upstream:
        config = pool_of(upstream, resilience={"idle_timeout_s": 0.4, "breaker_failures": 1})
        async with running_gateway(config) as gateway, RawClient(gateway.url, chat()) as client:
            await client.read_until(b"\r\n\r\n")
            client.writer.transport.pause_reading()
            await until(lambda: gateway.gateway.num_inflight == 0)
            assert gateway.gateway.fleet.views[0].healthy
            assert gateway.gateway.fleet.views[0].num_outstanding == 0
            await until(lambda: upstream.requests[0].disconnected_s is not None)


async def test_many_idle_streams_stay_cheap(session: aiohttp.ClientSession) -> None:
    """Hundreds of streams that say nothing do not slow another request down."""
    async with FakeUpstream(lambda received: Reply(num_tokens=2, interval_s=float(received.headers["x-pace"]))) as up:
        async with running_gateway(pool_of(up)) as gateway, asyncio.TaskGroup() as group:
            clients = [RawClient(gateway.url, chat(), headers={"x-pace": "20"}) for _ in range(300)]

            async def hold(client: RawClient) -> None:
                async with client:
                    await client.read_until(b"assistant")
                    await released.wait()

            released = asyncio.Event()
            for client in clients:
                group.create_task(hold(client))
            await until(lambda: up.num_open == 300, within_s=20)
            started_s = time.monotonic()
            async with session.post(gateway.url + CHAT, json=chat(), headers={"x-pace": "0"}) as response:
                await response.read()
            assert time.monotonic() - started_s < 1.0
            released.set()
