"""The event stream behind the page: what it says of pool, decisions and outcomes, and that watching stays bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from gateway_clients import CHAT, chat, pool_of
from headway.gateway.decisions import DecisionStore
from headway.gateway.live import MAX_WATCHERS, score
from headway.testing import FakeUpstream, running_gateway
from headway.types import Candidate, Decision, Estimate, Outcome


class Events:
    """The events of ``/events`` as they come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def next(self, name: str) -> Any:
        """The data of the next event of that name."""
        while True:
            event = (await self._response.content.readuntil(b"\n\n")).decode()
            fields = dict(line.split(": ", 1) for line in event.strip().splitlines())
            if fields.get("event") == name:
                return json.loads(fields["data"])


async def test_a_request_passes_through_the_stream(session: aiohttp.ClientSession) -> None:
    """A decision shows with its reason as it falls, its outcome when it ends, and both enter the score."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.get(gateway.url + "/events") as watched:
            assert watched.headers["content-type"].startswith("text/event-stream")
            events = Events(watched)
            pool = await events.next("pool")
            assert [one["id"] for one in pool["instances"]] == ["a"]
            assert pool["instances"][0]["timeline"] is None  # a hosted API cannot be replayed
            headers = {"x-slo-ttft-ms": "5000", "x-request-id": "mine"}
            async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as answer:
                await answer.read()
            [decision] = await events.next("decisions")
            assert (decision["request_id"], decision["instance"], decision["target_ms"]) == ("mine", "a", 5000)
            assert "chose a" in decision["reason"]
            [outcome] = await events.next("outcomes")
            assert (outcome["id"], outcome["status"]) == (decision["id"], "ok")
            assert outcome["ttft_ms"] > 0
            while (pool := await events.next("pool"))["score"]["num"] == 0:
                pass
            assert pool["score"]["num_in_time"] == pool["score"]["num_with_target"] == 1


async def test_the_stream_holds_no_prompt(session: aiohttp.ClientSession) -> None:
    """What a client wrote does not reach whoever watches."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat(content="zyxw-secret")) as answer:
            await answer.read()
        async with session.get(gateway.url + "/events") as watched:
            seen = b""
            while b"event: outcomes" not in seen:
                seen += await watched.content.readany()
            assert b"zyxw" not in seen


async def test_watchers_are_bounded_and_leave_nothing(session: aiohttp.ClientSession) -> None:
    """One page too many is told to come back; one that leaves makes room."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        watched = [await session.get(gateway.url + "/events") for _ in range(MAX_WATCHERS)]
        async with session.get(gateway.url + "/events") as refused:
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
        watched[0].close()

        async def is_free() -> bool:
            async with session.get(gateway.url + "/events") as again:
                return again.status == 200

        async with asyncio.timeout(5):
            while not await is_free():  # noqa: ASYNC110 - the server notices the closed socket in its own time
                await asyncio.sleep(0.01)
        for response in watched[1:]:
            response.close()


async def test_a_draining_gateway_ends_the_stream(session: aiohttp.ClientSession) -> None:
    """A page must not hold up the drain."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.get(gateway.url + "/events") as watched:
            await watched.content.readuntil(b"\n\n")
            gateway.gateway.draining = True
            async with asyncio.timeout(3):
                await watched.content.read()


@pytest.mark.parametrize("name", ["", "static/page.js", "static/page.css", "static/icon.svg"])
async def test_the_page_is_served_and_loads_nothing_from_elsewhere(session: aiohttp.ClientSession, name: str) -> None:
    """Every file of the page comes from here, under a policy that allows no other place."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.get(f"{gateway.url}/{name}") as response:
            assert response.status == 200
            assert response.headers["content-security-policy"].startswith("default-src 'self'")
            text = await response.text()
    links = text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in links
    assert "https://" not in links


@pytest.mark.parametrize("name", ["static/nope.js", "static/..%2flive.py", "static/../live.py"])
async def test_only_the_page_s_own_files_are_served(session: aiohttp.ClientSession, name: str) -> None:
    """No path leads out of the folder."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.get(f"{gateway.url}/{name}") as response:
            assert response.status == 404


def _record(store: DecisionStore, model: str, ttft_s: float | None, cost_usd: float, *, status: Any = "ok") -> None:
    estimate = Estimate(0.1, 0.1, 0.0, "replay")
    candidates = tuple(
        Candidate(name, name, "feasible", 0.5, 0.5, price, 10.0, 10, "prior", estimate)
        for name, price in (("small", 1e-6), ("large", 4e-6))
    )
    decision = Decision(
        query_id="q", policy="bear", arrival_s=0.0, candidates=candidates, reason="", slo="met-expected",
        chosen=0 if model == "small" else 1, ttft_target_s=0.2,
    )  # fmt: skip
    record = store.add("q", 1, decision)
    record.outcome = Outcome(query_id="q", instance_id=model, status=status, ttft_s=ttft_s, cost_usd=cost_usd)


def test_the_score_compares_with_the_largest_model() -> None:
    """Cost against always the dearest runs over the same queries: predicted there, real where it answered."""
    store = DecisionStore()
    _record(store, "small", 0.1, 2e-6)
    _record(store, "large", 0.3, 6e-6)
    _record(store, "small", None, 1e-6, status="interrupted")
    _record(store, "small", None, 1e-6, status="cancelled")
    found = score(store.since(0), "large")
    assert (found["num"], found["num_with_target"], found["num_in_time"], found["num_priced"]) == (3, 3, 1, 2)
    assert found["cost_per_1000_usd"] == pytest.approx(1e3 * (2e-6 + 6e-6) / 2)
    assert found["dearest_per_1000_usd"] == pytest.approx(1e3 * (4e-6 + 6e-6) / 2)


def test_new_decisions_are_found_once() -> None:
    """``since`` gives what was added after a count, oldest first, and no more than is kept."""
    store = DecisionStore(capacity=3)
    for number in range(5):
        _record(store, "small", 0.1, number)
    costs = [record.outcome.cost_usd for record in store.since(0) if record.outcome is not None]
    assert costs == [2, 3, 4]
    assert len(store.since(4)) == 1
    assert store.since(5) == []
