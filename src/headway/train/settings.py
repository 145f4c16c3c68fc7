"""How a predictor is trained. Defaults were chosen on folds and seeds other than those of any published figure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

#: Below this many prompts a fold more is worth its time.
_FEW_PROMPTS = 2000

Count = Annotated[int, Meta(ge=1, le=10_000)]
Positive = Annotated[float, Meta(gt=0, le=1e6)]


class Settings(Struct, frozen=True, kw_only=True):
    """What may be set.

    Trees: at most ``max_trees``, as many as a held-out fifth of the prompts says, of ``num_leaves`` leaves that hold
    at least the answers to ``min_leaf_prompts`` prompts. ``huber_delta`` is where the loss of quality turns linear.
    Linear stage: ``text_strength`` and ``label_ridge`` are ridge penalties, ``dense_weight`` is how far one standard
    deviation of a dense feature counts against a whole text of length 1, ``label_temperature`` sharpens label
    probabilities, ``label_strength`` rows of the model's mean are added to each label's. ``neighbours`` is the k of
    knn. ``num_folds`` None means 10 for less than 2,000 prompts, else 5.
    """

    max_trees: Count = 250
    num_leaves: Count = 12
    learning_rate: Positive = 0.03
    min_leaf_prompts: Positive = 4.0
    feature_share: Positive = 0.4
    row_share: Positive = 0.8
    leaf_ridge: Positive = 5.0
    huber_delta: Positive = 0.9
    text_strength: Positive = 3.0
    label_ridge: Positive = 1.0
    label_temperature: Positive = 10.0
    label_strength: Positive = 5.0
    dense_weight: Positive = 0.05
    num_components: Count = 16
    neighbours: Count = 40
    num_folds: Annotated[int, Meta(ge=2, le=50)] | None = None
    seed: int = 0

    def folds_for(self, num_prompts: int) -> int:
        """How many folds that many prompts are split into."""
        return self.num_folds or (10 if num_prompts < _FEW_PROMPTS else 5)
