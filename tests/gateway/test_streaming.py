"""Streams cross the gateway byte for byte and at once, and the TTFT clock stops where it should."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import aiohttp
import pytest

from gateway_clients import CHAT, RawClient, chat, pool_of, until
from headway.testing import FakeUpstream, Reply, pool, running_gateway

RECORDING = (
    b": ping\n\n"
    b'data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    + 'data: {"id":"1","choices":[{"index":0,"delta":{"content":"hé🚄"},"finish_reason":null}]}\n\n'.encode()
    + b'data: {"id":"1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_streams_cut_at_every_byte_arrive_unchanged(session: aiohttp.ClientSession, line_end: bytes) -> None:
    """T17: a recorded stream cut at every byte, LF and CRLF, inside UTF-8, gives the client identical bytes."""
    data = RECORDING.replace(b"\n", line_end)
    cuts = [(data[:cut], data[cut:]) for cut in range(1, len(data))]
    script = [Reply(chunks=cut, interval_s=0.001) for cut in cuts]
    script.append(Reply(chunks=tuple(data[i : i + 1] for i in range(len(data)))))
    async with FakeUpstream(script) as upstream, running_gateway(pool_of(upstream)) as gateway:
        for _ in script:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert await response.read() == data
                assert response.headers["content-type"] == "text/event-stream"
        async with session.get(gateway.url + "/metrics") as response:
            assert f'status="200"}} {len(script):.1f}' in await response.text()


async def test_first_event_is_forwarded_at_once(session: aiohttp.ClientSession) -> None:
    """T18: of events paced 50 ms apart the first is at the client long before the last leaves the upstream."""
    reply = Reply(num_tokens=20, interval_s=0.05)
    async with FakeUpstream(reply) as upstream, running_gateway(pool_of(upstream)) as gateway:
        arrivals = []
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            assert "content-encoding" not in response.headers
            async for _ in response.content.iter_any():
                arrivals.append(time.monotonic())
        ended_s = upstream.requests[0].ended_s
        assert ended_s is not None
        assert arrivals[0] < ended_s - 0.5
        assert len(arrivals) >= 15  # each event on its own, not one lump


async def test_added_delay_between_events_is_small(session: aiohttp.ClientSession) -> None:
    """T18: paced 20 ms apart, the gateway adds no gap that a reader could see (median, against direct)."""
    reply = Reply(num_tokens=30, interval_s=0.02)
    async with FakeUpstream(reply) as upstream, running_gateway(pool_of(upstream)) as gateway:
        gaps = {}
        for name, url in (("direct", upstream.url + "/chat/completions"), ("gateway", gateway.url + CHAT)):
            arrivals = []
            async with session.post(url, json=chat("m")) as response:
                async for _ in response.content.iter_any():
                    arrivals.append(time.monotonic())
            between = sorted(b - a for a, b in pairwise(arrivals))
            gaps[name] = between[len(between) // 2]
        assert gaps["gateway"] < gaps["direct"] + 0.02


async def test_ttft_stops_at_the_first_content_not_at_the_role(session: aiohttp.ClientSession) -> None:
    """Headers, comments and the role chunk come at once; the measured TTFT is that of the first content delta."""
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    tool = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}]}\n\n'
    reply = Reply(chunks=(role, tool, b"data: [DONE]\n\n"), comments=1, interval_s=0.15)
    async with FakeUpstream(reply) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            await response.read()
            record = gateway.gateway.decisions.get(response.headers["x-headway-decision"])
        assert record is not None
        assert record.outcome is not None
        assert record.outcome.ttft_s is not None
        assert record.outcome.total_s is not None
        assert 0.3 <= record.outcome.ttft_s < record.outcome.total_s - 0.1


async def test_injected_usage_is_counted_and_dropped(session: aiohttp.ClientSession) -> None:
    """Usage the client did not ask for is counted, and its event does not reach the client."""
    async with FakeUpstream(Reply(num_tokens=4, prompt_tokens=9)) as upstream:
        config = pool(
            [{"name": "m", "price": {"input_per_1m": 1.0, "output_per_1m": 10.0}}],
            [{"id": "a", "model": "m", "api_base": upstream.url, "engine": "vllm-0.32"}],
        )
        async with running_gateway(config) as gateway:
            async with session.post(gateway.url + CHAT, json=chat("m")) as response:
                text = await response.text()
                record = gateway.gateway.decisions.get(response.headers["x-headway-decision"])
            assert b"usage" not in text.encode()
            assert text.endswith("data: [DONE]\n\n")
            assert text.count('"tok "') == 4
            assert record is not None
            assert record.outcome is not None
            assert (record.outcome.prompt_tokens, record.outcome.output_tokens) == (9, 4)
            assert record.outcome.cost_usd == pytest.approx(49e-6)
        assert upstream.requests[0].json["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": False}])
async def test_usage_that_the_client_asked_for_stays(
    session: aiohttp.ClientSession, options: dict[str, object]
) -> None:
    """A client that asked for usage gets it, and its options go up as they came."""
    async with FakeUpstream() as upstream:
        config = pool([{"name": "m"}], [{"id": "a", "model": "m", "api_base": upstream.url, "engine": "vllm-0.32"}])
        body = chat("m", stream_options=options)
        async with running_gateway(config) as gateway, session.post(gateway.url + CHAT, json=body) as response:
            assert '"completion_tokens": 5' in await response.text()
        assert upstream.requests[0].body == json.dumps(body).encode()


async def test_other_stream_options_survive_the_injection(session: aiohttp.ClientSession) -> None:
    """Asking for usage keeps what else the client's ``stream_options`` say."""
    async with FakeUpstream() as upstream:
        config = pool([{"name": "m"}], [{"id": "a", "model": "m", "api_base": upstream.url, "engine": "vllm-0.32"}])
        body = chat("m", stream_options={"include_usage": False, "x": [1]})
        async with running_gateway(config) as gateway, session.post(gateway.url + CHAT, json=body) as response:
            assert "completion_tokens" not in await response.text()
        assert upstream.requests[0].json["stream_options"] == {"include_usage": True, "x": [1]}


async def test_hosted_providers_get_no_injection(session: aiohttp.ClientSession) -> None:
    """Nothing is asked of a provider that may not know the option; tokens are then counted by events."""
    async with FakeUpstream(Reply(num_tokens=6)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat("m")) as response:
            await response.read()
            record = gateway.gateway.decisions.get(response.headers["x-headway-decision"])
        assert "stream_options" not in upstream.requests[0].json
        assert record is not None
        assert record.outcome is not None
        assert record.outcome.output_tokens == 6


async def test_a_slow_reader_gets_everything() -> None:
    """A client that reads late holds the stream back instead of losing bytes or filling memory."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"z" * 60_000 + b'"}}]}\n\n'
    reply = Reply(chunks=(*(event,) * 100, b"data: [DONE]\n\n"))
    async with FakeUpstream(reply) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with RawClient(gateway.url, chat("m")) as client:
            await client.read_until(b"\r\n\r\n")
            await until(lambda: upstream.num_open == 1)
            received = await _read_all(client)
        assert received.count(b"z") == 6_000_000


async def _read_all(client: RawClient) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += await client.reader.read(1 << 20)
    return data
