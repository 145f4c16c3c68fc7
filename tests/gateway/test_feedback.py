"""Feedback over real sockets: rows join what users say with what answers cost, and prompts stay out of the file."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import aiohttp
import pytest

from gateway_clients import CHAT, chat, pool_of, until
from headway.config import Config
from headway.errors import ConfigError
from headway.gateway.request import CHAT as CHAT_ENDPOINT
from headway.gateway.request import parse_request
from headway.gateway.state import Gateway
from headway.predict.features import prompt_features
from headway.predict.prompt import prompt_of_query, prompt_of_text
from headway.testing import FakeUpstream, Reply, RunningGateway, pool, running_gateway
from headway.train.dataset import EvaluationRow, read_rows

FEEDBACK = "/v1/feedback"


def config_of(upstream: FakeUpstream, path: Path, *, engine: str = "vllm-0.32", **rest: object) -> Config:
    instance = {"id": "a", "model": "m", "api_base": upstream.url, "engine": engine}
    return pool([{"name": "m"}], [instance], feedback={"file": str(path), **rest})


async def answered(session: aiohttp.ClientSession, gateway: RunningGateway, **body: object) -> tuple[str, str]:
    """Ask once; the request's and the decision's id."""
    async with session.post(gateway.url + CHAT, json=chat(**body)) as response:
        await response.read()
        assert response.status == 200
        return response.headers["x-request-id"], response.headers["x-headway-decision"]


async def said(
    session: aiohttp.ClientSession, gateway: RunningGateway, expected: int = 200, **fields: object
) -> dict[str, object]:
    """Give feedback; the answer's body."""
    async with session.post(gateway.url + FEEDBACK, json=fields) as response:
        assert response.status == expected, await response.text()
        body = await response.json()
    assert isinstance(body, dict)
    return body


async def test_a_row_joins_what_is_said_with_what_was_measured(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """By request id or decision id, a quality or a thumb: a row that training reads, with tokens, times and cost."""
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream(Reply(num_tokens=3, prompt_tokens=11)) as upstream:
        async with running_gateway(config_of(upstream, path, prompts=True)) as gateway:
            request_id, decision_id = await answered(session, gateway, content="What is it?", max_tokens=50)
            body = await said(session, gateway, request_id=request_id, quality=0.8, comment="too long")
            assert body == {"stored": True, "request_id": request_id, "decision_id": decision_id}
            _, other = await answered(session, gateway, stream=False)
            await said(session, gateway, decision_id=other, thumbs="down")
            async with session.get(gateway.url + "/metrics") as response:
                metrics = await response.text()
    first, second = read_rows(path)
    assert first == EvaluationRow(
        prompt_id=decision_id, model="m", messages=[{"role": "user", "content": "What is it?"}], prompt_tokens=11,
        output_tokens=3, cost_usd=0.0, quality=0.8, judge="feedback", max_tokens=50, ttft_s=first.ttft_s,
        latency_s=first.latency_s, comment="too long",
    )  # fmt: skip
    assert first.ttft_s is not None
    assert (second.prompt_id, second.quality) == (other, 0.0)
    assert 'headway_feedback_rows_total{kind="feedback"} 2.0' in metrics
    assert 'headway_feedback_quality_count{model="m"} 2.0' in metrics
    assert 'headway_quality_prediction_error_count{model="m"} 2.0' in metrics


async def test_without_leave_no_prompt_reaches_the_file(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """By default features stand for the prompt, bit for bit those that serving computes; words and comments do not."""
    path = tmp_path / "feedback.jsonl"
    secret = "The launch code of Zanzibar is quokka."
    async with FakeUpstream(Reply(token="Understood ")) as upstream:
        async with running_gateway(config_of(upstream, path)) as gateway:
            request_id, _ = await answered(session, gateway, content=secret)
            await said(session, gateway, id=request_id, quality=1, comment="quokkas!")
    text = path.read_text().lower()
    assert not any(word in text for word in ("zanzibar", "quokka", "understood"))
    (row,) = read_rows(path)
    assert (row.prompt, row.messages, row.comment) == (None, None, None)
    assert row.features is not None
    ours, theirs = row.features.features(), prompt_features(prompt_of_text(secret))
    for name in ("dense", "hashed", "buckets"):
        assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()


async def test_kept_features_are_those_that_routed(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Turns, the system's share and the limit included: training sees of a long conversation what serving saw of it."""
    path = tmp_path / "feedback.jsonl"
    body = {
        "model": "auto",
        "messages": [
            {"role": "system", "content": "Be brief. " * 2000},
            {"role": "user", "content": "What is it?"},
            {"role": "assistant", "content": "A headway."},
            {"role": "user", "content": [{"type": "text", "text": "And why? " * 900}]},
        ],
        "max_tokens": 70,
    }
    async with FakeUpstream() as upstream, running_gateway(config_of(upstream, path)) as gateway:
        async with session.post(gateway.url + CHAT, json=body) as response:
            assert response.status == 200
        request = parse_request(CHAT_ENDPOINT, {}, json.dumps(body).encode())
        query = gateway.gateway.query_of(request, "q", 0.0)
    (row,) = read_rows(path)
    assert row.features is not None
    ours, theirs = row.features.features(), prompt_features(prompt_of_query(query))
    assert ours.dense.tobytes() == theirs.dense.tobytes()
    assert ours.buckets.tobytes() == theirs.buckets.tobytes()


async def test_answers_nobody_spoke_of_are_rows_of_lengths(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Once their time is over, and when the gateway stops; failures and answers that were spoken of are not."""
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream(Reply(num_tokens=4)) as upstream:
        config = config_of(upstream, path, wait_s=0.05)
        async with running_gateway(config) as gateway:
            late, _ = await answered(session, gateway)
            await until(lambda: path.read_bytes().count(b"\n") == 1)
            assert (await said(session, gateway, 404, id=late, quality=1))["error"]["code"] == "feedback_unknown_id"  # type: ignore[index]
        async with running_gateway(config_of(upstream, path)) as gateway:
            spoken, _ = await answered(session, gateway)
            await said(session, gateway, id=spoken, quality=1)
            await answered(session, gateway)
            upstream.script = Reply(status=400, body=b"{}")
            async with session.post(gateway.url + CHAT, json=chat()) as response:
                assert response.status == 400
    rows = list(read_rows(path))
    assert [row.quality for row in rows] == [None, 1.0, None]
    assert {row.output_tokens for row in rows} == {4}


async def test_lengths_are_those_the_engine_counted(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """A hosted stream that reports no usage has no length to learn from: what is said of it is kept without one."""
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream() as upstream:
        async with running_gateway(config_of(upstream, path, engine="hosted")) as gateway:
            spoken, _ = await answered(session, gateway)
            await said(session, gateway, id=spoken, quality=1)
            await answered(session, gateway)
    (row,) = read_rows(path)
    assert (row.quality, row.prompt_tokens, row.output_tokens) == (1.0, None, None)


async def test_outcomes_can_be_left_out(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Who wants feedback only gets feedback only."""
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream() as upstream:
        async with running_gateway(config_of(upstream, path, outcomes=False)) as gateway:
            await answered(session, gateway)
    assert path.read_bytes() == b""


async def test_an_answer_is_spoken_of_once(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """A second verdict is a 409; one on another answer under the same request id is its own."""
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream() as upstream, running_gateway(config_of(upstream, path)) as gateway:
        headers = {"x-request-id": "mine"}
        decisions = []
        for _ in range(2):
            async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                await response.read()
                decisions.append(response.headers["x-headway-decision"])
        assert (await said(session, gateway, id="mine", quality=1))["decision_id"] == decisions[1]
        assert (await said(session, gateway, 409, id="mine", quality=0))["error"]["code"] == "feedback_given"  # type: ignore[index]
        assert (await said(session, gateway, id=decisions[0], quality=0))["stored"] is True
    assert len(path.read_bytes().splitlines()) == 2


async def test_clients_speak_of_their_own_answers(
    session: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer to somebody else is unknown, also under one's own request id; the admin may speak of all."""
    for name in ("ADMIN", "ANN", "BOB"):
        monkeypatch.setenv(f"KEY_{name}", f"sk-{name.lower()}")
    clients = [{"name": name, "key": f"env:KEY_{name.upper()}"} for name in ("ann", "bob")]
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream() as upstream:
        instance = {"id": "a", "model": "m", "api_base": upstream.url, "engine": "vllm-0.32"}
        config = pool(
            [{"name": "m"}],
            [instance],
            feedback={"file": str(path)},
            keys={"admin": "env:KEY_ADMIN", "clients": clients},
        )
        async with running_gateway(config) as gateway:

            async def speak(key: str, name: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                body = {"id": name, "thumbs": "up"}
                async with session.post(gateway.url + FEEDBACK, json=body, headers=headers) as response:
                    return response.status

            decisions = []
            for key in ("sk-ann", "sk-bob", "sk-ann"):
                headers = {"authorization": f"Bearer {key}", "x-request-id": "same"}
                async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                    await response.read()
                    decisions.append(response.headers["x-headway-decision"])
            assert await speak("sk-bob", decisions[0]) == 404
            assert await speak("sk-bob", "same") == 200
            assert await speak("sk-bob", "same") == 409
            assert await speak("sk-ann", decisions[1]) == 404  # bob's, though spoken of
            assert await speak("sk-admin", decisions[0]) == 200
            assert await speak("sk-ann", "same") == 200
            assert await speak("sk-wrong", "same") == 401
    assert {row.prompt_id for row in read_rows(path)} == set(decisions)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"id": "x"}, "quality"),
        ({"quality": 1}, "id"),
        ({"id": "x", "request_id": "x", "quality": 1}, "id"),
        ({"id": "x", "quality": 1, "thumbs": "up"}, "quality"),
        ({"id": "x", "quality": 1.5}, None),
        ({"id": "x", "quality": "good"}, None),
        ({"id": "x", "thumbs": "sideways"}, None),
        ({"id": "x", "quality": 1, "stars": 5}, None),
        ([1], None),
        ("{", None),
    ],
)
async def test_what_is_no_feedback_is_a_400(
    session: aiohttp.ClientSession, tmp_path: Path, body: object, param: str | None
) -> None:
    """The field is named; nothing is written."""
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream() as upstream, running_gateway(config_of(upstream, path)) as gateway:
        data = body if isinstance(body, str) else json.dumps(body)
        async with session.post(gateway.url + FEEDBACK, data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param
    assert path.read_bytes() == b""


async def test_unknown_ids_and_feedback_that_is_off_are_404(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """An id that no answer had says nothing of those that had one; off by default, and nothing is kept then."""
    async with FakeUpstream() as upstream:
        async with running_gateway(config_of(upstream, tmp_path / "f")) as gateway:
            error = (await said(session, gateway, 404, id="nobody", thumbs="up"))["error"]
            assert error["code"] == "feedback_unknown_id"  # type: ignore[index]
            async with session.post(gateway.url + FEEDBACK, data=b" " * 70_000) as response:
                assert response.status == 413
        async with running_gateway(pool_of(upstream)) as gateway:
            request_id, _ = await answered(session, gateway)
            error = (await said(session, gateway, 404, id=request_id, thumbs="up"))["error"]
            assert error["code"] == "feedback_off"  # type: ignore[index]


async def test_what_users_write_is_not_logged(
    session: aiohttp.ClientSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither prompt nor comment, at any level."""
    async with (
        FakeUpstream() as upstream,
        running_gateway(config_of(upstream, tmp_path / "f", prompts=True)) as gateway,
    ):
        with caplog.at_level(logging.DEBUG, logger="headway"):
            request_id, _ = await answered(session, gateway, content="my secret prompt")
            await said(session, gateway, id=request_id, quality=1, comment="my secret comment")
            await said(session, gateway, 400, id=request_id, quality=7, comment="my secret comment")
    assert not any("secret" in str(record.__dict__) for record in caplog.records)


async def test_memory_stays_bounded(
    session: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest answers make room: they become rows, and can no longer be spoken of."""
    monkeypatch.setattr("headway.gateway.feedback.MAX_WAITING", 3)
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream() as upstream, running_gateway(config_of(upstream, path)) as gateway:
        ids = [(await answered(session, gateway))[0] for _ in range(5)]
        await said(session, gateway, 404, id=ids[1], quality=1)
        await said(session, gateway, id=ids[2], quality=1)
        await asyncio.gather(*(said(session, gateway, id=name, quality=1) for name in ids[3:]))
        more = [(await answered(session, gateway))[0] for _ in range(6)]
        assert len(gateway.gateway.feedback._decisions) <= 3 + 3
        await said(session, gateway, id=more[-1], quality=1)
    assert [row.quality for row in read_rows(path)].count(None) == 2 + 5


async def test_every_endpoint_with_a_prompt_is_spoken_of(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Completions and responses give rows with their text; embeddings and bare token ids have none to learn from."""
    path = tmp_path / "feedback.jsonl"
    async with FakeUpstream() as upstream, running_gateway(config_of(upstream, path, prompts=True)) as gateway:
        for where, body in (
            ("/v1/completions", {"prompt": "Once upon"}),
            ("/v1/completions", {"prompt": [1, 2, 3]}),
            ("/v1/embeddings", {"input": "vector"}),
        ):
            async with session.post(gateway.url + where, json={"model": "m", **body}) as response:
                assert response.status == 200
    (row,) = read_rows(path)
    assert row.prompt == "Once upon"


async def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    """Whoever asks for feedback to be kept hears at once that it cannot be."""
    async with FakeUpstream() as upstream:
        config = config_of(upstream, tmp_path / "no" / "where.jsonl")
    with pytest.raises(ConfigError, match=r"feedback\.file"):
        Gateway(config)
