"""Intervals over seeds, against tables and by simulation; the area under a curve."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headway.lab.intervals import (
    area_under,
    bootstrap_interval,
    paired_gain,
    paired_interval,
    student_quantile,
    t_interval,
)


@pytest.mark.parametrize(
    ("confidence", "degrees", "t"),
    [(0.95, 1, 12.706), (0.95, 4, 2.776), (0.95, 9, 2.262), (0.99, 4, 4.604), (0.95, 200, 1.972)],
)
def test_students_quantiles_are_those_of_tables(confidence: float, degrees: int, t: float) -> None:
    """Two-sided quantiles agree with any printed table."""
    assert student_quantile(confidence, degrees) == pytest.approx(t, abs=6e-4)


def test_an_interval_by_hand() -> None:
    """Mean 3, standard deviation √2.5 over five runs: 3 ± 2.776·√.5."""
    interval = t_interval([1, 2, 3, 4, 5])
    assert interval.value == 3.0
    assert interval.low == pytest.approx(3 - 2.7764 * 0.5**0.5, abs=1e-3)
    assert interval.high == pytest.approx(3 + 2.7764 * 0.5**0.5, abs=1e-3)


def test_pairs_cancel_what_seeds_have_in_common() -> None:
    """A constant gain over seeds that vary widely has an interval of no width."""
    ours, theirs = [1.5, 9.5, 4.5], [1.0, 9.0, 4.0]
    difference = paired_interval(ours, theirs)
    assert (difference.value, difference.low, difference.high) == pytest.approx((0.5, 0.5, 0.5))
    gain = paired_gain([2.0, 18.0, 8.0], theirs)
    assert (gain.value, gain.low, gain.high) == pytest.approx((1.0, 1.0, 1.0))


def test_intervals_cover_the_truth_as_often_as_stated() -> None:
    """Of 400 experiments with five seeds about 95 % have the true gain inside."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        seeds = rng.normal(0.4, 0.03, 5)
        gain = paired_gain((1.25 * seeds + rng.normal(0, 0.01, 5)).tolist(), seeds.tolist())
        assert gain.low is not None
        assert gain.high is not None
        inside += gain.low <= 0.25 <= gain.high
    assert inside / 400 == pytest.approx(0.95, abs=0.03)


def test_the_bootstrap_is_seeded_and_agrees_on_many_runs() -> None:
    """One seed one interval; with many runs it is Student's."""
    values = np.random.default_rng(1).normal(2.0, 1.0, 80).tolist()
    first, again = (bootstrap_interval(values, np.random.default_rng(3)) for _ in range(2))
    assert first == again
    student = t_interval(values)
    assert first.low == pytest.approx(student.low, abs=0.03)
    assert first.high == pytest.approx(student.high, abs=0.03)


def test_a_single_run_has_no_interval() -> None:
    """One seed gives a value and nothing that looks like certainty."""
    for interval in (
        t_interval([2.0]),
        paired_interval([2.0], [0.0]),
        bootstrap_interval([2.0], np.random.default_rng(0)),
    ):
        assert (interval.value, interval.low, interval.high) == (2.0, None, None)


def test_the_area_is_that_of_trapezoids() -> None:
    """Uneven rates weigh by their distance."""
    assert area_under([3, 4, 6], [1.0, 3.0, 1.0]) == pytest.approx(2.0 + 4.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t_interval([]), "at least one"),
        (lambda: t_interval([float("nan")]), "finite"),
        (lambda: paired_interval([1.0, 2.0], [1.0]), "2 values"),
        (lambda: paired_gain([1.0], [0.0]), "no meaning"),
        (lambda: area_under([3.0], [1.0]), "two rising"),
        (lambda: area_under([3.0, 3.0], [1.0, 1.0]), "two rising"),
    ],
)
def test_what_cannot_be_compared_is_refused(call: Callable[[], object], message: str) -> None:
    """No runs, unlike numbers of seeds, NaN, falling rates, or a gain over nothing."""
    with pytest.raises(ValueError, match=message):
        call()
