"""The simple predictors that a learned one is held against, trained on the same folds.

``constant`` knows the model, ``task_label`` also the data set's own task label (which a router is not told),
``task_recognised`` the label that the prompt's text looks like, ``knn`` the nearest prompts, ``tfidf_ridge`` the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.predict.baselines import mean_of_known
from headway.train.fit import Fit
from headway.train.linear import label_means
from headway.train.material import Material
from headway.train.settings import Settings
from headway.train.table import Floats

Rival = Literal["constant", "task_label", "task_recognised", "knn", "tfidf_ridge"]
RIVALS: tuple[Rival, ...] = ("constant", "task_label", "task_recognised", "knn", "tfidf_ridge")
_TFIDF_STRENGTH = 5.0
_MAX_WORDS = 50_000
_CHUNK = 1024


class Predicted(Struct, frozen=True, eq=False):
    """What one predictor says of P prompts on M models, (P, M) each: quality, mean, median and 90 % quantile of the
    output tokens. NaN where it says nothing."""

    quality: Floats
    mean_tokens: Floats
    p50_tokens: Floats
    p90_tokens: Floats

    @classmethod
    def unknown(cls, shape: tuple[int, int]) -> Predicted:
        """NaN everywhere, to be filled."""
        return cls(*(np.full(shape, np.nan) for _ in range(4)))

    def put(self, prompts: NDArray[np.intp], found: Predicted) -> None:
        """Fill in the rows of ``prompts``."""
        for name in Predicted.__struct_fields__:
            getattr(self, name)[prompts] = getattr(found, name)


class LengthTable(Struct, frozen=True, eq=False):
    """Mean, median and 90 % quantile of output tokens per label and model, (L, M); NaN for an unknown model."""

    mean: Floats
    p50: Floats
    p90: Floats


def length_table(material: Material, strength: float) -> LengthTable:
    """Lengths per label, shrunk towards the model's own by ``strength`` rows; quantiles in the logarithm."""
    num_labels, num_models = len(material.label_names), material.num_models
    overall = lengths_of(material.tokens)
    shape = (num_labels, num_models)
    found = LengthTable(np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, np.nan))
    for label in range(num_labels):
        own = material.tokens[material.label == label]
        num = (~np.isnan(own)).sum(axis=0)
        weight = num / (num + strength)
        for name in LengthTable.__struct_fields__:
            general, special = getattr(overall, name)[0], getattr(lengths_of(own), name)[0]
            special = np.where(num > 0, special, general)
            mixed = np.expm1(weight * np.log1p(special) + (1 - weight) * np.log1p(general))
            getattr(found, name)[label] = weight * special + (1 - weight) * general if name == "mean" else mixed
    return found


def lengths_of(tokens: Floats) -> LengthTable:
    """The lengths of all rows together, (1, M)."""
    columns = [column[~np.isnan(column)] for column in tokens.T]
    figures = np.array(
        [(c.mean(), np.quantile(c, 0.5), np.quantile(c, 0.9)) if len(c) else (np.nan,) * 3 for c in columns]
    )
    return LengthTable(*figures.T[:, None, :])


def rivals(
    train: Material, test: Material, fit: Fit, *, texts: tuple[Sequence[str], Sequence[str]], settings: Settings
) -> dict[Rival, Predicted]:
    """What each rival, trained on ``train``, says of ``test``. ``texts`` are the prompts of both."""
    constant, lengths = mean_of_known(train.quality), lengths_of(train.tokens)
    shape = test.quality.shape
    by_label, label_lengths = (
        label_means(train, train.quality, settings.label_strength),
        length_table(train, settings.label_strength),
    )
    labels = fit.linear.scores(test.features).labels
    own = np.eye(len(train.label_names))[test.label]
    found: dict[Rival, Predicted] = {
        "constant": Predicted(
            np.broadcast_to(constant, shape),
            *(np.broadcast_to(getattr(lengths, name)[0], shape) for name in LengthTable.__struct_fields__),
        ),
        "knn": _nearest(train, test, fit, settings.neighbours),
        "tfidf_ridge": _tfidf(train, test, texts),
    }
    for name, weights in (("task_label", own), ("task_recognised", labels)):
        found[name] = Predicted(  # type: ignore[index]
            weights @ by_label,
            *(weights @ getattr(label_lengths, field) for field in LengthTable.__struct_fields__),
        )
    return found


def _nearest(train: Material, test: Material, fit: Fit, neighbours: int) -> Predicted:
    points, asked = fit.components(train.features), fit.components(test.features)
    squares = np.square(points).sum(axis=1)
    k = min(neighbours, len(points))
    found = Predicted.unknown(test.quality.shape)
    for start in range(0, len(asked), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(asked)))
        distance = squares - 2 * asked[rows] @ points.T
        nearest = np.argpartition(distance, k - 1, axis=1)[:, :k]
        quality, tokens = train.quality[nearest], train.tokens[nearest]
        with np.errstate(invalid="ignore"):
            found.put(rows, Predicted(_mean(quality), _mean(tokens), _quantile(tokens, 0.5), _quantile(tokens, 0.9)))
    return found


def _mean(values: Floats) -> Floats:
    """Mean over axis 1 without NaN; NaN where there is no other."""
    known = ~np.isnan(values)
    mean: Floats = np.where(known, values, 0.0).sum(axis=1) / np.where(known.any(axis=1), known.sum(axis=1), np.nan)
    return mean


def _quantile(values: Floats, share: float) -> Floats:
    """Quantile over axis 1 without NaN, by the nearest rank below; NaN where there is no other."""
    ordered, num = np.sort(values, axis=1), (~np.isnan(values)).sum(axis=1)
    place = np.floor(share * np.maximum(num - 1, 0)).astype(np.intp)
    taken: Floats = np.take_along_axis(ordered, place[:, None, :], axis=1)[:, 0, :]
    return taken


def _tfidf(train: Material, test: Material, texts: tuple[Sequence[str], Sequence[str]]) -> Predicted:
    """Ridge regressions on TF-IDF of words and pairs, per model; lengths in the logarithm, without a quantile."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    words = TfidfVectorizer(min_df=2, ngram_range=(1, 2), sublinear_tf=True, max_features=_MAX_WORDS)
    seen, asked = words.fit_transform(texts[0]), words.transform(texts[1])
    shape = test.quality.shape
    quality, log_tokens = np.full(shape, np.nan), np.full(shape, np.nan)
    for target, found in ((train.quality, quality), (train.log_tokens, log_tokens)):
        known = ~np.isnan(target)
        for column in range(shape[1]):
            rows = np.flatnonzero(known[:, column])
            if len(rows):
                ridge = Ridge(alpha=_TFIDF_STRENGTH, solver="sparse_cg", tol=1e-3)
                found[:, column] = ridge.fit(seen[rows], target[rows, column]).predict(asked)
    tokens = np.expm1(log_tokens)
    return Predicted(quality, tokens, tokens, np.full(shape, np.nan))
