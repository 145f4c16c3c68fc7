"""Limited processor sharing: the formula against the exact sum and against events, where both are known."""

from __future__ import annotations

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.estimate.queueing import lps_wait_s
from headway.lab.lps import Service, exact_wait, simulated_wait


@pytest.mark.parametrize("concurrency", [1, 5, 25])
@pytest.mark.parametrize("rho", [0.3, 0.9, 0.99])
def test_the_formula_is_the_stationary_sum(rho: float, concurrency: int) -> None:
    """For exponential service the closed form equals the sum over the stationary distribution."""
    assert lps_wait_s(rho, 1.0, concurrency) == pytest.approx(exact_wait(rho, concurrency), rel=1e-9)


def test_events_agree_with_the_formula() -> None:
    """A simulation that knows no formula finds its mean wait, within four standard errors."""
    found = simulated_wait(0.8, 3, np.random.default_rng(5), num_steps=2_000, num_queues=400)
    assert found.low is not None
    assert found.high is not None
    error = (found.high - found.low) / (2 * 1.96)
    assert abs(found.value - lps_wait_s(0.8, 1.0, 3)) < 4 * error
    assert error < 0.02 * found.value


def test_one_at_a_time_is_pollaczek_and_khinchine() -> None:
    """With k = 1 and any service the mean wait is ρ·E[S²]/2(1 − ρ), and there the variability factor is exact."""
    service = Service(long_share=0.1, long_mean=5.0)
    expected = 0.5 * service.second_moment / (2 * 0.5)
    assert lps_wait_s(0.5, 1.0, 1, service.second_moment / 2) == pytest.approx(expected)
    found = simulated_wait(0.5, 1, np.random.default_rng(6), num_steps=2_000, num_queues=400, service=service)
    assert found.value == pytest.approx(expected, rel=0.05)


def test_service_has_mean_one() -> None:
    """Both kinds of request together ask for one unit of service on average."""
    service = Service(long_share=0.1, long_mean=5.0)
    assert service.draw(np.random.default_rng(1), 400_000).mean() == pytest.approx(1.0, rel=0.02)
    assert Service().second_moment == 2.0


@pytest.mark.parametrize(("rho", "concurrency"), [(1.0, 5), (-0.1, 5), (0.5, 0)])
def test_impossible_queues_are_refused(rho: float, concurrency: int) -> None:
    """An overloaded queue has no mean wait, and at least one request is served at a time."""
    with pytest.raises(ConfigError):
        exact_wait(rho, concurrency)
