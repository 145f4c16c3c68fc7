"""References: what oracles know, what mixtures and thresholds choose, and the hull they are held against."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from headway.errors import ConfigError
from headway.estimate.registry import make_estimator
from headway.lab.acceptance.units import Play, pool_of, workload_of
from headway.lab.fallbacks import RULES, play_rule
from headway.lab.metrics import Status
from headway.lab.references import (
    RandomMixPolicy,
    TwoModelPolicy,
    gain_thresholds,
    hull_at,
    knowing,
    predicted_utility,
    true_clock,
    with_throughput,
)
from headway.lab.simulate import Sight, simulate

UNIT = Play(policy="bear", rate_per_s=8.0, seed=11, num_queries=200)


def test_an_oracle_knows_the_truth_and_nothing_else_changes() -> None:
    """True lengths and qualities take the predictions' place; queries, targets and truth stay."""
    work = workload_of(UNIT)
    known = knowing(work, lengths=True, qualities=True)
    assert (known.predicted_output_tokens == work.true_output_tokens).all()
    assert (known.predicted_quality == work.true_quality).all()
    assert (known.ttft_target_s == work.ttft_target_s).all()
    assert (knowing(work, lengths=True).predicted_quality == work.predicted_quality).all()


def test_the_true_clock_replaces_the_fitted_one() -> None:
    """An oracle's instances carry the truth's own form, with the mean host gap in the constant."""
    for fitted, known in zip(pool_of().instances, true_clock(pool_of()).instances, strict=True):
        assert fitted.instance.step_time is not None
        assert known.instance.step_time is not None
        assert fitted.instance.step_time.form == "linear"
        assert known.instance.step_time.form == "six_term"
        gap_s = known.instance.step_time.named()["b0"] - known.truth.step_time.named()["b0"]
        assert known.truth.host_gap_s[0] < gap_s < known.truth.host_gap_s[1]


def test_exact_lengths_are_only_for_those_who_know_them() -> None:
    """Taking predictions for certain is refused where they are not the truth, and plays where they are."""
    work, pool = workload_of(UNIT), pool_of()
    policy = RandomMixPolicy(np.random.default_rng(0), first="qwen3-0.6b", second="qwen3-8b", share=0.5)
    sight = Sight(exact_lengths=True)
    with pytest.raises(ConfigError, match="true lengths"):
        simulate(work, pool, policy=policy, estimator=make_estimator("replay"), seed=1, sight=sight)
    known = knowing(work, lengths=True)
    outcomes = simulate(known, pool, policy=policy, estimator=make_estimator("replay"), seed=1, sight=sight)
    assert (outcomes.status == Status.OK).all()
    rows = np.arange(known.num_queries)
    assert (outcomes.output_tokens == known.true_output_tokens[rows, outcomes.chosen]).all()


def test_another_throughput_goes_to_the_named_instance_only() -> None:
    """A refitted θ replaces the calibrated one where it is given."""
    pool = with_throughput(pool_of(), {"h100-8b": 1234.0})
    rates = [one.instance.calibration.prefill_tokens_per_s for one in pool.instances if one.instance.calibration]
    assert rates[1] == 1234.0
    assert rates[0] != 1234.0


def test_a_random_mix_sends_its_share() -> None:
    """Queries go to the two models of the pair only, the second one's share being as asked."""
    work, pool = workload_of(replace(UNIT, num_queries=1_000)), pool_of()
    policy = RandomMixPolicy(np.random.default_rng(3), first="qwen3-0.6b", second="qwen3-32b", share=0.25)
    chosen = simulate(work, pool, policy=policy, estimator=None, seed=1).chosen
    assert set(np.unique(chosen)) == {0, 2}
    assert (chosen == 2).mean() == pytest.approx(0.25, abs=0.04)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        RandomMixPolicy(np.random.default_rng(3), first="a", second="b", share=1.5)


def test_a_threshold_sends_the_larger_gains_to_the_strong_model() -> None:
    """Exactly the queries whose predicted gain reaches the threshold go to the strong model."""
    work, pool = workload_of(UNIT), pool_of()
    (threshold,) = gain_thresholds(work, pool, "qwen3-0.6b", "qwen3-8b", [0.3])
    gains = predicted_utility(work, pool, "qwen3-8b") - predicted_utility(work, pool, "qwen3-0.6b")
    policy = TwoModelPolicy(np.random.default_rng(0), weak="qwen3-0.6b", strong="qwen3-8b", threshold=threshold)
    chosen = simulate(work, pool, policy=policy, estimator=None, seed=1).chosen
    clear = np.abs(gains - threshold) > 1e-9
    assert ((chosen == 1) == (gains >= threshold))[clear].all()
    assert (chosen == 1).mean() == pytest.approx(0.3, abs=0.02)


def test_the_hull_is_concave_and_never_falls() -> None:
    """Between two points their chord counts, a point under it does not, and more money never does worse."""
    points = [(1.0, 0.2), (2.0, 0.3), (3.0, 0.8), (5.0, 0.6)]
    assert hull_at(points, 2.0) == pytest.approx(0.5)
    assert hull_at(points, 4.0) == pytest.approx(0.8)
    assert hull_at(points, 9.0) == pytest.approx(0.8)
    assert hull_at(points, 0.5) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="at least one"):
        hull_at([], 1.0)


@pytest.mark.parametrize("rule", RULES)
def test_every_fallback_answers_every_query(rule: str) -> None:
    """No rule wins by refusing: beyond saturation each query is answered."""
    figures = play_rule(rule, 14.0, 0.035, 3, 150)
    assert figures.refused == 0.0
    assert figures.failed == 0.0
