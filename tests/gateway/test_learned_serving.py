"""The circle closed over real sockets: train, serve, swap, hear from users, and train on what they said."""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp
import pytest
import yaml

from gateway_clients import CHAT, chat, until
from headway.config import load_config
from headway.errors import ArtifactError
from headway.gateway.state import Gateway
from headway.predict.artifact import encode_artifact
from headway.testing import FakeUpstream, Reply, running_gateway
from headway.train.build import build_artifact, cross_validated_card
from headway.train.dataset import EvaluationRow, read_rows
from headway.train.settings import Settings
from headway.train.table import EvaluationTable, build_table

pytest.importorskip("lightgbm", reason="needs the extra 'learned'")

THINGS = ("rivers", "trains", "bees", "clocks", "maps", "ships", "stars", "bread", "rain", "chess", "salt", "glass")
EASY, HARD = "Name a fact about stars near bees.", "Prove step by step that the statement about chess and rain holds."
SETTINGS = Settings(num_folds=3, max_trees=10)


def table(*, small_is_good_at_hard: bool = False) -> EvaluationTable:
    """Two models on 144 prompts: the large one manages hard ones, and small ones cost it more than they are worth."""
    rows = []
    for number in range(144):
        one, other, hard = THINGS[number % 12], THINGS[number // 12], number % 2 == 1
        text = f"Prove step by step that the statement about {one} and {other} holds."
        if not hard:
            text = f"Name a fact about {one} near {other}."
        good = 0.9 if not hard or small_is_good_at_hard else 0.2
        for model, quality in (("small", good), ("large", 0.85)):
            rows.append(
                EvaluationRow(
                    prompt_id=str(number), model=model, prompt=text, quality=quality, cost_usd=1e-5,
                    prompt_tokens=20, output_tokens=(300 if hard else 20) + number % 7, task="hard" if hard else "easy",
                )
            )  # fmt: skip
    return build_table(rows)


def artifact_of(made_of: EvaluationTable) -> bytes:
    card, material, calibration = cross_validated_card(made_of, SETTINGS, title="t", command="c")
    return encode_artifact(build_artifact(made_of, card, material, calibration, settings=SETTINGS))


@pytest.fixture(scope="module")
def artifact() -> bytes:
    return artifact_of(table())


def pool_file(directory: Path, small: str, large: str, **rest: object) -> Path:
    document = {
        "models": [{"name": "small"}, {"name": "large"}],
        "instances": [
            {"id": "s", "model": "small", "api_base": small, "engine": "vllm-0.32"},
            {"id": "l", "model": "large", "api_base": large, "engine": "vllm-0.32"},
        ],
        "routing": {"predictor": "predictor.hw"},
        "server": {"port": 0},
        **rest,
    }
    path = directory / "pool.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


async def ask(session: aiohttp.ClientSession, url: str, text: str) -> tuple[str, str]:
    """The model that answered, and the decision's id."""
    async with session.post(url + CHAT, json=chat(content=text)) as response:
        await response.read()
        assert response.status == 200
        return response.headers["x-headway-model"], response.headers["x-headway-decision"]


async def test_what_was_learned_routes_and_what_users_say_is_learned(
    session: aiohttp.ClientSession, tmp_path: Path, artifact: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Easy prompts go to the small model, hard ones to the large one, until an artifact says otherwise; the rows of
    that traffic, without its prompts, are a table like any other."""
    monkeypatch.setattr("headway.gateway.state.PREDICTOR_INTERVAL_S", 0.02)
    file = tmp_path / "predictor.hw"
    file.write_bytes(artifact)
    async with FakeUpstream(Reply(num_tokens=6)) as small, FakeUpstream(Reply(num_tokens=7)) as large:
        path = pool_file(tmp_path, small.url, large.url, feedback={"file": "feedback.jsonl"})
        async with running_gateway(load_config(path)) as gateway:
            decisions = []
            for text, expected in ((EASY, "small"), (HARD, "large"), (EASY, "small")):
                model, decision = await ask(session, gateway.url, text)
                assert model == expected
                decisions.append(decision)
            record = gateway.gateway.decisions.get(decisions[1])
            assert record is not None
            assert all(one.prediction not in (None, "prior", "default") for one in record.decision.candidates)
            body = {"id": decisions[1], "quality": 0.7}
            async with session.post(gateway.url + "/v1/feedback", json=body) as response:
                assert response.status == 200
            before = gateway.gateway.router.predictor
            file.with_suffix(".new").write_bytes(artifact_of(table(small_is_good_at_hard=True)))
            os.replace(file.with_suffix(".new"), file)
            await until(lambda: gateway.gateway.router.predictor is not before, within_s=20.0)
            assert (await ask(session, gateway.url, HARD))[0] == "small"
            last = gateway.gateway.router.predictor
            file.write_bytes(artifact[:-40])
            watch = next(iter(gateway.gateway.predictors.all()))
            await until(lambda: watch.problem is not None)
            assert "damaged" in (watch.problem or "")
            assert gateway.gateway.router.predictor is last
    rows = list(read_rows(tmp_path / "feedback.jsonl"))
    assert [row.quality for row in rows].count(0.7) == 1
    assert "Prove" not in (tmp_path / "feedback.jsonl").read_text()
    learned = build_table(rows)
    assert (learned.num_prompts, learned.model_names) == (4, ("large", "small"))


async def test_a_pool_of_other_models_starts_cold(tmp_path: Path, artifact: bytes) -> None:
    """A model that the artifact does not know is predicted from its card; a damaged file stops the start by its key."""
    path = pool_file(tmp_path, "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1")
    document = yaml.safe_load(path.read_text())
    document["models"].append({"name": "newcomer", "parameters": 8e9})
    document["instances"].append({"id": "n", "model": "newcomer", "api_base": "http://127.0.0.1:9/v1"})
    path.write_text(yaml.safe_dump(document))
    (tmp_path / "predictor.hw").write_bytes(artifact)
    assert Gateway(load_config(path)).router.predictor.cold_models == ("newcomer",)  # type: ignore[attr-defined]
    (tmp_path / "predictor.hw").write_bytes(artifact.replace(b"headway", b"Headway"))
    with pytest.raises(ArtifactError, match="no predictor artifact") as caught:
        Gateway(load_config(path))
    assert caught.value.key == "routing.predictor"
