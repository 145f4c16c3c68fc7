"""Another configuration while requests run: whole or not at all, and no stream notices."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from gateway_clients import CHAT, RawClient, chat, metrics, post, until
from headway.config import load_config
from headway.gateway.state import Gateway
from headway.testing import FakeUpstream, Reply, RunningGateway, running_gateway
from snapshot_engines import engines

_HEAD = "models: [{name: m}]\ninstances:\n"


class PoolFile:
    """A configuration in a file that the test rewrites."""

    def __init__(self, directory: Path, *upstreams: FakeUpstream, **rest: object) -> None:
        self.path = directory / "pool.yaml"
        self.upstreams = upstreams
        self.write(**rest)

    def write(self, *names: str, **rest: object) -> None:
        """A pool of the upstreams named (all by default), in place of what stood there."""
        instances = [
            {"id": name, "model": "m", "api_base": upstream.url, "engine": "vllm-0.32"}
            for name, upstream in zip("abcdefgh", self.upstreams, strict=False)
            if not names or name in names
        ]
        self.put({"models": [{"name": "m"}], "instances": instances, "server": {"port": 0}, **rest})

    def put(self, document: object) -> None:
        """Replace the file as an editor does."""
        draft = self.path.with_suffix(".new")
        draft.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
        os.replace(draft, self.path)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RunningGateway]:
        async with running_gateway(load_config(self.path)) as gateway:
            yield gateway


async def chosen(session: aiohttp.ClientSession, gateway: RunningGateway, count: int = 12) -> set[str]:
    """The instances that serve the next requests."""
    found = set()
    for _ in range(count):
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            await response.read()
            assert response.status == 200
            found.add(response.headers["x-headway-instance"])
    return found


def reload(gateway: RunningGateway) -> bool:
    return gateway.gateway.reloader.reload("test")


async def test_streams_of_a_removed_instance_finish(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """T32: an instance removed with 50 live streams gets nothing new and no probes; its streams end as they should."""
    slow = Reply(num_tokens=30, interval_s=0.02)
    async with FakeUpstream(slow) as gone, FakeUpstream(Reply(num_tokens=1)) as stays:
        pool = PoolFile(tmp_path, gone, stays, routing={"policy": "round_robin"})
        pool.write("a", routing={"policy": "round_robin"})
        async with pool.serving() as gateway:

            async def stream() -> bytes:
                async with session.post(gateway.url + CHAT, json=chat()) as response:
                    return await response.read()

            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(stream()) for _ in range(50)]
                await until(lambda: gone.num_open == 50)
                pool.write("b")
                assert reload(gateway)
                assert await chosen(session, gateway) == {"b"}
                text = await metrics(session, gateway)
                assert 'headway_inflight{instance="b"} 0.0' in text
                assert 'instance="a"} ' not in "".join(re.findall(r"headway_inflight\{.*", text))
            answers = [task.result() for task in streams]
            assert all(answer.count(b"tok ") == 30 and answer.endswith(b"data: [DONE]\n\n") for answer in answers)
            await until(lambda: gateway.gateway.num_inflight == 0)
            await gone.stop()
            await asyncio.sleep(1.1)
            assert gone.num_probes == 0
            assert len(gone.requests) == 50


async def test_an_instance_is_added_while_requests_run(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """The watch sees the file, and the new instance gets its share; requests under way stay booked."""
    async with FakeUpstream(Reply(num_tokens=2, interval_s=0.5)) as old, FakeUpstream(Reply(num_tokens=1)) as new:
        pool = PoolFile(tmp_path, old, new)
        pool.write("a", routing={"policy": "shortest_queue"})
        async with pool.serving() as gateway, RawClient(gateway.url, chat()) as client:
            await client.read_until(b"assistant")
            before = gateway.gateway.config.config_hash
            pool.write("a", "b", routing={"policy": "shortest_queue"})
            await until(lambda: gateway.gateway.config.config_hash != before)
            assert gateway.gateway.fleet.views[0].num_outstanding == 1
            assert await chosen(session, gateway, 3) == {"b"}
            await client.read_until(b"[DONE]")
            await until(lambda: gateway.gateway.fleet.views[0].num_outstanding == 0)


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("models: [", r"pool.yaml:1:10", "not valid YAML"),
        ("models:\n  - {name: m}\ninstances: []\n", r"pool.yaml:3:1: instances", "at least one instance"),
        (
            "models: [{name: m}]\ninstances:\n  - {id: a, model: m, api_base: 'http://x/v1'}\nroutin: {}\n",
            r"pool.yaml:4:1: routin",
            "did you mean 'routing'",
        ),
        (
            f"{_HEAD}  - {{id: a, model: m, api_base: 'http://x/v1', api_key: 'env:NOT_SET_1'}}\n",
            r"pool.yaml:3:\d+: instances\[0\].api_key",
            "NOT_SET_1 is not set",
        ),
        (
            "models: [{name: m}]\ninstances:\n  - {id: a, model: m, api_base: 'http://x/v1', engine: vllm-0.32,"
            " profile: nonsense}\n",
            r"pool.yaml:3:\d+: instances\[0\].profile",
            "nonsense",
        ),
        (
            "models: [{name: m}]\ninstances:\n  - {id: a, model: m, api_base: 'http://x/v1'}\n"
            "routing: {policy: random, delta_per_ms: 1}\n",
            r"pool.yaml:4:\d+: routing.delta_per_ms",
            "random does not take it",
        ),
        (
            f"{_HEAD}  - {{id: a, model: m, api_base: 'http://x/v1'}}\nkeys: {{file: none.yaml}}\n",
            r"none.yaml",
            "cannot be read",
        ),
    ],
)
async def test_a_bad_file_changes_nothing(  # noqa: PLR0917 - one case
    session: aiohttp.ClientSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    text: str,
    where: str,
    words: str,
) -> None:
    """T33: whatever is wrong, the old configuration serves; line, column and key are logged, and the gauge is set."""
    async with FakeUpstream() as upstream:
        pool = PoolFile(tmp_path, upstream)
        async with pool.serving() as gateway:
            inside = gateway.gateway
            before = (inside.config, inside.router, inside.fleet, inside.targets, inside.keys)
            pool.put(text)
            assert not reload(gateway)
            assert before == (inside.config, inside.router, inside.fleet, inside.targets, inside.keys)
            assert await chosen(session, gateway, 2) == {"a"}
            assert "headway_config_reload_failed 1.0" in await metrics(session, gateway)
            async with session.get(gateway.url + "/instances") as response:
                problem = (await response.json())["config_problem"]
            (logged,) = [record.fields for record in caplog.records if record.message == "reload_failed"]
            for told in (problem, logged["error"]):
                assert re.search(where, told), told
                assert words in told
            if ":" in where:
                assert logged["line"] > 0
                assert logged["column"] > 0
            pool.write()
            assert reload(gateway)
            assert "headway_config_reload_failed 0.0" in await metrics(session, gateway)


async def test_a_half_written_file_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that changes from look to look is left alone until it stands still."""
    async with FakeUpstream() as upstream:
        pool = PoolFile(tmp_path, upstream)
        gateway = Gateway(load_config(pool.path))  # not started: the test looks in its place
        reloader, before = gateway.reloader, gateway.config.config_hash
        for size in range(3):
            pool.path.write_text("models:" + " " * size)
            await reloader.look()
        assert reloader.problem is None
        pool.write(routing={"policy": "random"})
        await reloader.look()
        assert gateway.config.config_hash == before
        await reloader.look()
        assert gateway.config.config_hash != before
    assert not [record for record in caplog.records if record.message == "reload_failed"]


async def test_state_and_requests_of_what_stays_are_kept(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """A snapshot, a draining mark and a booked request survive; an instance with other limits reads its state anew."""
    async with engines(("a", "h100-qwen3-8b", "m"), ("b", "h100-qwen3-8b", "m")) as made:
        for engine in made:
            engine.publish(waiting=2)
            engine.upstream.script = Reply(num_tokens=2, interval_s=0.6)

        def document(**changed: object) -> dict[str, object]:
            second: dict[str, object] = {**made[1].instance(), **changed}
            return {"models": [{"name": "m"}], "instances": [made[0].instance(), second], "server": {"port": 0}}

        pool = PoolFile(tmp_path)
        pool.put(document())
        async with pool.serving() as gateway, RawClient(gateway.url, chat()) as client:
            await client.read_until(b"assistant")
            inside = gateway.gateway
            async with session.post(gateway.url + "/instances/a/drain") as response:
                assert response.status == 200
            views = {view.instance.id: view for view in inside.fleet.views}
            booked = next(name for name, view in views.items() if view.num_outstanding == 1)
            pool.put(document(limits={"max_num_seqs": 64}))
            assert reload(gateway)
            after = {view.instance.id: view for view in inside.fleet.views}
            assert after["a"] is views["a"]
            assert after["a"].draining
            assert after["b"] is not views["b"]
            assert after[booked].num_outstanding == 1
            async with session.get(gateway.url + "/instances") as response:
                rows = {row["id"]: row for row in (await response.json())["instances"]}
            assert [rows[name]["estimate"] for name in "ab"] == ["replay", "replay"]  # an idle engine publishes nothing
            await client.read_until(b"[DONE]")
            await until(lambda: all(view.num_outstanding == 0 for view in inside.fleet.views))


async def test_aliases_models_and_targets_change_together(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Names, prices and targets are those of the new file at once; a stream of a model that is gone ends well."""
    async with FakeUpstream(Reply(num_tokens=3, interval_s=0.2)) as upstream:
        pool = PoolFile(tmp_path, upstream)
        async with pool.serving() as gateway, RawClient(gateway.url, chat(model="m")) as client:
            await client.read_until(b"assistant")
            assert await post(session, gateway, model="fast") == 404
            entry = {"id": "a", "model": "n", "api_base": upstream.url}
            pool.put(
                {
                    "models": [{"name": "n", "price": {"input_per_1m": 1, "output_per_1m": 1}}],
                    "instances": [entry],
                    "aliases": {"fast": {"candidates": ["n"]}},
                    "routing": {"default_ttft_ms": 5000},
                }
            )
            assert reload(gateway)
            async with session.post(gateway.url + CHAT, json=chat(model="fast")) as response:
                await response.read()
                assert response.headers["x-headway-model"] == "n"
                assert response.headers["x-headway-slo"] == "met-expected"
            assert await post(session, gateway, model="m") == 404
            assert 'headway_cost_usd_total{instance="a",model="n"}' in await metrics(session, gateway)
            await client.read_until(b"[DONE]")
            await until(lambda: gateway.gateway.num_inflight == 0)


async def test_who_waits_is_decided_when_nobody_holds_any_more(
    session: aiohttp.ClientSession, tmp_path: Path, one_slot: dict[str, object]
) -> None:
    """From a holding policy to a choosing one and back, no held request is lost."""
    async with FakeUpstream(Reply(delay_s=0.5)) as upstream:
        pool = PoolFile(tmp_path, upstream, **one_slot)
        async with pool.serving() as gateway:
            asking = [asyncio.create_task(post(session, gateway)) for _ in range(4)]
            await until(lambda: len(gateway.gateway.queue) == 3)
            pool.write(routing={"policy": "bear"})
            assert reload(gateway)
            await until(lambda: upstream.num_open == 4)
            pool.write(**one_slot)
            assert reload(gateway)
            asking.append(asyncio.create_task(post(session, gateway)))
            await until(lambda: len(gateway.gateway.queue) == 1)
            assert await asyncio.gather(*asking) == [200] * 5


async def test_keys_are_reloaded_with_their_counts(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """The file of keys is watched too; a client's counts go on under its new limits."""
    from headway.config.keys import key_digest

    def row(name: str, **limits: object) -> dict[str, object]:
        return {"name": name, "sha256": key_digest(f"key-of-{name}"), **limits}

    async def ask(name: str) -> int:
        headers = {"authorization": f"Bearer key-of-{name}"}
        async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
            return response.status

    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"clients": [row("x", rpm=3)]}))
    async with FakeUpstream() as upstream:
        pool = PoolFile(tmp_path, upstream, keys={"file": "keys.yaml"})
        async with pool.serving() as gateway:
            assert [await ask("x"), await ask("x"), await ask("y")] == [200, 200, 401]
            ring = gateway.gateway.keys
            keys.write_text(yaml.safe_dump({"clients": [row("x", rpm=2), row("y")]}))
            await until(lambda: gateway.gateway.keys is not ring)
            assert [await ask("x"), await ask("y")] == [429, 200]
            (tmp_path / "more.yaml").write_text(yaml.safe_dump({"clients": [row("z")]}))
            pool.write(keys={"file": "more.yaml"})
            assert reload(gateway)
            assert [await ask("x"), await ask("z")] == [401, 200]
            ring = gateway.gateway.keys
            await asyncio.sleep(1.1)
            assert gateway.gateway.keys is ring  # the new file of keys is not taken for a changed one


async def test_what_needs_a_restart_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A port that cannot change is told, not passed over; what was added and removed is logged."""
    with caplog.at_level(logging.INFO, "headway"):
        async with FakeUpstream() as one, FakeUpstream() as two:
            pool = PoolFile(tmp_path, one, two)
            pool.write("a")
            async with pool.serving() as gateway:
                pool.write("b", server={"port": 1})
                assert reload(gateway)
    fields = {record.message: record.fields for record in caplog.records if hasattr(record, "fields")}
    assert fields["needs_restart"]["key"] == "server.port"
    assert (fields["reloaded"]["added"], fields["reloaded"]["removed"]) == (["b"], ["a"])


async def test_a_configuration_that_is_no_file_stays(caplog: pytest.LogCaptureFixture) -> None:
    """A gateway built from text has nothing to reload, and says so when asked."""
    from gateway_clients import pool_of

    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        await gateway.gateway.reloader.look()
        assert not reload(gateway)
    assert [record.message for record in caplog.records].count("reload_impossible") == 1


async def test_the_breaker_of_what_stays_stays_open(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """A reload is no cure: an instance that was out is out, one that rests rests, and a new one begins closed."""
    async with FakeUpstream(Reply(status=500)) as ill, FakeUpstream() as well:
        pool = PoolFile(tmp_path, ill, well, resilience={"breaker_failures": 1, "breaker_open_s": 60})
        pool.write("a", resilience={"breaker_failures": 1, "breaker_open_s": 60})
        async with pool.serving() as gateway:
            assert await post(session, gateway) >= 500
            pool.write(resilience={"breaker_failures": 2, "breaker_open_s": 60})
            assert reload(gateway)
            assert [breaker.state for breaker in gateway.gateway.health.breakers.values()] == ["open", "closed"]
            assert await chosen(session, gateway, 4) == {"b"}


async def test_no_request_notices_any_of_forty_reloads(
    session: aiohttp.ClientSession, tmp_path: Path, one_slot: dict[str, object]
) -> None:
    """Instances, policies and queues change at random under load: every stream is whole, nothing is left behind."""
    rng = random.Random(11)
    script = Reply(num_tokens=8, interval_s=0.003)
    routings: list[dict[str, object]] = [{"policy": "bear"}, {"policy": "round_robin"}, {"policy": "central_fcfs"}]
    routings += [one_slot["routing"], {"policy": "bear", "on_infeasible": "queue"}]  # type: ignore[list-item]
    async with FakeUpstream(script) as one, FakeUpstream(script) as two, FakeUpstream(script) as three:
        pool = PoolFile(tmp_path, one, two, three)
        async with pool.serving() as gateway:
            left = 400

            async def work() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    async with session.post(gateway.url + CHAT, json=chat()) as response:
                        body = await response.read()
                        assert response.status == 200, body
                        assert body.count(b"tok ") == 8
                        assert body.endswith(b"data: [DONE]\n\n")

            async def change() -> None:
                for _ in range(40):
                    names = rng.sample("abc", rng.randint(1, 3))
                    pool.write(*names, routing=rng.choice(routings))
                    assert reload(gateway)
                    await asyncio.sleep(0.02)

            await asyncio.gather(change(), *(work() for _ in range(24)))
            pool.write()
            assert reload(gateway)
            assert len(gateway.gateway.queue) == 0
            assert [(view.num_outstanding, len(view.ledger)) for view in gateway.gateway.fleet.views] == [(0, 0)] * 3
            assert gateway.gateway.num_inflight == 0
