"""Decisions over real snapshots in shared memory: who gets a request, why, and what is said about it."""

from __future__ import annotations

import aiohttp
import msgspec
import pytest

from gateway_clients import CHAT, chat
from headway.testing import (
    FakeUpstream,
    pool,
    running_gateway,
)
from snapshot_engines import SMALL, engines, explain, pool_of


async def test_long_prompts_go_where_they_fit(session: aiohttp.ClientSession) -> None:
    """T28: a 20k-token prompt goes to the 32k instance, always, and the 16k one says ``context``; none fits: 400."""
    async with engines(("a", "h100-qwen3-0.6b", "small"), ("b", "h100-qwen3-0.6b", "small")) as made:
        short = {**made[0].instance(), "limits": {"max_model_len": 16384}}
        long = {**made[1].instance(), "limits": {"max_model_len": 32768}}
        for engine, size in zip(made, (16384, 32768), strict=True):
            engine.limits = msgspec.structs.replace(engine.limits, max_model_len=size)
            engine.publish()
        async with running_gateway(pool([SMALL], [short, long])) as gateway:
            for _ in range(10):
                body = chat(content="x" * 80_000, stream=False)
                async with session.post(gateway.url + CHAT, json=body) as response:
                    assert response.headers["x-headway-instance"] == "b"
            async with session.get(f"{gateway.url}/decisions/{response.headers['x-headway-decision']}") as found:
                candidates = (await found.json())["candidates"]
            assert candidates[0]["verdict"] == "context"
            async with session.post(gateway.url + CHAT, json=chat(content="x" * 200_000)) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (400, "context_length_exceeded")
        assert made[0].upstream.requests == []


async def test_the_target_decides_between_dear_and_cheap(session: aiohttp.ClientSession) -> None:
    """T43: a 300 ms target that only the dear instance meets goes there; with 3 s the cheap one wins on utility."""
    async with engines(("cheap", "h100-qwen3-8b", "small"), ("dear", "h100-qwen3-8b", "large")) as made:
        made[0].publish(waiting=4)  # 32,000 prompt tokens to prefill first: most of a second
        made[1].publish()
        routing = {"lambda_per_musd": 0.01}  # so that the cheap model has the larger utility
        async with running_gateway(pool_of(made, routing=routing)) as gateway:
            tight = await explain(session, gateway, slo={"ttft_ms": 300}, max_tokens=100)
            loose = await explain(session, gateway, slo={"ttft_ms": 3000}, max_tokens=100)
    assert (tight["chosen"], tight["slo"]) == ("dear", "met-expected")
    assert {c["instance_id"]: c["verdict"] for c in tight["candidates"]} == {"cheap": "late", "dear": "feasible"}
    assert loose["chosen"] == "cheap"
    utilities = {c["instance_id"]: c["utility"] for c in loose["candidates"]}
    assert utilities["cheap"] > utilities["dear"]


async def test_an_infeasible_target_under_best_effort_is_answered(session: aiohttp.ClientSession) -> None:
    """T44: ``best_effort`` answers a hopeless query from the soonest instance and marks it infeasible."""
    async with engines(("a", "h100-qwen3-8b", "small"), ("b", "h100-qwen3-8b", "small")) as made:
        made[0].publish(waiting=8)
        made[1].publish(waiting=4)
        async with running_gateway(pool_of(made)) as gateway:
            async with session.post(gateway.url + CHAT, json=chat(), headers={"x-slo-ttft-ms": "100"}) as response:
                assert response.status == 200
                assert response.headers["x-headway-slo"] == "infeasible"
                assert response.headers["x-headway-instance"] == "b"


async def test_an_infeasible_target_under_reject_is_a_429(session: aiohttp.ClientSession) -> None:
    """T44: ``reject`` names the best possible TTFT and, from the replay, when to come back; nothing is sent."""
    async with engines(("a", "h100-qwen3-8b", "small"), ("b", "h100-qwen3-8b", "small")) as made:
        made[0].publish(waiting=20)
        made[1].publish(waiting=10)
        config = pool_of(made, routing={"on_infeasible": "reject"})
        async with running_gateway(config) as gateway:
            headers = {"x-slo-ttft-ms": "400"}
            async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                error = (await response.json())["error"]
                seen = response.headers
                assert response.status == 429
            async with session.get(f"{gateway.url}/decisions/{seen['x-headway-decision']}") as found:
                decision = await found.json()
            assert gateway.gateway.fleet.views[0].num_outstanding == 0
        assert made[0].upstream.requests == made[1].upstream.requests == []
    estimates = {c["instance_id"]: c["estimate"]["ttft_s"] for c in decision["candidates"]}
    best_ms = estimates["b"] * 1e3
    assert estimates["b"] < estimates["a"]
    assert float(seen["x-headway-best-ttft-ms"]) == pytest.approx(best_ms, rel=0.05)
    assert seen["x-headway-reason"] == "ttft_target"
    assert seen["x-headway-slo"] == "infeasible"
    assert 0 < int(seen["retry-after-ms"]) <= best_ms  # the queue ahead is gone by then at the latest
    assert int(seen["retry-after"]) >= 1
    assert error["type"] == "rate_limit_error"
    assert decision["chosen"] is None


async def test_every_decision_tells_why(session: aiohttp.ClientSession) -> None:
    """T45: the decision lists every candidate's p50/p90 TTFT, cost, quality, utility or verdict, snapshot age, hash."""
    async with engines(
        ("a", "h100-qwen3-8b", "small"), ("b", "h100-qwen3-8b", "large"), ("c", "h100-qwen3-8b", "large")
    ) as made:
        for engine in made:
            engine.publish(waiting=1)
        config = pool_of(made)
        async with running_gateway(config) as gateway:
            async with session.post(f"{gateway.url}/instances/c/drain") as response:
                assert response.status == 200
            headers = {"x-slo-ttft-ms": "2000", "x-headway-explain": "1", "x-request-id": "why-1"}
            async with session.post(gateway.url + CHAT, json=chat(max_tokens=60), headers=headers) as response:
                await response.read()
                shown = msgspec.json.decode(response.headers["x-headway-decision-json"])
                decision_id = response.headers["x-headway-decision"]
            async with session.get(f"{gateway.url}/decisions/{decision_id}") as response:
                kept = await response.json()
    assert {key: shown[key] for key in shown if key != "outcome"} == {
        key: kept[key] for key in kept if key != "outcome"
    }
    assert (kept["id"], kept["request_id"], kept["config_hash"]) == (decision_id, "why-1", config.config_hash)
    assert kept["decision_s"] > 0
    assert kept["outcome"]["status"] == "ok"
    assert [c["verdict"] for c in kept["candidates"]] == ["feasible", "feasible", "draining"]
    for candidate in kept["candidates"][:2]:
        estimate = candidate["estimate"]
        assert estimate["source"] == "replay"
        assert 0 < estimate["ttft_s"] < estimate["ttft_p90_s"]
        assert 0 <= estimate["snapshot_age_s"] < 5
        assert candidate["cost_usd"] > 0
        assert 0 < candidate["quality"] <= 1
        assert candidate["utility"] == pytest.approx(candidate["quality"] - 5e-4 * candidate["cost_usd"] * 1e6)


async def test_long_decisions_are_named_by_path(session: aiohttp.ClientSession) -> None:
    """A decision too long for a header is named by its path instead."""
    async with FakeUpstream() as upstream:
        instances = [{"id": f"i{n}", "model": "m", "api_base": upstream.url} for n in range(64)]
        async with running_gateway(pool([{"name": "m"}], instances)) as gateway:
            headers = {"x-headway-explain": "1"}
            async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                assert "x-headway-decision-json" not in response.headers
                path = response.headers["x-headway-explain"]
            async with session.get(gateway.url + path) as response:
                assert len((await response.json())["candidates"]) == 64


async def test_quality_floor_and_budget_filter(session: aiohttp.ClientSession) -> None:
    """A quality floor leaves out the small model, a budget the large one."""
    async with engines(("a", "h100-qwen3-8b", "small"), ("b", "h100-qwen3-8b", "large")) as made:
        for engine in made:
            engine.publish()
        async with running_gateway(pool_of(made)) as gateway:
            good = await explain(session, gateway, slo={"quality_min": 0.8})
            cheap = await explain(session, gateway, rso={"budget_cost": 0.0001})
            async with session.post(gateway.url + CHAT, json=chat(slo={"quality_min": 0.95})) as response:
                error = (await response.json())["error"]
                assert response.status == 400
    assert good["chosen"] == "b"
    assert cheap["chosen"] == "a"
    assert error["param"] == "slo.quality_min"
