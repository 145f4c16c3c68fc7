"""The rewards of the online linear program: each term as the formula says, and weights that cannot be meant."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.policy.bid_objective import Objective


def rewards(objective: Objective, duration: int, waited: float, **more: object) -> float:
    found = objective.rewards(
        np.array([[duration]]),
        np.array([[waited]]),
        reward_periods=100,
        period_s=0.1,
        **more,  # type: ignore[arg-type]
    )
    return float(found[0, 0])


ONLY = {"beta": 0.0, "gamma": 0.0}


@pytest.mark.parametrize(
    ("weights", "duration", "waited", "expected"),
    [
        ({"alpha": 2.0}, 30, 0, 0.3),  # min(ô, R)/R
        ({"alpha": 2.0}, 300, 0, 1.0),
        ({"beta": 3.0, "gamma": 0.0}, 30, 0, 0.7),  # (R − ô)₊/R
        ({"beta": 3.0, "gamma": 0.0}, 300, 0, 0.0),
        ({"gamma": 5.0}, 30, 0, 1.0),
        ({"sigma": 0.1}, 30, 0, 1.0),
        ({"zeta1": 1.0, "latency_slo_s": 5.0}, 30, 19, 1.0),  # waited + ô < 50 periods
        ({"zeta1": 1.0, "latency_slo_s": 5.0}, 30, 20, 0.0),
        ({"zeta2": 1.0, "wait_slo_s": 2.0}, 30, 19, 1.0),  # waited < 20 periods
        ({"zeta2": 1.0, "wait_slo_s": 2.0}, 30, 20, 0.0),
        ({"beta": 1.0, "gamma": 1.0, "zeta1": 1.0, "zeta2": 1.0}, 50, 1e9, (0.5 + 1.0) / 4),
    ],
)
def test_each_term_is_the_formula(weights: dict[str, float], duration: int, waited: float, expected: float) -> None:
    """A reward is the weighted mean of its terms, each between 0 and 1."""
    assert rewards(Objective(**{**ONLY, **weights}), duration, waited) == pytest.approx(expected)


def test_quality_is_clipped_and_a_request_may_bring_its_own_wait() -> None:
    """Values beyond [0, 1] count as the nearer bound; a request's own threshold stands in for the objective's."""
    objective = Objective(beta=0.0, gamma=0.0, quality=1.0)
    found = objective.rewards(
        np.array([[5]]), 0.0, reward_periods=100, period_s=0.1, values=np.array([[0.3, -2.0, 1.7]])
    )
    assert found.tolist() == [[0.3, 0.0, 1.0]]
    late = Objective(beta=0.0, gamma=0.0, zeta2=1.0, wait_slo_s=100.0)
    assert rewards(late, 5, 20, wait_slo_s=np.array([[2.0]])) == 0.0


def test_the_default_objective_prefers_short_answers_and_spreads() -> None:
    """With (0, 1, 1, 0, 0, 0) rewards fall with length and take up half of [0, 1]: nothing is clipped together."""
    found = Objective().rewards(np.arange(1, 101)[:, None], 0.0, reward_periods=100, period_s=0.03)
    assert (np.diff(found[:, 0]) < 0).all()
    assert (found[0, 0], found[-1, 0]) == (pytest.approx(0.995), pytest.approx(0.5))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"alpha": -1.0}, "routing.alpha"),
        ({"zeta1": math.nan}, "routing.zeta1"),
        ({"beta": math.inf}, "routing.beta"),
        ({"beta": 0.0, "gamma": 0.0}, "routing.alpha"),
        ({"quality": True}, "routing.quality"),
        ({"wait_slo_s": 0.0}, "routing.wait_slo_s"),
        ({"latency_slo_s": math.nan}, "routing.latency_slo_s"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(fields: dict[str, float], key: str) -> None:
    """Negative weights, numbers that are none, no weight at all and impossible thresholds name their key."""
    with pytest.raises(ConfigError) as caught:
        Objective(**fields)
    assert caught.value.key == key
