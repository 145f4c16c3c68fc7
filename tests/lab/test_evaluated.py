"""Queries from evaluation rows: the rows are the truth, an artifact predicts, no prompt of its training is played."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from headway.demo.predictor import write_answers
from headway.errors import ConfigError, DatasetError
from headway.lab.evaluated import HeldOut, evaluated_workload, held_out
from headway.lab.predictions import PERFECT, TASK_LABEL, PredictorQuality
from headway.lab.runs import load_results, plan, run
from headway.lab.scenario import load_scenario, parse_scenario
from headway.lab.unit import _file_digest
from headway.lab.workload import Workload, WorkloadSpec
from headway.predict.artifact import encode_artifact
from headway.predict.learned import LearnedPredictor
from headway.train.dataset import EvaluationRow, read_rows, write_rows
from headway.types import ModelCard, Query
from trained_artifacts import SEED, renamed, trained, workload

MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b")
EXAMPLE = Path(__file__).parents[2] / "examples" / "scenarios" / "trained.yaml"
SCENARIO = """\
name: trained
num_queries: 60
seeds: [0]
rates_per_s: [8]
workload: {rows: {file: rows.jsonl, artifact: some.hw}}
policies: [bear, {policy: bear, label: label, sees: task_label}, {policy: bear, label: oracle, sees: truth}]
baseline: label
references: [task_label]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with ``some.hw``, rows of other prompts in ``rows.jsonl``, and its own prompts in ``seen.jsonl``."""
    (tmp_path / "some.hw").write_bytes(encode_artifact(trained()))
    write_answers(workload(SEED + 1, 4.0), tmp_path / "rows.jsonl")
    write_answers(workload(SEED), tmp_path / "seen.jsonl")
    return tmp_path


def rows_of(path: Path) -> list[EvaluationRow]:
    return list(read_rows(path))


def read(place: Path, rows: str = "rows.jsonl", models: tuple[str, ...] = MODELS) -> HeldOut:
    held_out.cache_clear()
    return held_out(str(place / rows), str(place / "some.hw"), models)


def test_rows_are_the_truth_and_the_artifact_predicts(place: Path) -> None:
    """Qualities and lengths are the rows' own; predictions are what a gateway with this artifact would serve."""
    played = workload(SEED + 1, 4.0)
    found = read(place)
    assert found.note == "32 prompts; left out: 0 of the training, 0 without text or answers"
    predictor = LearnedPredictor(trained(), {name: ModelCard(name=name) for name in MODELS})
    for at, query in enumerate(played.queries):
        assert [found.quality[at].tolist(), found.output_tokens[at].tolist()] == [
            [query.answers[name].quality for name in MODELS],
            [query.answers[name].output_tokens for name in MODELS],
        ]
        asked = Query(
            id="q", arrival_s=0.0, prompt_text=query.prompt, prompt_tokens=dict.fromkeys(MODELS, 9), max_tokens=1024
        )
        served = predictor.predict(asked)
        assert found.said[0][at].tolist() == [served[name].quality for name in MODELS]
        assert np.minimum(found.said[1][at], 1024).tolist() == [served[name].output_tokens for name in MODELS]
        assert found.task_names[found.task[at]] == query.task


def test_prompts_of_the_training_are_left_out(place: Path) -> None:
    """They are counted where others remain, whatever their case and marks; where none remains there is no workload."""
    known = [replace(row, prompt=f"  {row.text.upper()}!") for row in rows_of(place / "seen.jsonl")[:30]]
    write_rows(place / "mixed.jsonl", [*known, *rows_of(place / "rows.jsonl")])
    assert read(place, "mixed.jsonl").note.startswith("32 prompts; left out: 10 of the training")
    with pytest.raises(DatasetError, match=r"seen\.jsonl.*nothing to play.*64 of the training"):
        read(place, "seen.jsonl")


def test_who_speaks_is_the_predictors_choice(place: Path) -> None:
    """R² of 1 is the truth, of 0 the task label, any other the artifact; means or medians as asked."""
    found, arrival_s = read(place), np.arange(70.0)

    def played(predictor: PredictorQuality) -> Workload:
        return evaluated_workload(found, arrival_s, WorkloadSpec(seed=3, models=MODELS, predictor=predictor))

    usual, median = played(PredictorQuality()), played(PredictorQuality(length="median"))
    order = [int(np.flatnonzero((found.quality == row).all(axis=1))[0]) for row in usual.true_quality]
    assert sorted(order[:32]) == list(range(32))  # each prompt once before any comes again
    assert (usual.predicted_quality == found.said[0][order]).all()
    assert (usual.predicted_output_tokens == found.said[1][order]).all()
    assert (median.predicted_output_tokens == found.said[2][order]).all()
    label, truth = played(TASK_LABEL), played(PERFECT)
    assert (label.predicted_quality == found.label[0][order]).all()
    assert (truth.predicted_quality == truth.true_quality).all()
    assert (truth.predicted_output_tokens == truth.true_output_tokens).all()


def test_stand_ins_answer_for_models_of_the_pool(place: Path) -> None:
    """Rows about other models are played where the scenario says which stands for which."""
    names = {name: f"other-{at}" for at, name in enumerate(MODELS)}
    (place / "some.hw").write_bytes(encode_artifact(renamed(names)))
    rows = rows_of(place / "rows.jsonl")
    write_rows(place / "rows.jsonl", [replace(row, model=names[row.model]) for row in rows])
    with_names = SCENARIO.replace("some.hw}", f"some.hw, models: {msgspec.json.encode(names).decode()}}}")
    (place / "s.yaml").write_text(with_names)
    plan(load_scenario(place / "s.yaml"))
    (place / "s.yaml").write_text(SCENARIO)
    with pytest.raises(ConfigError, match=r"s\.yaml:5.*does not know model 'qwen3-0\.6b'; it knows other-0"):
        plan(load_scenario(place / "s.yaml"))
    (place / "s.yaml").write_text(SCENARIO.replace("some.hw}", "some.hw, models: {qwen3-9b: other-0}}"))
    with pytest.raises(ConfigError, match=r"s\.yaml:5.*workload\.rows\.models\.qwen3-9b: the pool serves no"):
        plan(load_scenario(place / "s.yaml"))


def test_a_scenario_runs_on_rows(place: Path) -> None:
    """From the file to scores: the truth is worth more than the task label. Another artifact is another run."""
    (place / "s.yaml").write_text(SCENARIO)
    run(load_scenario(place / "s.yaml"), place / "out", jobs=1)
    results = load_results(place / "out")
    assert results.num_missing == 0
    scores = {name: results.of(name, 8.0)[0].score for name in ("bear", "label", "oracle")}
    assert scores["oracle"].on_time_utility > scores["label"].on_time_utility  # type: ignore[union-attr]
    keys = {unit.key for unit in results.plan.units}
    (place / "some.hw").write_bytes(encode_artifact(replace(trained(), generation=2)))
    _file_digest.cache_clear()
    assert keys.isdisjoint({unit.key for unit in plan(load_scenario(place / "s.yaml"))[0].units})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("some.hw}", "none.hw}", r"workload\.rows\.artifact: there is no file"),
        ("rows.jsonl", "none.jsonl", r"workload\.rows\.file: there is no file"),
        ("{rows:", "{shares: {alpaca: 1}, rows:", r"workload\.shares: does not go with rows"),
        ("{rows:", "{predictor: {quality_r2: 0.1}, rows:", r"workload\.predictor\.quality_r2: does not go with rows"),
    ],
)
def test_what_does_not_go_with_rows_is_told_at_its_line(place: Path, old: str, new: str, message: str) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=rf"s\.yaml:5.*{message}"):
        parse_scenario(SCENARIO.replace(old, new), path=str(place / "s.yaml"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_id": "9-0", "model": "m", "prompt": "x", "quality": 2}', r"bad\.jsonl:1.*<= 1"),
        ("no json", r"bad\.jsonl:1"),
        ('{"prompt_id": "a", "model": "m", "messages": [{"content": 3}]}', r"bad\.jsonl:1.*content"),
    ],
)
def test_wrong_rows_are_told_at_their_line(place: Path, line: str, message: str) -> None:
    """A value out of range, no JSON, messages of no shape."""
    (place / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(DatasetError, match=message):
        read(place, "bad.jsonl")


def test_contradictions_and_lacking_answers(place: Path) -> None:
    """One prompt id with two texts or two answers of a model is an error; a prompt without all answers is left out."""
    row = EvaluationRow(prompt_id="a", model=MODELS[0], prompt="x", quality=0.5, output_tokens=3)
    write_rows(place / "two.jsonl", [row, replace(row, prompt="y", model=MODELS[1])])
    with pytest.raises(DatasetError, match=r"two\.jsonl:2.*two different prompts"):
        read(place, "two.jsonl")
    write_rows(place / "two.jsonl", [row, row])
    with pytest.raises(DatasetError, match=r"two\.jsonl:2.*already has an answer"):
        read(place, "two.jsonl")
    write_rows(place / "two.jsonl", [row, replace(row, model=MODELS[1], output_tokens=0)])
    with pytest.raises(DatasetError, match="1 without text or answers"):
        read(place, "two.jsonl")


def test_the_shipped_example_can_be_planned(place: Path) -> None:
    """With files of the names it asks for beside it."""
    names = dict(zip(MODELS, ("FuseChat-Llama-3.2-1B-Instruct", "FuseChat-Qwen-2.5-7B-Instruct",
                              "FuseChat-Gemma-2-9B-Instruct"), strict=True))  # fmt: skip
    (place / "predictor.hw").write_bytes(encode_artifact(renamed(names)))
    rows = rows_of(place / "rows.jsonl")
    write_rows(place / "held_out.jsonl", [replace(row, model=names[row.model]) for row in rows])
    (place / EXAMPLE.name).write_bytes(EXAMPLE.read_bytes())
    settled, inputs = plan(load_scenario(place / EXAMPLE.name))
    assert {unit.key for unit in settled.units} == set(inputs)
