"""The demo's figures: what counts in time, what late and failed queries cost a policy, how predictions are judged."""

from __future__ import annotations

import io

import msgspec
import pytest

from headway.demo.pool import INSTANCES, PRICES
from headway.demo.run import DemoReport, check_policies
from headway.demo.score import PolicyScore, Served, score
from headway.demo.show import conclusion, show_report
from headway.demo.workload import DemoQuery, WorkloadSpec, build_workload
from headway.errors import ConfigError
from headway.lab.truth import Answer, Task


def _query(number: int, task: Task = "alpaca", quality: float = 0.8) -> DemoQuery:
    return DemoQuery(
        number=number,
        arrival_s=number,
        task=task,
        prompt="Explain.",
        prompt_tokens=100,
        ttft_target_s=0.2,
        answers={model: Answer(200, quality) for model in PRICES},
    )


def _served(number: int, ttft_s: float | None = 0.1, **fields: object) -> Served:
    seen: dict[str, object] = {
        "instance": "h100-8b", "model": "qwen3-8b", "prompt_tokens": 100, "output_tokens": 200,
        "predicted_ttft_s": 0.08, "engine_ttft_s": 0.09,
    }  # fmt: skip
    return Served(number=number, ttft_s=ttft_s, **{**seen, **fields})  # type: ignore[arg-type]


def _score(queries: list[DemoQuery], served: list[Served], policy: str = "bear") -> PolicyScore:
    return score(policy, queries, served, prices=PRICES, instances=INSTANCES)


def test_on_time_utility_is_quality_less_cost_where_in_time() -> None:
    """One answer in time, one late, one failed: the mean over all three counts only the first one's utility."""
    figures = _score([_query(0), _query(1), _query(2)], [_served(0), _served(1, 0.3), _served(2, error="HTTP 503: x")])
    cost_musd = 100 * 0.072 + 200 * 0.287
    assert figures.on_time_utility == pytest.approx((0.8 - 5e-4 * cost_musd) / 3)
    assert figures.attainment == pytest.approx(1 / 3)
    assert (figures.num_queries, figures.failed) == (3, 1)
    assert figures.mean_cost_usd == pytest.approx(cost_musd / 1e6)
    assert figures.errors == {"HTTP 503: x": 1}


def test_a_first_token_in_time_is_worth_nothing_without_the_rest() -> None:
    """A stream that broke off after a quick first token is failed, not in time."""
    figures = _score([_query(0)], [_served(0, 0.01, error="the stream ended before [DONE]")])
    assert (figures.attainment, figures.on_time_utility, figures.failed) == (0.0, 0.0, 1)
    assert figures.ttft_p50_s is None
    assert figures.mean_quality is None


def test_answers_that_cost_more_than_they_are_worth_are_shown() -> None:
    """An answer in time whose cost exceeds its quality lowers the score, and its part is reported by itself."""
    figures = _score([_query(0, quality=0.01), _query(1)], [_served(0), _served(1)])
    assert figures.num_on_time_negative == 1
    assert figures.on_time_negative == pytest.approx((0.01 - 5e-4 * (100 * 0.072 + 200 * 0.287)) / 2)


def test_prediction_errors_are_judged_by_both_clocks() -> None:
    """MAPE leaves out TTFTs below 50 ms and queries without a prediction, the median error only the latter."""
    queries = [_query(number) for number in range(3)]
    served = [
        _served(0, 0.100, predicted_ttft_s=0.080, engine_ttft_s=0.090),
        _served(1, 0.020, predicted_ttft_s=0.010, engine_ttft_s=0.020),
        _served(2, 0.100, predicted_ttft_s=None, engine_ttft_s=0.1),
    ]
    figures = _score(queries, served)
    assert figures.ttft_mape == pytest.approx(0.2)
    assert figures.ttft_mape_engine == pytest.approx(1 / 9)
    assert figures.ttft_error_p50_s == pytest.approx(0.015)
    assert figures.ttft_ratio_p90 == {"h100-8b": pytest.approx(1.25 + 0.9 * 0.75)}
    assert figures.ttft_overhead_p50_s == pytest.approx(0.0)


def test_shares_and_tasks_are_over_all_queries() -> None:
    """Every instance has its share of all queries, also an instance that got none, and each task its attainment."""
    queries = [_query(0), _query(1, "gov_report"), _query(2, "gov_report"), _query(3)]
    served = [
        _served(0), _served(1), _served(2, 0.5, instance="h100-32b", model="qwen3-32b"),
        _served(3, None, instance=None, model=None, error="ClientConnectorError"),
    ]  # fmt: skip
    figures = _score(queries, served)
    assert figures.shares == {"h100-0.6b": 0.0, "h100-8b": 0.5, "h100-32b": 0.25}
    assert figures.attainment_by_task == {"alpaca": 0.5, "gov_report": 0.5}


def test_a_query_without_an_outcome_is_refused() -> None:
    """A score over fewer outcomes than queries would hide the missing ones."""
    with pytest.raises(ValueError, match="exactly one entry per query"):
        _score([_query(0), _query(1)], [_served(0)])


@pytest.mark.parametrize("names", [[], ["bear", "fastest"], ["bear", "bear"]])
def test_policies_are_checked_before_anything_starts(names: list[str]) -> None:
    """No policy, an unknown one, or one named twice is a configuration error of the option."""
    with pytest.raises(ConfigError, match="--policies"):
        check_policies(names)


def test_the_sentence_names_whoever_led() -> None:
    """The conclusion follows the figures, not the hope."""
    bear = _score([_query(0)], [_served(0)])
    late = _score([_query(0), _query(1)], [_served(0), _served(1, 0.5)], "round_robin")
    failed = _score([_query(0)], [_served(0, error="x")], "random")
    assert conclusion([late, bear]).startswith("bear reached")
    assert "100% more than round_robin" in conclusion([bear, late])
    assert conclusion([late, failed]).startswith("round_robin reached")
    assert "the next was random with 0.000" in conclusion([failed, late])
    assert conclusion([bear]).endswith("in time.")


def test_the_report_prints_a_table_and_its_own_command() -> None:
    """A stranger finds every policy's row and the command that repeats the run; the JSON has the promised keys."""
    workload = build_workload(WorkloadSpec(qps=1, seconds=1))
    report = DemoReport(
        workload.summary, [_score([_query(0)], [_served(0)]), _score([_query(0)], [_served(0)], "random")]
    )
    stream = io.StringIO()
    show_report(report, "headway demo --qps 1", stream)
    assert "bear" in stream.getvalue()
    assert "random" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("Repeat with: headway demo --qps 1")
    data = msgspec.json.decode(msgspec.json.encode(report))
    assert {
        "policy", "num_queries", "failed", "attainment", "on_time_utility", "mean_quality", "mean_cost_usd",
        "ttft_p50_s", "ttft_p99_s", "ttft_mape", "ttft_error_p50_s", "shares",
    } <= data["policies"][0].keys()  # fmt: skip
    assert data["workload"]["num_queries"] == 1
