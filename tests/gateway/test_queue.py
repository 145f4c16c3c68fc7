"""The central queue over real sockets: order, bounds, time, clients that leave, and what is said of those who wait."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
import pytest

from gateway_clients import CHAT, RawClient, chat, metrics, names, pool_of, post, until
from headway.testing import FakeUpstream, Received, Reply, running_gateway
from pools import book


async def test_requests_go_one_by_one_in_order(session: aiohttp.ClientSession, one_slot: dict[str, object]) -> None:
    """With one slot six requests are never two at the upstream, and go in the order in which they came."""
    most = 0

    def script(received: Received) -> Reply:
        nonlocal most
        most = max(most, upstream.num_open)
        return Reply(num_tokens=2, delay_s=0.02)

    async with FakeUpstream(script) as upstream, running_gateway(pool_of(upstream, **one_slot)) as gateway:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number in range(6):
                tasks.append(group.create_task(post(session, gateway, f"q{number}")))
                await until(lambda count=number: len(gateway.gateway.queue) + gateway.gateway.num_inflight > count)
        assert [task.result() for task in tasks] == [200] * 6
        text = await metrics(session, gateway)
    assert most == 1
    assert names(upstream) == [f"q{number}" for number in range(6)]
    assert 'headway_queue_left_total{how="released"} 6.0' in text
    assert "headway_queue_wait_seconds_count 6.0" in text
    assert "headway_queue_length 0.0" in text


async def test_a_lower_priority_value_goes_first(session: aiohttp.ClientSession, one_slot: dict[str, object]) -> None:
    """Among the waiting, priority decides before the time of arrival."""
    async with FakeUpstream(Reply(delay_s=0.15)) as upstream, running_gateway(pool_of(upstream, **one_slot)) as gateway:
        async with asyncio.TaskGroup() as group:
            for number, priority in enumerate([0, 5, 0, -3]):
                group.create_task(post(session, gateway, f"p{priority}-{number}", priority=priority))
                await until(lambda count=number: gateway.gateway.num_inflight > count)
                await until(lambda count=number: len(gateway.gateway.queue) == count)
    assert names(upstream) == ["p0-0", "p-3-3", "p0-2", "p5-1"]


async def test_the_answer_says_how_long_it_was_held(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """x-headway-held-ms is the time in the queue, which counts neither as overhead nor as the upstream's."""
    async with FakeUpstream(Reply(delay_s=0.2)) as upstream, running_gateway(pool_of(upstream, **one_slot)) as gateway:
        async with asyncio.TaskGroup() as group:
            group.create_task(post(session, gateway, "first"))
            await until(lambda: upstream.num_open == 1)
            async with session.post(gateway.url + CHAT, json=chat(), headers={"x-headway-explain": "1"}) as response:
                held_ms = float(response.headers["x-headway-held-ms"])
                overhead_ms = float(response.headers["x-headway-overhead-ms"])
                assert "held" in response.headers["x-headway-decision-json"]
    assert 100 < held_ms < 2000
    assert overhead_ms < held_ms / 2


async def test_hanging_up_while_held(
    session: aiohttp.ClientSession, one_slot: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """T21: a client that leaves while it is held costs no upstream call; the entry is gone, 499 logged."""
    with caplog.at_level(logging.INFO, "headway"):
        async with (
            FakeUpstream(Reply(delay_s=30)) as upstream,
            running_gateway(pool_of(upstream, **one_slot)) as gateway,
        ):
            async with RawClient(gateway.url, chat()), RawClient(gateway.url, chat()) as second:
                await until(lambda: len(gateway.gateway.queue) == 1)
                hung_up_s = second.hang_up()
                await until(lambda: len(gateway.gateway.queue) == 0)
                assert time.monotonic() - hung_up_s < 0.1 + 0.2  # and what a busy machine may add
                await until(lambda: gateway.gateway.num_inflight == 1)
                assert len(upstream.requests) == 1
                assert gateway.gateway.fleet.views[0].num_outstanding == 1
                text = await metrics(session, gateway)
            await until(lambda: gateway.gateway.num_inflight == 0)
    assert 'headway_queue_left_total{how="cancelled"} 1.0' in text
    logged = [record.fields for record in caplog.records if record.message == "request"]
    assert [(entry["status"], entry["attempts"]) for entry in logged] == [(499, 0), (499, 1)]


async def test_the_deadline_covers_queue_and_attempt(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """T24: what the queue took is missing from the attempt: the answer is a 504 one deadline after the arrival."""
    script = [Reply(delay_s=0.4), Reply(delay_s=30)]
    config = {"resilience": {"deadline_s": 0.8, "attempts": 1}, **one_slot}
    async with FakeUpstream(script) as upstream, running_gateway(pool_of(upstream, **config)) as gateway:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(post(session, gateway, "first"))
            await until(lambda: upstream.num_open == 1)
            started_s = time.monotonic()
            assert await post(session, gateway, "second") == 504
            assert 0.75 < time.monotonic() - started_s < 1.5
        assert first.result() == 200
    assert names(upstream) == ["first", "second"]


@pytest.mark.parametrize("deadline_s", [0.3, 60.0])
async def test_held_too_long_is_a_429(
    session: aiohttp.ClientSession, one_slot: dict[str, object], deadline_s: float
) -> None:
    """T24: what is not released within queue.max_wait_s or the deadline was never sent, and is told when to come."""
    config = {
        "resilience": {"deadline_s": deadline_s},
        "queue": {"max_wait_s": 0.3 if deadline_s > 1 else 30},
        **one_slot,
    }
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream, **config)) as gateway:
        book(gateway.gateway.fleet, "resident", "a")
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            body = await response.json()
        assert response.status == 429
        assert body["error"]["code"] == "queue_timeout"
        assert "no slot is free" in body["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1
        assert int(response.headers["retry-after-ms"]) >= 1000
        assert response.headers["x-headway-reason"] == "queue_timeout"
        async with session.get(f"{gateway.url}/decisions/{response.headers['x-headway-decision']}") as found:
            decision = await found.json()
        assert (decision["chosen"], len(decision["candidates"])) == (None, 1)
        text = await metrics(session, gateway)
        assert 'headway_rejected_total{reason="queue_timeout"} 1.0' in text
        assert 'headway_queue_left_total{how="timeout"} 1.0' in text
        assert upstream.requests == []


async def test_held_too_long_may_be_sent_all_the_same(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """queue.on_timeout: best_effort sends it to the best there is, whatever the policy thinks."""
    script = [Reply(delay_s=1.0), Reply()]
    config = {"queue": {"max_wait_s": 0.1, "on_timeout": "best_effort"}, **one_slot}
    async with FakeUpstream(script) as upstream, running_gateway(pool_of(upstream, **config)) as gateway:
        async with RawClient(gateway.url, chat()):
            await until(lambda: upstream.num_open == 1)
            assert await post(session, gateway, "second") == 200
            text = await metrics(session, gateway)
    assert 'headway_queue_left_total{how="forced"} 1.0' in text


async def test_a_full_queue_sheds_the_lowest_priority_then_the_newest(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """T41: the lowest priority goes first, then the newest; 429 with Retry-After, retry-after-ms and the reason."""
    config = {"queue": {"max_length": 2}, **one_slot}
    async with FakeUpstream(Reply(delay_s=0.6)) as upstream, running_gateway(pool_of(upstream, **config)) as gateway:
        queue = gateway.gateway.queue
        shed: dict[str, aiohttp.ClientResponse] = {}

        async def ask(name: str, priority: int) -> int:
            body, headers = chat(priority=priority), {"x-request-id": name}
            async with session.post(gateway.url + CHAT, json=body, headers=headers) as response:
                await response.read()
                if response.status == 429:
                    shed[name] = response
                return response.status

        async with asyncio.TaskGroup() as group:
            group.create_task(ask("served", 0))
            await until(lambda: upstream.num_open == 1)
            for number, name in enumerate(["old", "low"], 1):
                group.create_task(ask(name, 9 if name == "low" else 0))
                await until(lambda count=number: len(queue) == count)
            assert await ask("lower still", 10) == 429
            group.create_task(ask("new", 0))
            await until(lambda: "low" in shed)
            assert await ask("newest", 0) == 429
            group.create_task(ask("urgent", -1))
            await until(lambda: "new" in shed)
        text = await metrics(session, gateway)
    assert list(shed) == ["lower still", "low", "newest", "new"]
    assert names(upstream) == ["served", "urgent", "old"]
    for response in shed.values():
        assert response.headers["x-headway-reason"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        assert int(response.headers["retry-after-ms"]) >= 1
    assert 'headway_rejected_total{reason="queue_full"} 4.0' in text
    assert 'headway_queue_left_total{how="shed"} 4.0' in text


async def test_what_can_never_run_is_refused_at_once(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """Too long a prompt is a 400, a pool that is down a 503, both while others wait and without waiting."""
    async with FakeUpstream(Reply(delay_s=30)) as upstream, running_gateway(pool_of(upstream, **one_slot)) as gateway:
        async with RawClient(gateway.url, chat()):
            await until(lambda: upstream.num_open == 1)
            async with session.post(gateway.url + CHAT, json=chat(content="x" * 400_000)) as response:
                assert response.status == 400
                assert (await response.json())["error"]["code"] == "context_length_exceeded"
            gateway.gateway.fleet.set_health("a", False)
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 503
                assert "retry-after" in response.headers
            assert len(gateway.gateway.queue) == 0


async def test_those_who_wait_can_be_looked_at(session: aiohttp.ClientSession, one_slot: dict[str, object]) -> None:
    """/queue lists them with the reason, /decisions/{request id} shows every candidate, the gauge counts them."""
    async with FakeUpstream(Reply(delay_s=30)) as upstream, running_gateway(pool_of(upstream, **one_slot)) as gateway:
        held = RawClient(gateway.url, chat(priority=3), headers={"x-request-id": "mine"})
        async with RawClient(gateway.url, chat()), held:
            await until(lambda: len(gateway.gateway.queue) == 1)
            async with session.get(gateway.url + "/queue") as response:
                body = await response.json()
            assert body["length"] == 1
            (row,) = body["held"]
            assert (row["request_id"], row["priority"]) == ("mine", 3)
            assert row["reason"] == "held by central_fcfs: no slot is free"
            async with session.get(gateway.url + "/decisions/mine") as response:
                decision = await response.json()
            assert decision["chosen"] is None
            assert decision["reason"] == "held by central_fcfs: no slot is free"
            assert decision["held_s"] > 0
            assert [one["instance_id"] for one in decision["candidates"]] == ["a"]
            assert "headway_queue_length 1.0" in await metrics(session, gateway)


async def test_the_same_request_id_may_wait_twice(session: aiohttp.ClientSession, one_slot: dict[str, object]) -> None:
    """Two requests of one id are told apart in queue and upstream; both clients see their own."""
    async with FakeUpstream(Reply(delay_s=0.05)) as upstream, running_gateway(pool_of(upstream, **one_slot)) as gateway:
        statuses = await asyncio.gather(*(post(session, gateway, "same") for _ in range(3)))
    assert statuses == [200] * 3
    assert len(set(names(upstream))) == 3


async def test_a_failed_attempt_goes_through_the_queue_again(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """Failover asks the policy anew, without the instance that failed."""
    async with FakeUpstream(Reply(status=503)) as bad, FakeUpstream() as good:
        async with running_gateway(pool_of(bad, good, **one_slot)) as gateway:
            assert await post(session, gateway, "q") == 200
            text = await metrics(session, gateway)
    assert len(bad.requests) == len(good.requests) == 1
    assert 'headway_queue_left_total{how="released"} 2.0' in text


async def test_held_requests_drain(session: aiohttp.ClientSession, one_slot: dict[str, object]) -> None:
    """T34: on a shutdown those who wait are still served within drain_s; newcomers are refused."""
    async with FakeUpstream(Reply(delay_s=0.2)) as upstream, running_gateway(pool_of(upstream, **one_slot)) as gateway:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(post(session, gateway, f"q{number}")) for number in range(3)]
            await until(lambda: len(gateway.gateway.queue) == 2)
            group.create_task(gateway.server.drain())
            await until(lambda: gateway.gateway.draining)
            assert await post(session, gateway, "late") == 503
    assert [task.result() for task in tasks] == [200] * 3


async def test_the_end_of_the_drain_time_empties_the_queue(
    session: aiohttp.ClientSession, one_slot: dict[str, object]
) -> None:
    """T34: who is still held when the drain time is over gets a 503 and no upstream call."""
    config = {"server": {"port": 0, "drain_s": 0.2}, **one_slot}
    async with FakeUpstream(Reply(delay_s=30)) as upstream, running_gateway(pool_of(upstream, **config)) as gateway:
        async with RawClient(gateway.url, chat()):
            await until(lambda: upstream.num_open == 1)
            async with asyncio.TaskGroup() as group:
                held = group.create_task(post(session, gateway, "held"))
                await until(lambda: len(gateway.gateway.queue) == 1)
                group.create_task(gateway.server.drain())
            assert held.result() == 503
        assert len(gateway.gateway.queue) == 0
    assert len(upstream.requests) == 1
