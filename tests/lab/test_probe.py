"""All estimators asked at once: the router is answered as without the others, and a refitted throughput is the best."""

from __future__ import annotations

import numpy as np
import pytest

from headway.estimate.registry import ESTIMATORS, make_estimator
from headway.lab.acceptance.units import Play, pool_of, workload_of
from headway.lab.probe import Throughput, mape, probe, refit
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.policy.registry import make_policy

UNIT = Play(policy="bear", rate_per_s=8.0, seed=12, num_queries=300)


def test_asking_all_changes_no_decision() -> None:
    """Each instance answers the same queries in the same times as when only the replay is asked."""
    work, pool = workload_of(UNIT), pool_of()
    probed = probe(work, pool, policy=make_policy("bear", rng=stream(1, "policy")), seed=4)
    plain = simulate(
        work, pool, policy=make_policy("bear", rng=stream(1, "policy")), estimator=make_estimator("replay"), seed=4
    )
    for index, name in enumerate(pool.ids):
        here = plain.chosen == index
        assert (probed.ttft_s[name] == plain.ttft_s[here]).all()
        assert (probed.predicted_s[name]["replay"] == plain.predicted_ttft_s[here]).all()
        assert set(probed.predicted_s[name]) == set(ESTIMATORS)
    assert probed.estimate_s > 0.0


def test_a_refitted_throughput_is_the_best_there_is() -> None:
    """No other constant within a factor of two has a smaller error on the run that it was fitted to."""
    work, pool = workload_of(UNIT), pool_of()
    probed = probe(work, pool, policy=make_policy("bear", rng=stream(1, "policy")), seed=4)
    for name, fit in refit(probed, pool).items():
        tokens, observed_s = probed.backlog_tokens[name], probed.ttft_s[name]
        best = mape(fit.predict_s(tokens), observed_s)
        assert best is not None
        for factor in np.linspace(0.5, 2.0, 31):
            other = Throughput(tokens_per_s=fit.tokens_per_s * factor, constant_s=fit.constant_s)
            error = mape(other.predict_s(tokens), observed_s)
            assert error is not None
            assert error >= best - 1e-12


def test_the_error_of_nothing_is_no_error() -> None:
    """Predictions without a bound are left out; where nothing is left there is no figure."""
    assert mape(np.array([np.inf]), np.array([1.0])) is None
    assert mape(np.array([np.inf, 1.1]), np.array([1.0, 1.0])) == pytest.approx(0.1)
