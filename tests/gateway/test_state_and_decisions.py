"""Decisions over real snapshots in shared memory: who gets a request, why, and what is said about it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from gateway_clients import CHAT, chat, until
from headway.config import Config
from headway.estimate.replay import replay
from headway.profiles import load_profile
from headway.snapshot.shared_memory import SharedMemoryWriter
from headway.testing import (
    FakeUpstream,
    Reply,
    RunningGateway,
    pool,
    running_gateway,
    segment_name,
    snapshot,
    waiting_request,
)
from headway.types import EngineLimits, EngineRequest, EngineState, Snapshot

SMALL = {
    "name": "small",
    "price": {"input_per_1m": 0.1, "output_per_1m": 0.1},
    "prior": {"quality": 0.5, "output_tokens": 50},
}
LARGE = {
    "name": "large",
    "price": {"input_per_1m": 9.0, "output_per_1m": 9.0},
    "prior": {"quality": 0.9, "output_tokens": 50},
}


class Engine:
    """A fake upstream with a snapshot segment of its own."""

    def __init__(self, name: str, profile: str, model: str) -> None:
        self.name, self.profile, self.model = name, profile, model
        self.limits = load_profile(profile).limits
        self.segment = segment_name()
        self.upstream = FakeUpstream(Reply(num_tokens=2))
        self.writer: SharedMemoryWriter | None = None
        self.sequence = 0

    def publish(self, *, waiting: int = 0, prompt_tokens: int = 8000, **rest: object) -> None:
        """Publish a snapshot with so many requests in the queue."""
        if self.writer is None:
            self.writer = SharedMemoryWriter(self.segment)
        self.sequence += 1
        queue = [waiting_request(f"other-{index}", prompt_tokens) for index in range(waiting)]
        shown: Snapshot = snapshot(waiting=queue, sequence=self.sequence, limits=self.limits)
        self.writer.publish(msgspec.structs.replace(shown, **rest))

    def instance(self) -> dict[str, object]:
        """Its entry in a configuration."""
        return {
            "id": self.name, "model": self.model, "api_base": self.upstream.url, "engine": "vllm-0.32",
            "profile": self.profile, "snapshots": {"shared_memory": self.segment},
        }  # fmt: skip


@asynccontextmanager
async def engines(*rows: tuple[str, str, str]) -> AsyncIterator[list[Engine]]:
    """Engines by (name, profile, model)."""
    made = [Engine(*row) for row in rows]
    try:
        for engine in made:
            await engine.upstream.start()
        yield made
    finally:
        for engine in made:
            await engine.upstream.stop()
            if engine.writer is not None:
                engine.writer.close()


def pool_of(made: list[Engine], **rest: object) -> Config:
    """The configuration of these engines, with the models they serve."""
    models = [model for model in (SMALL, LARGE) if model["name"] in {engine.model for engine in made}]
    return pool(models, [engine.instance() for engine in made], **rest)


async def explain(session: aiohttp.ClientSession, gateway: RunningGateway, **body: object) -> dict[str, object]:
    """The decision on a chat body, without sending it."""
    async with session.post(gateway.url + "/v1/route", json=chat(**body)) as response:
        assert response.status == 200
        return await response.json()


async def test_simultaneous_requests_spread_evenly(session: aiohttp.ClientSession) -> None:
    """T5: frozen snapshots, 100 simultaneous requests, four equal instances: 25 ± 3 each, thanks to the ledger."""
    names = "abcd"
    async with engines(*((name, "h100-qwen3-8b", "small") for name in names)) as made:
        for engine in made:
            engine.publish()
            engine.upstream.script = Reply(num_tokens=1, delay_s=1.0)
        async with running_gateway(pool_of(made)) as gateway:

            async def ask(number: int) -> str:
                body = chat(content=f"question {number} " * 40, max_tokens=100)
                async with session.post(gateway.url + CHAT, json=body) as response:
                    await response.read()
                    return response.headers["x-headway-instance"]

            shares = Counter(await asyncio.gather(*(ask(number) for number in range(100))))
    assert set(shares) == set(names)
    assert all(abs(share - 25) <= 3 for share in shares.values()), shares


async def test_silent_snapshots_are_shown_and_replaced(session: aiohttp.ClientSession) -> None:
    """T7: when snapshots stop, the instance shows as stale and is estimated by queueing, openly; never at random."""
    async with engines(("busy", "h100-qwen3-8b", "small"), ("idle", "h100-qwen3-8b", "small")) as made:
        busy, idle = made
        busy.publish(waiting=3)
        idle.publish()
        async with running_gateway(pool_of(made)) as gateway:
            decision = await explain(session, gateway)
            assert [c["estimate"]["source"] for c in decision["candidates"]] == ["replay", "replay"]
            assert decision["chosen"] == "idle"
            view = gateway.gateway.fleet.views[0]
            await until(lambda: view.stale, within_s=8)
            decision = await explain(session, gateway)
            by_name = {c["instance_id"]: c["estimate"] for c in decision["candidates"]}
            assert by_name["busy"]["source"] == "queueing"
            assert by_name["busy"]["snapshot_age_s"] > 2
            async with session.get(gateway.url + "/instances") as response:
                row = (await response.json())["instances"][0]
            assert (row["stale"], row["estimate"]) == (True, "queueing")
            async with session.get(gateway.url + "/metrics") as response:
                assert 'headway_snapshot_stale{instance="busy"} 1.0' in await response.text()
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 200
            busy.publish(waiting=1)
            decision = await explain(session, gateway)
            assert {c["instance_id"]: c["estimate"]["source"] for c in decision["candidates"]}["busy"] == "replay"


async def test_a_restarted_engine_is_followed(session: aiohttp.ClientSession) -> None:
    """T7: a segment that vanishes and comes back, with a sequence that begins anew, is picked up again."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish(waiting=2)
        async with running_gateway(pool_of(made)) as gateway:
            first = (await explain(session, gateway))["candidates"][0]["estimate"]["ttft_s"]
            assert made[0].writer is not None
            made[0].writer.close()
            made[0].writer, made[0].sequence = None, 0
            made[0].publish(engine_start=2)
            second = (await explain(session, gateway))["candidates"][0]["estimate"]
    assert second["source"] == "replay"
    assert second["ttft_s"] < first


async def test_foreign_bytes_in_a_segment_are_reported_once(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """A segment that holds no snapshot shows as a problem; requests are served all the same."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        Path(f"/dev/shm/{made[0].segment}").write_bytes(b"not a segment")
        try:
            async with running_gateway(pool_of(made)) as gateway:
                for _ in range(3):
                    async with session.post(gateway.url + CHAT, json=chat()) as response:
                        assert response.status == 200
                async with session.get(gateway.url + "/instances") as response:
                    row = (await response.json())["instances"][0]
        finally:
            Path(f"/dev/shm/{made[0].segment}").unlink()
    assert "no snapshot segment" in row["problem"]
    assert [record.message for record in caplog.records].count("snapshot_error") == 1


async def test_a_new_instance_is_estimated_right_from_the_first_request(session: aiohttp.ClientSession) -> None:
    """T42: a profile and an idle snapshot suffice: the first estimate is the replay's own figure."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish()
        async with running_gateway(pool_of(made)) as gateway:
            decision = await explain(session, gateway, content="x" * 4000)
    profile = load_profile("h100-qwen3-8b")
    state = EngineState(limits=profile.limits, running=[], waiting=[])
    newcomer = EngineRequest(request_id="n", prompt_tokens=1000, target_output_tokens=50)
    estimate = decision["candidates"][0]["estimate"]
    assert estimate["source"] == "replay"
    assert estimate["ttft_s"] == pytest.approx(replay(state, newcomer, profile.step_time).ttft_s, rel=1e-9)
    assert estimate["ttft_p90_s"] == pytest.approx(profile.calibration.ttft_ratio_p90 * estimate["ttft_s"])


async def test_a_profile_without_snapshots_still_knows_its_speed(session: aiohttp.ClientSession) -> None:
    """T42: without any state a profiled instance is estimated from its calibration, and says so."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        instance = {key: value for key, value in made[0].instance().items() if key != "snapshots"}
        async with running_gateway(pool([SMALL], [instance])) as gateway:
            estimate = (await explain(session, gateway, content="x" * 40_000))["candidates"][0]["estimate"]
    calibration = load_profile("h100-qwen3-8b").calibration
    assert estimate["source"] == "queueing"
    expected_s = 10_000 / calibration.prefill_tokens_per_s + calibration.decode_step_s
    assert estimate["ttft_s"] == pytest.approx(expected_s, rel=0.01)


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


async def test_a_mismatch_with_the_profile_is_shown(session: aiohttp.ClientSession) -> None:
    """An engine that runs with other limits than its profile says is replayed by its own, and shown."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].limits = EngineLimits(
            max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=32768, block_size=16, num_blocks=4096
        )
        made[0].publish()
        async with running_gateway(pool_of(made)) as gateway:
            async with session.get(gateway.url + "/instances") as response:
                row = (await response.json())["instances"][0]
    assert "max_num_batched_tokens" in row["problem"]
    assert row["engine_version"] == "vllm-0.32.0"


async def test_gauges_are_polled_off_the_request_path(session: aiohttp.ClientSession) -> None:
    """vLLM with neither snapshots nor profile: its own gauges are read and shown, its estimate is queueing."""
    text = (
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m",engine="0"} 3.0\n'
        'vllm:num_requests_waiting{model_name="m",engine="0"} 2.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    )
    async with FakeUpstream() as upstream:
        upstream.metrics = text
        config = pool([{"name": "m"}], [{"id": "a", "model": "m", "api_base": upstream.url, "engine": "vllm-0.32"}])
        async with running_gateway(config) as gateway:
            await until(lambda: gateway.gateway.feeds.gauges)
            async with session.get(gateway.url + "/instances") as response:
                gauges = (await response.json())["instances"][0]["gauges"]
            decision = await explain(session, gateway)
    assert (gauges["num_running"], gauges["num_waiting"], gauges["kv_cache_usage"]) == (3.0, 2.0, 0.25)
    assert decision["candidates"][0]["estimate"]["source"] == "queueing"


async def test_readiness_waits_for_the_first_snapshot(session: aiohttp.ClientSession) -> None:
    """``/readyz`` is 503 until every instance that is to publish has done so (or the stated grace is over)."""
    async with engines(("a", "h100-qwen3-8b", "small"), ("b", "h100-qwen3-8b", "small")) as made:
        made[0].publish()
        async with running_gateway(pool_of(made)) as gateway:
            async with session.get(gateway.url + "/readyz") as response:
                body = await response.json()
                assert response.status == 503
            assert "first snapshot of b" in body["reason"]
            assert body["grace_s"] > 0
            made[1].publish()
            await until(lambda: gateway.gateway.not_ready_because() is None)
            async with session.get(gateway.url + "/readyz") as response:
                assert response.status == 200


async def test_the_engine_counts_its_own_time(session: aiohttp.ClientSession) -> None:
    """The measured TTFT reaches metrics beside its prediction, and the target's fate is counted."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish()
        made[0].upstream.script = Reply(first_token_s=0.2, num_tokens=2)
        async with running_gateway(pool_of(made)) as gateway:
            for target_ms in ("100", "5000"):
                headers = {"x-slo-ttft-ms": target_ms}
                started_s = time.monotonic()
                async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                    await response.read()
                assert time.monotonic() - started_s >= 0.2
            async with session.get(gateway.url + "/metrics") as response:
                text = await response.text()
    assert 'headway_slo_attained_total{instance="a",model="small"} 1.0' in text
    assert 'headway_slo_missed_total{instance="a",model="small"} 1.0' in text
    assert 'headway_ttft_prediction_error_seconds_count{instance="a",source="replay"} 2.0' in text
