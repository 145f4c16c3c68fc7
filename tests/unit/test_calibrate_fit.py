"""Fitting step times: what a fit recovers, what it does not depend on, how it is tested and chosen."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway._core import batch_time_s
from headway.calibrate.fit import FORMS, best_fit, fit_and_test, fit_form, fit_step_times, held_out
from headway.calibrate.step_table import StepTable, feature_matrix, predict_s
from headway.engines.step_log import batch_features
from headway.errors import ConfigError, DatasetError
from headway.types import StepTime, StepTimeForm
from step_tables import random_batch, random_steps

SEEDS = st.integers(0, 2**32 - 1)

# Orders of magnitude of real engines, so that every term matters somewhere.
LINEAR = StepTime.linear(b0=7e-3, b1=2e-5, b2=5e-8, b3=1e-9, b_seq=4e-6)
KNEE = StepTime.knee(b0=7e-3, b1_below=1e-5, b1_above=3e-5, knee=300, b2=5e-8, b3=1e-9, b_seq=4e-6)
SIX_TERM = StepTime.six_term(b0=7e-3, bp=2e-5, bpp=5e-10, bd=3e-5, bs=5e-8, bss=3e-13)
TRUE = {"linear": LINEAR, "knee": KNEE, "six_term": SIX_TERM}


def drawn(form: StepTimeForm, rng: np.random.Generator) -> StepTime:
    """A step time of that form, each coefficient within a factor of four of the usual, a knee where batches lie."""
    values = np.array(TRUE[form].coefficients) * np.exp(rng.uniform(-1.4, 1.4, len(TRUE[form].coefficients)))
    if form == "knee":
        values[2] = values[1] * rng.uniform(1.5, 4.0)
        values[3] = rng.integers(50, 2000)
    return StepTime(form, tuple(values.tolist()))


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_predictions_are_those_of_the_core(seed: int) -> None:
    """A step time means the same to a fit as to the replay, for every form and batch."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng)
    table = StepTable(np.zeros(1), np.zeros(1), feature_matrix([batch_features(batch)]))
    for form in FORMS:
        step_time = drawn(form, rng)
        assert predict_s(step_time, table)[0] == pytest.approx(batch_time_s(step_time, batch), rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_a_fit_recovers_the_coefficients_of_its_own_form(form: StepTimeForm, seed: int) -> None:
    """From times without noise a fit gets back every coefficient, the knee included."""
    true = drawn(form, np.random.default_rng(seed))
    fitted = fit_form(form, random_steps(true, 400, seed))
    assert fitted.named() == pytest.approx(true.named(), rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
@given(SEEDS, st.floats(-12, 12))
@example(131071, 1.0)  # two knees do equally well but for rounding
@settings(max_examples=15, deadline=None)
def test_a_fit_does_not_depend_on_the_unit_of_time(form: StepTimeForm, seed: int, exponent: float) -> None:
    """Times multiplied by a number give the same errors, and coefficients multiplied by it."""
    steps = random_steps(SIX_TERM, 200, seed, noise=0.05)
    factor = 10.0**exponent
    scaled = StepTable(steps.start_s * factor, steps.time_s * factor, steps.features)
    plain, other = fit_step_times(steps, [form])[0], fit_step_times(scaled, [form])[0]
    assert other.mape == pytest.approx(plain.mape, rel=1e-6)
    expected = predict_s(plain.step_time, steps) * factor
    assert predict_s(other.step_time, steps) == pytest.approx(expected, rel=1e-6)


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_no_coefficient_is_negative(seed: int) -> None:
    """Times that have nothing to do with the batches still give no work that saves time."""
    rng = np.random.default_rng(seed)
    steps = random_steps(LINEAR, 150, seed)
    noise = StepTable(steps.start_s, rng.exponential(0.01, 150) + 1e-6, steps.features)
    for form in FORMS:
        assert min(fit_form(form, noise).coefficients) >= 0.0


def test_noise_does_not_bend_a_fit() -> None:
    """At 3 % noise the held-out error is that of the noise, and predictions meet the clock without it to 2 %."""
    steps = random_steps(KNEE, 4000, seed=3, noise=0.03)
    fit = fit_step_times(steps, ["knee"])[0]
    assert fit.mape == pytest.approx(0.03 * (2 / np.pi) ** 0.5, rel=0.1)
    assert np.abs(predict_s(fit.step_time, steps) / predict_s(KNEE, steps) - 1).max() < 0.02


def test_the_earlier_steps_train_and_the_later_ones_test() -> None:
    """A clock that slows down after 70 % of the log shows in the held-out error alone, with its sign."""
    steps = random_steps(LINEAR, 1000, seed=1)
    time_s = steps.time_s.copy()
    time_s[700:] *= 2.0
    fit = fit_step_times(StepTable(steps.start_s, time_s, steps.features), ["linear"])[0]
    assert fit.train_mape == pytest.approx(0.0, abs=1e-9)
    assert fit.held_out.num_steps == 300
    assert fit.mape == pytest.approx(0.5)
    assert fit.held_out.bias == pytest.approx(-0.5)
    assert fit.held_out.p95 == pytest.approx(0.5)


def test_errors_are_told_apart_by_kind_of_step() -> None:
    """Every held-out step is a decode, prefill or mixed one, and a fault of one kind stays there."""
    steps = random_steps(LINEAR, 1000, seed=2)
    time_s = np.where(steps.of_kind("prefill"), steps.time_s * 1.25, steps.time_s)
    slow = StepTable(steps.start_s, time_s, steps.features)
    by_kind = {kind: held_out(LINEAR, slow.select(slow.of_kind(kind))) for kind in ("decode", "prefill", "mixed")}
    assert sum(held.num_steps for held in by_kind.values()) == 1000
    assert by_kind["prefill"].mape == pytest.approx(0.2)
    assert by_kind["decode"].mape == pytest.approx(0.0, abs=1e-12)
    assert by_kind["mixed"].mape == pytest.approx(0.0, abs=1e-12)
    assert held_out(LINEAR, slow.select(slice(0))).mape is None


@pytest.mark.parametrize(("true", "chosen"), [(LINEAR, "linear"), (KNEE, "knee"), (SIX_TERM, "six_term")])
def test_the_form_of_the_clock_is_chosen(true: StepTime, chosen: str) -> None:
    """Of three fits the one of the clock's own form wins; a richer one that only ties does not."""
    fits = fit_step_times(random_steps(true, 3000, seed=4, noise=0.01))
    assert best_fit(fits).step_time.form == chosen


def test_a_stall_costs_one_step_and_no_more() -> None:
    """A few steps a hundred times too long leave the fit within 2 % of the clock."""
    steps = random_steps(LINEAR, 1000, seed=5)
    time_s = steps.time_s.copy()
    time_s[::97] *= 100.0
    fitted = fit_form("linear", StepTable(steps.start_s, time_s, steps.features))
    assert np.abs(predict_s(fitted, steps) / steps.time_s - 1).max() < 0.02


def test_batches_of_one_size_can_be_fitted() -> None:
    """Where every batch is alike nothing tells the terms apart, and the prediction is right all the same."""
    features = feature_matrix([batch_features([(1, 500, True)])] * 200)
    steps = StepTable(np.arange(200.0), np.full(200, 0.01), features)
    for fit in fit_step_times(steps):
        assert fit.mape == pytest.approx(0.0, abs=1e-9)


def test_fitting_and_testing_on_given_steps() -> None:
    """Training and test steps can be given apart."""
    fit = fit_and_test("linear", random_steps(LINEAR, 200, seed=6), random_steps(LINEAR, 50, seed=7))
    assert fit.held_out.num_steps == 50
    assert fit.mape == pytest.approx(0.0, abs=1e-9)


def test_a_short_log_is_refused() -> None:
    """Too few steps say how many are needed."""
    with pytest.raises(DatasetError, match="holds 99 steps with requests; at least 100 are needed"):
        fit_step_times(random_steps(LINEAR, 99, seed=1))


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has not installed scipy is told which extra brings it."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match=r"headway\[lab\]"):
        fit_form("linear", random_steps(LINEAR, 100, seed=1))
