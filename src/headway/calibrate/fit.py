"""Fits step-time forms to steps and tests them on later ones.

Non-negative least squares on rows divided by their time: every step counts by its relative error, a stall counts
little, and no coefficient says that work saves time. The first 70 % of the steps train, the last 30 % test; what is
reported as held-out error belongs to exactly the coefficients that are returned. It refuses logs too short to split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import numpy as np
from msgspec import Struct

from headway.calibrate.step_table import STEP_KINDS, Column, StepTable, design_matrix, predict_s, step_time_of
from headway.errors import ConfigError, DatasetError
from headway.types import StepTime, StepTimeForm

#: Forms from the plainest to the richest, in which order ties are settled.
FORMS: Final[tuple[StepTimeForm, ...]] = ("linear", "knee", "six_term")
TRAIN_SHARE: Final = 0.7
MIN_STEPS: Final = 100

#: A richer form must beat a plainer one by this much held-out MAPE: less is luck of the split.
_TIE_MAPE: Final = 5e-4
_NUM_KNEES: Final = 32
#: Knees whose errors differ by less than this share are equal: rounding shall not choose between them.
_TIE_LOSS: Final = 1e-9

NonNegativeLeastSquares = Callable[[Column, Column], tuple[Column, float]]


class HeldOut(Struct, frozen=True, kw_only=True):
    """Relative error of predictions on steps that no fit saw. Shares, not percent.

    ``mape`` is the mean of |predicted ÷ observed − 1|, ``bias`` the mean of predicted ÷ observed − 1, ``p95`` the
    95 % quantile of the former. All are None where there was no step.
    """

    num_steps: int
    mape: float | None = None
    bias: float | None = None
    p95: float | None = None


class Fit(Struct, frozen=True, kw_only=True):
    """One form fitted to the earlier steps and tested on the later ones, together and by kind of step."""

    step_time: StepTime
    train_mape: float
    held_out: HeldOut
    by_kind: dict[str, HeldOut]

    @property
    def mape(self) -> float:
        """The held-out MAPE over all kinds."""
        assert self.held_out.mape is not None  # a split leaves no empty test
        return self.held_out.mape


def fit_step_times(steps: StepTable, forms: Sequence[StepTimeForm] = FORMS) -> list[Fit]:
    """Every form fitted on the first 70 % of the steps (by time) and tested on the rest.

    Raises:
        ConfigError: scipy is not installed.
        DatasetError: fewer than :data:`MIN_STEPS` steps.
    """
    if len(steps) < MIN_STEPS:
        raise DatasetError(f"holds {len(steps)} steps with requests; at least {MIN_STEPS} are needed")
    num_train = int(TRAIN_SHARE * len(steps))
    return [fit_and_test(form, steps.select(slice(num_train)), steps.select(slice(num_train, None))) for form in forms]


def fit_and_test(form: StepTimeForm, train: StepTable, test: StepTable) -> Fit:
    """One form fitted on ``train`` and tested on ``test``."""
    step_time = fit_form(form, train)
    return Fit(
        step_time=step_time,
        train_mape=held_out(step_time, train).mape or 0.0,
        held_out=held_out(step_time, test),
        by_kind={kind: held_out(step_time, test.select(test.of_kind(kind))) for kind in STEP_KINDS},
    )


def best_fit(fits: Sequence[Fit]) -> Fit:
    """The fit with the smallest held-out MAPE; within 0.05 points the plainer form, which extrapolates better."""
    smallest = min(fit.mape for fit in fits)
    near = [fit for fit in fits if fit.mape <= smallest + _TIE_MAPE]
    return min(near, key=lambda fit: FORMS.index(fit.step_time.form))


def held_out(step_time: StepTime, steps: StepTable) -> HeldOut:
    """The relative error of ``step_time`` on ``steps``."""
    if not len(steps):
        return HeldOut(num_steps=0)
    error = predict_s(step_time, steps) / steps.time_s - 1.0
    return HeldOut(
        num_steps=len(steps),
        mape=float(np.abs(error).mean()),
        bias=float(error.mean()),
        p95=float(np.quantile(np.abs(error), 0.95)),
    )


def fit_form(form: StepTimeForm, steps: StepTable) -> StepTime:
    """The coefficients of one form with the least squared relative error on ``steps``.

    Raises:
        ConfigError: scipy is not installed.
    """
    solve = _solver()
    if form != "knee":
        return step_time_of(form, _fit_weights(solve, form, steps, 0.0)[0])
    knee = _best_knee(solve, steps)
    return step_time_of(form, _fit_weights(solve, form, steps, knee)[0], knee)


def _best_knee(solve: NonNegativeLeastSquares, steps: StepTable) -> float:
    """The knee with the least squared error: a geometric grid over the token counts seen, then ever finer ones."""
    tokens = steps.column("tokens")
    low, high = float(tokens.min()), float(tokens.max())
    grid = np.unique(np.round(np.geomspace(low, high, _NUM_KNEES)))
    while True:
        losses = np.array([_fit_weights(solve, "knee", steps, knee)[1] for knee in grid])
        best = int(np.argmax(losses <= losses.min() * (1.0 + _TIE_LOSS)))
        left, right = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        if max(grid[best] - left, right - grid[best]) <= 1:
            return float(grid[best])
        grid = np.unique(np.round(np.linspace(left, right, _NUM_KNEES)))


def _fit_weights(
    solve: NonNegativeLeastSquares, form: StepTimeForm, steps: StepTable, knee: float
) -> tuple[Column, float]:
    """Coefficients, and the norm of the relative error they leave."""
    relative = design_matrix(form, steps, knee) / steps.time_s[:, None]
    # Columns span ten powers of ten: scaled to one length, none is lost to rounding.
    lengths = np.linalg.norm(relative, axis=0)
    lengths[lengths == 0.0] = 1.0
    system = np.column_stack([relative / lengths, np.ones(len(steps))])
    # The triangle has the same solution as the thousands of rows it stands for.
    triangle = cast("Column", np.linalg.qr(system, mode="r"))
    weights, loss = solve(triangle[:, :-1], triangle[:, -1])
    return weights / lengths, loss


def _solver() -> NonNegativeLeastSquares:
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise ConfigError("fitting needs scipy: pip install 'headway[lab]'") from error
    return cast("NonNegativeLeastSquares", nnls)
