"""The boosted trees: rows for every known pair of prompt and model, and one LightGBM model per head.

Rows are laid out exactly as ``predict.forecast.Learned`` lays them out. LightGBM runs with one thread and fixed seeds,
so equal data give equal trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.predict.forecast import NUM_MODEL_COLUMNS, NUM_SCORE_COLUMNS, length_base, quality_base
from headway.train.folds import grouped_folds
from headway.train.linear import Scores
from headway.train.settings import Settings
from headway.train.table import FeatureTable, Floats

if TYPE_CHECKING:
    from lightgbm import Dataset

#: ``huber`` is for quality, the others for log1p of output tokens.
Objective = Literal["huber", "mean", "p50", "p90"]
_HELD_OUT_ONE_IN, _PATIENCE_TREES = 5, 30


class Pairs(Struct, frozen=True, eq=False):
    """Known pairs of prompt and model: their indices, and the target of each."""

    prompts: NDArray[np.intp]
    models: NDArray[np.intp]
    targets: Floats

    @classmethod
    def known(cls, values: Floats) -> Pairs:
        """The entries of ``values`` (P, M) that are no NaN."""
        prompts, models = np.nonzero(~np.isnan(values))
        return cls(prompts, models, values[prompts, models])


def tree_rows(features: FeatureTable, components: Floats, scores: Scores, models: Floats, pairs: Pairs) -> Floats:
    """One row per pair. ``components`` is (P, K), ``models`` (M, 3)."""
    prompts, columns = pairs.prompts, pairs.models
    num_dense = features.dense.shape[1]
    at = num_dense + components.shape[1]
    rows = np.empty((len(prompts), at + NUM_SCORE_COLUMNS + NUM_MODEL_COLUMNS))
    rows[:, :num_dense] = features.dense[prompts]
    rows[:, num_dense:at] = components[prompts]
    for number, values in enumerate((scores.quality, scores.log_tokens, scores.label_quality, scores.label_log_tokens)):
        rows[:, at + 2 * number] = values[prompts, columns]
        rows[:, at + 2 * number + 1] = values.mean(axis=1)[prompts]
    rows[:, -NUM_MODEL_COLUMNS:] = models[columns]
    return rows


def fit_trees(rows: Floats, pairs: Pairs, group: NDArray[np.intp], objective: Objective, settings: Settings) -> bytes:
    """LightGBM's text of a model of the pairs' targets less their linear base; ``group`` (P,) says which prompts are
    alike.

    A held-out fifth of the groups tells how many trees are enough, then all rows are used. Some seconds per 50,000
    rows.
    """
    targets = pairs.targets - (quality_base(rows) if objective == "huber" else length_base(rows))
    rows_per_prompt = len(rows) / len(np.unique(pairs.prompts))
    parameters = _parameters(objective, settings, rows_per_prompt)
    held = np.zeros(len(rows), np.bool_)
    held[grouped_folds(group[pairs.prompts], _HELD_OUT_ONE_IN, settings.seed)[0]] = True
    num_trees = _enough_trees(rows, targets, held, parameters, settings.max_trees)
    data = _dataset(rows, targets, parameters)
    import lightgbm

    text: str = lightgbm.train(parameters, data, num_trees).model_to_string()
    return text.encode()


def _enough_trees(
    rows: Floats, targets: Floats, held: NDArray[np.bool_], parameters: dict[str, object], most: int
) -> int:
    import lightgbm

    seen = _dataset(rows[~held], targets[~held], parameters)
    unseen = lightgbm.Dataset(rows[held], targets[held], reference=seen, params=parameters)
    patience = lightgbm.early_stopping(_PATIENCE_TREES, verbose=False)
    booster = lightgbm.train(parameters, seen, most, valid_sets=[unseen], callbacks=[patience])
    return max(1, int(booster.best_iteration))


def _dataset(rows: Floats, targets: Floats, parameters: dict[str, object]) -> Dataset:
    import lightgbm

    model_column = rows.shape[1] - NUM_MODEL_COLUMNS
    return lightgbm.Dataset(rows, targets, categorical_feature=[model_column], params=parameters, free_raw_data=True)


def _parameters(objective: Objective, settings: Settings, rows_per_prompt: float) -> dict[str, object]:
    losses: dict[Objective, dict[str, object]] = {
        "huber": {"objective": "huber", "alpha": settings.huber_delta, "metric": "l2"},
        "mean": {"objective": "regression", "metric": "l2"},
        "p50": {"objective": "quantile", "alpha": 0.5, "metric": "quantile"},
        "p90": {"objective": "quantile", "alpha": 0.9, "metric": "quantile"},
    }
    return {
        **losses[objective],
        "num_leaves": settings.num_leaves,
        "learning_rate": settings.learning_rate,
        "min_data_in_leaf": max(5, round(settings.min_leaf_prompts * rows_per_prompt)),
        "feature_fraction": settings.feature_share,
        "bagging_fraction": settings.row_share,
        "bagging_freq": 1,
        "lambda_l2": settings.leaf_ridge,
        "max_bin": 63,
        "max_cat_to_onehot": 64,
        "seed": settings.seed,
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }
