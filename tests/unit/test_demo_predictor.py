"""The demo by a trained artifact: what is said of it before anything starts, and the rows that train one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headway.demo.pool import POOL, RunningEngine, gateway_config
from headway.demo.predictor import load_trained, write_answers
from headway.demo.show import introduce
from headway.errors import ArtifactError
from headway.predict.artifact import encode_artifact
from headway.train.dataset import read_rows
from headway.train.table import build_table
from trained_artifacts import SEED, renamed, trained, workload


def test_rows_are_the_demos_truth(tmp_path: Path) -> None:
    """Every model's answer to every query with its tokens, quality and price, readable by training."""
    played, path = workload(3, seconds=1.0), tmp_path / "rows.jsonl.gz"
    assert write_answers(played, path) == 24
    table = build_table(read_rows(path))
    assert table.model_names == tuple(model.name for model in POOL)
    assert table.texts == tuple(query.prompt for query in played.queries)
    query = played.queries[5]
    for column, model in enumerate(POOL):
        answer = query.answers[model.name]
        assert table.quality[5, column] == answer.quality
        assert table.output_tokens[5, column] == answer.output_tokens
        assert table.cost_usd[5, column] == model.price.cost_usd(query.prompt_tokens, answer.output_tokens)


def test_the_gateway_is_told_of_the_artifact(tmp_path: Path) -> None:
    """By its whole path, since the configuration lies in a directory of its own; without one the priors speak."""
    engines = {model.name: RunningEngine("http://127.0.0.1:1", "s") for model in POOL}
    told = yaml.safe_load(gateway_config("bear", engines, tmp_path / "some.hw"))
    assert told["routing"]["predictor"] == str(tmp_path / "some.hw")
    assert yaml.safe_load(gateway_config("bear", engines))["routing"]["predictor"] == "prior"


def test_an_artifact_of_other_queries_is_introduced(tmp_path: Path) -> None:
    """Name, rows and what speaks; nothing of missing models or known prompts where there are none."""
    path = tmp_path / "some.hw"
    path.write_bytes(encode_artifact(trained()))
    played = workload(SEED + 1)
    loaded = load_trained(path, played)
    assert (loaded.cold_models, loaded.num_seen) == ((), 0)
    text = introduce(played.summary, ["bear"], loaded)
    assert "some.hw (192 rows, generation 1)" in text
    assert "does not know" not in text


def test_missing_models_and_known_prompts_are_said(tmp_path: Path) -> None:
    """A model that the artifact does not know is named, and so is a workload that it was trained on."""
    path = tmp_path / "two.hw"
    path.write_bytes(encode_artifact(renamed({"qwen3-8b": "another"})))
    loaded = load_trained(path, workload(SEED))
    assert loaded.cold_models == ("qwen3-8b",)
    assert "It does not know qwen3-8b" in loaded.description
    assert loaded.num_seen == 64
    assert "trained on the prompts of 64" in loaded.description


def test_an_artifact_of_no_use_is_refused_by_name(tmp_path: Path) -> None:
    """Foreign models, no artifact, no file: each is an error with the file's name, before anything starts."""
    foreign = tmp_path / "foreign.hw"
    names = {model.name: f"other-{number}" for number, model in enumerate(POOL)}
    foreign.write_bytes(encode_artifact(renamed(names)))
    played = workload(1, seconds=1.0)
    with pytest.raises(ArtifactError, match=r"knows none of qwen3-0\.6b.*only other-0") as found:
        load_trained(foreign, played)
    assert "foreign.hw" in str(found.value)
    (tmp_path / "text.hw").write_text("hello")
    with pytest.raises(ArtifactError, match=r"text\.hw.*no predictor artifact"):
        load_trained(tmp_path / "text.hw", played)
    with pytest.raises(ArtifactError, match=r"none\.hw.*cannot be read"):
        load_trained(tmp_path / "none.hw", played)
