"""The decision log over real sockets: a line per routed request, bounded files, no prompts, no harm by a full disk."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import msgspec
import pytest

from gateway_clients import CHAT, RawClient, chat, metrics, pool_of, post, until
from headway.decision_row import LoggedDecision
from headway.errors import ConfigError
from headway.testing import FakeUpstream, Reply, running_gateway


def lines_of(*paths: Path) -> list[LoggedDecision]:
    """The lines of these files, oldest first, each read as what it is said to be."""
    return [msgspec.json.decode(line, type=LoggedDecision) for path in paths for line in path.read_bytes().splitlines()]


async def test_a_line_holds_what_was_known_and_what_came_of_it(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Predictions, target, choice, status and outcome of each request are there; one without a decision is not."""
    log = tmp_path / "decisions.jsonl"
    async with FakeUpstream(Reply(num_tokens=4)) as one, FakeUpstream(Reply(status=503)) as two:
        config = pool_of(one, two, decisions={"file": str(log)}, routing={"policy": "round_robin"})
        async with running_gateway(config) as gateway:
            for name, body in (("first", {"max_tokens": 9}), ("second", {"slo": {"ttft_ms": 700}, "priority": 2})):
                assert await post(session, gateway, name, **body) == 200
            assert await post(session, gateway, model="nonsense") == 404
            gateway.gateway.fleet.set_health("a", False)
            gateway.gateway.fleet.set_health("b", False)
            assert await post(session, gateway, "refused") == 503
    first, second, refused = lines_of(log)
    assert (first.request_id, first.chosen, first.status, first.attempts) == ("first", "a", 200, 1)
    assert (first.max_tokens, first.policy, first.config_hash) == (9, "round_robin", config.config_hash)
    assert first.outcome is not None
    assert (first.outcome.status, first.outcome.output_tokens) == ("ok", 4)
    assert first.ttft_s is not None
    assert 0 < first.ttft_s <= first.duration_s
    assert [one.id for one in first.instances] == ["a"]
    assert first.models["m"].quality == 0.5
    assert first.models["m"].prompt_tokens
    assert (second.attempts, second.priority, second.chosen) == (2, 2, "a")  # after the 503 of b
    assert second.ttft_target_s is not None
    assert 0 < second.ttft_target_s <= 0.7
    assert (refused.status, refused.chosen, refused.outcome, refused.instances) == (503, None, None, [])
    assert "no instance can take the query now" in refused.reason


async def test_every_candidate_on_request(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """decisions.candidates shows all instances of a decision, with their verdicts."""
    log = tmp_path / "decisions.jsonl"
    async with FakeUpstream() as one, FakeUpstream() as two:
        config = pool_of(one, two, decisions={"file": str(log), "candidates": True})
        async with running_gateway(config) as gateway:
            assert await post(session, gateway) == 200
    (line,) = lines_of(log)
    assert [(one.id, one.verdict) for one in line.instances] == [("a", "feasible"), ("b", "feasible")]


async def test_a_client_that_left_is_logged_as_499(tmp_path: Path) -> None:
    """What a request that nobody waited for had cost stands there too."""
    log = tmp_path / "decisions.jsonl"
    async with FakeUpstream(Reply(num_tokens=500, interval_s=0.01)) as upstream:
        async with running_gateway(pool_of(upstream, decisions={"file": str(log)})) as gateway:
            async with RawClient(gateway.url, chat()) as client:
                await client.read_until(b"tok ")
                client.hang_up()
            await until(lambda: gateway.gateway.num_inflight == 0)
    (line,) = lines_of(log)
    assert line.status == 499
    assert line.outcome is not None
    assert line.outcome.status == "cancelled"
    assert line.outcome.output_tokens


async def test_files_are_bounded_and_no_line_is_torn(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """At max_mb a file is put aside; num_files of them are kept, and all together hold the newest lines in order."""
    log = tmp_path / "decisions.jsonl"
    async with FakeUpstream(Reply(num_tokens=1)) as upstream:
        config = pool_of(upstream, decisions={"file": str(log), "max_mb": 0.01, "num_files": 3})
        async with running_gateway(config) as gateway:
            for number in range(60):
                assert await post(session, gateway, f"q{number:03d}") == 200
    files = sorted(tmp_path.glob("decisions.jsonl*"), reverse=True)
    assert [path.name for path in files] == ["decisions.jsonl.2", "decisions.jsonl.1", "decisions.jsonl"]
    assert all(path.stat().st_size <= 10_000 for path in files)
    ids = [line.request_id for line in lines_of(*files)]
    assert ids == [f"q{number:03d}" for number in range(60 - len(ids), 60)]
    assert len(ids) >= 10


async def test_neither_prompts_nor_answers_stand_there(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """What people wrote and what they were told is nobody's business later."""
    log = tmp_path / "decisions.jsonl"
    async with FakeUpstream(Reply(token="secret answer ")) as upstream:
        async with running_gateway(pool_of(upstream, decisions={"file": str(log)})) as gateway:
            headers = {"authorization": "Bearer sk-123456789"}
            body = chat(content="a very private question", user="somebody")
            async with session.post(gateway.url + CHAT, json=body, headers=headers) as response:
                await response.read()
    text = log.read_text()
    assert len(text.splitlines()) == 1
    for private in ("private question", "secret answer", "sk-123456789", "somebody"):
        assert private not in text


async def test_a_sample_is_a_share(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """decisions.sample logs that share of the requests, and 0 none."""
    counts = {}
    for share in (0.0, 0.3):
        log = tmp_path / f"{share}.jsonl"
        async with FakeUpstream(Reply(num_tokens=1)) as upstream:
            async with running_gateway(pool_of(upstream, decisions={"file": str(log), "sample": share})) as gateway:
                for _ in range(100):
                    assert await post(session, gateway) == 200
        counts[share] = len(lines_of(log))
    assert counts[0.0] == 0
    assert 15 <= counts[0.3] <= 45


async def test_a_log_that_cannot_be_written_harms_nobody(
    session: aiohttp.ClientSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost lines are counted and the failure is logged once; requests are answered all the same."""
    log = tmp_path / "decisions.jsonl"
    async with FakeUpstream(Reply(num_tokens=1)) as upstream:
        config = pool_of(upstream, decisions={"file": str(log), "max_mb": 0.0001})  # 100 bytes: no line fits
        async with running_gateway(config) as gateway:
            for _ in range(5):
                assert await post(session, gateway) == 200
            await gateway.gateway.decision_log.flush()
            assert "headway_decision_log_lost_total 5.0" in await metrics(session, gateway)
    assert [record.message for record in caplog.records].count("file_not_written") == 1
    assert log.read_bytes() == b""


async def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    """The complaint names the key and the path."""
    async with FakeUpstream() as upstream:
        with pytest.raises(ConfigError, match=r"decisions.file: .*nowhere.*cannot be appended to") as caught:
            async with running_gateway(pool_of(upstream, decisions={"file": str(tmp_path / "nowhere" / "x")})):
                pass
    assert caught.value.key == "decisions.file"


async def test_held_requests_are_logged(
    session: aiohttp.ClientSession, tmp_path: Path, one_slot: dict[str, object]
) -> None:
    """How long the central queue kept a request stands in its line; one that timed out there has no outcome."""
    log = tmp_path / "decisions.jsonl"
    async with FakeUpstream(Reply(delay_s=0.4)) as upstream:
        config = pool_of(upstream, **one_slot, decisions={"file": str(log)}, queue={"max_wait_s": 0.6})
        async with running_gateway(config) as gateway, RawClient(gateway.url, chat()):
            await until(lambda: upstream.num_open == 1)
            assert await post(session, gateway, "held") == 200
    line = next(one for one in lines_of(log) if one.request_id == "held")
    assert line.held_s is not None
    assert 0.1 < line.held_s < 0.6
    assert json.loads(msgspec.json.encode(line))["version"] == 1
