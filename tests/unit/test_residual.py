"""The residual gate: a wrong clock is found out, a noisy one is not, and trust comes back."""

from __future__ import annotations

import pytest

from headway.estimate.residual import ResidualGate
from headway.types import Outcome
from pools import FAST, SLOW, choice, instance, pool, query


def outcome(name: str, instance_id: str, ttft_s: float) -> Outcome:
    return Outcome(query_id=name, instance_id=instance_id, status="ok", ttft_s=ttft_s, total_s=ttft_s)


@pytest.mark.parametrize("factor", [107.0, 1 / 107])
def test_a_clock_that_is_wrong_by_a_factor_loses_trust(factor: float) -> None:
    """Step times inflated or deflated a hundredfold are found out within a few answers."""
    gate = ResidualGate()
    stands = [gate.observe("a", factor * 0.3, 0.3) for _ in range(8)]
    assert [one.trusted for one in stands] == [True] * 7 + [False]
    assert stands[-1].ratio == pytest.approx(1 / factor)


def test_some_stalls_condemn_nobody() -> None:
    """A third of the answers ten times late leaves the median where it is."""
    gate = ResidualGate()
    assert all(gate.observe("a", 0.2, 2.0 if number % 3 == 0 else 0.21).trusted for number in range(60))


def test_short_times_say_nothing_of_the_clock() -> None:
    """Where both are a few milliseconds the network decides, and no pair is counted."""
    gate = ResidualGate()
    assert gate.observe("a", 0.003, 0.03).num_pairs == 0
    assert gate.observe("a", float("inf"), 0.3).num_pairs == 0


def test_trust_comes_back_with_right_predictions() -> None:
    """After the profile was mended the window fills with good pairs and the instance is trusted again."""
    gate = ResidualGate()
    for _ in range(32):
        gate.observe("a", 30.0, 0.3)
    assert not gate.residual("a").trusted
    for _ in range(32):
        gate.observe("a", 0.3, 0.3)
    assert gate.residual("a").trusted
    assert gate.residual("b").trusted


def test_the_router_closes_the_loop_from_outcome_to_fallback() -> None:
    """Answers far sooner than predicted take an instance out of the least-work rule, and right ones bring it back."""
    router = pool(instance("a", step_time=FAST), instance("b", step_time=SLOW))
    view = router.fleet.views[0]
    for number in range(40):
        name = f"q{number}"
        chosen = choice(router.decide(query(name=name), 0.0))
        router.fleet.book(
            request_id=name,
            instance_id="a",
            prompt_tokens=1000,
            predicted_output_tokens=100.0,
            max_tokens=None,
            priority=0,
            now=0.0,
            predicted_ttft_s=50.0 if number < 8 else 0.1,
        )
        assert chosen.estimate is not None
        router.observe(outcome(name, "a", 0.1), 0.0)
        if number == 7:
            assert not view.clock_trusted
    assert view.clock_trusted
    assert router.fleet.views[1].clock_trusted
