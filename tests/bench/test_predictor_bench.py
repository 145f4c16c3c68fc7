"""The cost of predictions is measured on artifacts that serve trees, on prompts that no memory answers."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from headway.bench.predictor import _written, num_trees, training_artifact
from headway.cli.bench_predict import predict
from headway.errors import ConfigError
from headway.predict.artifact import Artifact, encode_artifact
from headway.train.settings import Settings

pytest.importorskip("lightgbm", reason="needs the extra 'learned'")


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return training_artifact(40, Settings(num_folds=3, max_trees=8))


def test_both_pools_are_measured(artifact: Artifact, tmp_path: Path) -> None:
    """Three and nine models of an artifact in its file, each in a process of its own; every head is asked."""
    assert (artifact.serves_quality, artifact.serves_length) == ("learned", "learned")
    path = tmp_path / "some.hw"
    path.write_bytes(encode_artifact(artifact))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert predict(artifact=path, rounds=1, json=True) == 0
    figures = json.loads(out.getvalue())
    assert figures["num_trees"] == num_trees(artifact) > 3
    assert 0 < figures["features_us"] < figures["nine_models_us"]
    assert figures["three_models_us"] > 0
    assert figures["peak_rss_mb"] > 10


def test_prompts_are_as_long_as_said_and_never_alike() -> None:
    """A prompt that came twice would be answered from memory."""
    rng = np.random.default_rng(5)
    prompts = [_written(rng, 800) for _ in range(300)]
    assert {len(prompt) for prompt in prompts} == {800}
    assert len(set(prompts)) == 300


def test_rounds_are_at_least_one() -> None:
    """The message names the option."""
    with pytest.raises(ConfigError, match="--rounds"):
        predict(rounds=0)
