"""Everything beside the routed endpoints: health, versions, metrics, instances, and what they must not say."""

from __future__ import annotations

import logging

import aiohttp
import pytest

import headway
from gateway_clients import CHAT, chat, pool_of
from headway.gateway.log import JsonLines
from headway.testing import FakeUpstream, running_gateway


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
async def test_health_paths(session: aiohttp.ClientSession, path: str) -> None:
    """A gateway without snapshot sources is alive and ready at once."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.get(gateway.url + path) as response:
            assert response.status == 200


async def test_version_names_the_configuration(session: aiohttp.ClientSession) -> None:
    """Version and configuration hash tell what runs."""
    async with FakeUpstream() as upstream:
        config = pool_of(upstream)
        async with running_gateway(config) as gateway, session.get(gateway.url + "/version") as response:
            assert await response.json() == {"version": headway.__version__, "config_hash": config.config_hash}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("GET", "/decisions/unknown", 404, "decision_not_found"),
        ("GET", "/v1/models/unknown", 404, "model_not_found"),
        ("POST", "/instances/unknown/drain", 404, "instance_not_found"),
    ],
)
async def test_refusals_have_one_shape(
    session: aiohttp.ClientSession, method: str, path: str, status: int, code: str
) -> None:
    """Also here errors are always OpenAI's ``error`` object."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.request(method, gateway.url + path) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == code


async def test_route_explains_and_sends_nothing(session: aiohttp.ClientSession) -> None:
    """``POST /v1/route`` takes the body of any endpoint, decides, and books and sends nothing."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        for body in (chat(), {"model": "auto", "prompt": "x"}, {"model": "m", "input": ["x"]}):
            async with session.post(gateway.url + "/v1/route", json=body) as response:
                assert (await response.json())["chosen"] == "a"
        async with session.post(gateway.url + "/v1/route", data=b"{") as response:
            assert response.status == 400
        assert gateway.gateway.fleet.views[0].num_outstanding == 0
    assert upstream.requests == []


async def test_drained_instances_get_nothing_new(session: aiohttp.ClientSession) -> None:
    """An instance can be taken out by hand, and back in."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        drain = gateway.url + "/instances/a/drain"
        async with session.post(drain) as response:
            assert await response.json() == {"id": "a", "draining": True}
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert response.status == 503
        async with session.post(drain, json={"draining": "no"}) as response:
            assert response.status == 400
        async with session.post(drain, json={"draining": False}) as response:
            assert response.status == 200
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert response.status == 200


async def test_made_up_names_mint_no_series(session: aiohttp.ClientSession) -> None:
    """Whatever clients call their models, metrics only know configured names and ``other``."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        for number in range(20):
            async with session.post(gateway.url + CHAT, json=chat(f"made-up-{number}")) as response:
                assert response.status == 404
        async with session.post(gateway.url + CHAT, json=chat("m")) as response:
            await response.read()
        async with session.get(gateway.url + "/metrics") as response:
            text = await response.text()
    assert "made-up" not in text
    assert 'gen_ai_request_model="other"' in text
    for name in (
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_request_duration_seconds",
        "gen_ai_client_token_usage",
        "headway_predicted_ttft_seconds",
        "headway_ttft_prediction_error_seconds",
        "headway_decision_seconds",
        "headway_inflight",
        "headway_breaker_state",
        "headway_requests_total",
    ):
        assert f"\n{name}" in text


async def test_every_app_has_its_own_registry() -> None:
    """Two gateways in one process do not share metrics."""
    async with FakeUpstream() as upstream:
        async with running_gateway(pool_of(upstream)) as one, running_gateway(pool_of(upstream)) as two:
            assert one.gateway.telemetry.registry is not two.gateway.telemetry.registry


async def test_request_ids_are_taken_or_made(session: aiohttp.ClientSession) -> None:
    """``x-request-id`` wins over ``x-correlation-id``; what is unfit is replaced; each is echoed and forwarded."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        cases = [
            ({"x-request-id": "r-1", "x-correlation-id": "c-1"}, "r-1"),
            ({"x-correlation-id": "c-2"}, "c-2"),
            ({"x-request-id": "x" * 500}, None),
            ({}, None),
        ]
        for headers, expected in cases:
            async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                echoed = response.headers["x-request-id"]
                await response.read()
            assert echoed == upstream.requests[-1].headers["x-request-id"]
            assert echoed == expected if expected else len(echoed) == 24


async def test_a_request_id_in_use_twice_books_twice(session: aiohttp.ClientSession) -> None:
    """Clients that repeat an id still have one ledger entry each, and see their own id."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        for _ in range(3):
            async with session.post(gateway.url + CHAT, json=chat(), headers={"x-request-id": "same"}) as response:
                await response.read()
                assert response.headers["x-request-id"] == "same"
        assert len({request.headers["x-request-id"] for request in upstream.requests}) == 3
        assert gateway.gateway.fleet.views[0].num_outstanding == 0


async def test_logs_are_lines_of_json_without_prompts(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """One line per request, with figures; neither prompt nor key is in it."""
    with caplog.at_level(logging.DEBUG, "headway"):
        async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
            body = chat(content="very private words")
            headers = {"authorization": "Bearer sk-private"}
            async with session.post(gateway.url + CHAT, json=body, headers=headers) as response:
                await response.read()
    lines = [JsonLines().format(record) for record in caplog.records if record.name == "headway"]
    assert any('"event":"request"' in line and '"status":200' in line for line in lines)
    for line in lines:
        assert "\n" not in line
        assert "private" not in line
