"""Predictions from the configuration alone."""

from __future__ import annotations

import pytest

from headway.predict.base import cost_usd
from headway.predict.prior import PriorPredictor
from headway.types import ModelCard, ModelPrior, Query

CARDS = {
    "small": ModelCard(
        name="small",
        input_per_1m_usd=0.044,
        output_per_1m_usd=0.173,
        prior=ModelPrior(quality=0.35, output_tokens=200),
        tasks={"summarise": ModelPrior(quality=0.29, output_tokens=700)},
    ),
    "bare": ModelCard(name="bare", input_per_1m_usd=1.0, output_per_1m_usd=2.0),
}


def query(text: str = "Give three tips.", **fields: object) -> Query:
    known = {"id": "q", "arrival_s": 0.0, "prompt_text": text, "prompt_tokens": {"small": 100, "bare": 120}, **fields}
    return Query(**known)  # type: ignore[arg-type]


def test_cost_is_tokens_times_price_per_million() -> None:
    """A million tokens each way cost the two prices."""
    assert cost_usd(CARDS["small"], 1_000_000, 1_000_000) == pytest.approx(0.217)
    assert cost_usd(CARDS["small"], 0, 0) == 0.0


def test_the_prior_of_the_task_speaks_before_the_one_of_the_model() -> None:
    """A summary gets the card's summary prior, anything else its general one."""
    predictor = PriorPredictor(CARDS)
    general, summary = predictor.predict(query())["small"], predictor.predict(query("Summarize this: ..."))["small"]
    assert (general.quality, general.output_tokens, general.source) == (0.35, 200, "prior")
    assert (summary.quality, summary.output_tokens, summary.source) == (0.29, 700, "prior")
    assert summary.cost_usd == pytest.approx((100 * 0.044 + 700 * 0.173) / 1e6)


def test_a_model_of_which_nothing_is_known_is_marked_default() -> None:
    """Quality .5 and 256 tokens stand in, and say so."""
    prediction = PriorPredictor(CARDS).predict(query())["bare"]
    assert (prediction.quality, prediction.output_tokens, prediction.source) == (0.5, 256.0, "default")
    assert prediction.cost_usd == pytest.approx((120 + 2 * 256) / 1e6)


def test_an_answer_is_never_longer_than_asked_for() -> None:
    """max_tokens caps the predicted output, and the cost with it."""
    prediction = PriorPredictor(CARDS).predict(query(max_tokens=10))["small"]
    assert prediction.output_tokens == 10
    assert prediction.cost_usd == pytest.approx((100 * 0.044 + 10 * 0.173) / 1e6)
    assert PriorPredictor(CARDS).predict(query(max_tokens=10_000))["small"].output_tokens == 200


def test_only_candidate_models_are_predicted() -> None:
    """A pinned model is predicted alone; unknown names are the router's to refuse."""
    assert set(PriorPredictor(CARDS).predict(query(candidates=("bare", "gone")))) == {"bare"}


def test_a_missing_token_count_is_named() -> None:
    """A query without a count for a candidate model is a caller's mistake, not a free prompt."""
    with pytest.raises(ValueError, match=r"prompt_tokens of query 'q' lacks model 'bare'"):
        PriorPredictor(CARDS).predict(query(prompt_tokens={"small": 3}))
