"""The residual gate: a wrong clock is found out, a noisy one is not, and trust comes back."""

from __future__ import annotations

import numpy as np
import pytest

from headway._core import ReplayedEngine
from headway.estimate.residual import ResidualGate
from headway.router import Router
from headway.types import EngineState, Estimate, Outcome
from pools import FAST, LIMITS, SLOW, choice, instance, pool, query


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


# ---- correction --------------------------------------------------------------------------------------------------


def test_a_lasting_factor_is_taken_out() -> None:
    """First tokens that come 1.3 times as late as replayed, with noise, are corrected by about that."""
    gate, rng = ResidualGate(), np.random.default_rng(1)
    for _ in range(80):
        residual = gate.observe("a", 0.3, 0.3 * 1.3 * float(np.exp(0.1 * rng.standard_normal())))
    assert residual.trusted
    assert 1.25 < residual.correction < 1.33


def test_noise_around_a_right_profile_moves_nothing_to_speak_of() -> None:
    """Ratios that scatter by a fifth around 1 leave the correction within a twentieth of 1, on average at 1."""
    for seed in range(5):
        gate, rng = ResidualGate(), np.random.default_rng(seed)
        ratios = np.exp(0.2 * rng.standard_normal(500))
        corrections = [gate.observe("a", 0.3, 0.3 * float(ratio)).correction for ratio in ratios]
        assert 0.95 < min(corrections) <= max(corrections) < 1.05
        assert np.abs(np.log(corrections)).mean() < 0.01


def test_stalls_are_not_taken_for_a_slow_clock() -> None:
    """One answer in five ten times late: the correction stays where the others are."""
    gate = ResidualGate()
    for number in range(100):
        residual = gate.observe("a", 0.2, 2.0 if number % 5 == 0 else 0.2)
    assert residual.correction == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("factor", "bound"), [(3.5, 2.0), (1 / 3.5, 0.5)])
def test_a_correction_stays_within_its_bounds(factor: float, bound: float) -> None:
    """A factor beyond two is corrected by two, and the gate still lets it pass; it can be switched off."""
    gate, off = ResidualGate(), ResidualGate(correcting=False)
    for _ in range(100):
        residual = gate.observe("a", 0.3, 0.3 * factor)
        assert off.observe("a", 0.3, 0.3 * factor).correction == 1.0
    assert residual.trusted
    assert residual.correction == pytest.approx(bound, rel=0.01)


def test_a_stale_profile_is_compared_until_it_is_right_for_a_while() -> None:
    """Eleven right pairs are not enough, twelve of sixteen are; what came before those is forgotten then."""
    gate = ResidualGate()
    for _ in range(40):
        gate.observe("a", 30.0, 0.3)
    stands = [gate.observe("a", 0.3, 0.3) for _ in range(12)]
    assert [one.trusted for one in stands] == [False] * 11 + [True]
    assert stands[-1].ratio == pytest.approx(1.0)


IDLE_S = ReplayedEngine.from_state(EngineState(limits=LIMITS, running=[], waiting=[]), SLOW).ttft_s(1000)


def route(router: Router, number: int, observed_s: float) -> Estimate:
    """Decide, book as the gateway does, and let the first token come after so long."""
    name, now = f"q{number}", float(number)
    estimate = choice(router.decide(query(name=name), now)).estimate
    assert estimate is not None
    router.fleet.book(
        request_id=name,
        instance_id="a",
        prompt_tokens=1000,
        predicted_output_tokens=100.0,
        max_tokens=None,
        priority=0,
        now=now,
        predicted_ttft_s=estimate.ttft_s,
        raw_ttft_s=estimate.raw_ttft_s,
    )
    router.observe(outcome(name, "a", observed_s), now)
    return estimate


def test_the_router_stretches_what_it_replays() -> None:
    """Estimates of an instance that is 1.5 times as slow as its profile come to be right; the raw figure stays."""
    router = pool(instance("a", step_time=SLOW))
    estimates = [route(router, number, 1.5 * IDLE_S) for number in range(60)]
    first, last = estimates[0], estimates[-1]
    assert last.ttft_s == pytest.approx(1.5 * first.ttft_s, rel=0.02)
    assert last.raw_ttft_s == pytest.approx(first.ttft_s, rel=0.02)
    assert last.ttft_p90_s / last.ttft_s == pytest.approx(first.ttft_p90_s / first.ttft_s)


def test_a_stale_profile_hands_over_in_the_open_and_comes_back() -> None:
    """Ten times as slow as replayed: history speaks, with the observed times; once the replay is right it is back."""
    router = pool(instance("a", step_time=SLOW))
    slow = [route(router, number, 10 * IDLE_S) for number in range(20)]
    assert [one.source for one in slow[:8]] == ["replay"] * 8
    assert slow[-1].source == "history"
    assert slow[-1].ttft_s == pytest.approx(10 * IDLE_S, rel=0.01)
    assert slow[-1].raw_ttft_s == pytest.approx(slow[0].ttft_s, rel=0.01)
    assert not router.fleet.views[0].clock_trusted
    right = [route(router, number, IDLE_S) for number in range(20, 60)]
    assert (right[0].source, right[-1].source) == ("history", "replay")
