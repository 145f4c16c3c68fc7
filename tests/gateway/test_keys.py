"""Keys over real sockets: who may come, what each may use, and that no key shows anywhere."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import msgspec
import pytest

from gateway_clients import CHAT, RawClient, chat, metrics, until
from headway.cli.validate import validate
from headway.config import Config
from headway.config.keys import load_keys
from headway.errors import ConfigError
from headway.gateway import log
from headway.testing import FakeUpstream, Reply, RunningGateway, pool, running_gateway

ALICE, BOB, ADMIN = "hw-alice-8f3ad1", "hw-bob-51c09e", "hw-admin-77e0b2"
PRICE = {"input_per_1m": 1000.0, "output_per_1m": 1000.0}


@pytest.fixture(autouse=True)
def _keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in (("ALICE_KEY", ALICE), ("ADMIN_KEY", ADMIN)):
        monkeypatch.setenv(name, key)


def keyed(upstream: FakeUpstream, *, alice: dict[str, object] | None = None, **rest: object) -> Config:
    """A pool with two clients, alice's key in the environment and bob's as a hash."""
    clients = [
        {"name": "alice", "key": "env:ALICE_KEY", **(alice or {})},
        {"name": "bob", "sha256": hashlib.sha256(BOB.encode()).hexdigest()},
    ]
    keys = {"clients": clients, "admin": "env:ADMIN_KEY", **dict(rest.pop("keys", {}))}  # type: ignore[call-overload]
    instances = [{"id": "a", "model": "m", "api_base": upstream.url, "engine": "vllm-0.32"}]
    return pool([{"name": "m", "price": PRICE}], instances, keys=keys, **rest)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(
    session: aiohttp.ClientSession, gateway: RunningGateway, headers: dict[str, str], **body: object
) -> tuple[int, Mapping[str, str], dict[str, object]]:
    """Status, headers and, of errors, the error."""
    async with session.post(gateway.url + CHAT, json=chat(**body), headers=headers) as response:  # type: ignore[arg-type]
        raw = await response.read()
        error = json.loads(raw)["error"] if response.status >= 400 else {}
        return response.status, response.headers, error


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        (bearer(ALICE), 200, None),
        (bearer(BOB), 200, None),
        ({"x-api-key": ALICE}, 200, None),
        ({"api-key": BOB}, 200, None),
        ({}, 401, "missing_api_key"),
        (bearer("hw-alice-8f3ad2"), 401, "invalid_api_key"),
        (bearer(ADMIN), 401, "invalid_api_key"),
        ({"authorization": "Basic !!!"}, 401, "missing_api_key"),
    ],
)
async def test_a_known_key_is_needed(
    session: aiohttp.ClientSession, headers: dict[str, str], status: int, code: str | None
) -> None:
    """Keys come as OpenAI or Azure clients send them; without a known one the answer is a 401 and no upstream call."""
    async with FakeUpstream() as upstream, running_gateway(keyed(upstream)) as gateway:
        found, answered, error = await ask(session, gateway, headers)
        assert (found, error.get("code")) == (status, code)
        assert len(upstream.requests) == (status == 200)
        if status == 401:
            assert answered["www-authenticate"] == "Bearer"
            assert 'headway_rejected_total{reason="unauthorized"} 1.0' in await metrics(session, gateway)


async def test_what_shows_or_steers_needs_the_admins_key(session: aiohttp.ClientSession) -> None:
    """Decisions, instances, queue, page, route and drain are the admin's; health and metrics are everybody's."""
    async with FakeUpstream() as upstream, running_gateway(keyed(upstream)) as gateway:
        _, answered, _ = await ask(session, gateway, bearer(ALICE))
        decision = f"/decisions/{answered['x-headway-decision']}"
        basic = {"authorization": "Basic " + base64.b64encode(f"me:{ADMIN}".encode()).decode()}
        for path in (decision, "/instances", "/queue", "/"):
            for headers, status in (({}, 401), (bearer(ALICE), 403), (bearer(ADMIN), 200), (basic, 200)):
                async with session.get(gateway.url + path, headers=headers) as response:
                    assert response.status == status, (path, headers)
                    if status == 401:
                        assert response.headers["www-authenticate"].startswith("Basic")
        for path, status in ((CHAT.replace("chat/completions", "route"), 200), ("/instances/a/drain", 200)):
            for headers, expected in ((bearer(BOB), 403), (bearer(ADMIN), status)):
                async with session.post(gateway.url + path, json=chat(), headers=headers) as response:
                    assert response.status in (expected, 400 if "drain" in path and expected == 200 else expected)
        for path in ("/health", "/livez", "/readyz", "/version", "/metrics"):
            async with session.get(gateway.url + path) as response:
                assert response.status == 200
        async with session.get(gateway.url + "/v1/models", headers=bearer(BOB)) as response:
            assert response.status == 200
        async with session.get(gateway.url + "/v1/models") as response:
            assert response.status == 401


async def test_without_an_admin_key_nobody_steers(session: aiohttp.ClientSession) -> None:
    """Client keys alone do not open what shows the pool: it stays shut until an admin key is configured."""
    async with FakeUpstream() as upstream:
        config = keyed(upstream)
        assert config.keys is not None
        config = msgspec.structs.replace(config, keys=msgspec.structs.replace(config.keys, admin=None))
        async with running_gateway(config) as gateway:
            async with session.get(gateway.url + "/instances", headers=bearer(ALICE)) as response:
                assert response.status == 403
                assert (await response.json())["error"]["code"] == "admin_key_missing"


async def test_the_whole_decision_is_for_admins(session: aiohttp.ClientSession) -> None:
    """x-headway-explain is passed over for a client, and answered where the admin's key comes with it."""
    async with FakeUpstream() as upstream, running_gateway(keyed(upstream)) as gateway:
        explain = bearer(ALICE) | {"x-headway-explain": "1"}
        _, answered, _ = await ask(session, gateway, explain)
        assert "x-headway-decision-json" not in answered
        assert answered["x-headway-ignored"] == "explain"
        _, answered, _ = await ask(session, gateway, explain | {"x-headway-admin-key": ADMIN})
        assert "x-headway-decision-json" in answered
        assert all("x-headway-admin-key" not in received.headers for received in upstream.requests)


async def test_requests_per_minute(session: aiohttp.ClientSession) -> None:
    """The request beyond rpm is a 429 that says when to come again; the other key is not touched by it."""
    async with FakeUpstream() as upstream, running_gateway(keyed(upstream, alice={"rpm": 3})) as gateway:
        assert [(await ask(session, gateway, bearer(ALICE)))[0] for _ in range(3)] == [200] * 3
        status, answered, error = await ask(session, gateway, bearer(ALICE))
        assert (status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert answered["x-headway-reason"] == "key_rpm"
        assert 50 <= int(answered["retry-after"]) <= 60
        assert int(answered["retry-after-ms"]) <= 60_000
        assert (await ask(session, gateway, bearer(BOB)))[0] == 200
        assert 'headway_rejected_total{reason="key_rpm"} 1.0' in await metrics(session, gateway)
    assert len(upstream.requests) == 4


async def test_tokens_per_minute_count_what_was_used(session: aiohttp.ClientSession) -> None:
    """A request takes its prompt's estimate at first and what was reported at its end; the next one may not fit."""
    async with FakeUpstream(Reply(prompt_tokens=70, num_tokens=25)) as upstream:
        async with running_gateway(keyed(upstream, alice={"tpm": 100})) as gateway:
            assert (await ask(session, gateway, bearer(ALICE), content="x" * 120))[0] == 200
            status, answered, _ = await ask(session, gateway, bearer(ALICE), content="x" * 120)
            assert (status, answered["x-headway-reason"]) == (429, "key_tpm")
            status, answered, _ = await ask(session, gateway, bearer(ALICE), content="x" * 4000)
            assert (status, answered["retry-after"]) == (429, "3600")  # it will never fit
            assert 'headway_key_tokens_total{key="alice"} 95.0' in await metrics(session, gateway)


async def test_concurrency_counts_requests_under_way(session: aiohttp.ClientSession) -> None:
    """A key's place is free again the moment its request ends, also by hanging up."""
    async with FakeUpstream(Reply(num_tokens=400, interval_s=0.02)) as upstream:
        async with running_gateway(keyed(upstream, alice={"concurrency": 1})) as gateway:
            async with RawClient(gateway.url, chat(), headers=bearer(ALICE)) as client:
                await client.read_until(b"tok ")
                status, answered, _ = await ask(session, gateway, bearer(ALICE))
                assert (status, answered["x-headway-reason"]) == (429, "key_concurrency")
            await until(lambda: gateway.gateway.num_inflight == 0)
            async with RawClient(gateway.url, chat(), headers=bearer(ALICE)) as client:
                assert b" 200 " in await client.read_until(b"\r\n")
        assert len(upstream.requests) == 2


async def test_a_spent_budget_is_no_rate_limit(session: aiohttp.ClientSession) -> None:
    """Once the budget is spent the answer is OpenAI's insufficient_quota, and SDKs are told not to try again."""
    async with FakeUpstream(Reply(prompt_tokens=10, num_tokens=5)) as upstream:
        async with running_gateway(keyed(upstream, alice={"budget_usd": 0.02})) as gateway:
            assert [(await ask(session, gateway, bearer(ALICE)))[0] for _ in range(2)] == [200, 200]  # 0.015 each
            status, answered, error = await ask(session, gateway, bearer(ALICE))
            assert (status, error["type"], error["code"]) == (429, "insufficient_quota", "insufficient_quota")
            assert answered["x-should-retry"] == "false"
            assert answered["x-headway-reason"] == "key_budget"
            assert 'headway_key_cost_usd_total{key="alice"} 0.03' in await metrics(session, gateway)


async def test_spending_outlives_a_restart(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """keys.spend_file keeps what was spent; a file that is none stops the start, by name."""
    spend = tmp_path / "spend.json"
    async with FakeUpstream(Reply(prompt_tokens=10, num_tokens=5)) as upstream:
        config = keyed(upstream, alice={"budget_usd": 0.01}, keys={"spend_file": str(spend)})
        async with running_gateway(config) as gateway:
            assert (await ask(session, gateway, bearer(ALICE)))[0] == 200
        assert json.loads(spend.read_text())["alice"][1] == pytest.approx(0.015)
        async with running_gateway(config) as gateway:
            assert (await ask(session, gateway, bearer(ALICE)))[0] == 429
        spend.write_text("[]")
        with pytest.raises(ConfigError, match="holds no spending"):
            async with running_gateway(config):
                pass


async def test_two_gateways_count_apart(session: aiohttp.ClientSession) -> None:
    """T39: limits are per process, as docs/gateway.md says: two replicas give a key twice its requests."""
    async with FakeUpstream() as upstream:
        config = keyed(upstream, alice={"rpm": 1})
        async with running_gateway(config) as one, running_gateway(config) as two:
            statuses = [(await ask(session, gateway, bearer(ALICE)))[0] for gateway in (one, two, one, two)]
    assert statuses == [200, 200, 429, 429]


async def test_no_key_shows_anywhere(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys of clients, admin and instances are in no log line, answer, metric or decision, and reach no upstream."""
    monkeypatch.setenv("UPSTREAM_KEY", "sk-upstream-4d5e6f")
    secrets = (ALICE, BOB, ADMIN, "sk-upstream-4d5e6f", "sk-wrong-000111")
    seen: list[str] = []
    echo = b'{"error":{"message":"Incorrect API key provided: sk-upstream-4d5e6f"}}'
    async with FakeUpstream([Reply(), Reply(status=401, body=echo), Reply(status=500, body=echo)]) as upstream:
        config = keyed(upstream, resilience={"attempts": 1})
        instance = msgspec.structs.replace(config.instances[0], api_key=config.keys.clients[0].key)  # type: ignore[union-attr]
        instance = msgspec.structs.replace(instance, api_key=type(instance.api_key)("env:UPSTREAM_KEY"))  # type: ignore[misc,call-arg]
        config = msgspec.structs.replace(config, instances=[instance])
        with caplog.at_level(logging.DEBUG):
            async with running_gateway(config) as gateway:
                for key in (ALICE, BOB, BOB, "sk-wrong-000111"):
                    headers = bearer(key) | {"x-headway-explain": "1", "x-headway-admin-key": ADMIN}
                    async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                        seen += [str(response.headers), await response.text()]
                for path in ("/instances", "/queue", "/metrics", "/version"):
                    async with session.get(gateway.url + path, headers=bearer(ADMIN)) as response:
                        seen.append(await response.text())
        formatter = log.JsonLines()
        seen += [formatter.format(record) for record in caplog.records if record.name == "headway"]
        seen += [str(config), repr(config)]
    for received in upstream.requests:
        assert received.headers["authorization"] == "Bearer sk-upstream-4d5e6f"
        seen.append(str({name: value for name, value in received.headers.items() if name != "authorization"}))
    assert len(upstream.requests) == 3
    for secret in secrets:
        assert not [text for text in seen if secret in text], secret


async def test_a_clients_key_goes_to_no_instance(session: aiohttp.ClientSession) -> None:
    """With keys in use a client's credential is the gateway's own, and a plain engine gets none."""
    async with FakeUpstream() as upstream, running_gateway(keyed(upstream)) as gateway:
        await ask(session, gateway, bearer(ALICE))
    assert "authorization" not in upstream.requests[0].headers


@pytest.mark.parametrize("wanted", [False, True])
async def test_prompts_are_logged_on_request_only(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture, wanted: bool
) -> None:
    """server.log_prompts puts prompts into the log, and nothing else does."""
    with caplog.at_level(logging.DEBUG, "headway"):
        async with FakeUpstream() as upstream:
            async with running_gateway(keyed(upstream, server={"port": 0, "log_prompts": wanted})) as gateway:
                await ask(session, gateway, bearer(ALICE), content="a very private question")
    lines = [log.JsonLines().format(record) for record in caplog.records if record.name == "headway"]
    assert any("a very private question" in line for line in lines) is wanted
    assert any('"client":"alice"' in line for line in lines)


@pytest.mark.parametrize(("address", "warned"), [("http://0.0.0.0:1", True), ("http://[::1]:1", False)])
async def test_an_open_gateway_says_so(caplog: pytest.LogCaptureFixture, address: str, warned: bool) -> None:
    """Bound wider than this machine and without keys, the gateway warns at its start."""
    from headway.gateway.keys import KeyRing, warn_if_open

    async with FakeUpstream() as upstream:
        plain = msgspec.structs.replace(keyed(upstream), keys=None)
        warn_if_open(address, KeyRing(plain))
        assert ([record.message for record in caplog.records] == ["open_to_the_network"]) is warned
        caplog.clear()
        warn_if_open(address, KeyRing(keyed(upstream)))
        assert caplog.records == []


async def test_one_noisy_client_does_not_starve_another(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """Among those who wait clients take turns: bob's single request comes second, not behind alice's twelve."""
    async with FakeUpstream(Reply(delay_s=0.05)) as upstream:
        async with running_gateway(keyed(upstream, **one_slot, queue={"max_length": 20})) as gateway:
            async with asyncio.TaskGroup() as group:
                for number in range(13):
                    group.create_task(ask(session, gateway, bearer(ALICE) | {"x-request-id": f"alice-{number}"}))
                await until(lambda: len(gateway.gateway.queue) == 12)
                bob = group.create_task(ask(session, gateway, bearer(BOB) | {"x-request-id": "bob"}))
            assert bob.result()[0] == 200
    order = [received.headers["x-request-id"] for received in upstream.requests]
    waited = order.index("bob")
    assert waited < len(order) - 6, order


def test_a_file_of_keys(tmp_path: Path) -> None:
    """Hashes from a file beside the configuration; a key in clear, a name twice and an unset variable are refused."""
    config = pool([{"name": "m"}], [{"id": "a", "model": "m", "api_base": "http://x/v1"}], keys={"file": "keys.yaml"})
    config = msgspec.structs.replace(config, path=str(tmp_path / "pool.yaml"))
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    path = tmp_path / "keys.yaml"
    path.write_text(f"clients:\n  - {{name: bob, sha256: {digest}, rpm: 5}}\nadmin_sha256: {'a' * 64}\n")
    table = load_keys(config)
    assert table is not None
    assert (table.clients[digest].rpm, table.admins) == (5, frozenset({"a" * 64}))
    for text, words in (
        ("clients:\n  - {name: bob, key: env:ALICE_KEY}\n", r"keys.yaml:2:5: clients\[0\]: .* never a key"),
        (f"clients:\n  - {{name: b, sha256: {digest}}}\n  - {{name: c, sha256: {digest}}}\n", "has the key of client"),
        ("clients: [{name: b, sha256: abc}]\n", "sha256"),
        (f"clients: []\nadmin_sha256: {digest}\nkeys: 1\n", "unknown key"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_keys(config)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(config)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"clients": [{"name": "a", "key": "hw-in-clear"}]}, "must not stand in the file"),
        ({"admin": "hw-in-clear"}, "must not stand in the file"),
        ({"clients": [{"name": "a"}]}, "one of key"),
        ({"clients": [{"name": "a", "key": "env:A", "sha256": "0" * 64}]}, "one of key"),
        ({"clients": [{"name": "a b", "key": "env:A"}]}, "name"),
        ({"clients": [{"name": "a", "key": "env:A", "rpm": 0}]}, "rpm"),
        ({"clients": [{"name": "a", "key": "env:A", "rmp": 1}]}, "did you mean 'rpm'"),
    ],
)
def test_wrong_keys_are_refused_without_being_shown(keys: dict[str, object], words: str) -> None:
    """What is wrong in the keys section is told with its place, and no key is repeated."""
    with pytest.raises(ConfigError, match=words) as caught:
        pool([{"name": "m"}], [{"id": "a", "model": "m", "api_base": "http://x/v1"}], keys=keys)
    assert caught.value.key.startswith("keys")
    assert "hw-in-clear" not in str(caught.value)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({"server": {"host": "0.0.0.0"}}, "open to the network, and no keys are configured"),
        ({"keys": {"clients": [{"name": "a", "key": "env:NOT_SET_2"}]}}, "NOT_SET_2 is not set"),
        ({"keys": {"clients": [{"name": "a", "sha256": "a" * 64}]}}, "no admin key"),
        ({}, None),
    ],
)
def test_validate_warns_of_open_doors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rest: dict[str, object], words: str | None
) -> None:
    """``headway validate`` tells what a start would warn of or refuse, without being a start."""
    path = tmp_path / "pool.yaml"
    instance = {"id": "a", "model": "m", "api_base": "http://x/v1"}
    path.write_text(json.dumps({"models": [{"name": "m"}], "instances": [instance], **rest}))
    assert validate(path, json=True) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert [words in warning for warning in warnings] == ([] if words is None else [True])
