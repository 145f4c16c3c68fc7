"""Predictions: as good as asked, right on average, and blind but through their signal."""

from __future__ import annotations

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.lab.arrivals import poisson
from headway.lab.predictions import PERFECT, TASK_LABEL, PredictorQuality, mean_below
from headway.lab.truth import MODELS, TASKS
from headway.lab.workload import Workload, WorkloadSpec, four_task_workload

NUM = 60_000


def workload(predictor: PredictorQuality, *, seed: int = 1, max_tokens: int = 8192) -> Workload:
    arrival_s = poisson(NUM, 8.0, np.random.default_rng(0))
    return four_task_workload(arrival_s, WorkloadSpec(seed=seed, predictor=predictor, max_tokens=max_tokens))


@pytest.fixture(scope="module")
def default() -> Workload:
    return workload(PredictorQuality())


def within_tasks(w: Workload, column: int) -> list[tuple[np.ndarray, ...]]:
    """True and predicted quality, true and predicted length of each task on one model."""
    columns = (w.true_quality, w.predicted_quality, w.true_output_tokens, w.predicted_output_tokens)
    return [tuple(values[w.task == index, column] for values in columns) for index in range(len(TASKS))]


def r2(true: np.ndarray, predicted: np.ndarray) -> float:
    return 1.0 - float(((true - predicted) ** 2).sum() / ((true - true.mean()) ** 2).sum())


def log_r2(true: np.ndarray, predicted: np.ndarray) -> float:
    return float(np.corrcoef(np.log(true), np.log(predicted))[0, 1] ** 2)


@pytest.mark.parametrize("column", range(3))
def test_quality_is_as_predictable_as_measured(default: Workload, column: int) -> None:
    """Within every task the default predictor explains 5 to 7 % of the variance of quality."""
    for true, predicted, _, _ in within_tasks(default, column):
        assert 0.05 < r2(true, predicted) < 0.07


@pytest.mark.parametrize(("column", "measured"), [(0, 0.10), (1, 0.23), (2, 0.28)])
def test_lengths_are_as_predictable_as_measured(default: Workload, column: int, measured: float) -> None:
    """With loops counted in, log R² within a task averages the measured value on each model."""
    figures = [log_r2(true, predicted) for _, _, true, predicted in within_tasks(default, column)]
    assert np.mean(figures) == pytest.approx(measured, abs=0.02)


@pytest.mark.parametrize("asked", [0.1, 0.5, 0.9])
def test_other_predictors_are_as_good_as_asked(asked: float) -> None:
    """Any R² between 0 and 1 is realised, of quality over all answers and of log length over those that end."""
    w = workload(PredictorQuality(quality_r2=asked, length_log_r2=asked, length="median"))
    for column in range(3):
        for true, predicted, length, predicted_length in within_tasks(w, column):
            assert r2(true, predicted) == pytest.approx(asked, abs=0.07)
            ends = length < 8192
            assert log_r2(length[ends], predicted_length[ends]) == pytest.approx(asked, abs=0.03)


def test_perfect_predictions_are_the_truth() -> None:
    """R² = 1 gives true qualities and lengths, loops too."""
    w = workload(PERFECT)
    assert np.array_equal(w.predicted_quality, w.true_quality)
    assert np.array_equal(w.predicted_output_tokens, w.true_output_tokens)


@pytest.mark.parametrize("max_tokens", [8192, 600])
def test_the_task_label_tells_the_task_means(max_tokens: int) -> None:
    """R² = 0 leaves one value per task and model: its mean quality, and its mean length under max_tokens."""
    w = workload(TASK_LABEL, max_tokens=max_tokens)
    for column, model in enumerate(MODELS):
        for index, (true, predicted, length, predicted_length) in enumerate(within_tasks(w, column)):
            assert set(predicted.tolist()) == {MODELS[model].mean_quality[TASKS[index]]}
            assert true.mean() == pytest.approx(predicted[0], abs=0.01)
            assert len(set(predicted_length.tolist())) == 1
            assert predicted_length[0] == pytest.approx(length.mean(), rel=0.05)


def test_predictions_are_right_on_average(default: Workload) -> None:
    """Where a model is predicted better it is better by as much, and predicted lengths add up to true ones."""
    for column in range(3):
        for true, predicted, length, predicted_length in within_tasks(default, column):
            slope = np.polyfit(predicted, true, 1)[0]
            assert slope == pytest.approx(1.0, abs=0.12)
            assert predicted_length.mean() == pytest.approx(length.mean(), rel=0.05)


def test_differences_between_models_are_calibrated(default: Workload) -> None:
    """A predicted gain of one model over another is the gain to expect, as errors hang together like truths."""
    for index in range(len(TASKS)):
        of_task = default.task == index
        gain = default.predicted_quality[of_task, 2] - default.predicted_quality[of_task, 0]
        true_gain = default.true_quality[of_task, 2] - default.true_quality[of_task, 0]
        assert np.polyfit(gain, true_gain, 1)[0] == pytest.approx(1.0, abs=0.2)


def test_loops_come_as_a_surprise(default: Workload) -> None:
    """Answers that never end are predicted no longer than others of their task."""
    for _, _, length, predicted in within_tasks(default, 0):
        loops = length == 8192
        assert predicted[loops].mean() == pytest.approx(predicted[~loops].mean(), rel=0.12)


def test_a_median_is_exceeded_half_the_time() -> None:
    """Asked for medians, half of the answers that end are longer than predicted."""
    w = workload(PredictorQuality(length="median"))
    for column in range(3):
        for _, _, length, predicted in within_tasks(w, column):
            ends = length < 8192
            assert (length[ends] > predicted[ends]).mean() == pytest.approx(0.5, abs=0.03)


def test_the_cut_mean_is_that_of_draws() -> None:
    """The mean below a limit is what drawing and cutting gives."""
    draws = np.exp(5.0 + 0.7 * np.random.default_rng(0).standard_normal(400_000))
    for limit in (100.0, 300.0, 8192.0):
        formula = mean_below(np.array([5.0]), np.array([0.7]), limit)[0]
        assert formula == pytest.approx(np.minimum(draws, limit).mean(), rel=0.005)


@pytest.mark.parametrize(
    ("options", "key"),
    [({"quality_r2": -0.1}, "quality_r2"), ({"length_log_r2": 1.5}, "length_log_r2"), ({"length": "mode"}, "length")],
)
def test_impossible_predictors_are_refused(options: dict[str, object], key: str) -> None:
    """A share of variance outside 0 to 1, or an unknown kind of length, names its key."""
    with pytest.raises(ConfigError, match=f"predictor.{key}"):
        PredictorQuality(**options)  # type: ignore[arg-type]
