"""How far two judges agree: figures that can be worked out by hand, and intervals that behave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DatasetError
from headway.train.agree import agreement
from headway.train.dataset import EvaluationRow

SCORE = st.integers(0, 10).map(lambda score: score / 10)
TABLES = st.dictionaries(
    st.sampled_from("pqrstu"), st.dictionaries(st.sampled_from("abcd"), SCORE, min_size=1), min_size=1
)


def rows(scores: dict[str, dict[str, float]]) -> list[EvaluationRow]:
    return [
        EvaluationRow(prompt_id=name, model=model, prompt="x", response=f"{name}{model}", quality=score)
        for name, models in scores.items()
        for model, score in models.items()
    ]


def test_figures_are_those_of_the_definition() -> None:
    """Two prompts worked out by hand: order of pairs with and without ties, top choice, difference of means."""
    first = rows({"p": {"a": 0.9, "b": 0.5, "c": 0.5}, "q": {"a": 0.2, "b": 0.6}})
    second = rows({"p": {"a": 0.8, "b": 0.8, "c": 0.1}, "q": {"a": 0.1, "b": 0.3}, "r": {"a": 1.0}})
    report = agreement(first, second)
    assert (report.num_prompts, report.num_answers, report.num_pairs) == (2, 5, 4)
    assert (report.num_only_first, report.num_only_second) == (0, 1)
    # p: a>b against a=b, a>c twice, b=c against b>c; q: a<b twice.
    assert report.pairwise.value == pytest.approx(2 / 4)
    assert (report.num_pairs_decided, report.pairwise_decided.value) == (2, 1.0)
    # p: the first says a, the second draws a or b; q: both say b.
    assert report.top_choice.value == pytest.approx((0.5 + 1.0) / 2)
    assert report.mean_difference.value == pytest.approx((2.7 - 2.1) / 5)
    a, b = [0.9, 0.5, 0.5, 0.2, 0.6], [0.8, 0.8, 0.1, 0.1, 0.3]
    assert report.pearson.value == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert report.spearman.value == pytest.approx(np.corrcoef([4, 1.5, 1.5, 0, 3], [3.5, 3.5, 0.5, 0.5, 2])[0, 1])
    centred_a = np.array(a) - np.repeat([np.mean(a[:3]), np.mean(a[3:])], [3, 2])
    centred_b = np.array(b) - np.repeat([np.mean(b[:3]), np.mean(b[3:])], [3, 2])
    assert report.within_prompt.value == pytest.approx(np.corrcoef(centred_a, centred_b)[0, 1])


@settings(max_examples=60)
@given(TABLES)
def test_a_judge_agrees_with_itself(scores: dict[str, dict[str, float]]) -> None:
    """Against itself every share and correlation that exists is 1 (but for ties at the top), no difference."""
    report = agreement(rows(scores), rows(scores), num_resamples=50)
    for figure in (report.pairwise, report.pairwise_decided, report.pearson, report.spearman, report.within_prompt):
        assert figure.value is None or figure.value == pytest.approx(1.0)
    assert report.mean_difference.value == pytest.approx(0.0, abs=1e-12)
    assert report.num_only_first == report.num_only_second == 0


@settings(max_examples=60)
@given(TABLES, TABLES)
def test_agreement_is_the_same_both_ways(
    ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]
) -> None:
    """Who is called the first judge changes nothing but the sign of the difference; intervals hold their value."""
    if not any(model in theirs.get(name, {}) for name, models in ours.items() for model in models):
        with pytest.raises(DatasetError, match="in common"):
            agreement(rows(ours), rows(theirs))
        return
    one = agreement(rows(ours), rows(theirs), num_resamples=200)
    other = agreement(rows(theirs), rows(ours), num_resamples=0)
    for name in ("pairwise", "pairwise_decided", "top_choice", "pearson", "spearman", "within_prompt"):
        figure, mirrored = getattr(one, name), getattr(other, name)
        if figure.value is None:
            assert mirrored.value is None
            continue
        assert figure.value == pytest.approx(mirrored.value)
        if figure.low is not None:
            assert figure.low <= figure.high
    assert one.mean_difference.value == pytest.approx(-other.mean_difference.value)


def test_intervals_are_of_prompts_and_seeded() -> None:
    """Answers of one prompt are no independent witnesses: ten copies of each answer leave the interval as wide."""
    rng = np.random.default_rng(3)
    truth = rng.uniform(0.2, 0.8, (60, 3))

    def table(noise: float, copies: int) -> dict[str, dict[str, float]]:
        seen = np.clip(truth + np.random.default_rng(int(noise * 100)).normal(0, noise, truth.shape), 0, 1)
        return {f"p{i}": {f"m{j}-{k}": float(seen[i, j]) for j in range(3) for k in range(copies)} for i in range(60)}

    once = agreement(rows(table(0.1, 1)), rows(table(0.2, 1)), seed=5)
    again = agreement(rows(table(0.1, 1)), rows(table(0.2, 1)), seed=5)
    tenfold = agreement(rows(table(0.1, 10)), rows(table(0.2, 10)), seed=5)
    assert once == again
    for figure, copied in ((once.pearson, tenfold.pearson), (once.mean_difference, tenfold.mean_difference)):
        assert figure.low is not None
        assert figure.high is not None
        assert copied.low == pytest.approx(figure.low, abs=1e-9)
        assert figure.low < figure.value < figure.high  # type: ignore[operator]


def test_a_single_prompt_has_no_interval() -> None:
    """One prompt cannot tell how far others would lie off."""
    report = agreement(rows({"p": {"a": 1.0, "b": 0.0}}), rows({"p": {"a": 0.5, "b": 0.1}}))
    assert report.pairwise.value == 1.0
    assert (report.pairwise.low, report.pairwise.high) == (None, None)


def test_unlike_answers_are_not_compared() -> None:
    """Two files of different runs hold different texts under one name: their scores say nothing of the judges."""
    other = [EvaluationRow(prompt_id="p", model="a", prompt="x", response="else", quality=0.5)]
    with pytest.raises(DatasetError, match="unlike answers of 'a' to prompt 'p'"):
        agreement(rows({"p": {"a": 1.0}}), other)
