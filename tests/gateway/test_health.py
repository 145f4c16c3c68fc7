"""Instances that fail are left out, probed for free, and taken back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp

from gateway_clients import CHAT, chat, pool_of, until
from headway.gateway.health import Breaker
from headway.testing import FakeUpstream, Received, Reply, RunningGateway, running_gateway

QUICK = {"breaker_failures": 5, "breaker_open_s": 0.3, "attempts": 1}


def answering(good: Callable[[], bool]) -> Callable[[Received], Reply]:
    """A script that says 500 while ``good`` does not hold."""
    return lambda received: Reply(num_tokens=1) if good() else Reply(status=500)


async def test_client_errors_leave_the_breaker_closed(session: aiohttp.ClientSession) -> None:
    """T11: a flood of bad requests says nothing of the instance's health."""
    async with FakeUpstream(Reply(status=400)) as upstream:
        async with running_gateway(pool_of(upstream, resilience={"breaker_failures": 1})) as gateway:
            for _ in range(100):
                async with session.post(gateway.url + CHAT, json=chat(stream=False)) as response:
                    assert response.status == 400
            assert gateway.gateway.health.breakers["a"].state == "closed"
        assert len(upstream.requests) == 100


async def test_five_failures_open_and_one_request_closes(session: aiohttp.ClientSession) -> None:
    """T12: five 500s open the breaker; once its time is over one request proves the instance, and it is back."""
    recovered = False
    async with FakeUpstream(answering(lambda: recovered)) as upstream:
        async with running_gateway(pool_of(upstream, resilience=QUICK)) as gateway:
            breaker = gateway.gateway.health.breakers["a"]
            for _ in range(5):
                async with session.post(gateway.url + CHAT, json=chat()) as response:
                    assert response.status == 500
            assert breaker.state == "open"
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 503
                assert response.headers["retry-after"]
            recovered = True
            await until(lambda: breaker.state == "half_open")
            calls = len(upstream.requests)
            assert calls == 5
            statuses = await asyncio.gather(*(_status(session, gateway.url) for _ in range(6)))
            assert statuses.count(200) >= 1
            assert breaker.state == "closed"
            assert await _status(session, gateway.url) == 200


async def test_a_failed_trial_opens_again(session: aiohttp.ClientSession) -> None:
    """T12: half open, exactly one request is let through; when it fails the breaker is open again."""
    async with FakeUpstream(answering(lambda: False)) as upstream:
        async with running_gateway(pool_of(upstream, resilience=QUICK)) as gateway:
            breaker = await _half_open(session, gateway)
            statuses = await asyncio.gather(*(_status(session, gateway.url) for _ in range(6)))
            assert sorted(statuses) == [500, 503, 503, 503, 503, 503]
            assert breaker.state == "open"
        assert len(upstream.requests) == 6


async def test_a_long_trial_keeps_others_out_only_until_its_first_token(session: aiohttp.ClientSession) -> None:
    """Half open, the first token of a stream decides: others need not wait for the end of somebody's long answer."""
    script = [Reply(status=500)] * 5 + [Reply(num_tokens=2000, interval_s=0.05), Reply(num_tokens=1)]
    async with FakeUpstream(script) as upstream:
        async with running_gateway(pool_of(upstream, resilience=QUICK)) as gateway:
            breaker = await _half_open(session, gateway)
            async with session.post(gateway.url + CHAT, json=chat()) as trial:
                await until(lambda: breaker.state == "closed")
                assert await _status(session, gateway.url) == 200
                assert not trial.content.at_eof()


async def test_a_trial_that_breaks_after_its_first_token_opens_again(session: aiohttp.ClientSession) -> None:
    """An instance taken back by a first token is on probation: one failure is enough, until an answer was whole."""
    broken = Reply(num_tokens=3, interval_s=0.02, dies="after_tokens")
    script = [Reply(status=500)] * 5 + [broken, Reply(num_tokens=3), broken, Reply(num_tokens=1)]
    async with FakeUpstream(script) as upstream:
        async with running_gateway(pool_of(upstream, resilience=QUICK)) as gateway:
            breaker = await _half_open(session, gateway)
            await _stream(session, gateway.url)
            assert breaker.state == "open"
            await until(lambda: breaker.state == "half_open")
            for _ in range(2):  # a whole answer, and then one that breaks
                await _stream(session, gateway.url)
            assert (breaker.state, breaker.failures) == ("closed", 1)


async def test_a_killed_instance_costs_no_request(session: aiohttp.ClientSession) -> None:
    """T14: after a kill the requests in flight are all that is lost; the rest goes elsewhere, and it comes back."""
    async with FakeUpstream() as first, FakeUpstream() as second:
        config = pool_of(first, second, routing={"policy": "round_robin"})
        async with running_gateway(config) as gateway:
            assert [await _status(session, gateway.url) for _ in range(4)] == [200] * 4
            await first.stop()
            statuses = await asyncio.gather(*(_status(session, gateway.url) for _ in range(50)))
            assert statuses == [200] * 50
            view = gateway.gateway.fleet.views[0]
            assert not view.healthy
            seen = len(first.requests)
            await first.start()
            await until(lambda: view.healthy)
            assert first.num_probes >= 1
            assert len(first.requests) == seen  # probes are free
            assert [await _status(session, gateway.url) for _ in range(4)] == [200] * 4
            assert len(first.requests) == seen + 2


async def test_one_slow_cold_answer_condemns_nobody(session: aiohttp.ClientSession) -> None:
    """An instance whose first answer took a second (cold start) is healthy and keeps getting its share."""
    first_asked = False

    def cold(received: Received) -> Reply:
        nonlocal first_asked
        reply = Reply(num_tokens=1) if first_asked else Reply(num_tokens=1, first_token_s=1.0)
        first_asked = True
        return reply

    async with FakeUpstream(cold) as slow, FakeUpstream(Reply(num_tokens=1)) as fast:
        async with running_gateway(pool_of(slow, fast)) as gateway:
            while not first_asked:
                assert await _stream(session, gateway.url) == 200
            for _ in range(40):
                assert await _stream(session, gateway.url) == 200
            assert gateway.gateway.health.breakers["a"].state == "closed"
            assert len(slow.requests) >= 5


async def test_all_down_is_a_quick_503(session: aiohttp.ClientSession) -> None:
    """T15: with every instance out the answer is 503 with Retry-After, at once, in OpenAI's shape."""
    async with FakeUpstream() as upstream:
        config = pool_of(upstream)
        await upstream.stop()
        async with running_gateway(config) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 502
            started_s = time.monotonic()
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 503
                assert int(response.headers["retry-after"]) >= 1
                assert (await response.json())["error"]["code"] == "no_healthy_instance"
            assert time.monotonic() - started_s < 0.5
            async with session.get(gateway.url + "/metrics") as response:
                text = await response.text()
    assert 'headway_breaker_state{instance="a"} 2.0' in text
    assert 'headway_rejected_total{reason="no_instance"} 1.0' in text


async def test_healthy_instances_are_never_probed(session: aiohttp.ClientSession) -> None:
    """T16: no probe is sent where nothing is wrong, and none that costs tokens ever."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        assert await _status(session, gateway.url) == 200
        await asyncio.sleep(1.2)
        assert upstream.num_probes == 0
        assert len(upstream.requests) == 1


async def _half_open(session: aiohttp.ClientSession, gateway: RunningGateway) -> Breaker:
    """The breaker of the one instance, opened by five failures and half open since its time is over."""
    breaker = gateway.gateway.health.breakers["a"]
    for _ in range(5):
        await _status(session, gateway.url)
    await until(lambda: breaker.state == "half_open")
    return breaker


async def _status(session: aiohttp.ClientSession, url: str) -> int:
    async with session.post(url + CHAT, json=chat(stream=False)) as response:
        await response.read()
        return response.status


async def _stream(session: aiohttp.ClientSession, url: str) -> int:
    async with session.post(url + CHAT, json=chat()) as response:
        await response.read()
        return response.status
