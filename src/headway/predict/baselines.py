"""The simple predictors an artifact carries beside its trees: constant, by task label, by nearest neighbours.

They are what a learned predictor must beat, and what serves where it does not. Each gives, for the models of a pool,
quality, expected output tokens and their 90 % quantile. They refuse to look at anything but the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.errors import ArtifactError
from headway.predict.artifact import Artifact
from headway.predict.features import PromptFeatures
from headway.predict.linear import Floats, LinearScores, checked


class Reading(NamedTuple):
    """A prompt as the predictors of one artifact read it: features, principal components (K,), linear scores."""

    features: PromptFeatures
    components: Floats
    linear: LinearScores


class Lengths(NamedTuple):
    """Output tokens of each model, (S,): what is expected (mean or median), and the 90 % quantile."""

    expected: Floats
    p90: Floats


class Voice(Protocol):
    """What can speak for the S models of a pool that an artifact knows. NaN where nothing is known."""

    def quality(self, reading: Reading) -> Floats:
        """Quality in [0, 1] of each model, (S,)."""
        ...

    def lengths(self, reading: Reading) -> Lengths:
        """Output tokens of each model."""
        ...


class Constant:
    """Each model's mean over the training data."""

    def __init__(self, artifact: Artifact, chosen: Sequence[int], *, median: bool = False) -> None:
        num, overall = len(artifact.models), artifact.overall
        columns = np.asarray(chosen, np.intp)
        self._quality = checked(overall.quality, "overall.quality", num)[columns]
        typical = overall.p50_tokens if median else overall.output_tokens
        expected = checked(typical, "overall.output_tokens", num)[columns]
        self._lengths = Lengths(expected, checked(overall.p90_tokens, "overall.p90_tokens", num)[columns])

    def quality(self, reading: Reading) -> Floats:
        """The means, whatever the prompt."""
        return self._quality

    def lengths(self, reading: Reading) -> Lengths:
        """The same, whatever the prompt."""
        return self._lengths


class TaskLabel:
    """Each model's mean on the task that the prompt looks like: task labels weigh in by their probability."""

    def __init__(self, artifact: Artifact, chosen: Sequence[int], *, median: bool = False) -> None:
        table = artifact.labels
        columns, typical = np.asarray(chosen, np.intp), "p50_tokens" if median else "output_tokens"
        self._quality, self._tokens, self._p90 = (
            checked(getattr(table, name), f"labels.{name}", len(table.labels), len(artifact.models))[:, columns]
            for name in ("quality", typical, "p90_tokens")
        )

    def quality(self, reading: Reading) -> Floats:
        """The labels' means."""
        return reading.linear.labels @ self._quality

    def lengths(self, reading: Reading) -> Lengths:
        """The means of the labels' lengths."""
        labels = reading.linear.labels
        return Lengths(labels @ self._tokens, labels @ self._p90)


class NearestNeighbours:
    """Each model's mean over the k nearest training prompts on the principal components. O(training prompts)."""

    def __init__(self, artifact: Artifact, chosen: Sequence[int], *, median: bool = False) -> None:
        store, num = artifact.neighbours, len(artifact.models)
        num_axes = checked(artifact.components.axes, "components.axes", None, None).shape[0]
        self._points = checked(store.points, "neighbours.points", None, num_axes)
        size = len(self._points)
        columns = np.asarray(chosen, np.intp)
        self._quality = checked(store.quality, "neighbours.quality", size, num)[:, columns]
        self._tokens = checked(store.output_tokens, "neighbours.output_tokens", size, num)[:, columns]
        self._k, self._median = min(store.k, size), median
        if self._k < 1:
            raise ArtifactError("neighbours must hold at least one prompt")

    def nearest(self, components: Floats) -> NDArray[np.intp]:
        """The k nearest training prompts, in no particular order."""
        distance = np.square(self._points - components).sum(axis=1)
        return np.argpartition(distance, self._k - 1)[: self._k]

    def quality(self, reading: Reading) -> Floats:
        """The neighbours' mean quality."""
        return mean_of_known(self._quality[self.nearest(reading.components)])

    def lengths(self, reading: Reading) -> Lengths:
        """What the neighbours' lengths are."""
        tokens = self._tokens[self.nearest(reading.components)]
        expected = quantile_of_known(tokens, 0.5) if self._median else mean_of_known(tokens)
        return Lengths(expected, quantile_of_known(tokens, 0.9))


def mean_of_known(values: Floats) -> Floats:
    """Column means without the NaN entries; NaN for a column that has no other."""
    known = ~np.isnan(values)
    num = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    mean: Floats = np.divide(total, num, out=np.full(values.shape[1], np.nan), where=num > 0)
    return mean


def quantile_of_known(values: Floats, share: float) -> Floats:
    """A quantile of each column without its NaN entries; NaN for a column that has no other."""
    columns = [column[~np.isnan(column)] for column in values.T]
    return np.array([np.quantile(column, share) if len(column) else np.nan for column in columns], np.float64)
