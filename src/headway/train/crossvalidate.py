"""Predictions of every prompt by predictors that saw neither it nor one like it, over grouped folds.

The learned predictor and its rivals go through the same folds. Calibration of a fold is fitted on the raw outputs of
the other folds, so no prompt's own outcome touches what is said of it but through a monotone map that others share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import DatasetError
from headway.train.calibration import Calibration, calibrate
from headway.train.fit import MIN_ROWS, fit
from headway.train.folds import grouped_folds
from headway.train.heads import Objective
from headway.train.material import Material
from headway.train.rivals import RIVALS, Predicted, Rival, rivals
from headway.train.settings import Settings
from headway.train.table import Floats


class CrossValidation(Struct, frozen=True, eq=False):
    """``learned`` and each rival's word on all prompts; ``raw`` outputs of the heads, to calibrate the final predictor
    with; ``fold`` (P,) says in which each prompt was tested; ``label_accuracy`` is how often the task label that the
    text looks like is the true one."""

    learned: Predicted
    rivals: dict[Rival, Predicted]
    raw: dict[Objective, Floats]
    fold: NDArray[np.intp]
    label_accuracy: float


def cross_validate(
    material: Material,
    texts: Sequence[str],
    settings: Settings,
    *,
    on_fold: Callable[[int, int], None] = lambda number, num_folds: None,
) -> CrossValidation:
    """Over the folds of ``settings.seed``; ``on_fold`` hears of each before it starts.

    Raises:
        DatasetError: fewer unlike prompts than folds, or too few answers to grow trees on.
    """
    shape = material.quality.shape
    folds = grouped_folds(material.group, settings.folds_for(shape[0]), settings.seed)
    raw: dict[Objective, Floats] = {}
    found = {name: Predicted.unknown(shape) for name in RIVALS}
    fold_of, hits = np.empty(shape[0], np.intp), 0
    for number, test in enumerate(folds):
        on_fold(number, len(folds))
        fold_of[test] = number
        held = np.zeros(shape[0], np.bool_)
        held[test] = True
        train, asked = material.take(np.flatnonzero(~held)), material.take(test)
        fitted = fit(train, settings)
        for head, values in fitted.outputs(asked.features).items():
            raw.setdefault(head, np.full(shape, np.nan))[test] = values
        words = ([texts[i] for i in np.flatnonzero(~held).tolist()], [texts[i] for i in test.tolist()])
        for name, said in rivals(train, asked, fitted, texts=words, settings=settings).items():
            found[name].put(test, said)
        hits += int((fitted.linear.scores(asked.features).labels.argmax(axis=1) == asked.label).sum())
    raw = {head: values for head, values in raw.items() if not np.isnan(values).any()}  # grown in every fold
    if not raw:
        raise DatasetError(f"hold too few answers: without a fold, at least {MIN_ROWS} of them must remain to train on")
    learned = Predicted.unknown(shape)
    for number, test in enumerate(folds):
        others = fold_of != number
        calibration = calibrate(
            {head: values[others] for head, values in raw.items()},
            material.quality[others],
            material.log_tokens[others],
            fold_of[others],
        )
        learned.put(test, calibrated({head: values[test] for head, values in raw.items()}, calibration))
    return CrossValidation(learned, found, raw, fold_of, hits / shape[0])


def calibrated(raw: dict[Objective, Floats], calibration: Calibration) -> Predicted:
    """Raw outputs of heads, (P, M) each, as serving calibrates them; NaN for a head that is missing."""
    shape = next(iter(raw.values())).shape
    said = Predicted.unknown((shape[0], shape[1]))
    if calibration.quality is not None:
        said.quality[:] = np.clip(calibration.quality.apply(raw["huber"]), 0.0, 1.0)
    if calibration.mean_scale is not None:
        said.mean_tokens[:] = np.maximum(1.0, calibration.mean_scale * np.exp(raw["mean"]) - 1.0)
    for name, shift in (("p50", calibration.p50_shift), ("p90", calibration.p90_shift)):
        if shift is not None:
            head: Objective = "p50" if name == "p50" else "p90"
            tokens = np.exp(raw[head] + shift) - 1.0
            getattr(said, f"{name}_tokens")[:] = np.maximum(1.0, np.ceil(tokens) if name == "p90" else tokens)
    return said
