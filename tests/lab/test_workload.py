"""Workloads: one spec one world, at every rate, in the shares asked; and columns no traffic could have."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headway.errors import ConfigError, DatasetError
from headway.lab.arrivals import poisson
from headway.lab.predictions import PERFECT, PredictorQuality
from headway.lab.traces import Trace
from headway.lab.truth import TASKS
from headway.lab.workload import CHAT_HEAVY, Workload, WorkloadSpec, four_task_workload, trace_workload

MATRICES = ("true_output_tokens", "true_quality", "predicted_output_tokens", "predicted_quality")
COLUMNS = ("arrival_s", "task", "prompt_tokens", "ttft_target_s", *MATRICES)


def four_tasks(num: int = 400, *, rate_per_s: float = 8.0, **changes: Any) -> Workload:
    return four_task_workload(poisson(num, rate_per_s, np.random.default_rng(0)), WorkloadSpec(**changes))


def a_trace(num: int = 50, **changes: Any) -> Trace:
    rng = np.random.default_rng(7)
    columns: dict[str, Any] = {
        "name": "t.csv",
        "arrival_s": np.arange(num, dtype=np.float64) ** 1.5,
        "prompt_tokens": rng.integers(5, 3000, num).astype(np.int32),
        "output_tokens": np.exp(5 + 0.8 * rng.standard_normal(num)).astype(np.int32) + 1,
        "num_dropped_empty": 2,
        "num_dropped_long": 3,
    }
    return Trace(**{**columns, **changes})


def as_bytes(workload: Workload) -> bytes:
    return b"".join(getattr(workload, name).tobytes() for name in COLUMNS)


def test_equal_specs_give_equal_bytes() -> None:
    """A workload is a function of its arrivals and spec; another seed gives another one."""
    assert as_bytes(four_tasks(seed=3)) == as_bytes(four_tasks(seed=3))
    assert as_bytes(four_tasks(seed=3)) != as_bytes(four_tasks(seed=4))


def test_only_arrivals_change_with_the_rate() -> None:
    """At another rate the same queries come, so that rates can be compared in pairs."""
    slow, fast = four_tasks(rate_per_s=4.0), four_tasks(rate_per_s=8.0)
    for name in COLUMNS[1:]:
        assert np.array_equal(getattr(slow, name), getattr(fast, name))
    assert slow.arrival_s == pytest.approx(2 * fast.arrival_s)


def test_predictors_see_the_same_world() -> None:
    """A better predictor changes the predictions and nothing else."""
    plain, perfect = four_tasks(), four_tasks(predictor=PERFECT)
    for name in COLUMNS[:-2]:
        assert np.array_equal(getattr(plain, name), getattr(perfect, name))
    assert not np.array_equal(plain.predicted_quality, perfect.predicted_quality)


def test_tasks_come_in_equal_shares() -> None:
    """By default each of the four tasks is a quarter of the queries."""
    counts = np.bincount(four_tasks(20_000).task, minlength=4)
    assert counts / 20_000 == pytest.approx(0.25, abs=0.01)


def test_shares_can_be_asked_for() -> None:
    """A chat-heavy mix has few documents; shares need not sum to 1, and a task may be left out."""
    arrival_s = poisson(20_000, 8.0, np.random.default_rng(0))
    chat = four_task_workload(arrival_s, WorkloadSpec(), shares=CHAT_HEAVY)
    assert np.bincount(chat.task) / 20_000 == pytest.approx([CHAT_HEAVY[task] for task in TASKS], abs=0.01)
    two = four_task_workload(arrival_s, WorkloadSpec(), shares={"alpaca": 3, "gov_report": 1})
    assert np.bincount(two.task, minlength=4) / 20_000 == pytest.approx([0.75, 0, 0.25, 0], abs=0.01)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"alpacca": 1.0}, r"workload\.shares\.alpacca.*did you mean 'alpaca'"),
        ({"alpaca": -1.0}, r"workload\.shares\.alpaca"),
        ({"alpaca": float("nan")}, r"workload\.shares\.alpaca"),
        ({"alpaca": 0.0}, r"workload\.shares: must not all be 0"),
    ],
)
def test_impossible_shares_are_refused(shares: dict[Any, float], message: str) -> None:
    """An unknown task, a negative share or nothing at all names its key."""
    with pytest.raises(ConfigError, match=message):
        four_task_workload(np.array([0.0]), WorkloadSpec(), shares=shares)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": -1}, "seed"),
        ({"models": ()}, "models"),
        ({"models": ("gpt",)}, "models"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"target_slope_ms_per_token": -0.1}, "target_slope_ms_per_token"),
        ({"lambda_per_musd": float("nan")}, "lambda_per_musd"),
    ],
)
def test_impossible_specs_are_refused(changes: dict[str, Any], key: str) -> None:
    """What no workload can have names its key."""
    with pytest.raises(ConfigError, match=key):
        four_tasks(**changes)


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("arrival_s", 0, -1.0, "row 1: must be at least 0"),
        ("arrival_s", 5, 0.0, "row 6: must not be before the row above"),
        ("arrival_s", 5, np.nan, "row 6: must be at least 0, not nan"),
        ("task", 2, 4, "row 3: must index task_names"),
        ("prompt_tokens", 3, 0, "row 4: must be at least 1"),
        ("ttft_target_s", 4, np.inf, "row 5: must be above 0, not inf"),
        ("true_output_tokens", (6, 1), 0, "row 7: must be 1 to 8192"),
        ("true_output_tokens", (6, 1), 9000, "row 7: must be 1 to 8192, not 9000"),
        ("predicted_output_tokens", (7, 2), np.nan, "row 8: must be above 0, not nan"),
        ("true_quality", (8, 0), 1.5, "row 9: must lie between 0 and 1"),
        ("predicted_quality", (9, 0), -0.5, "row 10: must lie between 0 and 1"),
    ],
)
def test_impossible_values_name_column_and_row(column: str, row: Any, value: float, message: str) -> None:
    """A NaN, a negative or an unsorted value raises a DatasetError with the column and the row."""
    good = four_tasks(20)
    values = getattr(good, column).copy()
    values[row] = value
    with pytest.raises(DatasetError, match=f"column '{column}', {message}"):
        msgspec.structs.replace(good, **{column: values})


def test_columns_must_fit_each_other() -> None:
    """An empty workload, and a column of another length, are refused by name."""
    good = four_tasks(20)
    with pytest.raises(DatasetError, match="'arrival_s' is empty"):
        msgspec.structs.replace(good, arrival_s=np.empty(0))
    with pytest.raises(DatasetError, match=r"'true_quality' has shape \(20, 2\), not \(20, 3\)"):
        msgspec.structs.replace(good, true_quality=good.true_quality[:, :2])


def test_nobody_changes_the_world() -> None:
    """The columns of a workload are read-only."""
    with pytest.raises(ValueError, match="read-only"):
        four_tasks(20).true_quality[0, 0] = 1.0


def test_a_trace_is_played_row_by_row() -> None:
    """A stretch keeps each row's lengths and the gap before it, scaled to the rate; every model gives that length."""
    trace = a_trace()
    w = trace_workload(trace, 20, WorkloadSpec(seed=2), rate_per_s=4.0)
    assert (w.task_names, set(w.task.tolist())) == (("trace",), {0})
    start = next(n for n in range(50) if np.array_equal(trace.prompt_tokens[n : n + 20], w.prompt_tokens))
    assert np.array_equal(w.true_output_tokens[:, 1], trace.output_tokens[start : start + 20])
    assert (w.true_output_tokens == w.true_output_tokens[:, :1]).all()
    assert trace.arrival_s is not None
    gaps_s = np.diff(trace.arrival_s)[start - 1 : start + 19]
    assert np.diff(w.arrival_s) == pytest.approx(gaps_s[1:] * 5.0 / gaps_s.sum())
    assert w.arrival_s[-1] == pytest.approx(5.0)
    assert "2 rows without tokens and 3 beyond the context dropped" in w.note


def test_a_trace_keeps_its_own_rate() -> None:
    """Without a rate the gaps are the trace's."""
    trace = a_trace()
    w = trace_workload(trace, 49, WorkloadSpec())
    assert trace.arrival_s is not None
    assert w.arrival_s == pytest.approx(trace.arrival_s[1:])


def test_lengths_alone_take_any_arrivals() -> None:
    """A trace without times plays at arrivals that are given, and refuses to invent some."""
    lengths = a_trace(arrival_s=None)
    w = trace_workload(lengths, 80, WorkloadSpec(), arrival_s=poisson(80, 8.0, np.random.default_rng(0)))
    assert np.array_equal(w.prompt_tokens[:30], w.prompt_tokens[50:])
    with pytest.raises(ConfigError, match="no arrivals of its own"):
        trace_workload(lengths, 20, WorkloadSpec(), rate_per_s=4.0)
    with pytest.raises(ConfigError, match="either"):
        trace_workload(lengths, 20, WorkloadSpec(), arrival_s=np.zeros(19))
    with pytest.raises(ConfigError, match="rate_per_s"):
        trace_workload(a_trace(), 20, WorkloadSpec(), rate_per_s=0.0)


def test_recorded_lengths_are_predicted_as_well_as_asked() -> None:
    """On a trace too log R² is the one asked for, the mean is right, and R² = 1 is the record."""
    trace = a_trace(20_000)
    w = trace_workload(trace, 19_999, WorkloadSpec(predictor=PredictorQuality(length_log_r2=0.4)))
    logs = np.log(w.true_output_tokens[:, 0]), np.log(w.predicted_output_tokens[:, 0])
    assert np.corrcoef(*logs)[0, 1] ** 2 == pytest.approx(0.4, abs=0.03)
    assert w.predicted_output_tokens.mean() == pytest.approx(w.true_output_tokens.mean(), rel=0.03)
    perfect = trace_workload(trace, 500, WorkloadSpec(predictor=PERFECT))
    assert np.array_equal(perfect.predicted_output_tokens, perfect.true_output_tokens)


def test_a_trace_may_be_cut_short() -> None:
    """max_tokens ends recorded answers, and medians can be predicted instead of means."""
    spec = WorkloadSpec(max_tokens=100, predictor=PredictorQuality(length="median"))
    w = trace_workload(a_trace(2000), 1000, spec)
    assert w.true_output_tokens.max() == 100
    assert w.predicted_output_tokens.max() <= 100
