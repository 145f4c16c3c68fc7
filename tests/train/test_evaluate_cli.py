"""``headway evaluate`` as a user runs it: on rows, with an artifact, and on the published sets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from evaluation_rows import MODELS, made_rows, retold, run, write
from headway.train.build import cross_validated_card
from headway.train.card import Card
from headway.train.card_index import BEGIN, END, index_page, read_cards, verdicts, write_index
from headway.train.measures import Figure
from headway.train.published import PUBLISHED
from headway.train.settings import Settings
from headway.train.table import EvaluationTable

pytest.importorskip("lightgbm", reason="needs the extra 'learned'")
pytest.importorskip("sklearn", reason="needs the extra 'train'")

CARDS = Path(__file__).parents[2] / "docs" / "predictors"
DATA = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
ROWS = made_rows()
POOL = """models:
  - {name: small-1b, price: {input_per_1m: 0.1, output_per_1m: 0.1}}
  - {name: large-30b, price: {input_per_1m: 2, output_per_1m: 2}}
instances:
  - {id: s, model: small-1b, api_base: "http://127.0.0.1:1/v1", engine: hosted}
  - {id: l, model: large-30b, api_base: "http://127.0.0.1:1/v1", engine: hosted}
"""


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals from 20 resamples instead of 200: no test here reads one closely, and they are most of the time."""
    for name in ("card.NUM_RESAMPLES", "held_out.NUM_RESAMPLES", "strata._NUM_RESAMPLES"):
        monkeypatch.setattr(f"headway.train.{name}", 20)


def test_the_card_holds_every_figure_and_the_command_that_makes_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against every rival, in routing value too, by thirds; run again, the card's command gives the same card."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "pool.yaml").write_text(POOL)
    assert run("evaluate", "rows.jsonl", "--config", "pool.yaml", "--folds", 2, "--out", "cards", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    card = json.loads((tmp_path / "cards" / "rows.json").read_bytes())
    assert printed == card
    assert card["command"] == "headway evaluate rows.jsonl --config pool.yaml --folds 2"
    rivals = ("constant", "task_label", "task_recognised", "knn", "tfidf_ridge")
    assert list(card["figures"]) == [*rivals, "learned"]
    assert list(card["above"]) == list(rivals)
    for ours in ("r2", "auc", "calibration_error", "length_rank_correlation", "p90_coverage", "p90_pinball_tokens"):
        assert {name for name, figures in card["figures"].items() if ours in figures} >= {*rivals[:4], "learned"}
    assert card["figures"]["learned"]["r2"]["value"] > 0.5
    assert card["figures"]["constant"]["r2"]["value"] < 0.01
    assert card["p90_pinball_saved"]["value"] > 0.3  # half of the answers are ten times as long as the others
    ways = card["routing"]["values"]
    assert ways["oracle"]["value"] >= ways["learned"]["value"] > ways["random_two_model_hull"]["value"]
    thirds = {"task_recognised", "best_single_model", "random_two_model_hull", "oracle"}
    assert [(one["by"], one["name"]) for one in card["strata"]] == [
        ("length", "short"), ("length", "middle"), ("length", "long"),
        ("difficulty", "hard"), ("difficulty", "middle"), ("difficulty", "easy"),
    ]  # fmt: skip
    assert all(set(one["routing_above"]) == thirds for one in card["strata"])

    assert run(*card["command"].split()[1:]) == 0
    assert capsys.readouterr().out == (tmp_path / "cards" / "rows.md").read_text() + "\n"


def test_only_prompts_that_training_has_not_seen_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen ones are found in whatever case and counted; where all are seen there is no figure, and an error."""
    seen, artifact = write(tmp_path / "seen.jsonl", ROWS), tmp_path / "predictor.hw"
    assert run("train", seen, "--folds", 2, "--trees", 8, "--out", artifact, "--json") == 0
    capsys.readouterr()
    assert run("evaluate", seen, "--artifact", artifact, "--json") == 2
    refused = capsys.readouterr()
    assert "hold no prompt that the artifact was not trained on" in refused.err
    assert refused.out == ""

    shouted = retold(ROWS, "0", "shouted", ("Name one fact", "NAME one FACT"))
    mixed = write(tmp_path / "mixed.jsonl", [*ROWS[:20], *shouted, *made_rows(12, seed=9, first=500)])
    assert run("evaluate", mixed, "--artifact", artifact, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_prompts"], found["num_seen_prompts"]) == (12, 11)
    assert found["figures"]["task_label"]["r2"]["value"] > 0.5
    assert run("evaluate", mixed, "--artifact", artifact) == 0
    assert "12 prompts that the artifact has not seen, 11 that it was trained on" in capsys.readouterr().out

    strangers = write(tmp_path / "strangers.jsonl", made_rows(1, seed=9, first=500)[:1])
    strangers.write_text(strangers.read_text().replace(MODELS[0], "stranger"))
    assert run("evaluate", strangers, "--artifact", artifact) == 2
    assert "hold no answer of a model that the artifact knows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "DATA: give either files of evaluation rows, or --published"),
        (("rows.jsonl", "--folds", 1), "--folds: must be at least 2"),
        (("missing.jsonl",), "missing.jsonl"),
        (("--published", "alpaca"), "no published set 'alpaca'"),
        (("--published", "all", "--artifact", "x.hw"), "--artifact: asks about files of rows"),
    ],
)
def test_wrong_options_are_named(
    arguments: tuple[object, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the option or the file."""
    assert run("evaluate", *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_published_sets_need_a_directory_that_holds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which variable to set, or what is missing where it points to."""
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    assert run("evaluate", "--published", "routellm") == 2
    assert "set HEADWAY_DATA to the directory that holds evals/" in capsys.readouterr().err
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    assert run("evaluate", "--published", "routellm") == 2
    assert f"{tmp_path}/evals" in capsys.readouterr().err
    (tmp_path / "evals").mkdir()
    assert run("evaluate", "--published", "routellm") == 2
    assert "routellm_mmlu_gsm8k.jsonl.gz" in capsys.readouterr().err


def test_the_index_says_what_its_cards_say(tmp_path: Path) -> None:
    """The cards of the documentation are complete, and the page that leads to them was made from them."""
    cards = read_cards(CARDS, list(PUBLISHED))
    assert list(cards) == list(PUBLISHED)
    page = (CARDS / "README.md").read_text()
    block = index_page(cards, "headway evaluate --published all --out docs/predictors")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == block
    for name, card in cards.items():
        assert card.command == f"headway evaluate --published {name}"
        assert f"$ {card.command}" in (CARDS / f"{name}.md").read_text()
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert write_index(tmp_path, block).read_text() == f"before\n{BEGIN}\n\n{block}\n\n{END}\nafter\n"


def test_a_missed_threshold_is_shown_as_missed() -> None:
    """A lead must be proven, a level reached; what is not measured has no verdict."""
    card = read_cards(CARDS, ["routellm"])["routellm"]

    def holds(**changed: object) -> dict[str, bool]:
        return {text: one.holds for text, one in verdicts(msgspec.structs.replace(card, **changed)).items()}

    lead = "quality R² above task label, neighbours and TF-IDF + ridge"
    assert holds()[lead]
    touching = {**card.above, "knn": {**card.above["knn"], "r2": Figure(0.02, -0.001, 0.04)}}
    assert not holds(above=touching)[lead]
    saved = "p90 pinball loss 5% below a constant quantile per model"
    assert [holds(p90_pinball_saved=Figure(value, 0.0, 0.2))[saved] for value in (0.05, 0.049)] == [True, False]
    assert saved not in holds(p90_pinball_saved=None)
    learned = {**card.figures["learned"], "p90_coverage": Figure(0.93, 0.9, 0.96)}
    assert not holds(figures={**card.figures, "learned": learned})["p90 covers 88% to 92%"]


@pytest.fixture(scope="module")
def alpaca() -> EvaluationTable:
    if not (DATA / "evals" / "alpaca_eval_scored.csv.gz").is_file():
        pytest.skip("set HEADWAY_DATA to the directory that holds evals/alpaca_eval_scored.csv.gz")
    return PUBLISHED["alpaca-eval"].table(DATA / "evals")


def test_real_answers_without_their_traps(alpaca: EvaluationTable) -> None:
    """No attack on the judge, no reference, no empty answer; and lengths of unseen prompts are told better than by a
    constant, with a quantile that covers what it says."""
    assert not {"NullModel", "gpt4_gamed", "gpt4_1106_preview"} & set(alpaca.model_names)
    assert (alpaca.num_prompts, len(alpaca.models)) == (805, 55)
    assert float(np.nanmin(alpaca.output_tokens)) >= 1.0
    priced = [at for at, model in enumerate(alpaca.models) if model.input_per_1m_usd is not None]
    part = alpaca.take(np.arange(alpaca.num_prompts), np.array(priced))
    card: Card = cross_validated_card(part, Settings(num_folds=2, max_trees=40, seed=17), title="t", command="c")[0]
    learned = card.figures["learned"]
    assert learned["length_rank_correlation"].value > 0.3
    assert 0.85 <= learned["p90_coverage"].value <= 0.95
    assert card.p90_pinball_saved is not None
    assert card.p90_pinball_saved.value > 0.0
