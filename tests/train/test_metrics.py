"""Scores by rule: what normalisation forgives, ROUGE-L against its definition, patterns that take answers out."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError, DatasetError
from headway.train.dataset import EvaluationRow, read_rows
from headway.train.metrics import (
    apply_metric,
    exact_match,
    longest_common_subsequence,
    metric_rule,
    normalised,
    rouge_l,
)

WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=12)


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        ("  The Answer is:\tPARIS! ", "answer is paris"),
        ("ﬁve-fold, a   bit", "five fold bit"),
        ("3.50 and 1,000; x-1 -2.", "3.50 and 1,000 x 1 -2"),
        ("snake_case", "snake case"),
        ("«Ja», sagte sie.", "ja sagte sie"),
        ("", ""),
    ],
)
def test_normalisation_forgives_form_and_keeps_numbers(text: str, compared: str) -> None:
    """Case, articles, punctuation and spaces do not count; a decimal point and a sign do."""
    assert normalised(text) == compared


@given(st.text(max_size=60))
def test_normalising_twice_changes_nothing(text: str) -> None:
    """The form that is compared is a fixed one."""
    assert normalised(normalised(text)) == normalised(text)


def test_exact_means_equal_once_normalised() -> None:
    """35 is not 3.5, and an answer with an explanation is not the reference."""
    assert exact_match("The Eiffel Tower.", "eiffel tower") == 1.0
    assert exact_match("3.5", "35") == 0.0
    assert exact_match("-2", "2") == 0.0
    assert exact_match("It is Paris", "Paris") == 0.0


@given(WORDS, WORDS)
def test_the_common_subsequence_is_the_longest(first: list[str], second: list[str]) -> None:
    """Bits of one integer give what the textbook's table gives, in either order."""

    @cache
    def longest(i: int, j: int) -> int:
        if i == len(first) or j == len(second):
            return 0
        if first[i] == second[j]:
            return 1 + longest(i + 1, j + 1)
        return max(longest(i + 1, j), longest(i, j + 1))

    assert longest_common_subsequence(first, second) == longest(0, 0)
    assert longest_common_subsequence(second, first) == longest(0, 0)


def test_rouge_is_the_f1_of_the_common_subsequence() -> None:
    """Three of four words in order against three: 2·3 / (4 + 3)."""
    assert rouge_l("police killed big gunman", "police killed gunman") == pytest.approx(6 / 7)
    assert rouge_l("same words", "Same words!") == 1.0
    assert rouge_l("gunman police", "police gunman") == 0.5
    assert rouge_l("", "x") == rouge_l("x", "...") == 0.0


def test_a_long_answer_is_scored_in_good_time() -> None:
    """Twenty thousand words against twenty thousand are no reason to wait."""
    text = " ".join(str(i % 997) for i in range(20_000))
    assert rouge_l(text, text) == 1.0


def test_a_pattern_takes_the_last_match() -> None:
    """Models think aloud before they answer; the group is what is compared."""
    rule = metric_rule("regex", r"answer is \(?([A-D])\)?")
    assert rule("The answer is A? No, the answer is (C).", "c") == 1.0
    assert rule("I do not know", "c") == 0.0
    assert metric_rule("regex", r"\d+")("1 and 42", "42") == 1.0
    by_reference = metric_rule("regex")
    assert by_reference("Year: 1889.", r"\b18\d\d\b") == 1.0
    assert by_reference("Year: 1989.", r"\b18\d\d\b") == 0.0


def test_wrong_patterns_are_named() -> None:
    """A pattern of the command line is a usage error, one of the data an error of the data."""
    with pytest.raises(ConfigError, match="--pattern: is no regular expression"):
        metric_rule("regex", "(")
    with pytest.raises(ConfigError, match="--metric regex only"):
        metric_rule("exact", "x")
    with pytest.raises(DatasetError, match="is no regular expression"):
        metric_rule("regex")("x", "(")


def test_rows_are_scored_and_written(tmp_path: Path) -> None:
    """Answers with a reference get a quality and the metric's name; the others are there without one."""
    rows = [
        EvaluationRow(prompt_id="p", model="m", prompt="x", response="Paris", reference="paris"),
        EvaluationRow(prompt_id="p", model="n", prompt="x", response="Rome", reference="paris"),
        EvaluationRow(prompt_id="q", model="m", prompt="y", response="z", quality=0.3, judge="old"),
        EvaluationRow(prompt_id="q", model="n", prompt="y", status="error", error="x"),
    ]
    summary = apply_metric(rows, tmp_path / "out.jsonl.gz", "exact")
    written = list(read_rows(tmp_path / "out.jsonl.gz"))
    assert [(row.quality, row.judge) for row in written] == [(1.0, "exact"), (0.0, "exact"), (None, None), (None, None)]
    assert (summary.num_rows_judged, summary.num_unanswered, summary.num_without_reference) == (2, 1, 1)
    assert summary.mean_quality == 0.5
    with pytest.raises(DatasetError, match="no answer has a reference"):
        apply_metric(rows[2:], tmp_path / "none.jsonl", "exact")
