"""Routing on engines that show nothing: what their streams tell is nearly as good as their state."""

from __future__ import annotations

import numpy as np

from headway.estimate.registry import make_estimator
from headway.lab.arrivals import poisson
from headway.lab.metrics import Score, score
from headway.lab.pool import qwen3_pool
from headway.lab.simulate import Sight, simulate
from headway.lab.truth import stream
from headway.lab.workload import WorkloadSpec, four_task_workload
from headway.policy.registry import make_policy


def played(sight: Sight, seed: int = 23) -> tuple[Score, float]:
    """Score and mean TTFT error of 700 queries at 7 per second."""
    pool = qwen3_pool()
    arrival_s = poisson(700, 7.0, stream(seed, "arrivals"))
    workload = four_task_workload(arrival_s, WorkloadSpec(seed=seed, models=pool.models))
    policy = make_policy("bear", rng=stream(seed, "policy"))
    outcomes = simulate(workload, pool, policy=policy, estimator=make_estimator("replay"), seed=seed, sight=sight)
    errors = np.abs(outcomes.predicted_ttft_s / outcomes.ttft_s - 1)
    return score(workload, pool, outcomes), float(errors[np.isfinite(errors)].mean())


def test_shadows_cost_little_against_the_engines_own_state() -> None:
    """The same queries on shadows: within 2 % of the on-time utility, the mean error within 1.3 times."""
    (shown, shown_error), (shadowed, shadowed_error) = played(Sight()), played(Sight(shadow=True))
    assert shadowed.on_time_utility > 0.98 * shown.on_time_utility
    assert shadowed_error < 1.3 * shown_error
