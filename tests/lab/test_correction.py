"""Observed against replayed times in simulated runs: a wrong clock is corrected, a right one is left alone."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from headway.estimate.registry import make_estimator
from headway.lab.arrivals import poisson
from headway.lab.metrics import Outcomes
from headway.lab.pool import LabInstance, Pool, qwen3_pool
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.lab.workload import WorkloadSpec, four_task_workload
from headway.policy.registry import make_policy


def with_step_times_scaled(pool: Pool, factor: float) -> Pool:
    """What estimators believe a step takes, times ``factor``; the engines are as they were."""
    instances = []
    for one in pool.instances:
        step_time = one.instance.step_time
        assert step_time is not None
        scaled = replace(step_time, coefficients=tuple(value * factor for value in step_time.coefficients))
        instances.append(LabInstance(instance=replace(one.instance, step_time=scaled), truth=one.truth))
    return replace(pool, instances=tuple(instances))


def mean_error(outcomes: Outcomes) -> float:
    seen = np.isfinite(outcomes.predicted_ttft_s) & np.isfinite(outcomes.ttft_s)
    return float(np.abs(outcomes.predicted_ttft_s[seen] / outcomes.ttft_s[seen] - 1).mean())


def run(factor: float, *, correcting: bool, seed: int = 21) -> Outcomes:
    pool = with_step_times_scaled(qwen3_pool(), factor)
    workload = four_task_workload(
        poisson(1500, 7.0, stream(seed, "arrivals")), WorkloadSpec(seed=seed, models=pool.models)
    )
    policy = make_policy("bear", rng=stream(seed, "policy"))
    return simulate(workload, pool, policy=policy, estimator=make_estimator("replay"), seed=seed, correcting=correcting)


@pytest.mark.parametrize("factor", [1 / 1.3, 1.3])
def test_a_wrong_clock_costs_less_than_half_its_error_with_correction(factor: float) -> None:
    """Step times 1.3 times too short or too long: the mean error falls by more than half, the start included."""
    assert mean_error(run(factor, correcting=True)) < 0.5 * mean_error(run(factor, correcting=False))


def test_a_right_clock_is_left_alone() -> None:
    """With the fitted profiles the mean error is no worse for being corrected, to a thousandth."""
    assert mean_error(run(1.0, correcting=True)) < mean_error(run(1.0, correcting=False)) + 0.001
