"""A gateway whose engines run elsewhere: state over ZeroMQ, its loss shown in the open, their clocks no obstacle."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Callable, Iterator

import aiohttp
import msgspec
import pytest

from gateway_clients import CHAT, chat, until
from headway.config import Config
from headway.snapshot.shared_memory import segment_path
from headway.testing import FakeUpstream, Reply, pool, running_gateway
from served_engines import MODEL, EngineProcess
from snapshot_engines import explain
from zeromq_peers import PublisherProcess


@pytest.fixture
def start_engine() -> Iterator[Callable[[str], tuple[EngineProcess, str]]]:
    """Starts engine processes that publish over ZeroMQ; each comes with its address, and ends with the test."""
    started: list[EngineProcess] = []

    def start(address: str) -> tuple[EngineProcess, str]:
        engine = EngineProcess("--zeromq", address)
        started.append(engine)
        assert engine.process.stdout is not None
        match = re.fullmatch(r"publishing on (tcp://127\.0\.0\.1:\d+)\n", engine.process.stdout.readline())
        assert match
        return engine, match[1]

    yield start
    for engine in started:
        if engine.process.poll() is None:
            engine.process.kill()
            engine.process.communicate()
        segment_path(engine.segment).unlink(missing_ok=True)


def pool_over(*engines: tuple[str, str]) -> Config:
    """A pool of one model with an instance per (URL, ZeroMQ address)."""
    instances: list[dict[str, object]] = [
        {"id": "abcd"[index], "model": MODEL, "api_base": url + "/v1", "engine": "vllm-0.32",
         "profile": "h100-qwen3-8b", "snapshots": {"zeromq": address}}
        for index, (url, address) in enumerate(engines)
    ]  # fmt: skip
    return pool([{"name": MODEL, "prior": {"quality": 0.8, "output_tokens": 100}}], instances)


def sources(decision: dict[str, object]) -> dict[str, str]:
    """Who spoke for each instance."""
    return {one["instance_id"]: one["estimate"]["source"] for one in decision["candidates"]}  # type: ignore[attr-defined]


async def instance_rows(session: aiohttp.ClientSession, url: str) -> dict[str, dict[str, object]]:
    async with session.get(url + "/instances") as response:
        return {row["id"]: row for row in (await response.json())["instances"]}


async def test_two_engines_are_replayed_and_a_frozen_one_falls_back_in_the_open(
    session: aiohttp.ClientSession,
    start_engine: Callable[[str], tuple[EngineProcess, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """T7 over ZeroMQ: both are replayed; the one that freezes amid an answer shows as stale, is logged, estimated by
    queueing and avoided; awake again it is replayed again, and so is the engine that takes a killed one's place."""
    caplog.set_level(logging.INFO)
    frozen, address = start_engine("tcp://127.0.0.1:0")
    other, other_address = start_engine("tcp://127.0.0.1:0")
    async with running_gateway(pool_over((frozen.url, address), (other.url, other_address))) as gateway:
        view = gateway.gateway.fleet.views[0]
        await until(lambda: not gateway.gateway.feeds.silent)
        assert sources(await explain(session, gateway)) == {"a": "replay", "b": "replay"}
        row = (await instance_rows(session, gateway.url))["a"]
        assert (row["snapshots"], row["clock_offset_s"], row["problem"]) == (address, 0.0, None)
        async with session.post(gateway.url + CHAT, json=chat(max_tokens=5)) as response:
            assert response.status == 200
            assert (await response.read()).endswith(b"data: [DONE]\n\n")

        body = chat(MODEL, max_tokens=20_000, ignore_eos=True)
        async with session.post(frozen.url + CHAT, json=body) as endless:
            assert endless.status == 200
            await endless.content.readline()
            await until(lambda: view.snapshot is not None and view.snapshot.running)
            assert sources(await explain(session, gateway)) == {"a": "replay", "b": "replay"}
            frozen.process.send_signal(signal.SIGSTOP)
            try:
                await until(lambda: view.stale, within_s=10)
                decision = await explain(session, gateway)
                assert sources(decision) == {"a": "queueing", "b": "replay"}
                assert decision["chosen"] == "b"
                row = (await instance_rows(session, gateway.url))["a"]
                assert (row["stale"], row["estimate"]) == (True, "queueing")
                await until(lambda: any("snapshots are stale" in str(record.__dict__) for record in caplog.records))
            finally:
                frozen.process.send_signal(signal.SIGCONT)
            await until(lambda: not view.stale, within_s=15)
            assert sources(await explain(session, gateway)) == {"a": "replay", "b": "replay"}

        assert view.snapshot is not None
        first_start = view.snapshot.engine_start
        frozen.end(signal.SIGKILL)
        start_engine(address)
        await until(lambda: view.snapshot.engine_start != first_start, within_s=15)
        assert sources(await explain(session, gateway)) == {"a": "replay", "b": "replay"}


async def test_an_engine_on_another_clock_is_replayed(session: aiohttp.ClientSession) -> None:
    """An engine whose host started long before ours: its snapshots are as old as they are, also while it is silent."""
    publisher = PublisherProcess(shift_s=5000.0, host=bytes(range(16)))
    upstream = FakeUpstream(Reply(num_tokens=2))
    await upstream.start()
    try:
        async with running_gateway(pool_over((upstream.url.removesuffix("/v1"), publisher.address))) as gateway:
            await asyncio.to_thread(publisher.publish, 1)
            await until(lambda: not gateway.gateway.feeds.silent)
            assert sources(await explain(session, gateway)) == {"a": "replay"}
            await asyncio.sleep(1.2)  # three heartbeats, each stamped when it came
            row = (await instance_rows(session, gateway.url))["a"]
            assert row["clock_offset_s"] == pytest.approx(-5000.0, abs=0.15)
            assert row["snapshot_age_s"] == pytest.approx(1.2, abs=0.6)
            await asyncio.to_thread(publisher.publish, 2)
            await until(lambda: gateway.gateway.fleet.views[0].snapshot.sequence == 2)
            assert sources(await explain(session, gateway)) == {"a": "replay"}
    finally:
        publisher.kill()
        await upstream.stop()


async def test_an_absent_engine_is_waited_for_and_then_served_openly(session: aiohttp.ClientSession) -> None:
    """Nobody publishes: not ready at first, and every estimate says that it is no replay."""
    upstream = FakeUpstream(Reply(num_tokens=2))
    await upstream.start()
    try:
        config = pool_over((upstream.url.removesuffix("/v1"), "tcp://127.0.0.1:9"))
        async with running_gateway(config) as gateway:
            async with session.get(gateway.url + "/readyz") as response:
                assert response.status == 503
                assert "first snapshot of a" in (await response.json())["reason"]
            assert sources(await explain(session, gateway)) == {"a": "queueing"}
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 200
    finally:
        await upstream.stop()


async def test_sources_over_the_network_come_and_go_by_reload(session: aiohttp.ClientSession) -> None:
    """A reload opens the socket of a new instance, closes that of one that is gone, and leaves the others' alone."""
    publishers = [PublisherProcess(), PublisherProcess()]
    async with FakeUpstream(Reply(num_tokens=2)) as upstream:
        url = upstream.url.removesuffix("/v1")
        both = pool_over(*((url, publisher.address) for publisher in publishers))
        first = msgspec.structs.replace(both, instances=both.instances[:1])
        second = msgspec.structs.replace(both, instances=both.instances[1:])
        try:
            async with running_gateway(first) as gateway:
                feeds = gateway.gateway.feeds
                await asyncio.to_thread(publishers[0].publish, 1)
                await until(lambda: not feeds.silent)
                kept = feeds.subscribers["a"]
                gateway.gateway.reconfigure(both)
                assert feeds.subscribers["a"] is kept
                await asyncio.to_thread(publishers[1].publish, 1)
                await until(lambda: not feeds.silent)
                assert sources(await explain(session, gateway)) == {"a": "replay", "b": "replay"}
                gateway.gateway.reconfigure(second)
                assert list(feeds.subscribers) == ["b"]
                await asyncio.to_thread(publishers[0].publish, 2)
                assert sources(await explain(session, gateway)) == {"b": "replay"}
                assert list(await instance_rows(session, gateway.url)) == ["b"]
        finally:
            for publisher in publishers:
                publisher.kill()
