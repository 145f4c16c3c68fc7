"""Scores of a run: every figure by hand on six queries, and refused work that wins nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headway.lab.metrics import REFUSED, Outcomes, Status, realise, score
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.workload import Workload

INF = float("inf")


def six() -> Workload:
    """Six queries of two tasks on two models; λ makes 1,000 micro-USD worth 0.5."""
    quality = np.array([[0.2, 0.9]] * 6)
    return Workload(
        arrival_s=np.arange(6.0),
        task=np.array([0, 0, 0, 1, 1, 1], np.int8),
        task_names=("short", "long"),
        models=("qwen3-0.6b", "qwen3-8b"),
        prompt_tokens=np.array([100, 100, 100, 10000, 10000, 10000], np.int32),
        ttft_target_s=np.full(6, 0.5),
        true_output_tokens=np.full((6, 2), 1000, np.int32),
        true_quality=quality,
        predicted_output_tokens=np.full((6, 2), 1000.0),
        predicted_quality=quality,
        max_tokens=8192,
    )


def two() -> Pool:
    return qwen3_pool((1, 1, 0))


def played() -> Outcomes:
    """In time on the 8B, in time on the 0.6B, late on the 8B; in time and not worth it, refused, failed."""
    return Outcomes(
        chosen=np.array([1, 0, 1, 0, REFUSED, 1], np.int32),
        feasible=np.array([True, True, True, True, False, False]),
        status=np.array([Status.OK, Status.OK, Status.OK, Status.OK, Status.REFUSED, Status.FAILED], np.int8),
        ttft_s=np.array([0.1, 0.04, 0.8, 0.5, INF, INF]),
        total_s=np.array([1.0, 2.0, 3.0, 4.0, INF, INF]),
        predicted_ttft_s=np.array([0.12, 0.02, 0.4, np.nan, np.nan, 0.3]),
        output_tokens=np.array([1000, 1000, 1000, 1000, 0, 0], np.int32),
    )


# micro-USD: 8B 100·.072 + 1000·.287 = 294.2; 0.6B 100·.044 + 173 = 177.4; 0.6B 10,000·.044 + 173 = 613
UTILITIES = [0.9 - 0.1471, 0.2 - 0.0887, 0.9 - 0.1471, 0.2 - 0.3065, 0.0, 0.0]


def test_every_query_is_realised_on_its_model() -> None:
    """Quality and cost are those of the model that answered; a refused query has neither, a failed one its prompt's."""
    real = realise(six(), two(), played())
    assert real.utility == pytest.approx(UTILITIES)
    assert real.on_time.tolist() == [True, True, False, True, False, False]
    assert real.answered.tolist() == [True, True, True, True, False, False]
    assert real.cost_usd * 1e6 == pytest.approx([294.2, 177.4, 294.2, 613.0, 0.0, 720.0])


def test_the_figures_by_hand() -> None:
    """On-time utility counts all six queries, late, refused and failed ones as 0, negatives apart."""
    s = score(six(), two(), played())
    assert s.on_time_utility == pytest.approx((UTILITIES[0] + UTILITIES[1] + UTILITIES[3]) / 6)
    assert s.on_time_utility_floored == pytest.approx((UTILITIES[0] + UTILITIES[1]) / 6)
    assert s.on_time_negative == pytest.approx(UTILITIES[3] / 6)
    assert s.on_time_utility == pytest.approx(s.on_time_utility_floored + s.on_time_negative)
    assert s.mean_utility == pytest.approx(sum(UTILITIES) / 6)
    assert (s.attainment, s.refused, s.failed, s.feasible) == pytest.approx((3 / 6, 1 / 6, 1 / 6, 4 / 6))
    assert s.mean_quality == pytest.approx((0.9 + 0.2 + 0.9 + 0.2) / 4)
    assert s.mean_cost_usd == pytest.approx((294.2 + 177.4 + 294.2 + 613.0) / 4 * 1e-6)
    assert s.mean_output_tokens == 1000
    assert s.ttft_mean_s == pytest.approx(0.36)
    assert s.ttft_p50_s == pytest.approx(0.3)
    assert s.total_mean_s == pytest.approx(2.5)
    assert s.shares == {"h100-0.6b": pytest.approx(2 / 6), "h100-8b": pytest.approx(3 / 6)}


def test_errors_are_over_predicted_times_of_50_ms_and_more() -> None:
    """Queries without a prediction, or answered within 50 ms, say nothing of the estimator."""
    s = score(six(), two(), played())
    assert s.ttft_mape == pytest.approx((0.2 + 0.5) / 2)
    assert s.ttft_mape_by_model == {"qwen3-8b": pytest.approx(0.35)}


def test_each_task_has_its_own_figures() -> None:
    """Attainment, utility, shares and the times of the late, per task."""
    tasks = score(six(), two(), played()).tasks
    short, long = tasks["short"], tasks["long"]
    assert (short.attainment, long.attainment) == pytest.approx((2 / 3, 1 / 3))
    assert long.on_time_utility == pytest.approx(UTILITIES[3] / 3)
    assert (short.late_ttft_p50_s, long.late_ttft_p50_s) == (0.8, None)
    assert short.shares == {"qwen3-0.6b": pytest.approx(1 / 3), "qwen3-8b": pytest.approx(2 / 3)}
    assert long.missed_shares == {"qwen3-0.6b": 0.0, "qwen3-8b": pytest.approx(1 / 3)}
    assert short.share == long.share == 0.5


def test_refusing_the_worst_wins_no_attainment() -> None:
    """A run that refuses what would be late scores the same attainment as one that answers it late."""
    late, refused = played(), played()
    refused.chosen[2], refused.status[2], refused.ttft_s[2] = REFUSED, Status.REFUSED, INF
    assert score(six(), two(), late).attainment == score(six(), two(), refused).attainment


def test_a_target_met_to_the_point_is_met() -> None:
    """The hard rule is TTFT ≤ target."""
    assert realise(six(), two(), played()).on_time[3]


def test_nothing_answered_is_no_figure() -> None:
    """Where every query is refused means are None, not NaN, and the score still counts N."""
    s = score(six(), two(), Outcomes.empty(6))
    assert (s.num_queries, s.on_time_utility, s.refused) == (6, 0.0, 1.0)
    assert s.mean_quality is s.ttft_p99_s is s.ttft_mape is None
    assert b"NaN" not in msgspec.json.encode(s)


def test_foreign_outcomes_are_refused() -> None:
    """Outcomes of another workload, or on an instance the pool does not have, are no score."""
    with pytest.raises(ValueError, match="6 queries"):
        score(six(), two(), Outcomes.empty(5))
    foreign = played()
    foreign.chosen[0] = 2
    with pytest.raises(ValueError, match="2 instances"):
        score(six(), two(), foreign)
