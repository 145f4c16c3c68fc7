"""What the client sees when an instance fails, and how often upstreams are called for it."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from gateway_clients import CHAT, RawClient, chat, pool_of
from headway.testing import FakeUpstream, Reply, pool, running_gateway

ROUND_ROBIN = {"policy": "round_robin"}  # so that a first attempt lands on the first instance
FAST = {"first_byte_timeout_s": 0.3, "idle_timeout_s": 0.3, "deadline_s": 5, "attempts": 2}


def events_of(data: bytes) -> list[str]:
    """The data of each event."""
    return [part.decode().removeprefix("data: ") for part in data.split(b"\n\n") if part and not part.startswith(b":")]


async def test_death_in_mid_stream_is_one_error_event(session: aiohttp.ClientSession) -> None:
    """T19: an upstream that dies after 10 events gives 10 events, one error event, and one upstream call in all."""
    dying = Reply(num_tokens=10, dies="after_tokens")
    async with FakeUpstream(dying) as first, FakeUpstream(dying) as second:
        async with running_gateway(pool_of(first, second)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 200
                events = events_of(await response.read())
            record = gateway.gateway.decisions.get(response.headers["x-headway-decision"])
        assert len(first.requests) + len(second.requests) == 1
    assert len([event for event in events if '"tok "' in event]) == 10
    assert len([event for event in events if "error" in event]) == 1
    error = json.loads(events[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "upstream_interrupted")
    assert record is not None
    assert record.outcome is not None
    assert (record.outcome.status, record.outcome.output_tokens) == ("interrupted", 10)


async def test_death_inside_an_event_leaves_a_readable_error(session: aiohttp.ClientSession) -> None:
    """After a torn event the error event begins on a line of its own."""
    torn = Reply(chunks=(b'data: {"choices":[]}\n\n', b'data: {"cho'), dies="after_tokens")
    async with FakeUpstream(torn) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            data = await response.read()
    assert data.startswith(b'data: {"choices":[]}\n\ndata: {"cho\n\ndata: {"error":')


async def test_a_stream_without_an_end_mark_is_broken(session: aiohttp.ClientSession) -> None:
    """A stream that just stops, without finish reason or ``[DONE]``, is no complete answer."""
    cut = Reply(chunks=(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n',))
    async with FakeUpstream(cut) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert "upstream_interrupted" in events_of(await response.read())[-1]


async def test_an_upstreams_own_error_event_passes(session: aiohttp.ClientSession) -> None:
    """An engine that reports its failure inside the stream is not corrected, and its answer does not count as one."""
    data = b'data: {"error":{"message":"engine died"}}\n\n'
    async with FakeUpstream(Reply(chunks=(data,))) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert await response.read() == data
        record = gateway.gateway.decisions.get(response.headers["x-headway-decision"])
    assert record is not None
    assert record.outcome is not None
    assert record.outcome.status == "error"


@pytest.mark.parametrize(
    ("dies", "stream"), [("before_headers", True), ("before_headers", False), ("after_headers", True)]
)
async def test_early_death_fails_over(session: aiohttp.ClientSession, dies: str, stream: bool) -> None:
    """T20: an upstream that dies before the first byte of its body is replaced without the client noticing."""
    async with FakeUpstream(Reply(dies=dies)) as first, FakeUpstream() as second:  # type: ignore[arg-type]
        async with running_gateway(pool_of(first, second, routing=ROUND_ROBIN)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat(stream=stream)) as response:
                assert response.status == 200
                assert response.headers["x-headway-instance"] == "b"
                assert (await response.text()).count("tok ") >= 5
        assert (len(first.requests), len(second.requests)) == (1, 1)
        ids = {request.headers["x-request-id"] for request in (*first.requests, *second.requests)}
        assert len(ids) == 1


async def test_refused_connections_fail_over(session: aiohttp.ClientSession) -> None:
    """An instance that does not listen is replaced, and is out from then on."""
    async with FakeUpstream() as first, FakeUpstream() as second:
        config = pool_of(first, second, routing=ROUND_ROBIN)
        await first.stop()
        async with running_gateway(config) as gateway:
            for _ in range(4):
                async with session.post(gateway.url + CHAT, json=chat(stream=False)) as response:
                    assert response.headers["x-headway-instance"] == "b"
            async with session.get(gateway.url + "/metrics") as response:
                assert 'headway_retries_total{reason="unreachable"} 1.0' in await response.text()


@pytest.mark.parametrize("stream", [True, False])
async def test_attempts_bound_upstream_calls(session: aiohttp.ClientSession, stream: bool) -> None:
    """T25: with an upstream that always says 503 and two attempts there are two calls, and SDKs are told to stop."""
    refusal = Reply(status=503, body=b'{"error":{"message":"busy"}}')
    async with FakeUpstream(refusal) as one, FakeUpstream(refusal) as two, FakeUpstream(refusal) as three:
        async with running_gateway(pool_of(one, two, three)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat(stream=stream)) as response:
                assert response.status == 503
                assert response.headers["x-should-retry"] == "false"
                assert await response.read() == b'{"error":{"message":"busy"}}'
        assert len(one.requests) + len(two.requests) + len(three.requests) == 2


async def test_a_sole_instance_is_asked_once_more(session: aiohttp.ClientSession) -> None:
    """T25: with one instance the second attempt goes there too, and succeeds if it has recovered."""
    async with FakeUpstream([Reply(status=503), Reply()]) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert response.status == 200
            await response.read()
        assert len(upstream.requests) == 2
        assert gateway.gateway.fleet.views[0].num_outstanding == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_any_byte_of_an_answer_forbids_a_second_call(session: aiohttp.ClientSession, stream: bool) -> None:
    """T26: once a byte of an answer's body was seen the request is never sent again, even if the client saw none."""
    partial = (
        Reply(chunks=(b'data: {"c',), dies="after_tokens")
        if stream
        else Reply(chunks=(b'{"id":',), dies="after_tokens", content_type="application/json")
    )
    async with FakeUpstream(partial) as first, FakeUpstream(partial) as second:
        async with running_gateway(pool_of(first, second)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat(stream=stream)) as response:
                data = await response.read()
                assert response.status == (200 if stream else 502)
        assert len(first.requests) + len(second.requests) == 1
    assert b"upstream_interrupted" in data


async def test_comments_alone_are_no_first_byte(session: aiohttp.ClientSession) -> None:
    """T22: when only comments arrive, the client gets a 504 at the limit; the request is not sent twice."""
    chatty = Reply(comments=1000, interval_s=0.05)
    async with FakeUpstream(chatty) as first, FakeUpstream(chatty) as second:
        async with running_gateway(pool_of(first, second, resilience=FAST)) as gateway:
            started_s = time.monotonic()
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 504
                assert (await response.json())["error"]["code"] == "upstream_timeout"
            assert 0.25 <= time.monotonic() - started_s < 2
        assert len(first.requests) + len(second.requests) == 1


async def test_comments_before_the_answer_pass(session: aiohttp.ClientSession) -> None:
    """Comments that came before the first event reach the client, in front of it."""
    async with FakeUpstream(Reply(comments=2, interval_s=0.01)) as upstream:
        async with running_gateway(pool_of(upstream)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert (await response.read()).startswith(b": keep-alive\n\n: keep-alive\n\ndata: ")


@pytest.mark.parametrize("hangs", ["before_headers", "after_headers"])
async def test_silence_fails_over_at_the_first_byte_limit(session: aiohttp.ClientSession, hangs: str) -> None:
    """T10: an instance that accepts and says nothing is given up at the limit, and the other one answers."""
    async with FakeUpstream(Reply(hangs=hangs)) as first, FakeUpstream() as second:  # type: ignore[arg-type]
        async with running_gateway(pool_of(first, second, routing=ROUND_ROBIN, resilience=FAST)) as gateway:
            started_s = time.monotonic()
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.headers["x-headway-instance"] == "b"
            assert 0.25 <= time.monotonic() - started_s < 2
        assert first.requests[0].disconnected_s is not None


async def test_silence_everywhere_is_a_504(session: aiohttp.ClientSession) -> None:
    """T24: the deadline covers all attempts."""
    limits = FAST | {"deadline_s": 0.5, "attempts": 5}
    silent = Reply(hangs="before_headers")
    async with FakeUpstream(silent) as first, FakeUpstream(silent) as second:
        async with running_gateway(pool_of(first, second, resilience=limits)) as gateway:
            started_s = time.monotonic()
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 504
                assert response.headers["x-should-retry"] == "false"
            assert 0.45 <= time.monotonic() - started_s < 2


async def test_long_answers_that_are_not_streamed_are_no_silence(session: aiohttp.ClientSession) -> None:
    """An answer that is not streamed has its first byte at its end: the first-byte limit grows with ``max_tokens``."""
    slow = Reply(delay_s=0.6)
    async with FakeUpstream(slow) as upstream, running_gateway(pool_of(upstream, resilience=FAST)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat(stream=False, max_tokens=100)) as response:
            assert response.status == 200
        async with session.post(gateway.url + CHAT, json=chat(stream=False)) as response:
            assert response.status == 200
        async with session.post(gateway.url + CHAT, json=chat(stream=False, max_tokens=1)) as response:
            assert response.status == 504


async def test_a_stalled_stream_ends_by_the_idle_limit(session: aiohttp.ClientSession) -> None:
    """A stream that falls silent ends with an error event instead of hanging for ever."""
    async with FakeUpstream(Reply(num_tokens=3, interval_s=2.0)) as upstream:
        async with running_gateway(pool_of(upstream, resilience=FAST)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert "upstream_timeout" in events_of(await response.read())[-1]
        assert upstream.requests[0].disconnected_s is not None


async def test_a_stream_outlives_deadline_and_first_byte_limit(session: aiohttp.ClientSession) -> None:
    """A stream that keeps flowing is not cut, however long it takes."""
    limits = FAST | {"deadline_s": 0.3}
    async with FakeUpstream(Reply(num_tokens=12, interval_s=0.05)) as upstream:
        async with running_gateway(pool_of(upstream, resilience=limits)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert events_of(await response.read())[-1] == "[DONE]"


async def test_back_pressure_is_no_sickness(session: aiohttp.ClientSession) -> None:
    """An upstream's 429 goes elsewhere, or back to the client with its bytes; it never marks an instance unhealthy."""
    busy = Reply(status=429, body=b'{"error":{"message":"slow down"}}')
    async with FakeUpstream(busy) as upstream:
        async with running_gateway(pool_of(upstream, resilience={"breaker_failures": 1})) as gateway:
            for _ in range(3):
                async with session.post(gateway.url + CHAT, json=chat()) as response:
                    assert response.status == 429
                    assert response.headers["retry-after"] == "1"
                    assert response.headers["x-headway-reason"] == "upstream"
                    assert await response.read() == busy.body
            assert gateway.gateway.fleet.views[0].healthy
        assert len(upstream.requests) == 3


async def test_foreign_error_pages_take_openai_shape(session: aiohttp.ClientSession) -> None:
    """A proxy's HTML 502 keeps its status and becomes a body that SDKs can read."""
    page = Reply(status=502, body=b"<html>Bad Gateway</html>", headers={"content-type": "text/html"})
    async with FakeUpstream(page) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert response.status == 502
            assert response.content_type == "application/json"
            assert (await response.json())["error"]["type"] == "server_error"


async def test_an_upstream_that_speaks_no_http_is_a_502(session: aiohttp.ClientSession) -> None:
    """Garbage instead of HTTP is a protocol failure of that instance, in OpenAI's shape."""

    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0-nonsense\r\n")
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    async with server:
        upstream_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        config = pool([{"name": "m"}], [{"id": "a", "model": "m", "api_base": upstream_url}])
        async with running_gateway(config) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 502
                error = (await response.json())["error"]
    assert error["code"] == "upstream_protocol_error"
    assert "127.0.0.1" not in error["message"]


async def test_too_many_requests_are_refused_at_the_door(session: aiohttp.ClientSession) -> None:
    """Beyond ``max_inflight`` a request gets 429 with Retry-After and a reason, and no upstream call."""
    async with FakeUpstream(Reply(num_tokens=50, interval_s=0.02)) as upstream:
        config = pool_of(upstream, server={"port": 0, "max_inflight": 1})
        async with running_gateway(config) as gateway:
            async with RawClient(gateway.url, chat()) as running:
                await running.read_until(b"\r\n\r\n")
                async with session.post(gateway.url + CHAT, json=chat()) as response:
                    assert response.status == 429
                    assert response.headers["retry-after"] == "1"
                    assert response.headers["x-headway-reason"] == "max_inflight"
        assert len(upstream.requests) == 1
