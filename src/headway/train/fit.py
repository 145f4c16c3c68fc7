"""Trains a predictor on material: linear stage, principal components, one boosted model per head, then calibration.

Calibration needs predictions of prompts that training has not seen. They come from the folds of
:mod:`headway.train.crossvalidate`; this file fits, and puts the artifact's arrays together.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from headway.predict.forecast import length_base, project, quality_base
from headway.predict.trees import Trees
from headway.train.heads import Objective, Pairs, fit_trees, tree_rows
from headway.train.linear import LinearFit, Scores, fit_linear, out_of_fold_scores, principal_components
from headway.train.material import Material
from headway.train.settings import Settings
from headway.train.table import FeatureTable, Floats

#: Fewer known values than this are nothing to grow trees on.
MIN_ROWS = 100
_LENGTH_HEADS: tuple[Objective, ...] = ("mean", "p50", "p90")


class Fit(Struct, frozen=True, eq=False, kw_only=True):
    """A trained predictor before calibration. ``trees`` lacks heads for which nothing was known."""

    linear: LinearFit
    component_mean: Floats
    component_axes: Floats
    models: Floats
    trees: dict[Objective, bytes]

    def components(self, features: FeatureTable) -> Floats:
        """Principal components of prompts, (P, K)."""
        return project(features.hashed, self.component_mean, self.component_axes)

    def outputs(self, features: FeatureTable, scores: Scores | None = None) -> dict[Objective, Floats]:
        """What each head says of every prompt on every model, (P, M), uncalibrated; asked through the serving code."""
        shape = (len(features.dense), len(self.models))
        prompts, models = np.indices(shape).reshape(2, -1)
        scores = self.linear.scores(features) if scores is None else scores
        pairs = Pairs(prompts, models, np.zeros(len(prompts)))
        rows = tree_rows(features, self.components(features), scores, self.models, pairs)
        bases = {True: quality_base(rows), False: length_base(rows)}
        return {
            head: (Trees(text).predict(rows) + bases[head == "huber"]).reshape(shape)
            for head, text in self.trees.items()
        }


def fit(material: Material, settings: Settings) -> Fit:
    """Train on all of ``material``. About 10 s of CPU per 50,000 answers."""
    linear = fit_linear(material, settings)
    mean, axes = principal_components(material.features.hashed, settings.num_components)
    components = project(material.features.hashed, mean, axes)
    scores = out_of_fold_scores(material, settings, settings.seed)
    trees: dict[Objective, bytes] = {}
    for values, heads in ((material.quality, ("huber",)), (material.log_tokens, _LENGTH_HEADS)):
        pairs = Pairs.known(values)
        if len(pairs.targets) >= MIN_ROWS:
            rows = tree_rows(material.features, components, scores, material.models, pairs)
            for head in heads:
                trees[head] = fit_trees(rows, pairs, material.group, head, settings)
    return Fit(linear=linear, component_mean=mean, component_axes=axes, models=material.models, trees=trees)
