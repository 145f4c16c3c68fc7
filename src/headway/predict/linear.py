"""The linear stage of an artifact: text scores of each model, and what the task looks like.

Its scores are columns of the trees and feed the simple predictors. Served one prompt at a time from the prompt's
distinct hash buckets, so its cost follows the prompt and not the hash space. It refuses models it was not built for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.errors import ArtifactError
from headway.predict.artifact import Array, Artifact
from headway.predict.features import NUM_BUCKETS, NUM_FEATURES, PromptFeatures

Floats = NDArray[np.float64]


def checked(array: Array, name: str, *shape: int | None) -> Floats:
    """The values of an artifact's array.

    Raises:
        ArtifactError: another shape than ``shape`` (None: any size there).
    """
    values = array.numpy()
    if len(values.shape) != len(shape) or any(
        want not in (None, size) for want, size in zip(shape, values.shape, strict=True)
    ):
        raise ArtifactError(f"{name} has shape {values.shape}, not {shape}")
    return values


class LinearScores(NamedTuple):
    """Scores of one prompt for S chosen models: text scores of quality and of log1p tokens, (S,) each with the mean
    over all of the artifact's models, and the probability of each task label, (L,)."""

    quality: Floats
    mean_quality: float
    log_tokens: Floats
    mean_log_tokens: float
    labels: Floats


class LinearStage:
    """The ridge regressions of an artifact, for the models at ``chosen``.

    Raises:
        ArtifactError: arrays that do not fit each other.
    """

    def __init__(self, artifact: Artifact, chosen: Sequence[int]) -> None:
        model, num, num_labels = artifact.linear, len(artifact.models), len(artifact.labels.labels)
        self._idf = checked(model.idf, "linear.idf", NUM_BUCKETS)
        self._mean = checked(model.dense_mean, "linear.dense_mean", NUM_FEATURES)
        self._scale = checked(model.dense_scale, "linear.dense_scale", NUM_FEATURES)
        self._limit = model.dense_limit
        targets = 2 * num + num_labels
        weights = checked(model.weights, "linear.weights", NUM_BUCKETS + NUM_FEATURES, targets)
        intercept = checked(model.intercept, "linear.intercept", targets)
        if num_labels < 1:
            raise ArtifactError("labels must hold at least one task label")
        # Own score and the mean over all models, of quality and of length, then labels: columns of one matrix.
        columns, everything = np.asarray(chosen, np.intp), np.vstack([weights, intercept])
        quality, lengths, labels = everything[:, :num], everything[:, num : 2 * num], everything[:, 2 * num :]
        matrix = np.column_stack(
            [quality[:, columns], quality.mean(axis=1), lengths[:, columns], lengths.mean(axis=1), labels]
        )
        # In single precision, as it is stored: what is looked up at random should be small.
        self._words = np.ascontiguousarray(matrix[:NUM_BUCKETS], np.float32)
        self._dense, self._intercept = matrix[NUM_BUCKETS:-1].copy(), matrix[-1].copy()
        self._size, self._temperature = len(columns), model.temperature

    def read(self, features: PromptFeatures) -> LinearScores:
        """The scores of a prompt. O(distinct words)."""
        dense = dense_input(features.dense, self._mean, self._scale, self._limit)
        found = self._intercept + dense @ self._dense
        buckets = features.buckets
        if len(buckets):
            idf = self._idf.take(buckets)
            found += (idf @ self._words.take(buckets, axis=0).astype(np.float64)) / math.sqrt(idf @ idf)
        size = self._size
        return LinearScores(
            found[:size],
            found[size],
            found[size + 1 : 2 * size + 1],
            found[2 * size + 1],
            softmax(self._temperature * found[2 * size + 2 :]),
        )


def dense_input(dense: Floats, mean: Floats, scale: Floats, limit: float) -> Floats:
    """Dense features (..., F) as the regressions take them: centred, scaled, bounded; what is missing counts as 0."""
    centred: Floats = (dense - mean) * scale
    centred[np.isnan(centred)] = 0.0
    np.maximum(centred, -limit, out=centred)
    return np.minimum(centred, limit, out=centred)


def softmax(scores: Floats) -> Floats:
    """Probabilities from scores, over the last axis."""
    powers: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers
