"""Logged traffic once more: what is read, what is assumed, and that the simulation follows from both."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway.cli.whatif import whatif
from headway.config import parse_config
from headway.decision_row import LoggedDecision, LoggedInstance, LoggedModel
from headway.errors import ConfigError, DatasetError
from headway.lab.whatif import (
    MAX_STRETCH,
    NO_TARGET_S,
    as_it_was,
    read_decisions,
    simulated_pool,
    what_if,
    workload_of,
)
from headway.types import Outcome

POOL = """
models:
  - {name: small, price: {input_per_1m: 0.04, output_per_1m: 0.2}, prior: {quality: 0.4, output_tokens: 90}}
  - {name: large, price: {input_per_1m: 0.3, output_per_1m: 0.7}, parameters: 3.0e10}
instances:
  - {id: s, model: small, api_base: "http://127.0.0.1:9/v1", engine: vllm-0.32, profile: h100-qwen3-0.6b}
  - {id: l, model: large, api_base: "http://127.0.0.1:9/v1", engine: vllm-0.32, profile: h100-qwen3-32b}
"""


def row(number: int, **changes: object) -> LoggedDecision:
    """A request answered by ``large`` in 30 tokens where 60 were predicted, in time."""
    one = LoggedDecision(
        wall_s=1000.0 + 0.2 * number,
        request_id=f"r{number}",
        decision_id=f"d{number}",
        client=None,
        operation="chat",
        requested_model="auto",
        stream=True,
        max_tokens=200,
        priority=0,
        ttft_target_s=0.5,
        quality_min=None,
        max_cost_usd=None,
        policy="bear",
        config="",
        config_hash="h",
        reason="",
        slo="met-expected",
        held_s=None,
        retry_after_s=None,
        decision_s=None,
        models={
            "small": LoggedModel(100, 0.4, 50.0, 1e-5, "prior"),
            "large": LoggedModel(100, 0.9, 60.0, 7e-5, "prior"),
        },
        instances=[LoggedInstance("l", "large", "feasible", 0.8, 0, 0.1, 0.1, 0.0, "replay", 0.0)],
        chosen="l",
        attempts=1,
        status=200,
        ttft_s=0.1,
        duration_s=1.0,
        outcome=Outcome(
            query_id=f"r{number}", instance_id="l", status="ok", ttft_s=0.1, prompt_tokens=110, output_tokens=30,
            cost_usd=5e-5,
        ),
    )  # fmt: skip
    return msgspec.structs.replace(one, **changes)


def write(path: Path, *rows: LoggedDecision) -> Path:
    """A decision log."""
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    return path


def test_rows_come_in_order_of_arrival_from_several_files(tmp_path: Path) -> None:
    """Rotated files may be named in any order; what came to no decision is left out."""
    newer = write(tmp_path / "a", row(5), row(4, models={}))
    older = write(tmp_path / "b", row(2), row(1))
    assert [one.request_id for one in read_decisions([newer, older])] == ["r1", "r2", "r5"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{", "is no logged decision"), ('{"wall_s": 1}', "missing required field"), (None, "has version 9, not 1")],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str | None, complaint: str) -> None:
    """File and line of what is no row, or of one that another version wrote."""
    bad = msgspec.json.encode(row(1, version=9)).decode() if line is None else line
    path = tmp_path / "log"
    path.write_text(msgspec.json.encode(row(0)).decode() + "\n" + bad + "\n")
    with pytest.raises(DatasetError, match=complaint) as caught:
        read_decisions([path])
    assert (caught.value.path, caught.value.line) == (str(path), 2)


def test_an_empty_log_is_an_error(tmp_path: Path) -> None:
    """There is nothing to say of no traffic."""
    with pytest.raises(DatasetError, match="holds no decision"):
        read_decisions([write(tmp_path / "log")])


def test_what_happened_is_counted_from_the_log() -> None:
    """Targets met over those given, real cost over all requests, predicted quality of who answered."""
    rows = [row(0), row(1, ttft_s=0.9), row(2, ttft_target_s=None), row(3, chosen=None, outcome=None, ttft_s=None)]
    found = as_it_was(rows)
    assert (found.num_queries, found.num_with_target) == (4, 3)
    assert found.attainment == pytest.approx(1 / 3)
    assert found.cost_usd == pytest.approx(1.5e-4)
    assert found.mean_quality == pytest.approx(0.9)
    assert (found.refused, found.shares) == (0.25, {"l": 0.75})


def test_what_is_unknown_is_predicted_and_stretched() -> None:
    """The real length where a model answered; elsewhere its prediction times how far the real answer was off."""
    pool = simulated_pool(parse_config(POOL))
    workload = workload_of([row(0), row(1, ttft_target_s=None)], pool, 5e-4)
    assert workload.models == ("small", "large")
    assert workload.true_output_tokens.tolist() == [[25, 30], [25, 30]]
    assert workload.prompt_tokens.tolist() == [110, 110]
    assert workload.arrival_s.tolist() == pytest.approx([0.0, 0.2])
    assert workload.ttft_target_s.tolist() == [0.5, NO_TARGET_S]


def test_stretching_keeps_within_limits() -> None:
    """An answer far beyond its prediction stretches the others by no more than a bound, and within max_tokens."""
    far = msgspec.structs.replace(row(0).outcome, output_tokens=6000)
    pool = simulated_pool(parse_config(POOL))
    lengths = workload_of([row(0, outcome=far, max_tokens=None)], pool, 5e-4).true_output_tokens
    assert lengths.tolist() == [[round(50 * MAX_STRETCH), 6000]]
    assert workload_of([row(0, outcome=far, max_tokens=100)], pool, 5e-4).true_output_tokens[0, 0] == 100


def test_a_request_for_one_model_stays_with_it() -> None:
    """Only ``auto`` and aliases leave the choice; a model that the other pool lacks is an error."""
    config = parse_config(POOL)
    bound = [row(number, requested_model="small") for number in range(20)]
    assert what_if(bound, config, "latency_agnostic", seeds=[0]).shares == {"s": 1.0, "l": 0.0}
    gone = row(0, requested_model="huge", models={"huge": LoggedModel(100, 0.9, 60.0, 7e-5, "prior")})
    with pytest.raises(DatasetError, match="'huge', which this pool has not"):
        workload_of([gone], simulated_pool(config), 5e-4)


def test_policies_differ_and_repeat() -> None:
    """The same seeds give the same answer; a policy that minds quality and cost beats turns on both."""
    rows, config = [row(number) for number in range(60)], parse_config(POOL)
    bear = what_if(rows, config, "bear", seeds=[0, 1])
    assert bear == what_if(rows, config, "bear", seeds=[0, 1])
    turns = what_if(rows, config, "round_robin", seeds=[0])
    assert turns.shares == {"s": 0.5, "l": 0.5}
    assert bear.mean_quality is not None
    assert turns.mean_quality is not None
    assert bear.mean_quality > turns.mean_quality
    assert bear.attainment == 1.0


def test_an_instance_without_a_profile_is_refused() -> None:
    """What cannot be simulated is named with its line."""
    config = parse_config(POOL.replace(", profile: h100-qwen3-32b", ""))
    with pytest.raises(ConfigError, match="'l' has no profile"):
        simulated_pool(config)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON array: what happened, then each policy; the pool is the one that the log names."""
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    log = write(tmp_path / "log", *(row(number, config=str(pool)) for number in range(30)))
    assert whatif(log, policy="bear,random", seeds=1, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found] == [None, "bear", "random"]
    assert all(np.isfinite(one["cost_usd"]) for one in found)
    assert whatif(log, policy="bear", seeds=1) == 0
    assert "as it was" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="unknown policy"):
        whatif(log, policy="baer", seeds=1)
    with pytest.raises(ConfigError, match="names no configuration"):
        whatif(write(tmp_path / "other", row(0)), policy="bear")
