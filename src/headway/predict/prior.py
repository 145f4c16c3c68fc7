"""Predictions from what the configuration says of each model, so that a pool routes before anything was trained.

A model card may hold a prior for each task type and one for all of them; the nearest one speaks. Where the card says
nothing, quality .5 and 256 output tokens stand in, marked ``default`` so that nobody takes them for knowledge. This
file refuses to look at load, time or the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from headway.predict.base import cost_usd
from headway.predict.tasks import task_type
from headway.types import ModelCard, ModelPrior, Prediction, Query

_DEFAULT = ModelPrior()


class PriorPredictor:
    """Quality and output length of each model from its card, by task type."""

    def __init__(self, models: Mapping[str, ModelCard]) -> None:
        self._models = dict(models)
        self._by_task = any(card.tasks for card in models.values())

    def predict(self, query: Query) -> dict[str, Prediction]:
        """One prediction per candidate model known here; output tokens never exceed ``query.max_tokens``.

        Raises:
            ValueError: ``query.prompt_tokens`` lacks a candidate model.
        """
        task = task_type(query.prompt_text) if self._by_task else None
        names = self._models if query.candidates is None else query.candidates
        predictions = {}
        for name in names:
            card = self._models.get(name)
            if card is not None:
                predictions[name] = self._predict_one(query, card, task)
        return predictions

    @staticmethod
    def _predict_one(query: Query, card: ModelCard, task: str | None) -> Prediction:
        prompt_tokens = query.prompt_tokens.get(card.name)
        if prompt_tokens is None:
            raise ValueError(f"query.prompt_tokens of query {query.id!r} lacks model {card.name!r}")
        known = (card.tasks.get(task) if task is not None else None) or card.prior
        prior = known or _DEFAULT
        output_tokens = prior.output_tokens
        if query.max_tokens is not None and query.max_tokens < output_tokens:
            output_tokens = float(query.max_tokens)
        cost = cost_usd(card, prompt_tokens, output_tokens)
        return Prediction(prior.quality, output_tokens, cost, "default" if known is None else "prior")
