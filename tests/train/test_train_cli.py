"""``headway train`` as a user runs it, on small generated rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from evaluation_rows import MODELS, made_rows, retold, run, spoilt, write
from headway.predict.artifact import Artifact, decode_artifact

pytest.importorskip("lightgbm", reason="needs the extra 'learned'")
pytest.importorskip("sklearn", reason="needs the extra 'train'")

QUICK = ("--folds", 2, "--trees", 8, "--seed", 3)
FEW_RESAMPLES = ("headway.train.card.NUM_RESAMPLES", 20)
ROWS = made_rows()


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals from 20 resamples instead of 200: no test here reads one closely, and they are most of the time."""
    monkeypatch.setattr(*FEW_RESAMPLES)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl.gz", ROWS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the rows, the artifact trained on them, and its card."""
    directory = tmp_path_factory.mktemp("trained")
    data = write(directory / "rows.jsonl.gz", ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FEW_RESAMPLES)
        assert run("train", data, *QUICK, "--out", directory / "predictor.hw", "--card", directory) == 0
    return directory


def artifact(path: Path) -> Artifact:
    return decode_artifact(path.read_bytes())


def card(directory: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((directory / "predictor.json").read_bytes()))


def test_equal_rows_and_seed_give_equal_bytes(trained: Path, rows: Path, tmp_path: Path) -> None:
    """Trained twice, the artifact is the same byte for byte, and so is its card; another seed gives another."""
    target = tmp_path / "predictor.hw"
    assert run("train", rows, *QUICK, "--out", target, "--card", tmp_path) == 0
    assert target.read_bytes() == (trained / "predictor.hw").read_bytes()
    first, second = card(trained), card(tmp_path)
    assert second.pop("command") == f"headway train {rows} --out {target} --folds 2 --seed 3 --trees 8"
    assert first.pop("command") != ""
    assert first == second
    assert run("train", rows, *QUICK[:-1], 4, "--out", target) == 0
    assert target.read_bytes() != (trained / "predictor.hw").read_bytes()


def test_update_trains_anew_on_rows_that_have_grown(
    trained: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own settings, in place, one generation on; on the very same rows it does nothing."""
    target, fresh, more = tmp_path / "predictor.hw", tmp_path / "fresh.hw", tmp_path / "more.jsonl"
    before = (trained / "predictor.hw").read_bytes()
    target.write_bytes(before)
    assert run("train", rows, "--update", target) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert target.read_bytes() == before

    write(more, made_rows(10, seed=1, first=1000))
    assert run("train", rows, more, "--update", target) == 0
    assert "generation 2, 240 rows (+20 since the one before)" in capsys.readouterr().out
    assert run("train", rows, more, *QUICK, "--out", fresh) == 0
    updated, anew = artifact(target), artifact(fresh)
    assert (updated.generation, anew.generation) == (2, 1)
    assert updated.settings == anew.settings == {**updated.settings, "num_folds": 2, "max_trees": 8, "seed": 3}
    assert (updated.quality, updated.labels, updated.data) == (anew.quality, anew.labels, anew.data)


def test_alike_prompts_are_found_and_kept_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal but for case and marks, and equal but for a word at the end: both are counted, in card and artifact."""
    same, near = retold(ROWS, "0", "same", (".", " !!")), retold(ROWS, "1", "near", ("Prove", "Please prove"))
    data = write(tmp_path / "rows.jsonl", [*ROWS, *same, *near])
    assert run("train", data, *QUICK, "--out", tmp_path / "predictor.hw", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_equal_prompts"], found["num_near_prompts"]) == (1, 1)
    assert artifact(tmp_path / "predictor.hw").data.num_duplicate_prompts == 2


def test_what_serves_is_what_the_card_found(trained: Path) -> None:
    """Task labels say all there is to know here: the artifact says that no trees are needed, and serves the label."""
    found, made = card(trained), artifact(trained / "predictor.hw")
    for field in ("serves_quality", "serves_length", "why"):
        assert getattr(made, field) == found[field]
    assert made.serves_quality == "task_label"
    assert "no proof that the trees are better" in made.why
    assert found["figures"]["task_recognised"]["r2"]["value"] > 0.5
    assert tuple(model.name for model in made.models) == MODELS


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"quality": 7}, "Expected `float` <= 1.0 - at `$.quality`"),
        ({"qualty": 0.5}, "unknown field `qualty`"),
        ({"prompt": None}, "a row needs one of `prompt`, `messages` and `features`"),
        ({"prompt_id": "0", "model": MODELS[0]}, f"prompt '0' already has an answer of '{MODELS[0]}' in line 1"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    values: dict[str, object], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong, in which line of which file; nothing is written."""
    data = spoilt(tmp_path / "rows.jsonl", ROWS, 6, **values)
    for verb in (["train", data, "--out", tmp_path / "predictor.hw"], ["evaluate", data]):
        assert run(*verb) == 2
        complained = capsys.readouterr().err
        assert complaint in complained
        assert f"{data}:6" in complained
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_too_few_answers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rather than a predictor grown on nothing."""
    data = write(tmp_path / "rows.jsonl", made_rows(40))
    assert run("train", data, *QUICK, "--out", tmp_path / "predictor.hw") == 2
    assert "hold too few answers" in capsys.readouterr().err
    assert run("train", data, "--folds", 50, "--out", tmp_path / "predictor.hw") == 2
    assert "holds 40 unlike prompts, too few for 50 folds" in capsys.readouterr().err
    assert not (tmp_path / "predictor.hw").exists()


def test_rows_of_two_files_must_not_contradict(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt id cannot stand for two prompts."""
    other = write(tmp_path / "other.jsonl", made_rows(1, seed=5))
    assert run("train", rows, other, "--out", tmp_path / "predictor.hw") == 2
    assert "prompt id '0' stands for two different prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "--out: give either --out"),
        (("--out", "new.hw", "--folds", 1), "--folds"),
        (("--out", "new.hw", "--trees", 0), "--trees"),
        (("--update", "rows.jsonl.gz"), "is no predictor artifact"),
    ],
)
def test_wrong_options_are_named(
    options: tuple[object, ...],
    complaint: str,
    rows: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is trained."""
    monkeypatch.chdir(rows.parent)
    assert run("train", rows, *options) != 0
    assert complaint in capsys.readouterr().err
    assert not (rows.parent / "new.hw").exists()
