"""Engines that publish nothing behind a real gateway: replayed from what it sent, doubted where their gauges differ."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace

from gateway_clients import CHAT, RawClient, chat, until
from headway.engines.openai_request import OUTPUT_TOKENS_HEADER
from headway.fleet import FleetView
from headway.testing import RunningGateway, pool, running_gateway
from live_engines import LiveEngine, scaled_profile, serving
from snapshot_engines import explain

SMALL = "h100-qwen3-0.6b"
SCALE = 6.0  # simulated steps of 17 ms and more: an event loop shared with everybody else keeps up with them
MODEL = {"name": "m", "prior": {"quality": 0.5, "output_tokens": 60}}


@pytest.fixture(autouse=True)
def quick_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read gauges twenty times a second, so that three readings do not take three."""
    monkeypatch.setattr("headway.gateway.state.GAUGE_POLL_S", 0.05)


async def ask(
    session: aiohttp.ClientSession, url: str, *, model: str = "m", content: str = "hello", tokens: int = 60
) -> int:
    """Send a chat and read all of its answer; the status."""
    headers = {OUTPUT_TOKENS_HEADER: str(tokens)}
    async with session.post(url + CHAT, json=chat(model=model, content=content), headers=headers) as response:
        await response.read()
        return response.status


async def row_of(session: aiohttp.ClientSession, gateway: RunningGateway, index: int = 0) -> dict[str, object]:
    async with session.get(gateway.url + "/instances") as response:
        rows: list[dict[str, object]] = (await response.json())["instances"]
        return rows[index]


async def test_a_shadow_is_about_as_right_as_snapshots_would_be(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Forty queries through the gateway: its median error is within 1.5 times that of the engine's own state replayed.

    Both are held against what the gateway saw, on a machine that may be busy: a tenth on top is let pass, and that now
    and then a process which stood still for seconds counts as an engine that did.
    """
    engine = LiveEngine(SMALL, "m", time_scale=SCALE)
    async with serving(engine):
        profile = scaled_profile(tmp_path, SMALL, SCALE)
        async with running_gateway(pool([MODEL], [engine.instance("a", profile)])) as gateway:
            view = gateway.gateway.fleet.views[0]
            shown = FleetView([view.instance], default_output_tokens=60.0)
            rng = np.random.default_rng(3)
            by_snapshots: list[float] = []
            pending: list[asyncio.Task[int]] = []
            for number in range(40):
                tokens = int(rng.choice([40, 1500, 9000]))
                now = gateway.gateway.clock()
                shown.observe_snapshot(replace(engine.engine.snapshot(), instance_id="a"), now)
                shown.age(now)
                estimate = shown.first_tokens([tokens], 0)[0][0]
                assert estimate is not None
                by_snapshots.append(estimate)
                content = f"{number:04d}" * tokens
                pending.append(asyncio.create_task(ask(session, gateway.url, content=content)))
                await asyncio.sleep(rng.exponential(0.08))
            assert await asyncio.gather(*pending) == [200] * 40
            records = list(gateway.gateway.decisions._records.values())
            observed = [one.outcome.ttft_s for one in records if one.outcome is not None]
            estimates = [one.decision.candidates[0].estimate for one in records]
            row = await row_of(session, gateway)
    sources = [one.source for one in estimates if one is not None]
    by_shadow = np.array([one.ttft_s for one in estimates if one is not None])
    seen = np.array(observed, float)
    errors = [float(np.median(np.abs(np.array(said) / seen - 1))) for said in (by_shadow, by_snapshots)]
    assert sources.count("shadow") >= 36
    assert errors[0] < 1.5 * errors[1] + 0.1
    assert (row["estimate"], row["stale"], row["outstanding"]) == ("shadow", False, 0)


async def test_traffic_that_bypasses_the_gateway_is_found_and_shown(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """One request past two widens the replay, six end it; other estimates speak until the gauges agree again."""
    engine = LiveEngine(SMALL, "m", time_scale=SCALE)
    async with serving(engine):
        profile = scaled_profile(tmp_path, SMALL, SCALE)
        async with running_gateway(pool([MODEL], [engine.instance("a", profile)])) as gateway:
            view = gateway.gateway.fleet.views[0]
            own = [asyncio.create_task(ask(session, gateway.url, tokens=8000)) for _ in range(2)]
            await until(lambda: len(engine.engine.view.running) == 2)
            assert (await row_of(session, gateway))["estimate"] == "shadow"
            foreign = [asyncio.create_task(ask(session, engine.url, tokens=8000))]
            await until(lambda: not view.agreement.holds)
            row = await row_of(session, gateway)
            assert row["estimate"] == "shadow_widened"
            assert row["problem"] == "1 of its requests did not come through here"
            assert (await explain(session, gateway, model="m"))["candidates"][0]["estimate"][
                "source"
            ] == "shadow_widened"
            foreign += [asyncio.create_task(ask(session, engine.url, tokens=8000)) for _ in range(5)]
            await until(lambda: view.agreement.is_hopeless)
            row = await row_of(session, gateway)
            assert (row["estimate"], row["stale"], row["shadow"]["foreign"]) == ("queueing", True, 6)  # type: ignore[index]
            async with session.get(gateway.url + "/metrics") as response:
                text = await response.text()
            assert 'headway_shadow_lost{instance="a"} 1.0' in text
            assert 'headway_shadow_foreign_requests{instance="a"} 6.0' in text
            for task in foreign:
                task.cancel()
            await asyncio.gather(*foreign, return_exceptions=True)
            await until(lambda: view.agreement.holds)
            assert (await row_of(session, gateway))["estimate"] == "shadow"
            for task in own:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)
            await until(lambda: view.num_outstanding == 0)


async def test_cancels_and_restarts_leave_nothing_in_the_shadow(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Clients that hang up, and an engine that begins anew: the replay holds what the engine holds, and is used on."""
    engine = LiveEngine(SMALL, "m", time_scale=SCALE)
    async with serving(engine):
        profile = scaled_profile(tmp_path, SMALL, SCALE)
        async with running_gateway(pool([MODEL], [engine.instance("a", profile)])) as gateway:
            view = gateway.gateway.fleet.views[0]
            body, headers = chat(model="m"), {OUTPUT_TOKENS_HEADER: "8000"}
            async with RawClient(gateway.url, body, headers=headers) as client:
                await client.read_until(b"data:")
                client.hang_up()
                await until(lambda: view.num_outstanding == 0)
            assert await residents(session, gateway) == (0, 0)
            streams = [asyncio.create_task(ask(session, gateway.url, tokens=8000)) for _ in range(3)]
            await until(lambda: [entry.num_events > 0 for entry in view.ledger.values()] == [True] * 3)
            assert await residents(session, gateway) == (3, 0)
            await engine.start()
            for task in streams:
                with contextlib.suppress(aiohttp.ClientError):
                    await task
            await until(lambda: view.num_outstanding == 0)
            assert await residents(session, gateway) == (0, 0)
            assert await ask(session, gateway.url) == 200
            assert (await row_of(session, gateway))["estimate"] == "shadow"


async def residents(session: aiohttp.ClientSession, gateway: RunningGateway) -> tuple[object, object]:
    row = await row_of(session, gateway)
    return row["running"], row["waiting"]


async def test_the_cache_hot_spot_is_left_when_its_queue_is_longer_than_a_prefill(
    session: aiohttp.ClientSession,
) -> None:
    """T9: a shared prefix is on A. While A is idle the newcomer goes there; behind half a minute of queue, to B."""
    profile = "h100-qwen3-8b"
    engines = {name: LiveEngine(profile, name, prefix_caching=True) for name in "ab"}
    models = [{"name": name, "prior": {"quality": 0.5, "output_tokens": 60}} for name in "ab"]
    prefix = "shared instructions. " * 1600  # 8,400 tokens
    async with serving(*engines.values()):
        instances = [engine.instance(name, limits={"prefix_caching": True}) for name, engine in engines.items()]
        async with running_gateway(pool(models, instances)) as gateway:
            assert await ask(session, gateway.url, model="a", content=prefix + "first question", tokens=1) == 200
            newcomer = {"content": prefix + "another question"}
            idle = await explain(session, gateway, **newcomer)
            ttft_s = {one["instance_id"]: one["estimate"]["ttft_s"] for one in idle["candidates"]}
            assert idle["chosen"] == "a"
            assert ttft_s["a"] < 0.1 * ttft_s["b"]
            queue = [
                asyncio.create_task(ask(session, gateway.url, model="a", content=f"{number:05d}x" * 20_000))
                for number in range(28)
            ]
            view = gateway.gateway.fleet.views[0]
            await until(lambda: view.num_outstanding == 28)
            busy = await explain(session, gateway, **newcomer)
            for task in queue:
                task.cancel()
            await asyncio.gather(*queue, return_exceptions=True)
            await until(lambda: view.num_outstanding == 0)
    ttft_s = {one["instance_id"]: one["estimate"]["ttft_s"] for one in busy["candidates"]}
    assert busy["chosen"] == "b"
    assert ttft_s["a"] > 25.0
    assert ttft_s["b"] < 0.5
