"""An artifact at work: from a prompt to quality and length of every model of a pool, one batched call per head.

Quality and length may be spoken by different predictors: the artifact names for each the one that proved best, which
may be a simple one. Everything that can be wrong with an artifact shows while this is built: shapes, trees, and the
numbers it must give on its own test prompts. It refuses to know prices, cards or queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from headway.errors import ArtifactError
from headway.predict.artifact import Artifact, Kind
from headway.predict.baselines import Constant, Lengths, NearestNeighbours, Reading, TaskLabel, Voice
from headway.predict.features import NUM_FEATURES, NUM_HASHED, PromptFeatures, prompt_features
from headway.predict.forest import Forest
from headway.predict.linear import Floats, LinearStage, checked
from headway.predict.prompt import Prompt, prompt_of_text

#: Columns of a row of the trees after dense features and components: text scores, then what the model is.
NUM_SCORE_COLUMNS = 8
NUM_MODEL_COLUMNS = 3
_SCORES_FROM_END = NUM_SCORE_COLUMNS + NUM_MODEL_COLUMNS
#: How far a loaded artifact may be from what it said when it was trained, relative to 1 + the value.
_TOLERANCE = 1e-6
_FEWEST_TOKENS = 1.0


class Forecast(Struct, frozen=True, eq=False):
    """What S models are expected to make of a prompt, (S,) each. NaN where the artifact knows nothing."""

    quality: Floats
    output_tokens: Floats
    p90_tokens: Floats


def model_columns(artifact: Artifact) -> Floats:
    """What the trees know of each model, (M, 3): its index, log parameters, log context tokens; NaN where unknown."""
    rows = [
        (
            float(index),
            np.nan if model.log_parameters is None else model.log_parameters,
            np.nan if model.context_tokens is None else np.log(model.context_tokens),
        )
        for index, model in enumerate(artifact.models)
    ]
    return np.array(rows, np.float64)


def quality_base(rows: Floats) -> Floats:
    """Where the quality trees start from: half the text score, half the label score of the row's own model."""
    base: Floats = 0.5 * (rows[:, -_SCORES_FROM_END] + rows[:, -_SCORES_FROM_END + 4])
    return base


def length_base(rows: Floats) -> Floats:
    """Where the trees of log1p tokens start from: the text score of the row's own model."""
    base: Floats = rows[:, -_SCORES_FROM_END + 2]
    return base


def project(hashed: Floats, mean: Floats, axes: Floats) -> Floats:
    """Principal components of signed hashed words, (..., K) of (..., H)."""
    components: Floats = (hashed - mean) @ axes.T
    return components


class Learned:
    """Boosted trees on a prompt's features, its linear scores and the model asked about."""

    def __init__(self, artifact: Artifact, chosen: Sequence[int], *, median: bool = False) -> None:
        columns, num = np.asarray(chosen, np.intp), len(artifact.models)
        num_axes = checked(artifact.components.axes, "components.axes", None, NUM_HASHED).shape[0]
        self._scores_at = NUM_FEATURES + num_axes
        width = self._scores_at + NUM_SCORE_COLUMNS + NUM_MODEL_COLUMNS
        self._rows = np.zeros((len(columns), width))
        self._rows[:, -NUM_MODEL_COLUMNS:] = model_columns(artifact)[columns]
        # Of each label: quality of each chosen model and their mean over all models, then the same of log tokens.
        labels, tables = len(artifact.labels.labels), []
        for name in ("quality", "log_tokens"):
            table = checked(getattr(artifact.labels, name), f"labels.{name}", labels, num)
            tables += [table[:, columns], table.mean(axis=1, keepdims=True)]
        self._labels = np.column_stack(tables)
        self._reading: Reading | None = None
        texts: list[bytes] = []
        if artifact.quality is not None and artifact.serves_quality == "learned":
            head = artifact.quality
            texts.append(head.trees)
            self._slope = head.slope
            self._level = checked(head.level, "quality.level", num)[columns]
            self._knots = checked(head.knots, "quality.knots", 2, None)
        if artifact.length is not None and artifact.serves_length == "learned":
            length = artifact.length
            scale, p50_shift, p90_shift = (
                checked(getattr(length, name), f"length.{name}", num)[columns]
                for name in ("mean_scale", "p50_shift", "p90_shift")
            )
            texts += [length.p50 if median else length.mean, length.p90]
            self._factor = np.exp(p50_shift) if median else scale
            self._p90_shift = p90_shift
        own = range(self._scores_at, width - NUM_MODEL_COLUMNS, 2)
        self._ask = Forest.of(texts, self._rows, own, range(width - NUM_MODEL_COLUMNS, width))
        self._said: Floats | None = None

    def _heads(self, reading: Reading) -> tuple[Floats, Floats]:
        """The rows, and what every head that serves says of them, (heads, S): quality first, then the lengths."""
        rows = self.rows(reading)
        if self._said is None:
            self._said = self._ask()
        return rows, self._said

    def rows(self, reading: Reading) -> Floats:
        """What the trees are asked, (S, width). The array is reused by the next call."""
        rows, at, size = self._rows, self._scores_at, len(self._rows)
        if reading is self._reading:
            return rows
        linear = reading.linear
        by_label = linear.labels @ self._labels
        rows[:, :NUM_FEATURES] = reading.features.dense
        rows[:, NUM_FEATURES:at] = reading.components
        rows[:, at] = linear.quality
        rows[:, at + 1] = linear.mean_quality
        rows[:, at + 2] = linear.log_tokens
        rows[:, at + 3] = linear.mean_log_tokens
        rows[:, at + 4] = by_label[:size]
        rows[:, at + 5] = by_label[size]
        rows[:, at + 6] = by_label[size + 1 : -1]
        rows[:, at + 7] = by_label[-1]
        self._reading, self._said = reading, None
        return rows

    def quality(self, reading: Reading) -> Floats:
        """Calibrated quality."""
        rows, said = self._heads(reading)
        raw = said[0] + quality_base(rows)
        return calibrated_quality(raw, self._level, self._slope, self._knots)

    def lengths(self, reading: Reading) -> Lengths:
        """Output tokens; trees and their base give the logarithm of one more."""
        rows, said = self._heads(reading)
        base = length_base(rows)
        expected = self._factor * np.exp(said[-2] + base) - 1.0
        return Lengths(expected, np.ceil(np.exp(said[-1] + base + self._p90_shift) - 1.0))


def calibrated_quality(raw: Floats, level: Floats, slope: float, knots: Floats) -> Floats:
    """Quality from raw outputs (..., M): drawn towards each model's level by ``slope``, then through ``knots``."""
    return np.asarray(np.interp(level + slope * (raw - level), knots[0], knots[1]), np.float64)


class Forecaster:
    """Asks what an artifact says should speak, for the models at ``chosen`` (indices into its models).

    With ``median`` the length expected is the median, not the mean.

    Raises:
        ArtifactError: the artifact's parts do not fit together, its trees cannot be loaded, or it says other things
            than when it was trained.
    """

    def __init__(self, artifact: Artifact, chosen: Sequence[int], *, median: bool = False) -> None:
        self.quality_source: Kind = artifact.serves_quality
        self.length_source: Kind = artifact.serves_length
        self._mean = checked(artifact.components.mean, "components.mean", NUM_HASHED)
        self._axes = checked(artifact.components.axes, "components.axes", None, NUM_HASHED)
        self._linear = LinearStage(artifact, chosen)
        columns, num = np.asarray(chosen, np.intp), len(artifact.models)
        self._no_quality = np.isnan(checked(artifact.overall.quality, "overall.quality", num)[columns])
        self._no_length = np.isnan(checked(artifact.overall.output_tokens, "overall.output_tokens", num)[columns])
        self._unknown = bool(self._no_quality.any() or self._no_length.any())
        for kind, head in ((self.quality_source, artifact.quality), (self.length_source, artifact.length)):
            if kind == "learned" and head is None:
                raise ArtifactError("names learned trees that it does not hold")
        voices: dict[Kind, Voice] = {
            kind: _VOICES[kind](artifact, chosen, median=median) for kind in {self.quality_source, self.length_source}
        }
        self._quality, self._length = voices[self.quality_source], voices[self.length_source]

    def read(self, prompt: Prompt) -> Reading:
        """The prompt as the predictors read it."""
        return self.reading_of(prompt_features(prompt))

    def reading_of(self, features: PromptFeatures) -> Reading:
        """As :meth:`read`, of features computed before."""
        components = project(features.hashed, self._mean, self._axes)
        return Reading(features, components, self._linear.read(features))

    def forecast(self, prompt: Prompt) -> Forecast:
        """What the models are expected to make of ``prompt``: quality in [0, 1], tokens at least 1."""
        return self.forecast_of(self.read(prompt))

    def forecast_of(self, reading: Reading) -> Forecast:
        """As :meth:`forecast`, of a prompt that was read before."""
        quality = np.maximum(np.minimum(self._quality.quality(reading), 1.0), 0.0)
        expected, p90 = (np.maximum(tokens, _FEWEST_TOKENS) for tokens in self._length.lengths(reading))
        if self._unknown:
            quality[self._no_quality] = np.nan
            expected[self._no_length] = p90[self._no_length] = np.nan
        return Forecast(quality, expected, p90)


_VOICES: dict[Kind, type[Constant] | type[TaskLabel] | type[NearestNeighbours] | type[Learned]] = {
    "constant": Constant,
    "task_label": TaskLabel,
    "knn": NearestNeighbours,
    "learned": Learned,
}


def check_self_tests(artifact: Artifact) -> None:
    """Ask an artifact its own test prompts.

    Raises:
        ArtifactError: as :class:`Forecaster`, or an answer is another than when it was trained.
    """
    forecaster = Forecaster(artifact, range(len(artifact.models)))
    for number, test in enumerate(artifact.self_tests, 1):
        found = forecaster.forecast(prompt_of_text(test.text))
        for name in ("quality", "output_tokens", "p90_tokens"):
            wanted, got = checked(getattr(test, name), f"self_tests.{name}", len(artifact.models)), getattr(found, name)
            if not np.allclose(got, wanted, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                worst = float(np.nanmax(np.abs(got - wanted)))
                raise ArtifactError(
                    f"says other things here than where it was trained ({name} of test prompt {number} differs by "
                    f"{worst:.3g}): it needs the versions of LightGBM and numpy it was made with, or training again"
                )
