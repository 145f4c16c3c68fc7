"""Predictions for a model that no training data knows: from its card, and from the trained models most like it.

Likeness is in size and price. The level is the card's own prior where it has one; how a prompt differs from the usual
is what it does to the neighbours. Whoever reads the prediction sees ``cold_start`` as its source. It refuses to call
such a guess learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headway.predict.artifact import TrainedModel
from headway.predict.linear import Floats
from headway.types import ModelCard

#: A model twice as large, or twice as dear, weighs as 1/e of an equal one.
_UNIT = math.log(2.0)


class ColdStart:
    """What one unknown model's predictions are made of."""

    def __init__(self, card: ModelCard, models: Sequence[TrainedModel], levels: tuple[Floats, Floats]) -> None:
        """``levels`` are the trained models' mean quality and mean output tokens, (M,) each, NaN where unknown."""
        self._card = card
        weights = np.array([math.exp(-_distance(card, model)) for model in models])
        self._weights = weights if weights.sum() > 0 else np.ones(len(models))
        self._quality, self._tokens = (self._mix(values) for values in levels)

    def _mix(self, values: Floats) -> float:
        """The neighbours' weighted mean; NaN where none is known."""
        known = ~np.isnan(values)
        total = float(self._weights[known].sum())
        return float((self._weights[known] * values[known]).sum()) / total if total > 0 else math.nan

    def quality(self, said: Floats, prior: float | None) -> float:
        """Quality, given what is ``said`` of the trained models, (M,); NaN where neither they nor a prior say."""
        mixed = self._mix(said)
        if prior is None:
            return mixed
        moved = mixed - self._quality
        return prior if math.isnan(moved) else min(1.0, max(0.0, prior + moved))

    def tokens(self, said: Floats, prior: float | None) -> float:
        """Output tokens, likewise; a prior is multiplied by what the prompt does to the neighbours' lengths."""
        mixed = self._mix(said)
        if prior is None:
            return mixed
        factor = mixed / self._tokens if self._tokens > 0 else math.nan
        return prior if math.isnan(factor) else max(1.0, prior * factor)


def _distance(card: ModelCard, model: TrainedModel) -> float:
    """In doublings of size and of output price; what one of the two does not know is left out."""
    distance = 0.0
    if card.parameters is not None and model.log_parameters is not None:
        distance += abs(math.log(card.parameters) - model.log_parameters) / _UNIT
    price = model.output_per_1m_usd
    if card.output_per_1m_usd > 0 and price is not None and price > 0:
        distance += abs(math.log(card.output_per_1m_usd / price)) / _UNIT
    return distance
