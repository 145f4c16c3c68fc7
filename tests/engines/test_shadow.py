"""A shadow beside the engine it stands for: equal to snapshots where nothing is hidden, close to them where much is."""

from __future__ import annotations

import numpy as np
import pytest

from four_task_mix import NAMES
from shadow_runs import ShadowRun


def on_the_way(rng: np.random.Generator) -> float:
    """Half a millisecond, and exponentially often another one."""
    return float(0.0005 + rng.exponential(0.001))


@pytest.mark.parametrize("name", NAMES)
def test_with_an_exact_clock_and_nothing_late_a_shadow_is_the_snapshot(name: str) -> None:
    """The same estimates to a millionth for all queries but at most one in a hundred, and these to two hundredths.

    (A request that ends at its last allowed token leaves the replay's count of its last batch a moment too early.)
    """
    run = ShadowRun(name, num_queries=300, exact=True)
    run.run()
    apart = np.abs(run.by_shadow / run.by_snapshots - 1)
    assert np.quantile(apart, 0.99) < 1e-6
    assert apart.max() < 0.02


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_on_a_noisy_engine_a_shadow_errs_about_as_much_as_snapshots(late: bool, seed: int) -> None:
    """Noise, stalls, host gaps, and what is on its way: the mean error stays within 1.3 times that with snapshots."""
    run = ShadowRun(seed=seed, delay_s=on_the_way) if late else ShadowRun(seed=seed)
    run.run()
    by_shadow, by_snapshots = run.errors(run.by_shadow), run.errors(run.by_snapshots)
    assert len(by_shadow) == 400
    assert by_shadow.mean() < 1.3 * by_snapshots.mean()
    assert np.median(by_shadow) < 1.2 * np.median(by_snapshots)


@pytest.mark.parametrize("factor", [0.77, 1.3])
def test_errors_of_a_wrong_clock_do_not_add_up(factor: float) -> None:
    """A profile 1.3 times off makes estimates about as wrong, in the last hundred queries no more than in the first."""
    run = ShadowRun(clock_factor=factor)
    run.run()
    ratios = run.observed / run.by_shadow
    assert np.median(ratios) == pytest.approx(factor, rel=0.1)
    first, last = np.abs(np.log(ratios[:100])).mean(), np.abs(np.log(ratios[-100:])).mean()
    assert last < 1.5 * first
    assert run.errors(run.by_shadow).mean() < 1.5 * run.errors(run.by_snapshots).mean()


def test_cancelled_requests_leave_the_shadow() -> None:
    """With a third of all answers broken off by the client the error is that of snapshots, and nothing stays behind."""
    run = ShadowRun(cancelled_share=0.33, delay_s=on_the_way)
    run.run()
    assert run.errors(run.by_shadow).mean() < 1.3 * run.errors(run.by_snapshots).mean()
    view = run.shadowed.views[0]
    run.shadowed.age(run.now_s + 1.0)
    assert (view.num_outstanding, len(view.ledger), len(view.unanswered)) == (0, 0, 0)
    assert view.engine is not None
    assert (view.engine.num_running, view.engine.num_waiting) == (0, 0)
