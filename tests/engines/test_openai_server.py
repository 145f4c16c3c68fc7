"""The simulated engine over real sockets: what an OpenAI client sends is answered in vLLM's shapes, or refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from headway._core import batch_time_s
from headway.predict.tokens import count_tokens
from served_engines import MODEL, ServedEngine

NUM_FREE = 23894 - 1
LONG = "a question of some length, asked again and again. " * 40


def chat(content: str = "hello", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


async def post(served: ServedEngine, path: str, body: object, headers: dict[str, str] | None = None) -> dict[str, Any]:
    async with served.client.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return dict(await response.json())


async def events_of(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    text = await response.text()
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_chat_streams_a_role_then_one_event_per_token(served: ServedEngine) -> None:
    """As vLLM does: a role-only chunk, a chunk per token, the reason on the last one, usage if asked, [DONE]."""
    body = chat(max_tokens=5, ignore_eos=True, stream=True, stream_options={"include_usage": True})
    async with served.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "abc"}) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"] == "abc"
        events = await events_of(response)
    assert {event["id"] for event in events} == {"chatcmpl-abc"}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {event["model"] for event in events} == {MODEL}
    role, *tokens, usage = events
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokens) == 5
    assert all(event["choices"][0]["delta"]["content"].strip() for event in tokens)
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None] * 4 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == count_tokens("hello")
    assert usage["usage"]["completion_tokens"] == 5
    assert tokens[-1]["x_headway_engine"] == usage["x_headway_engine"]


async def test_usage_is_not_streamed_unasked(served: ServedEngine) -> None:
    """Without stream_options no event carries usage."""
    async with served.client.post("/v1/chat/completions", json=chat(max_tokens=2, stream=True)) as response:
        assert all("usage" not in event for event in await events_of(response))


async def test_streamed_and_whole_answers_are_the_same_text(served: ServedEngine) -> None:
    """The text follows from the request id alone."""
    headers = {"x-request-id": "same"}
    whole = await post(served, "/v1/chat/completions", chat(max_tokens=9, ignore_eos=True), headers)
    body = chat(max_tokens=9, ignore_eos=True, stream=True)
    async with served.client.post("/v1/chat/completions", json=body, headers=headers) as response:
        events = await events_of(response)
    streamed = "".join(event["choices"][0]["delta"]["content"] for event in events)
    message = whole["choices"][0]["message"]
    assert message == {"role": "assistant", "content": streamed}
    assert len(streamed.split()) == 9
    assert whole["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens", "num_choices"),
    [("four letters", 3, 1), ([5, 6, 7, 8], 4, 1), (["ab", "cdefgh"], 3, 2), ([[1, 2], [3, 4, 5]], 5, 2)],
)
async def test_completions_take_text_token_ids_and_lists_of_them(
    served: ServedEngine, prompt: object, prompt_tokens: int, num_choices: int
) -> None:
    """Each prompt becomes a choice; usage counts them together."""
    answer = await post(served, "/v1/completions", {"prompt": prompt, "max_tokens": 3, "ignore_eos": True})
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices))
    assert all(len(choice["text"].split()) == 3 for choice in answer["choices"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 3 * num_choices)
    assert usage["total_tokens"] == prompt_tokens + 3 * num_choices


async def test_several_prompts_stream_side_by_side(served: ServedEngine) -> None:
    """Every prompt of one streamed body gets its tokens under its own index, and ends once."""
    body = {"prompt": ["ab", "cd"], "max_tokens": 4, "ignore_eos": True, "stream": True}
    async with served.client.post("/v1/completions", json=body) as response:
        choices = [event["choices"][0] for event in await events_of(response)]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert len(own) == 4
        assert [choice["finish_reason"] for choice in own] == [None] * 3 + ["length"]


@pytest.mark.parametrize(
    ("header", "fields", "tokens", "reason"),
    [
        ("7", {}, 7, "stop"),
        ("7", {"max_tokens": 4}, 4, "length"),
        ("7", {"max_completion_tokens": 4}, 4, "length"),
        (f"other=9,{MODEL}=6", {}, 6, "stop"),
        ("7", {"min_tokens": 9}, 9, "stop"),
        ("7", {"max_tokens": 12, "ignore_eos": True}, 12, "length"),
    ],
)
async def test_the_header_states_the_answer_length(
    served: ServedEngine, header: str, fields: dict[str, object], tokens: int, reason: str
) -> None:
    """A demo may fix each answer's length, for all models or by model; limits of the request still hold."""
    headers = {"x-headway-sim-output-tokens": header}
    answer = await post(served, "/v1/chat/completions", chat(**fields), headers)
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["choices"][0]["finish_reason"] == reason


async def test_a_drawn_length_follows_from_seed_and_request_id(served: ServedEngine) -> None:
    """The same request id gives the same length again; other ids give others, also when the header is about others."""
    lengths = []
    for name, headers in [("a", {}), ("b", {}), ("a", {"x-headway-sim-output-tokens": "other=3"})]:
        body = chat(max_tokens=4000)
        answer = await post(served, "/v1/chat/completions", body, headers | {"x-request-id": name})
        lengths.append(answer["usage"]["completion_tokens"])
    assert lengths[0] == lengths[2] != lengths[1]


BAD_REQUESTS: list[tuple[str, object, int, str | None]] = [
    ("/v1/chat/completions", chat(n=2), 400, "n"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "x", "logprobs": 0}, 400, "logprobs"),
    ("/v1/chat/completions", chat(logprobs=True), 400, "logprobs"),
    ("/v1/chat/completions", chat(max_tokens=0), 400, "max_tokens"),
    ("/v1/chat/completions", chat(max_completion_tokens=-1), 400, "max_completion_tokens"),
    ("/v1/chat/completions", chat(max_tokens="many"), 400, "max_tokens"),
    ("/v1/chat/completions", chat(max_tokens=5, min_tokens=6), 400, "min_tokens"),
    ("/v1/chat/completions", chat(priority=2**40), 400, "priority"),
    ("/v1/chat/completions", chat(stream_options={"include_usage": 3}), 400, "stream_options.include_usage"),
    ("/v1/chat/completions", {"model": MODEL, "prompt": "x"}, 400, "messages"),
    ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"model": MODEL, "messages": [7]}, 400, "messages[0]"),
    ("/v1/completions", {"model": MODEL}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[1], []]}, 400, "prompt[1]"),
    ("/v1/completions", {"prompt": [1, "x"]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 1025}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1] * 131072}, 400, "input_tokens"),
    ("/v1/completions", {"prompt": [1] * 131000, "max_tokens": 73}, 400, "max_tokens"),
    ("/v1/chat/completions", [chat()], 400, None),
    ("/v1/chat/completions", chat() | {"model": "gpt"}, 404, "model"),
    ("/v1/embeddings", {"input": "x"}, 404, None),
    ("/v1/models", {}, 405, None),
]


async def test_a_wrong_request_is_refused_with_its_field(served: ServedEngine) -> None:
    """Every mistake gets a status and an OpenAI error body that names the field; nothing enters the engine."""
    for path, body, status, param in BAD_REQUESTS:
        async with served.client.post(path, json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (status, status, param), (path, body)
        assert error["message"]
        assert error["type"] in ("BadRequestError", "NotFoundError", "MethodNotAllowedError")
    assert served.engine.view.free_blocks == NUM_FREE
    assert not served.engine.view.waiting


async def test_a_body_that_is_no_json_is_refused(served: ServedEngine) -> None:
    """Rubbish is a 400, however deep or broken."""
    for body in (b"", b"{", b"\xff\xfe", b'{"messages": ' + b"[" * 5000):
        async with served.client.post("/v1/chat/completions", data=body) as response:
            assert response.status == 400, body
            assert "no JSON" in (await response.json())["error"]["message"]


async def test_a_wrong_length_header_is_refused(served: ServedEngine) -> None:
    """A length that is no positive number is an error that names the header."""
    for header in ("0", "-3", "x", "", "1.5", "9" * 30, f"{MODEL}=", "²"):
        headers = {"x-headway-sim-output-tokens": header}
        async with served.client.post("/v1/chat/completions", json=chat(), headers=headers) as response:
            assert response.status == 400, header
            assert (await response.json())["error"]["param"] == "x-headway-sim-output-tokens"


async def test_sampling_and_tools_in_the_body_are_taken(served: ServedEngine) -> None:
    """Parameters that only shape the text are accepted; tool definitions count as prompt."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    plain = await post(served, "/v1/chat/completions", chat(max_tokens=1, temperature=0.3, top_p=0.9, stop=["x"]))
    tooled = await post(served, "/v1/chat/completions", chat(max_tokens=1, tools=tools, logprobs=False, n=1))
    assert tooled["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks_at_once(served: ServedEngine, stream: bool) -> None:
    """On disconnect the request leaves the engine, streamed or not, and all its blocks are free again."""
    body = chat(LONG, max_tokens=100_000, ignore_eos=True, stream=stream)
    view = served.engine.view
    request = asyncio.create_task(served.client.post("/v1/chat/completions", json=body))
    await served.until(lambda: any(generation.num_tokens > 3 for generation in view.running.values()))
    assert view.free_blocks < NUM_FREE
    if stream:
        (await request).close()
    else:
        request.cancel()
    await served.until(lambda: not view.running)
    assert view.free_blocks == NUM_FREE


async def test_a_cancelled_neighbour_disturbs_nobody(served: ServedEngine) -> None:
    """While one client leaves mid-stream, another one's answer comes whole."""
    stays = asyncio.create_task(post(served, "/v1/chat/completions", chat(max_tokens=60, ignore_eos=True)))
    body = chat(max_tokens=100_000, ignore_eos=True, stream=True)
    async with served.client.post("/v1/chat/completions", json=body) as leaving:
        await leaving.content.readany()
        leaving.close()
    assert (await stays)["usage"]["completion_tokens"] == 60
    await served.until(lambda: served.engine.view.free_blocks == NUM_FREE)


async def test_the_ttft_of_an_idle_engine_is_one_step_of_its_profile(served: ServedEngine) -> None:
    """The engine's own figure for a lone prompt is its prefill step by the truth profile, within noise and host gap."""
    for name in ("a", "b", "c"):
        answer = await post(served, "/v1/chat/completions", chat(LONG, max_tokens=2), {"x-request-id": name})
        step_s = batch_time_s(served.engine.truth.step_time, [(count_tokens(LONG), 0, False)])
        figures = answer["x_headway_engine"]
        assert figures["queue_s"] == 0.0
        assert figures["ttft_s"] == pytest.approx(step_s + 0.0002, rel=5 * 0.03)


async def test_metrics_have_vllm_names_and_follow_the_engine(served: ServedEngine) -> None:
    """Gauges, counters and histograms bear vLLM's names and labels, and their values are the engine's."""
    await post(served, "/v1/chat/completions", chat(LONG, max_tokens=5, ignore_eos=True))
    running = asyncio.create_task(post(served, "/v1/chat/completions", chat(LONG, max_tokens=100_000, ignore_eos=True)))
    await served.until(lambda: bool(served.engine.view.running))
    async with served.client.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain")
        samples = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
    running.cancel()
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    assert float(samples["vllm:num_requests_running" + labels]) == 1
    assert float(samples["vllm:num_requests_waiting" + labels]) == 0
    assert 0 < float(samples["vllm:kv_cache_usage_perc" + labels]) < 0.1
    assert float(samples["vllm:num_preemptions_total" + labels]) == 0
    assert float(samples["vllm:prompt_tokens_total" + labels]) >= count_tokens(LONG)
    assert float(samples["vllm:generation_tokens_total" + labels]) >= 5
    assert float(samples["vllm:time_to_first_token_seconds_count" + labels]) >= 1
    assert float(samples["vllm:request_queue_time_seconds_count" + labels]) >= 1
    config = next(name for name in samples if name.startswith("vllm:cache_config_info"))
    assert 'block_size="16"' in config
    assert 'num_gpu_blocks="23894"' in config


async def test_models_health_and_version(served: ServedEngine) -> None:
    """The cold endpoints that routers and clients look at."""
    async with served.client.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 131072)
    async with served.client.get("/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with served.client.head("/health") as response:
        assert response.status == 200
    async with served.client.get("/version") as response:
        assert await response.json() == {"version": "vllm-0.32.0"}


async def test_the_official_client_works_unmodified(served: ServedEngine) -> None:
    """The openai package streams, reads usage, and raises its typed errors."""
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        max_tokens=4,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) == 4
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    whole = await client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 131072"):
        await client.completions.create(model=MODEL, prompt=[1] * 200_000)
    await client.close()
