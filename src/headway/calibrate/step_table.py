"""Steps as columns: what a fit, its test and the calibration figures read.

One row per token batch, one column per feature of ``native/step_time.hpp``. The design matrix of a step-time form is
built here and nowhere else, so that a fit and its test cannot disagree on what a coefficient multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, cast, get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.engines.step_log import StepFeatures
from headway.types import StepTime, StepTimeForm

FeatureName = Literal[
    "requests", "tokens", "prefill_tokens", "decodes", "decode_context", "context", "prefill_pairs", "chunk_squares",
    "context_squares",
]  # fmt: skip
StepKind = Literal["decode", "prefill", "mixed"]

FEATURES: Final[tuple[FeatureName, ...]] = get_args(FeatureName)
STEP_KINDS: Final[tuple[StepKind, ...]] = get_args(StepKind)

Column = NDArray[np.float64]
Matrix = NDArray[np.float64]


class StepTable(Struct, frozen=True, eq=False):
    """Steps in the order they ran. ``features`` has one row per step, its columns in the order of :data:`FEATURES`.

    Times are seconds. ``outputs`` and ``finished`` (tokens given, requests ended) are None where the log has none.
    """

    start_s: Column
    time_s: Column
    features: Matrix
    outputs: Column | None = None
    finished: Column | None = None

    def __len__(self) -> int:
        return len(self.time_s)

    def column(self, name: FeatureName) -> Column:
        """One feature of every step."""
        return self.features[:, FEATURES.index(name)]

    def select(self, rows: slice | NDArray[np.bool_] | NDArray[np.int64]) -> StepTable:
        """These steps alone."""
        return StepTable(
            self.start_s[rows],
            self.time_s[rows],
            self.features[rows],
            None if self.outputs is None else self.outputs[rows],
            None if self.finished is None else self.finished[rows],
        )

    def of_kind(self, kind: StepKind) -> NDArray[np.bool_]:
        """Which steps are of a kind: only decodes, only prefill chunks, or both."""
        decodes, prefills = self.column("decodes") > 0, self.column("prefill_tokens") > 0
        wanted = {"decode": decodes & ~prefills, "prefill": prefills & ~decodes, "mixed": decodes & prefills}
        return wanted[kind]


def feature_matrix(batches: Iterable[StepFeatures]) -> Matrix:
    """The features of batches as rows."""
    rows = [[float(getattr(batch, name)) for name in FEATURES] for batch in batches]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(FEATURES))


def design_matrix(form: StepTimeForm, table: StepTable, knee: float = 0.0) -> Matrix:
    """What each coefficient of a form multiplies, one row per step; ``knee`` is no column, it shapes two of them."""
    one = np.ones(len(table))
    column, tokens = table.column, table.column("tokens")
    attention = [column("decode_context"), column("prefill_pairs"), column("requests")]
    if form == "linear":
        columns = [one, tokens, *attention]
    elif form == "knee":
        columns = [one, np.minimum(tokens, knee), np.maximum(tokens - knee, 0.0), *attention]
    else:
        names: tuple[FeatureName, ...] = ("prefill_tokens", "chunk_squares", "decodes", "context", "context_squares")
        columns = [one, *(column(name) for name in names)]
    return np.column_stack(columns)


def step_time_of(form: StepTimeForm, weights: Column, knee: float = 0.0) -> StepTime:
    """The step time whose coefficients are ``weights``, in the order of :func:`design_matrix`."""
    values = tuple(float(weight) for weight in weights)
    if form == "knee":
        values = (*values[:3], float(knee), *values[3:])
    return StepTime(form, values)


def predict_s(step_time: StepTime, table: StepTable) -> Column:
    """Seconds of every step under ``step_time``; equal to the native core's word for it up to rounding."""
    values, knee = list(step_time.coefficients), 0.0
    if step_time.form == "knee":
        knee = values.pop(3)
    return cast("Column", design_matrix(step_time.form, table, knee) @ np.array(values))
