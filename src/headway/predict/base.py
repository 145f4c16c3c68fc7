"""What a predictor is, and what a query costs: the two things every predictor shares.

A predictor says, before a query is sent, what each model would make of it. It never sees an instance or its load:
that is the estimator's half. Prices are per million tokens, so token counts times prices are micro-USD.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headway.types import ModelCard, Prediction, Query


class Predictor(Protocol):
    """Gives quality, output length and cost of a query on each model it may go to."""

    def predict(self, query: Query) -> Mapping[str, Prediction]:
        """One :class:`Prediction` per model of ``query.candidates`` (every known model where that is None)."""
        ...


def cost_usd(card: ModelCard, prompt_tokens: float, output_tokens: float) -> float:
    """Price of one query in USD, of predicted tokens before it and of counted tokens after it."""
    return (prompt_tokens * card.input_per_1m_usd + output_tokens * card.output_per_1m_usd) * 1e-6
