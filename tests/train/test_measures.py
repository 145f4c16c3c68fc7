"""What the figures of a model card credit, on small matrices whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from headway.train.measures import (
    Resamples,
    auc,
    calibration_error,
    coverage,
    pinball_loss,
    r2,
    r2_apart,
    r2_shared,
    rank_correlation,
)

RNG = np.random.default_rng(11)
HARD, APART = RNG.normal(size=(200, 1)), RNG.normal(size=(200, 3))
LEVELS = np.array([0.0, 3.0, -2.0])
#: Three models of different levels; how hard prompts are for all, and for whom.
ACTUAL = LEVELS + 2.0 * HARD + APART
MEANS = ACTUAL.mean(axis=0)


def test_telling_models_apart_earns_nothing() -> None:
    """Each model's own mean, which explains most of the variance over all rows, scores 0 in every measure."""
    said = np.broadcast_to(MEANS, ACTUAL.shape)
    assert [measure(ACTUAL, said) for measure in (r2, r2_shared, r2_apart)] == pytest.approx([0.0, 0.0, 0.0])
    assert rank_correlation(ACTUAL, said) == 0.0
    assert auc(ACTUAL, said) == pytest.approx(0.5)


def test_how_hard_for_all_and_how_hard_for_whom_are_told_apart() -> None:
    """Whoever knows one of both scores 1 in it and 0 in the other, and all in all something between."""
    beyond = ACTUAL - MEANS
    for_all = MEANS + np.broadcast_to(beyond.mean(axis=1, keepdims=True), ACTUAL.shape)
    for_whom = ACTUAL - for_all + MEANS
    assert (r2_shared(ACTUAL, for_all), r2_apart(ACTUAL, for_all)) == pytest.approx((1.0, 0.0))
    assert (r2_shared(ACTUAL, for_whom), r2_apart(ACTUAL, for_whom)) == pytest.approx((0.0, 1.0))
    assert r2(ACTUAL, for_all) + r2(ACTUAL, for_whom) == pytest.approx(1.0)
    assert np.isnan(r2_apart(ACTUAL[:, :1], for_all[:, :1]))  # of one model there is nothing to tell apart


def test_unknown_outcomes_count_for_nothing() -> None:
    """What is said of them changes no figure."""
    holes = np.where(RNG.random(ACTUAL.shape) < 0.3, np.nan, ACTUAL)
    said = ACTUAL + RNG.normal(size=ACTUAL.shape)
    wild = np.where(np.isnan(holes), 1e6, said)
    for measure in (r2, r2_shared, r2_apart, auc, rank_correlation, calibration_error, coverage, pinball_loss):
        assert measure(holes, wild) == measure(holes, said)


def test_the_pinball_loss_is_least_at_the_quantile_and_coverage_says_how_much_it_covers() -> None:
    """Of the numbers 1 to 100, 90."""
    actual = np.arange(1.0, 101.0)[:, None]
    losses = [pinball_loss(actual, np.full_like(actual, value)) for value in range(1, 101)]
    assert int(np.argmin(losses)) + 1 in (90, 91)
    assert coverage(actual, np.full_like(actual, 90.0)) == 0.9


def test_resamples_keep_alike_prompts_together() -> None:
    """A group is drawn whole, as often as it is drawn; another seed draws otherwise."""
    group = np.array([0, 0, 0, 1, 2, 2])
    counts = Resamples(group, 50, seed=1).counts(len(group))
    assert (counts[:, 0] == counts[:, 1]).all()
    assert (counts[:, 1] == counts[:, 2]).all()
    assert (counts[:, 4] == counts[:, 5]).all()
    assert (counts[:, [0, 3, 4]].sum(axis=1) == 3).all()
    assert (counts != Resamples(group, 50, seed=2).counts(len(group))).any()
