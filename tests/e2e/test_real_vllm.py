"""Real vLLM servers behind the gateway: what clients do, and what happens when an engine is killed under load.

``make e2e`` installs vLLM once (2.2 GB) and runs these; without it they are skipped.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest

from real_pool import CONTEXT_TOKENS, SEATS, RealPool, real_pool
from real_vllm_environment import missing

pytestmark = [
    pytest.mark.skipif("HEADWAY_E2E" not in os.environ, reason="real engines take minutes: run `make e2e`"),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]
FIXED: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    """The three engines and the gateway, for all tests of this file."""
    with real_pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.fixture
async def client(pool: RealPool) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, which does not retry by itself."""
    async with openai.AsyncOpenAI(base_url=f"{pool.gateway.url}/v1", api_key="any", max_retries=0) as made:
        yield made


async def settled(condition: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait until ``condition`` holds."""
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, "the awaited state did not come"
        await asyncio.sleep(0.1)


def messages(text: str = "What is a headway?") -> list[Any]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


async def test_the_gateway_replays_what_the_engines_publish(pool: RealPool) -> None:
    """Every engine shows its version and its state, and the estimate made of it is the replay."""
    await settled(lambda: pool.get("/readyz")["ready"])
    for name in pool.engines:
        row = pool.instance(name)
        assert (row["estimate"], row["engine_version"], row["problem"]) == ("replay", "vllm-0.32.0", None)


@pytest.mark.parametrize("model", ["auto", "qwen3-small", "qwen3-medium", "qwen3-large"])
async def test_chat(client: openai.AsyncOpenAI, model: str) -> None:
    """A whole answer of the length asked for, whoever gives it."""
    answer = await client.chat.completions.create(model=model, messages=messages(), max_tokens=8, extra_body=FIXED)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


async def test_streaming_with_a_target(client: openai.AsyncOpenAI) -> None:
    """Tokens come one by one; the answer's headers say who gives it and what was expected."""
    raw = await client.chat.completions.with_raw_response.create(
        model="auto", messages=messages(), max_tokens=12, stream=True, stream_options={"include_usage": True},
        extra_body=FIXED, extra_headers={"x-slo-ttft-ms": "20000"},
    )  # fmt: skip
    assert raw.headers["x-headway-instance"] == "large"
    assert raw.headers["x-headway-slo"] == "met-expected"
    assert float(raw.headers["x-headway-predicted-ttft-ms"]) > 0
    chunks = [chunk async for chunk in raw.parse()]
    contents = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(contents) > 3
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_completions_take_text_and_token_ids(client: openai.AsyncOpenAI) -> None:
    """A prompt may be text or a list of token ids, and ids are counted for what they are."""
    for prompt, num_tokens in (("one two three", None), ([5, 6, 7, 8, 9, 10, 11], 7)):
        answer = await client.completions.create(model="qwen3-small", prompt=prompt, max_tokens=4, extra_body=FIXED)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert num_tokens in (None, answer.usage.prompt_tokens)


async def test_a_prompt_beyond_every_context_is_refused_here(client: openai.AsyncOpenAI, pool: RealPool) -> None:
    """What fits nowhere is a 400 with its code, and no engine hears of it."""
    before = sum(engine.gauge("vllm:request_success_total") for engine in pool.engines.values())
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="auto", messages=messages("word " * 2 * CONTEXT_TOKENS))
    assert refused.value.code == "context_length_exceeded"
    assert sum(engine.gauge("vllm:request_success_total") for engine in pool.engines.values()) == before


async def test_what_the_engine_refuses_comes_as_it_said_it(client: openai.AsyncOpenAI, pool: RealPool) -> None:
    """An error of the engine's own keeps its status and words, and costs the instance nothing."""
    with pytest.raises(openai.BadRequestError, match=r"max_tokens|maximum context length"):
        await client.chat.completions.create(model="qwen3-small", messages=messages(), max_tokens=CONTEXT_TOKENS + 1)
    assert pool.instance("small")["breaker"] == "closed"


async def test_leaving_a_stream_frees_the_engine(client: openai.AsyncOpenAI, pool: RealPool) -> None:
    """The engine stops working for a client that is gone, and nothing stays booked."""
    stream = await client.chat.completions.create(
        model="qwen3-large", messages=messages(), max_tokens=3000, stream=True, extra_body=FIXED
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    assert pool.engines["large"].gauge("vllm:num_requests_running") == 1
    await stream.close()
    await settled(lambda: pool.engines["large"].gauge("vllm:num_requests_running") == 0)
    await settled(lambda: pool.instance("large")["outstanding"] == 0)


async def test_priority_reaches_the_engine(client: openai.AsyncOpenAI) -> None:
    """With every seat taken and others in line, the request with the lower number is served before those."""
    order: list[str] = []

    async def ask(name: str, priority: int, max_tokens: int) -> None:
        stream = await client.chat.completions.create(
            model="qwen3-medium", messages=messages(), max_tokens=max_tokens, stream=True,
            extra_body={**FIXED, "priority": priority},
        )  # fmt: skip
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content and name not in order:
                order.append(name)

    async with asyncio.TaskGroup() as tasks:
        for number in range(SEATS):
            tasks.create_task(ask(f"seat {number}", 0, 150))
        await settled(lambda: len(order) == SEATS)
        for number in range(3):
            tasks.create_task(ask(f"patient {number}", 5, 5))
        await asyncio.sleep(1.0)
        tasks.create_task(ask("urgent", 1, 5))
    assert order.index("urgent") < min(order.index(f"patient {number}") for number in range(3))


async def test_an_engine_killed_under_load_costs_only_what_it_was_doing(
    client: openai.AsyncOpenAI, pool: RealPool
) -> None:
    """Answers under way on the killed engine end in an error; all else is answered; restarted, it serves again."""
    killed = pool.engines["small"]
    ended: list[tuple[str, str]] = []
    until_s = time.monotonic() + 600.0
    calmer, stop = asyncio.Event(), asyncio.Event()

    async def keep_asking() -> None:
        while not stop.is_set() and time.monotonic() < until_s:
            if calmer.is_set():
                await asyncio.sleep(2.0)
            instance = "none"
            try:
                raw = await client.chat.completions.with_raw_response.create(
                    model="auto", messages=messages(), max_tokens=30, stream=True, extra_body=FIXED
                )
                instance = raw.headers["x-headway-instance"]
                text = [chunk async for chunk in raw.parse()]
                ended.append((instance, "ok" if text else "empty"))
            except openai.APIError as error:
                ended.append((instance, type(error).__name__))

    async def killing_at_chunk(number: int) -> int:
        """One long answer; the engine is killed when so much of it has come. How much came."""
        num_chunks = 0
        stream = await client.chat.completions.create(
            model="qwen3-small", messages=messages(), max_tokens=3500, stream=True, extra_body=FIXED
        )
        try:
            async for _ in stream:
                num_chunks += 1
                if num_chunks == number:
                    killed.server.kill()
        except openai.APIError:
            return num_chunks
        raise AssertionError(f"the stream ended as if it were whole, after {num_chunks} chunks")

    asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
    await settled(lambda: len(ended) >= len(asking), 120)  # the load is under way
    assert 50 <= await asyncio.wait_for(killing_at_chunk(50), 120) < 3500
    while pool.instance("small")["breaker"] == "closed" and time.monotonic() < until_s:
        with pytest.raises(openai.InternalServerError):  # nobody else has this model, so there is no failover
            await client.chat.completions.create(model="qwen3-small", messages=messages(), max_tokens=1)
    assert pool.instance("small")["breaker"] != "closed"
    num_before = len(ended)
    await settled(lambda: len(ended) > num_before + 5, 120)
    calmer.set()  # beside engines without a pause a start takes minutes on two cores
    killed.server.start()
    await asyncio.to_thread(killed.server.wait_ready)

    async def serves_again() -> bool:
        try:
            answer = await client.chat.completions.create(
                model="qwen3-small", messages=messages(), max_tokens=4, extra_body=FIXED
            )
        except openai.InternalServerError:
            return False
        return answer.usage is not None and answer.usage.completion_tokens == 4

    while not await serves_again():
        assert time.monotonic() < until_s
        await asyncio.sleep(0.2)
    assert pool.instance("small")["breaker"] == "closed"
    stop.set()
    await asyncio.gather(*asking)
    assert [one for one in ended if one[1] != "ok" and one[0] != "small"] == []
    assert sum(one[1] != "ok" for one in ended) <= len(asking)
    await settled(lambda: pool.instance("small")["estimate"] == "replay", 30)
    assert all(pool.instance(name)["outstanding"] == 0 for name in pool.engines)
