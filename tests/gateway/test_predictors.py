"""Trained predictors in a running gateway: taken from their files, swapped without a restart, tried in the shadow.

What is in the files stands in for an artifact: qualities by model. That real artifacts load is tested where they are
made; here it is the gateway that is held to its word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml

from gateway_clients import CHAT, RawClient, chat, until
from headway.config import Config, load_config
from headway.errors import ArtifactError, ConfigError
from headway.gateway.state import Gateway
from headway.predict.base import Predictor
from headway.testing import FakeUpstream, Reply, running_gateway
from headway.types import Prediction, Query

SMALL, LARGE = {"small": 0.9, "large": 0.1}, {"small": 0.1, "large": 0.9}


class Table:
    def __init__(self, quality: Mapping[str, float]) -> None:
        self.quality = quality

    def predict(self, query: Query) -> Mapping[str, Prediction]:
        return {model: Prediction(value, 10.0, 0.0, "table") for model, value in self.quality.items()}


def load(config: Config, content: bytes) -> Predictor:
    try:
        quality = msgspec.json.decode(content, type=dict[str, float])
    except msgspec.MsgspecError as error:
        raise ArtifactError("is damaged: its checksum does not hold") from error
    if set(quality) != {model.name for model in config.models}:
        raise ArtifactError("knows other models")
    return Table(quality)


class Files:
    """A configuration and its artifacts, each write with a time of its own."""

    def __init__(self, directory: Path, small: str, large: str) -> None:
        self.directory, self._writes = directory, 0
        self.document: dict[str, object] = {
            "models": [{"name": "small"}, {"name": "large"}],
            "instances": [
                {"id": "s", "model": "small", "api_base": small, "engine": "vllm-0.32"},
                {"id": "l", "model": "large", "api_base": large, "engine": "vllm-0.32"},
            ],
            "routing": {"predictor": "live.hw"},
            "server": {"port": 0},
        }

    def write(self, name: str, content: object) -> None:
        self._writes += 1
        path = self.directory / name
        path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
        os.utime(path, ns=(self._writes * 10**9,) * 2)

    def config(self) -> Config:
        path = self.directory / "pool.yaml"
        path.write_text(yaml.safe_dump(self.document))
        return load_config(path)


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.gateway.state.PREDICTOR_INTERVAL_S", 0.02)


async def chosen(session: aiohttp.ClientSession, url: str) -> str:
    async with session.post(url + CHAT, json=chat()) as response:
        await response.read()
        assert response.status == 200
        return response.headers["x-headway-model"]


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(url + "/metrics") as response:
        found = re.search(rf"^{re.escape(name)} (\S+)$", await response.text(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def test_a_new_artifact_takes_over_while_streams_run(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Decisions follow the file from one request to the next; a stream that began before goes on untouched."""
    async with FakeUpstream(Reply(num_tokens=150, interval_s=0.01)) as small, FakeUpstream() as large:
        files = Files(tmp_path, small.url, large.url)
        files.write("live.hw", SMALL)
        async with running_gateway(files.config(), load=load) as gateway:
            router = gateway.gateway.router
            before = router.predictor
            async with RawClient(gateway.url, chat()) as client:
                assert b"x-headway-model: small" in await client.read_until(b"tok ")
                files.write("live.hw", LARGE)
                await until(lambda: router.predictor is not before)
                assert await chosen(session, gateway.url) == "large"
                rest = await client.read_until(b"data: [DONE]")
                assert rest.count(b"tok ") == 149
            assert await metric(session, gateway.url, 'headway_predictor_broken{role="live"}') == 0


async def test_a_corrupt_artifact_keeps_the_old_one(
    session: aiohttp.ClientSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are served as before, log and metric say so, and a good file mends it."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        files = Files(tmp_path, small.url, large.url)
        files.write("live.hw", SMALL)
        async with running_gateway(files.config(), load=load) as gateway:
            before = gateway.gateway.router.predictor
            files.write("live.hw", b"{torn")
            await until(lambda: any(record.message == "predictor_not_loaded" for record in caplog.records))
            assert gateway.gateway.router.predictor is before
            assert await chosen(session, gateway.url) == "small"
            assert await metric(session, gateway.url, 'headway_predictor_broken{role="live"}') == 1
            files.write("live.hw", LARGE)
            await until(lambda: gateway.gateway.router.predictor is not before)
            assert await chosen(session, gateway.url) == "large"
            assert await metric(session, gateway.url, 'headway_predictor_broken{role="live"}') == 0
            assert await metric(session, gateway.url, 'headway_predictor_load_failures_total{role="live"}') == 1


async def test_an_artifact_is_tried_in_the_shadow_first(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """It decides beside the live one and sends nothing; a newer file for it is taken up too."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        files = Files(tmp_path, small.url, large.url)
        files.write("live.hw", SMALL)
        files.write("next.hw", LARGE)
        files.document["shadow"] = {"predictor": "next.hw", "sample": 1.0}
        async with running_gateway(files.config(), load=load) as gateway:
            assert [await chosen(session, gateway.url) for _ in range(3)] == ["small"] * 3
            name = 'headway_shadow_decisions_total{agreement="other_model"}'
            assert await metric(session, gateway.url, name) == 3
            shadow = gateway.gateway.shadow
            assert shadow is not None
            before = shadow.router.predictor
            files.write("next.hw", SMALL)
            await until(lambda: shadow.router.predictor is not before)
            assert await chosen(session, gateway.url) == "small"
            name = 'headway_shadow_decisions_total{agreement="same_instance"}'
            assert await metric(session, gateway.url, name) == 1
    assert large.requests == []


async def test_the_prior_can_stand_in_the_shadow_of_an_artifact(tmp_path: Path) -> None:
    """And the other way round: what is named ``prior`` is what the configuration says of the models."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        files = Files(tmp_path, small.url, large.url)
    files.write("live.hw", SMALL)
    files.document["shadow"] = {"predictor": "prior"}
    gateway = Gateway(files.config(), load=load)
    assert gateway.shadow is not None
    query = Query(id="q", arrival_s=0.0, prompt_text="x", prompt_tokens={"small": 1, "large": 1})
    assert gateway.router.predictor.predict(query)["small"].source == "table"
    assert gateway.shadow.router.predictor.predict(query)["small"].source == "default"


async def test_a_reload_names_another_artifact_or_keeps_the_old(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """With the configuration the predictor changes; one that cannot be loaded keeps the whole old configuration."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        files = Files(tmp_path, small.url, large.url)
        files.write("live.hw", SMALL)
        files.write("other.hw", LARGE)
        files.write("broken.hw", b"{")
        async with running_gateway(files.config(), load=load) as gateway:
            inner = gateway.gateway
            first = inner.router.predictor
            files.document["routing"] = {"predictor": "broken.hw"}
            files.config()
            assert not inner.reloader.reload("test")
            assert "routing.predictor" in (inner.reloader.problem or "")
            assert inner.router.predictor is first
            files.document["routing"] = {"predictor": "live.hw", "default_ttft_ms": 900}
            files.config()
            assert inner.reloader.reload("test")
            assert inner.router.predictor is first  # the same file and models: nothing to load
            files.document["routing"] = {"predictor": "other.hw"}
            files.config()
            assert inner.reloader.reload("test")
            assert await chosen(session, gateway.url) == "large"
            last = inner.router.predictor
            files.write("other.hw", SMALL)
            await until(lambda: inner.router.predictor is not last)
            assert await chosen(session, gateway.url) == "small"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"{", "is damaged"), (b'{"small": 1}', "knows other models")],
)
def test_a_start_names_what_is_wrong_with_an_artifact(tmp_path: Path, content: bytes | None, words: str) -> None:
    """A missing, damaged or foreign file stops the start, at the key that names it; no request ever meets it."""
    files = Files(tmp_path, "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1")
    if content is not None:
        files.write("live.hw", content)
    with pytest.raises(ConfigError, match=words) as caught:
        Gateway(files.config(), load=load)
    assert caught.value.key == "routing.predictor"
    assert caught.value.line is not None
