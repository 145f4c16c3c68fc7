"""What is known of the instances' state: snapshots, gauges, profiles, and what is said when they fail."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from gateway_clients import CHAT, chat, until
from headway.estimate.replay import replay
from headway.fleet import Gauges
from headway.gateway.feeds import parse_gauges
from headway.profiles import load_profile
from headway.testing import (
    FakeUpstream,
    Reply,
    pool,
    running_gateway,
)
from headway.types import EngineLimits, EngineRequest, EngineState
from snapshot_engines import SMALL, engines, explain, pool_of


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


async def test_the_exact_replay_decides_between_slow_and_busy(session: aiohttp.ClientSession) -> None:
    """T4: a slow idle instance against a fast one with 20,000 queued prefill tokens: the first by replay wins."""
    rows = (("slow", "h100-qwen3-32b", "small"), ("fast", "h100-qwen3-8b", "small"))
    chosen = []
    async with engines(*rows) as made:
        for content in ("x" * 4_000, "x" * 100_000):
            made[0].publish()
            made[1].publish(waiting=2, prompt_tokens=10_000)
            expected = []
            for engine, waiting in zip(made, (0, 2), strict=True):
                profile = load_profile(engine.profile)
                queued = [
                    EngineRequest(request_id=str(number), prompt_tokens=10_000, target_output_tokens=256, max_tokens=64)
                    for number in range(waiting)
                ]
                state = EngineState(limits=profile.limits, running=[], waiting=queued)
                newcomer = EngineRequest(request_id="n", prompt_tokens=len(content) // 4, target_output_tokens=50)
                expected.append(replay(state, newcomer, profile.step_time).ttft_s)
            async with running_gateway(pool_of(made)) as gateway:
                decision = await explain(session, gateway, content=content)
            assert decision["chosen"] == rows[expected.index(min(expected))][0]
            chosen.append(decision["chosen"])
    assert chosen == ["slow", "fast"]


@pytest.mark.parametrize("shadow_state", [True, False])
async def test_a_profile_without_snapshots_still_knows_its_speed(
    session: aiohttp.ClientSession, shadow_state: bool
) -> None:
    """T42: an instance that shows nothing is replayed from what was sent there, or else known by its calibration."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        instance = {key: value for key, value in made[0].instance().items() if key != "snapshots"}
        async with running_gateway(pool([SMALL], [{**instance, "shadow_state": shadow_state}])) as gateway:
            estimate = (await explain(session, gateway, content="x" * 40_000))["candidates"][0]["estimate"]
            async with session.get(gateway.url + "/instances") as response:
                row = (await response.json())["instances"][0]
    profile = load_profile("h100-qwen3-8b")
    if shadow_state:
        state = EngineState(limits=profile.limits, running=[], waiting=[])
        newcomer = EngineRequest(request_id="n", prompt_tokens=10_000, target_output_tokens=50)
        expected_s = replay(state, newcomer, profile.step_time).ttft_s
    else:
        expected_s = 10_000 / profile.calibration.prefill_tokens_per_s + profile.calibration.decode_step_s
    source = "shadow" if shadow_state else "queueing"
    assert (estimate["source"], row["estimate"], row["shadow"] is not None) == (source, source, shadow_state)
    assert estimate["ttft_s"] == pytest.approx(expected_s, rel=0.01)


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


async def test_an_engine_nobody_checked_is_shown(session: aiohttp.ClientSession) -> None:
    """A version outside the configured one, and what the engine says was never compared, stand in one problem."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish(engine_version="vllm-0.33.0", unchecked=["vLLM 0.33.0 (only on 0.32.0)", "LoRA adapters"])
        async with running_gateway(pool_of(made)) as gateway:
            async with session.get(gateway.url + "/instances") as response:
                row = (await response.json())["instances"][0]
    assert row["problem"] == (
        "the engine is vllm-0.33.0, the configuration says vllm-0.32; "
        "the replay was never checked on vLLM 0.33.0 (only on 0.32.0), LoRA adapters"
    )


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


def test_gauges_are_read_as_vllm_writes_them() -> None:
    """Several engine cores add up, their cache shares average; what a text lacks or garbles is not made up."""
    text = (
        b'# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        b'vllm:num_requests_running{engine="1",model_name="m"} 1.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        b'vllm:generation_tokens_total{engine="0"} 1.2e+06\n'
        b'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="9000",'
        b'enable_prefix_caching="True",x="block_size=8"} 1.0\n'
    )
    assert parse_gauges(text, 5.0) == Gauges(4.0, 2.0, 0.5, 5.0, 1.2e6, 9000, 16, True)
    short = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
    assert parse_gauges(short, 5.0) == Gauges(1.0, 0.0, 0.0, 5.0)
    assert parse_gauges(b"vllm:num_requests_running 1\n", 5.0) is None
    assert parse_gauges(short.replace(b" 1", b" many"), 5.0) is None
    assert parse_gauges(b"", 5.0) is None


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
