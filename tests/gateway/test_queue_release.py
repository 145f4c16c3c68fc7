"""When the central queue is released: a policy's mistakes, its own time, departures, and the infeasible that wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import aiohttp
import pytest

from gateway_clients import CHAT, RawClient, chat, metrics, pool_of, post, until
from headway.fleet import FleetView
from headway.policy.base import HeldQuery, Release, choosable
from headway.policy.central_queue import CentralQueuePolicy
from headway.policy.registry import POLICIES, PolicyRow
from headway.testing import FakeUpstream, Reply, running_gateway
from snapshot_engines import engines
from snapshot_engines import pool_of as engine_pool


async def test_a_policy_that_fails_harms_nobody_for_good(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in a policy is logged, those who wait keep waiting, and are released when it works again."""

    class Faulty(CentralQueuePolicy):
        num_calls = 0

        def release(self, queue: Sequence[HeldQuery], fleet: FleetView, now: float) -> list[Release]:
            self.num_calls += 1
            if self.num_calls == 1:
                return [Release(queue[0].query.id, "nowhere", "of a mistake")]
            return super().release(queue, fleet, now)

    monkeypatch.setitem(POLICIES, "faulty", PolicyRow(lambda rng, options: Faulty("fcfs", {}), "fails", holds=True))
    async with FakeUpstream() as upstream:
        async with running_gateway(pool_of(upstream, routing={"policy": "faulty"})) as gateway:
            assert await post(session, gateway, "q") == 200
    assert [record.message for record in caplog.records].count("release_error") == 1


async def test_the_policy_is_asked_at_the_time_it_names(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that wants nothing but time gets it: without any event it is asked again when it said."""

    class Patient:
        name = "patient"

        def release(self, queue: Sequence[HeldQuery], fleet: FleetView, now: float) -> list[Release]:
            return [
                Release(held.query.id, held.candidates[choosable(held.candidates)[0]].instance_id, "it waited long")
                for held in queue
                if now - held.held_since_s >= 0.1
            ]

        def next_release_s(self, now: float) -> float | None:
            return now + 0.02

    monkeypatch.setitem(POLICIES, "patient", PolicyRow(lambda rng, options: Patient(), "waits", holds=True))
    async with FakeUpstream() as upstream:
        async with running_gateway(pool_of(upstream, routing={"policy": "patient"})) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 200
                assert 100 <= float(response.headers["x-headway-held-ms"]) < 1000


async def test_random_departures_leave_nothing_behind(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """T6: of 1,500 held requests half leave at random points; queue, ledger and gauges end at zero."""
    rng = random.Random(7)
    script = Reply(num_tokens=2, interval_s=0.001)
    async with FakeUpstream(script) as one, FakeUpstream(script) as two:
        config = pool_of(one, two, queue={"max_length": 20}, **one_slot)
        async with running_gateway(config) as gateway:
            fates = [rng.random() * 0.05 if rng.random() < 0.5 else None for _ in range(1500)]

            async def work() -> None:
                while fates:
                    leaves_s = fates.pop()
                    async with RawClient(gateway.url, chat(), headers={"connection": "close"}) as client:
                        if leaves_s is None:
                            await client.reader.read()
                        else:
                            await asyncio.sleep(leaves_s)

            await asyncio.gather(*(work() for _ in range(48)))
            await until(lambda: gateway.gateway.num_inflight == 0)
            assert len(gateway.gateway.queue) == 0
            views = gateway.gateway.fleet.views
            assert [(view.num_outstanding, len(view.ledger)) for view in views] == [(0, 0), (0, 0)]
            text = await metrics(session, gateway)
    assert "headway_queue_length 0.0" in text
    for how in ("released", "shed", "cancelled"):
        assert f'headway_queue_left_total{{how="{how}"}}' in text


async def test_the_infeasible_wait_for_a_snapshot_that_makes_them_feasible(session: aiohttp.ClientSession) -> None:
    """on_infeasible: queue holds what would be late, and a snapshot with an empty queue lets it go at once."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish(waiting=40)
        config = engine_pool(made, routing={"on_infeasible": "queue", "default_ttft_ms": 60})
        async with running_gateway(config) as gateway, asyncio.TaskGroup() as group:
            asking = group.create_task(post(session, gateway, "q"))
            await until(lambda: len(gateway.gateway.queue) == 1)
            async with session.get(gateway.url + "/queue") as response:
                (row,) = (await response.json())["held"]
            assert "no instance is in time: the best offers" in row["reason"]
            assert made[0].upstream.requests == []
            made[0].publish()
            assert await asking == 200


async def test_the_feasible_are_not_held(session: aiohttp.ClientSession) -> None:
    """on_infeasible: queue changes nothing for a query that an instance is in time for."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish()
        config = engine_pool(made, routing={"on_infeasible": "queue", "default_ttft_ms": 5000})
        async with running_gateway(config) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 200
                assert response.headers["x-headway-slo"] == "met-expected"
                assert float(response.headers["x-headway-held-ms"]) < 100


@pytest.mark.parametrize(("on_timeout", "status"), [("reject", 429), ("best_effort", 200)])
async def test_the_hopeless_are_answered_in_the_end(
    session: aiohttp.ClientSession, on_timeout: str, status: int
) -> None:
    """on_infeasible: queue with a target that nobody can meet: held for max_wait_s, then refused or sent as it is."""
    async with engines(("a", "h100-qwen3-8b", "small")) as made:
        made[0].publish()
        queue = {"max_wait_s": 0.15, "on_timeout": on_timeout}
        config = engine_pool(made, routing={"on_infeasible": "queue", "default_ttft_ms": 0.01}, queue=queue)
        async with running_gateway(config) as gateway:
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == status
                assert response.headers["x-headway-slo"] == "infeasible"
                if status == 429:
                    assert float(response.headers["x-headway-best-ttft-ms"]) > 0


@pytest.mark.parametrize("policy", sorted(name for name, row in POLICIES.items() if row.holds))
async def test_every_holding_policy_serves(session: aiohttp.ClientSession, policy: str) -> None:
    """Whatever its rule, a burst of forty on two engines is answered whole, and nothing stays held or booked."""
    async with engines(("a", "h100-qwen3-8b", "small"), ("b", "h100-qwen3-32b", "small")) as made:
        for engine in made:
            engine.publish()
            engine.upstream.script = Reply(num_tokens=2, delay_s=0.02)
        config = engine_pool(made, routing={"policy": policy, "default_ttft_ms": 2000})
        async with running_gateway(config) as gateway:
            statuses = await asyncio.gather(
                *(post(session, gateway, f"{policy}-{number}", max_tokens=50) for number in range(40))
            )
            assert statuses == [200] * 40
            assert len(gateway.gateway.queue) == 0
            assert [view.num_outstanding for view in gateway.gateway.fleet.views] == [0, 0]
            assert 'headway_queue_left_total{how="released"} 40.0' in await metrics(session, gateway)
