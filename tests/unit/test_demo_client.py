"""The load client over real sockets: what it sends, when its TTFT clock stops, and what counts as a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from headway.demo.load_client import play
from headway.demo.score import Served
from headway.demo.workload import DemoQuery
from headway.lab.truth import MODELS, Answer

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
LAST = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3},'
    b'"x_headway_engine":{"ttft_s":0.01,"queue_s":0.002}}\n\ndata: [DONE]\n\n'
)
HEADERS = {
    "content-type": "text/event-stream", "x-headway-instance": "h100-8b", "x-headway-model": "qwen3-8b",
    "x-headway-predicted-ttft-ms": "12.5", "x-headway-slo": "met-expected",
}  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def _gateway(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _streams(*chunks: bytes) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    return handle


def _query(number: int = 0, arrival_s: float = 0.0) -> DemoQuery:
    return DemoQuery(
        number=number,
        arrival_s=arrival_s,
        task="alpaca",
        prompt="Explain.",
        prompt_tokens=2,
        ttft_target_s=0.1605,
        answers={model: Answer(number + 3, 0.5) for model in MODELS},
    )


async def _one(handler: Handler, patience_s: float = 20.0) -> Served:
    async with _gateway(handler) as url:
        return (await play([_query()], url, patience_s=patience_s))[0]


async def test_a_whole_answer_is_read_to_its_last_event() -> None:
    """Headers, usage and the engine's own TTFT of an answer come back, and it is no failure."""
    served = await _one(_streams(ROLE, WORD, WORD, LAST))
    assert served.error is None
    assert (served.instance, served.model, served.slo) == ("h100-8b", "qwen3-8b", "met-expected")
    assert served.predicted_ttft_s == pytest.approx(0.0125)
    assert served.engine_ttft_s == 0.01
    assert (served.prompt_tokens, served.output_tokens) == (7, 3)
    assert served.ttft_s is not None


async def test_long_answers_are_read_from_their_tail() -> None:
    """An answer far longer than the tail that is kept, in one piece or cut at odd places, still ends well."""
    stream = ROLE + WORD * 500 + LAST
    for size in (len(stream), 777):
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        served = await _one(_streams(*pieces))
        assert (served.error, served.output_tokens, served.engine_ttft_s) == (None, 3, 0.01)


async def test_the_clock_stops_at_content_not_at_the_role() -> None:
    """TTFT does not stop at headers, the role chunk or a comment: it waits for the first content."""
    gate = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        await response.write(b": keep-alive\n\n" + ROLE)
        asyncio.get_running_loop().call_later(0.2, gate.set)
        await gate.wait()
        await response.write(WORD[:20])
        await response.write(WORD[20:] + LAST)
        return response

    served = await _one(handle)
    assert served.ttft_s is not None
    assert served.ttft_s >= 0.2


async def test_the_request_carries_target_and_hidden_lengths() -> None:
    """Each query goes out as a streamed chat with its target, the same max_tokens, and every model's true length."""
    seen: list[tuple[dict[str, str], bytes]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append((dict(request.headers), await request.read()))
        return await _streams(WORD, LAST)(request)

    await _one(handle)
    headers = {name.lower(): value for name, value in seen[0][0].items()}
    body = msgspec.json.decode(seen[0][1])
    assert headers["x-slo-ttft-ms"] == "160.500"
    assert headers["x-headway-sim-output-tokens"] == "qwen3-0.6b=3,qwen3-8b=3,qwen3-32b=3"
    assert (body["model"], body["max_tokens"], body["stream"]) == ("auto", 1024, True)
    assert body["messages"] == [{"role": "user", "content": "Explain."}]


async def test_queries_go_out_in_order_and_come_back_in_order() -> None:
    """Every query has its outcome, in the order of the queries, and the listeners hear of each one."""
    heard: list[int] = []
    queries = [_query(number, number * 0.01) for number in range(5)]
    sent: list[None] = []
    async with _gateway(_streams(WORD, LAST)) as url:
        served = await play(
            queries,
            url,
            patience_s=20,
            on_sent=lambda: sent.append(None),
            on_served=lambda one: heard.append(one.number),
        )
    assert [one.number for one in served] == [0, 1, 2, 3, 4]
    assert sorted(heard) == [0, 1, 2, 3, 4]
    assert len(sent) == 5


async def _refuse(_: web.Request) -> web.StreamResponse:
    body = {"error": {"message": "busy", "type": "rate_limit_error", "param": None, "code": "saturated"}}
    return web.json_response(body, status=429)


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        (_refuse, "HTTP 429: saturated"),
        (_streams(WORD), "the stream ended before [DONE]"),
        (_streams(WORD, b'data: {"error":{"message":"gone"}}\n\n'), "the stream broke off with an error event"),
        (_streams(ROLE, LAST), "the stream held no content"),
        (_streams(b"data: {oops\n\n", LAST), "a malformed event"),
    ],
)
async def test_every_way_to_fail_has_a_name(handler: Handler, error: str) -> None:
    """A refusal, a broken stream, an error event and an empty answer are failures, each by its own name."""
    assert (await _one(handler)).error == error


async def test_a_gateway_that_is_not_there_is_a_failure() -> None:
    """A refused connection is an outcome, not an exception that ends the run."""
    async with _gateway(_refuse) as url:
        pass
    served = (await play([_query()], url, patience_s=20))[0]
    assert served.error == "ClientConnectorError"
    assert served.instance is None


async def test_patience_ends() -> None:
    """An answer that never ends is a failure soon after the last arrival, with what was seen until then kept."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        await response.write(WORD)
        await asyncio.Event().wait()
        return response

    async with _gateway(handle) as url:
        served = (await play([_query()], url, patience_s=0.3))[0]
    assert served.error == "unfinished when patience ended"
    assert served.instance == "h100-8b"
