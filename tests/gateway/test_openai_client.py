"""The official OpenAI client, unmodified, against the gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from gateway_clients import pool_of, until
from headway.testing import FakeUpstream, Reply, RunningGateway, pool, running_gateway

TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
]
MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client_of(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client with everything at its default but address and key."""
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="sk-any") as client:
        yield client


async def test_streaming_and_not() -> None:
    """Chat streams and whole answers arrive as the client's own types, usage included where asked for."""
    async with FakeUpstream(Reply(num_tokens=3)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with client_of(gateway) as client:
            whole = await client.chat.completions.create(model="auto", messages=MESSAGES)
            assert whole.choices[0].message.content == "tok tok tok "
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 3
            stream = await client.chat.completions.create(
                model="auto", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "tok tok tok "
            assert chunks[-1].usage is not None


async def test_completions_embeddings_and_models() -> None:
    """The other endpoints a client knows work too."""
    async with FakeUpstream(Reply(num_tokens=2)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with client_of(gateway) as client:
            completion = await client.completions.create(model="m", prompt="say")
            assert completion.choices[0].text == "tok tok "
            vectors = await client.embeddings.create(model="m", input="x", encoding_format="float")
            assert vectors.data[0].embedding == [0.1, 0.2]
            assert {model.id async for model in client.models.list()} == {"auto", "m"}
            assert (await client.models.retrieve("m")).id == "m"


async def test_tools_targets_and_answer_headers() -> None:
    """Tools pass in the body, targets through ``extra_body``, and the decision is readable from the answer."""
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
    events = [
        {**chunk, "choices": [choice]},
        {**chunk, "choices": [{**choice, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    chunks = (*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events), b"data: [DONE]\n\n")
    async with FakeUpstream(Reply(chunks=chunks)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with client_of(gateway) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="auto", messages=MESSAGES, tools=TOOLS, tool_choice="auto", stream=True,
                extra_body={"slo": {"ttft_ms": 5000}}, extra_headers={"x-headway-explain": "1"},
            )  # fmt: skip
            assert raw.headers["x-headway-slo"] == "met-expected"
            assert json.loads(raw.headers["x-headway-decision-json"])["ttft_target_s"] == 5.0
            calls = [c async for c in raw.parse()]
    assert calls[0].choices[0].delta.tool_calls[0].function.name == "look_up"
    assert upstream.requests[0].json["tools"] == TOOLS
    assert "slo" not in upstream.requests[0].json


async def test_closing_a_stream_cancels_the_upstream() -> None:
    """Leaving the stream early is seen upstream, and nothing stays booked."""
    async with FakeUpstream(Reply(num_tokens=1000, interval_s=0.02)) as upstream:
        async with running_gateway(pool_of(upstream)) as gateway, client_of(gateway) as client:
            stream = await client.chat.completions.create(model="auto", messages=MESSAGES, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            await until(lambda: upstream.requests[0].disconnected_s is not None)
            await until(lambda: gateway.gateway.num_inflight == 0)
            assert gateway.gateway.fleet.views[0].num_outstanding == 0


async def test_client_errors_are_typed() -> None:
    """What is wrong with a request comes as the client's own exceptions, with code and parameter."""
    async with FakeUpstream() as upstream:
        config = pool([{"name": "m", "context_tokens": 100}], [{"id": "a", "model": "m", "api_base": upstream.url}])
        async with running_gateway(config) as gateway, client_of(gateway) as client:
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.chat.completions.create(model="gpt-x", messages=MESSAGES)
            assert unknown.value.code == "model_not_found"
            long_message = {"role": "user", "content": "x" * 4000}
            with pytest.raises(openai.BadRequestError) as long:
                await client.chat.completions.create(model="m", messages=[long_message])
            assert long.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(
                    model="m", messages=MESSAGES, extra_headers={"x-slo-ttft-ms": "fast"}
                )
            assert bad.value.param == "x-slo-ttft-ms"
    assert upstream.requests == []


@pytest.mark.parametrize(
    ("reply", "kind", "num_calls"),
    [
        (Reply(status=401), openai.AuthenticationError, 1),
        (Reply(status=422), openai.UnprocessableEntityError, 1),
        (Reply(status=429), openai.RateLimitError, 1),
        (Reply(status=503), openai.InternalServerError, 2),
        (Reply(dies="before_headers"), openai.InternalServerError, 2),
    ],
)
async def test_upstream_failures_are_typed_and_not_multiplied(
    reply: Reply, kind: type[Exception], num_calls: int
) -> None:
    """T25: the client's own two retries do not multiply ours: it is told that they are spent."""
    async with FakeUpstream(reply) as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with client_of(gateway) as client:
            with pytest.raises(kind):
                await client.chat.completions.create(model="auto", messages=MESSAGES)
        assert len(upstream.requests) == num_calls


async def test_a_broken_stream_is_an_api_error() -> None:
    """T19: a stream that dies raises in the client after its events were delivered; it does not just stop."""
    async with FakeUpstream(Reply(num_tokens=4, dies="after_tokens")) as upstream:
        async with running_gateway(pool_of(upstream)) as gateway, client_of(gateway) as client:
            stream = await client.chat.completions.create(model="auto", messages=MESSAGES, stream=True)
            seen = []
            with pytest.raises(openai.APIError, match="broke off"):  # noqa: PT012 - it is the iteration that raises
                async for chunk in stream:
                    seen.append(chunk.choices[0].delta.content)
            assert seen.count("tok ") == 4
    assert len(upstream.requests) == 1
