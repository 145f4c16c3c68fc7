"""Fits the linear stage: ridge regressions on hashed words and dense features, label tables, principal components.

Its scores enter the trees as features, so while trees are trained each prompt's scores must come from a stage that has
not seen it: :func:`out_of_fold_scores`. Everything is deterministic; what is served in single precision is rounded
before the trees learn from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from headway.predict.features import NUM_BUCKETS
from headway.predict.linear import dense_input, softmax
from headway.train.folds import grouped_folds
from headway.train.material import Material
from headway.train.settings import Settings
from headway.train.table import FeatureTable, Floats

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

#: Conjugate gradients end at this share of the first residual, or after so many steps.
_TOLERANCE, _MAX_STEPS = 1e-3, 60
_NUM_INNER_FOLDS = 4
#: A dense feature counts for no more than this many standard deviations.
_LIMIT_SD = 5.0


class LabelMeans(Struct, frozen=True, eq=False):
    """Means per task label and model, (L, M), shrunk towards the model's own mean; log1p tokens."""

    quality: Floats
    log_tokens: Floats


class Scores(Struct, frozen=True, eq=False):
    """The linear stage's scores of P prompts, (P, M) each, and label probabilities (P, L)."""

    quality: Floats
    log_tokens: Floats
    label_quality: Floats
    label_log_tokens: Floats
    labels: Floats


class LinearFit(Struct, frozen=True, eq=False, kw_only=True):
    """A fitted stage; arrays as in ``artifact.LinearModel``."""

    idf: Floats
    dense_mean: Floats
    dense_scale: Floats
    dense_limit: float
    weights: Floats
    intercept: Floats
    temperature: float
    label_means: LabelMeans

    def input(self, features: FeatureTable) -> csr_matrix:
        """Prompts as the regressions take them, (P, B + F)."""
        from scipy.sparse import csr_matrix, hstack

        words = _words(features, self.idf)
        dense = dense_input(features.dense, self.dense_mean, self.dense_scale, self.dense_limit)
        return hstack([words, csr_matrix(dense)]).tocsr()

    def scores(self, features: FeatureTable) -> Scores:
        """The stage's scores of prompts."""
        found = self.input(features) @ self.weights + self.intercept
        num = self.label_means.quality.shape[1]
        labels = softmax(self.temperature * found[:, 2 * num :])
        return Scores(
            found[:, :num],
            found[:, num : 2 * num],
            labels @ self.label_means.quality,
            labels @ self.label_means.log_tokens,
            labels,
        )


def fit_linear(material: Material, settings: Settings) -> LinearFit:
    """The stage of all of ``material``. Some seconds per 10,000 prompts and 10 models."""
    features = material.features
    dense = np.nan_to_num(features.dense)
    sd = dense.std(axis=0)
    empty = LinearFit(
        idf=_single(_inverse_frequency(features)),
        dense_mean=_single(dense.mean(axis=0)),
        dense_scale=_single(np.divide(settings.dense_weight, sd, out=np.zeros_like(sd), where=sd > 1e-9)),
        dense_limit=_LIMIT_SD * settings.dense_weight,
        weights=np.zeros((0, 0)),
        intercept=np.zeros(0),
        temperature=settings.label_temperature,
        label_means=LabelMeans(
            label_means(material, material.quality, settings.label_strength),
            label_means(material, material.log_tokens, settings.label_strength),
        ),
    )
    num_scores = 2 * material.num_models
    strengths = np.full(material.targets.shape[1], settings.text_strength)
    strengths[num_scores:] = settings.label_ridge
    weights, intercept = _ridges(empty.input(features), material.targets, strengths)
    from msgspec.structs import replace

    return replace(empty, weights=_single(weights), intercept=intercept)


def out_of_fold_scores(material: Material, settings: Settings, seed: int) -> Scores:
    """Each prompt's scores by a stage that saw neither it nor one of its group."""
    shape, num_labels = material.quality.shape, len(material.label_names)
    labels = np.zeros((len(material.quality), num_labels))
    found = Scores(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape), labels)
    for test in grouped_folds(material.group, _NUM_INNER_FOLDS, seed):
        held = np.zeros(material.num_prompts, np.bool_)
        held[test] = True
        scores = fit_linear(material.take(np.flatnonzero(~held)), settings).scores(material.features.take(test))
        for name in Scores.__struct_fields__:
            getattr(found, name)[test] = getattr(scores, name)
    return found


def label_means(material: Material, values: Floats, strength: float) -> Floats:
    """Mean of ``values`` (P, M) per label and model, (L, M), as if ``strength`` rows of the model's mean were added.

    0 for a model of which nothing is known, and without added rows for one of which nothing is known on that label.
    """
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    own_labels = np.eye(len(material.label_names))[material.label].T
    total, num = own_labels @ filled, own_labels @ known
    overall = filled.sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    weight = num + strength
    means: Floats = np.divide(total + strength * overall, weight, out=np.zeros_like(total), where=weight > 0)
    return means


def principal_components(hashed: Floats, num: int) -> tuple[Floats, Floats]:
    """The mean (H,) and the ``num`` leading axes (num, H) of hashed words, each axis' largest entry positive."""
    mean = hashed.mean(axis=0)
    centred = hashed - mean
    _, vectors = np.linalg.eigh(centred.T @ centred)
    axes = vectors[:, ::-1][:, :num].T
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
    return _single(mean), _single(axes * np.where(signs == 0, 1.0, signs)[:, None])


def _single(values: Floats) -> Floats:
    """Rounded to single precision, as the artifact stores it."""
    return values.astype(np.float32).astype(np.float64)


def _inverse_frequency(features: FeatureTable) -> Floats:
    """Smoothed inverse document frequency of every bucket, (B,)."""
    count = np.bincount(np.concatenate([*features.buckets, np.zeros(0, np.int64)]), minlength=NUM_BUCKETS)
    idf: Floats = np.log((1 + len(features.buckets)) / (1 + count)) + 1.0
    return idf


def _words(features: FeatureTable, idf: Floats) -> csr_matrix:
    """Prompts by buckets, each row of length 1, (P, B)."""
    from scipy.sparse import csr_matrix

    sizes = np.array([len(one) for one in features.buckets], np.int64)
    indices = np.concatenate([*features.buckets, np.zeros(0, np.int64)])
    rows = np.repeat(np.arange(len(sizes)), sizes)
    values = idf[indices]
    norms = np.sqrt(np.bincount(rows, values**2, minlength=len(sizes)))
    shape = (len(sizes), NUM_BUCKETS)
    return csr_matrix((values / norms[rows], indices, np.concatenate(([0], np.cumsum(sizes)))), shape=shape)


def _ridges(words: csr_matrix, targets: Floats, strengths: Floats) -> tuple[Floats, Floats]:
    """A ridge regression per column of ``targets`` (P, T), each on the rows where it is known; 0 where it never is."""
    weights, intercept = np.zeros((words.shape[1], targets.shape[1])), np.zeros(targets.shape[1])
    known = ~np.isnan(targets)
    patterns: dict[bytes, list[int]] = {}
    for column in range(targets.shape[1]):
        patterns.setdefault(known[:, column].tobytes(), []).append(column)
    for columns in patterns.values():
        rows = np.flatnonzero(known[:, columns[0]])
        if len(rows):
            there = targets[rows][:, columns]
            intercept[columns] = there.mean(axis=0)
            weights[:, columns] = _ridge(words[rows], there - intercept[columns], strengths[columns])
    return weights, intercept


def _ridge(words: csr_matrix, targets: Floats, strengths: Floats) -> Floats:
    """Conjugate gradients on the normal equations, all columns side by side."""
    weights = np.zeros((words.shape[1], targets.shape[1]))
    transposed = words.T.tocsr()
    residual = transposed @ targets
    direction = residual.copy()
    size = np.square(residual).sum(axis=0)
    enough = _TOLERANCE**2 * np.maximum(size, 1e-30)
    for _ in range(_MAX_STEPS):
        if (size <= enough).all():
            break
        image = transposed @ (words @ direction) + strengths * direction
        step = size / np.maximum((direction * image).sum(axis=0), 1e-30)
        weights += step * direction
        residual -= step * image
        before, size = size, np.square(residual).sum(axis=0)
        direction = residual + size / np.maximum(before, 1e-30) * direction
    return weights
