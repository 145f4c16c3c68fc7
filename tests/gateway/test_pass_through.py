"""What crosses the gateway: bodies, headers and answers, unchanged but for what is declared."""

from __future__ import annotations

import io
import json

import aiohttp
import pytest

from gateway_clients import CHAT, chat, pool_of
from headway.testing import FakeUpstream, Reply, pool, running_gateway

AWKWARD = (
    b'{ "messages" : [ {"role":"user","content":[{"type":"text","text":"see \\u00e9 \\"this\\""},'
    b'{"type":"image_url","image_url":{"url":"https://example.com/a.png","detail":"low"}}]} ],\n'
    b'  "model":  "auto", "seed": 123456789012345678901234567890, "temperature": 1.0e0, "unknown": {"model": "x",\t'
    b'"deep": [1, {"a": null}]},"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],'
    b'"logit_bias": {"50256": -100}}'
)


async def test_body_is_equal_but_for_the_model(session: aiohttp.ClientSession) -> None:
    """T30: unknown nested fields, huge integers, image URLs and tools reach the upstream byte for byte."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, data=AWKWARD) as response:
            assert response.status == 200
        assert upstream.requests[0].body == AWKWARD.replace(b'"model":  "auto"', b'"model":  "m"')


async def test_body_with_a_concrete_model_is_the_same_bytes(session: aiohttp.ClientSession) -> None:
    """A body that needs no change is not touched at all."""
    body = AWKWARD.replace(b'"auto"', b'"m"')
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, data=body) as response:
            assert response.headers["x-headway-model"] == "m"
        assert upstream.requests[0].body == body


async def test_routing_keys_are_stripped(session: aiohttp.ClientSession) -> None:
    """``slo`` and ``rso`` are the router's and do not reach the upstream; ``priority`` and ``user`` do."""
    body = chat("m", stream=False, slo={"ttft_ms": 300}, rso={"budget_cost": 1}, priority=3, user="u")
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=body) as response:
            assert response.status == 200
        assert upstream.requests[0].json == {key: body[key] for key in body if key not in ("slo", "rso")}


async def test_headers_to_the_upstream(session: aiohttp.ClientSession) -> None:
    """Unknown headers pass unread; what belongs to one hop, one host or our own bookkeeping does not."""
    headers = {
        "x-request-id": "req-7",
        "traceparent": "00-1",
        "x-headway-sim-output-tokens": "m=12",
        "x-custom": "é".encode().decode("latin-1"),
        "x-headway-explain": "1",
        "Accept-Encoding": "gzip",
        "Connection": "keep-alive, x-hop",
        "x-hop": "1",
        "Authorization": "Bearer client",
        "Cookie": "a=b",
        "User-Agent": "tester/1",
        "OpenAI-Beta": "x",
    }
    async with (
        FakeUpstream() as local,
        running_gateway(pool([{"name": "m"}], [_instance(local, engine="vllm-0.32")])) as gateway,
    ):
        async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
            assert response.headers["x-request-id"] == "req-7"
        seen = local.requests[0].headers
    for name in ("x-request-id", "traceparent", "x-headway-sim-output-tokens", "x-custom", "openai-beta"):
        assert name in seen
    assert seen["user-agent"] == "tester/1"
    assert seen["authorization"] == "Bearer client"
    assert seen["accept-encoding"] == "identity"
    assert seen["host"] == local.url.removeprefix("http://").removesuffix("/v1")
    for name in ("x-hop", "x-headway-explain"):
        assert name not in seen


async def test_credentials_stay_with_their_owner(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hosted provider gets the pool's key or none, never the client's; the key shows up in no answer."""
    monkeypatch.setenv("TEST_POOL_KEY", "sk-pool-secret")
    headers = {"Authorization": "Bearer client", "api-key": "client", "Cookie": "a=b"}
    async with FakeUpstream() as keyed, FakeUpstream() as bare:
        instances = [
            {**_instance(keyed), "api_key": "env:TEST_POOL_KEY"},
            {**_instance(bare), "id": "b", "model": "n"},
        ]
        async with running_gateway(pool([{"name": "m"}, {"name": "n"}], instances)) as gateway:
            for model in ("m", "n"):
                async with session.post(gateway.url + CHAT, json=chat(model), headers=headers) as response:
                    assert response.status == 200
            async with session.get(gateway.url + "/instances") as response:
                assert "sk-pool-secret" not in await response.text()
    assert keyed.requests[0].headers["authorization"] == "Bearer sk-pool-secret"
    assert "authorization" not in bare.requests[0].headers
    for upstream in (keyed, bare):
        assert "api-key" not in upstream.requests[0].headers
        assert "cookie" not in upstream.requests[0].headers


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_upstream_client_errors_pass_as_they_are(session: aiohttp.ClientSession, status: int) -> None:
    """An upstream's 4xx keeps its status and its bytes, and no second instance is bothered with it."""
    body = b'{"error": {"message": "bad schema",  "type":"x", "param":null, "code": 1e400}}'
    async with FakeUpstream(Reply(status=status, body=body)) as first, FakeUpstream() as second:
        config = pool_of(first, second, routing={"policy": "round_robin"})
        async with running_gateway(config) as gateway:
            first_status = {}
            for _ in range(2):
                async with session.post(gateway.url + CHAT, json=chat()) as response:
                    first_status[response.headers["x-headway-instance"]] = (response.status, await response.read())
    assert first_status["a"] == (status, body)
    assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_answer_headers_tell_the_decision(session: aiohttp.ClientSession) -> None:
    """Every answer names instance, model, policy, decision, prediction, overhead and what became of the target."""
    body = chat(stream=False)
    async with FakeUpstream(Reply(headers={"x-provider": "1", "set-cookie": "a=b"})) as upstream:
        async with running_gateway(pool_of(upstream)) as gateway:
            headers = {"x-slo-ttft-ms": "5000", "x-slo-tpot-ms": "20"}
            async with session.post(gateway.url + CHAT, json=body, headers=headers) as response:
                seen = response.headers
    assert seen["x-headway-instance"] == "a"
    assert seen["x-headway-model"] == "m"
    assert seen["x-headway-policy"] == "bear"
    assert seen["x-headway-slo"] == "met-expected"
    assert seen["x-headway-ignored"] == "tpot"
    assert float(seen["x-headway-predicted-ttft-ms"]) > 0
    assert float(seen["x-headway-overhead-ms"]) >= 0
    assert len(seen["x-headway-decision"]) == 16
    assert seen["x-provider"] == "1"
    assert "set-cookie" not in seen
    assert "x-headway-snapshot-age-ms" not in seen  # nothing is known of a hosted instance's state


@pytest.mark.parametrize(
    ("headers", "extra", "target_ms"),
    [
        ({"x-slo-ttft-ms": "900"}, {"slo": {"ttft_ms": 1}}, 900.0),
        ({"x-llm-d-slo-ttft-ms": "900"}, {}, 900.0),
        ({}, {"slo": {"ttft_ms": 900}, "rso": {"ttft_slo_ms": 1}}, 900.0),
        ({}, {"rso": {"ttft_slo_ms": 900.5}}, 900.5),
        ({}, {"slo": None}, 700.0),
    ],
)
async def test_targets_by_every_accepted_name(
    session: aiohttp.ClientSession, headers: dict[str, str], extra: dict[str, object], target_ms: float
) -> None:
    """Headers win over the body, ``slo`` over ``rso``, and a request without a target gets the configured one."""
    async with FakeUpstream() as upstream:
        async with running_gateway(pool_of(upstream, routing={"default_ttft_ms": 700})) as gateway:
            body = chat(stream=False, **extra)
            async with session.post(gateway.url + "/v1/route", json=body, headers=headers) as response:
                decision = await response.json()
    assert decision["ttft_target_s"] == pytest.approx(target_ms / 1e3)
    assert upstream.requests == []


@pytest.mark.parametrize(
    ("headers", "extra", "param"),
    [
        ({"x-slo-ttft-ms": "soon"}, {}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "-5"}, {}, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "nan"}, {}, "x-slo-ttft-ms"),
        ({"x-slo-tpot-ms": "0"}, {}, "x-slo-tpot-ms"),
        ({}, {"slo": {"ttft_ms": "300"}}, "slo.ttft_ms"),
        ({}, {"slo": {"ttft_ms": True}}, "slo.ttft_ms"),
        ({}, {"slo": [1]}, "slo"),
        ({}, {"slo": {"quality_min": 2}}, "slo.quality_min"),
        ({}, {"slo": {"max_cost_usd": -1}}, "slo.max_cost_usd"),
        ({}, {"rso": {"budget_cost": "x"}}, "rso.budget_cost"),
        ({}, {"priority": "high"}, "priority"),
        ({}, {"messages": []}, "messages"),
        ({}, {"messages": None}, "messages"),
        ({}, {"model": None}, "model"),
        ({}, {"model": 7}, "model"),
    ],
)
async def test_bad_requests_name_the_parameter(
    session: aiohttp.ClientSession, headers: dict[str, str], extra: dict[str, object], param: str
) -> None:
    """What routing cannot read is a 400 in OpenAI's shape that names the parameter; nothing is sent."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat() | extra, headers=headers) as response:
            error = (await response.json())["error"]
            assert response.status == 400
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert upstream.requests == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b'"x"', b"\xff", b'{"model":"m","messages":' + b"[" * 100_000]
)
async def test_what_is_no_json_object_is_a_400(session: aiohttp.ClientSession, body: bytes) -> None:
    """Broken, foreign and deeply nested bodies are refused in OpenAI's shape."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_unknown_models_are_404(session: aiohttp.ClientSession) -> None:
    """A model that is neither in the pool nor an alias is 404 ``model_not_found``."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat("gpt-x")) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_that_are_too_large_are_413(session: aiohttp.ClientSession, declared: bool) -> None:
    """A body beyond ``max_body_mb`` is refused, announced or not."""
    body = json.dumps(chat(content="x" * 20_000)).encode()

    async def pieces() -> object:
        yield body[:15_000]
        yield body[15_000:]

    async with FakeUpstream() as upstream:
        config = pool_of(upstream, server={"port": 0, "max_body_mb": 0.01})
        async with running_gateway(config) as gateway:
            data = body if declared else pieces()
            async with session.post(gateway.url + CHAT, data=data) as response:
                assert response.status == 413
    assert upstream.requests == []


async def test_large_bodies_pass(session: aiohttp.ClientSession) -> None:
    """A body of several megabytes arrives whole."""
    body = json.dumps(chat("auto", stream=False, content="x" * 3_000_000)).encode()
    async with FakeUpstream() as upstream:
        config = pool([{"name": "m", "context_tokens": 2_000_000}], [_instance(upstream)])
        async with (
            running_gateway(config) as gateway,
            session.post(gateway.url + CHAT, data=io.BytesIO(body)) as response,
        ):
            assert response.status == 200
    assert upstream.requests[0].body == body.replace(b'"auto"', b'"m"')


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "say hi"}),
        ("/v1/completions", {"model": "m", "prompt": [1, 2, 3]}),
        ("/v1/embeddings", {"model": "m", "input": ["a", "b"]}),
        ("/v1/responses", {"model": "m", "input": "say hi"}),
    ],
)
async def test_other_endpoints_are_routed_too(
    session: aiohttp.ClientSession, path: str, body: dict[str, object]
) -> None:
    """Completions, embeddings and responses reach an instance's own path, query string included."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + path + "?api-version=1", json=body) as response:
            assert response.status == 200
            assert response.headers["x-headway-instance"] == "a"
        assert upstream.requests[0].path == path
        assert upstream.requests[0].query == "api-version=1"
        assert upstream.requests[0].json == body


async def test_token_counts_learn_from_reported_usage(session: aiohttp.ClientSession) -> None:
    """T29: without a tokenizer, reported usage corrects the count; ratio and error are exported."""
    async with FakeUpstream(Reply(prompt_tokens=1500)) as upstream, running_gateway(pool_of(upstream)) as gateway:
        body = chat(stream=False, content="x" * 4000)  # counts as 1,000
        for _ in range(120):
            async with session.post(gateway.url + CHAT, json=body) as response:
                await response.read()
        async with session.post(gateway.url + "/v1/route", json=body) as response:
            tokens = (await response.json())["candidates"][0]["prompt_tokens"]
        async with session.get(gateway.url + "/metrics") as response:
            text = await response.text()
    assert tokens == pytest.approx(1500, rel=0.05)
    assert 'headway_prompt_token_ratio{model="m"}' in text
    assert 'headway_prompt_token_error{model="m"}' in text


def _instance(upstream: FakeUpstream, engine: str = "hosted") -> dict[str, object]:
    return {"id": "a", "model": "m", "api_base": upstream.url, "engine": engine}
