"""The acceptance table: rows of the agreed shape, the same on every run, units shared, and unknown names refused."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import replace

from headway.calibrate.acceptance import AcceptanceRow
from headway.cli.lab_acceptance import acceptance
from headway.errors import ConfigError
from headway.estimate.registry import make_estimator
from headway.lab.acceptance import FULL, GROUPS, QUICK, acceptance_rows, run
from headway.lab.acceptance.settings import SLOPES, Settings
from headway.lab.acceptance.table import Group, Results
from headway.lab.acceptance.units import PLAYERS, Play, play, shared, with_slope, workload_of
from headway.lab.acceptance.utility import utility_at
from headway.lab.metrics import score
from headway.lab.pool import qwen3_pool
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.policy.registry import make_policy

TINY = replace(
    QUICK,
    seeds=(2101, 2102),
    tuning_seeds=(77,),
    rates_per_s=(5.0, 8.0),
    num_queries=60,
    num_estimate_queries=80,
    num_step_queries=200,
    num_fluid_queries=60,
    lps_steps=300,
)


def test_rows_have_the_agreed_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints one JSON array of objects with id, claim, setting, value, ci95, threshold and pass; exit 0."""
    monkeypatch.setattr("headway.lab.acceptance.QUICK", TINY)
    assert acceptance(json=True, only="A5", quick=True, jobs=1) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {frozenset(row) for row in rows} == {
        frozenset({"id", "claim", "setting", "value", "ci95", "threshold", "pass"})
    }
    judged = [row for row in rows if row["pass"] is not None]
    assert [row["id"] for row in judged] == ["A5-0.035", "A5-0.0035"]
    assert all(row["pass"] == (row["value"] >= row["threshold"]) for row in judged)


def test_rows_print_as_markdown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``--markdown`` prints every row as a table row with its verdict in words; it excludes ``--json``."""
    monkeypatch.setattr("headway.lab.acceptance.QUICK", TINY)
    assert acceptance(markdown=True, only="A5-0.035", quick=True, jobs=1) == 0
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert header.count("|") == rule.count("|") == rows[0].count("|")
    assert [row.split(" | ")[0] for row in rows] == ["| A5-0.035", "| A5-0.035-refused", "| A5-0.035-negative"]
    assert rows[0].endswith(("| pass |", "| miss |"))
    assert rows[1].endswith("| – |  |")
    with pytest.raises(ConfigError, match="one of --json and --markdown"):
        acceptance(json=True, markdown=True, only="A5-0.035", quick=True, jobs=1)


def test_same_settings_give_the_same_rows() -> None:
    """A table is a function of its settings."""
    assert acceptance_rows(TINY, only=["A5"], num_jobs=1) == acceptance_rows(TINY, only=["A5"], num_jobs=1)


def test_one_row_can_be_asked_for() -> None:
    """``only`` takes a claim or one row of it."""
    rows = acceptance_rows(TINY, only=["A5-0.035"], num_jobs=1)
    assert [row.id for row in rows] == ["A5-0.035", "A5-0.035-refused", "A5-0.035-negative"]


@pytest.mark.parametrize("name", ["A99", "A5-0.36", "a5"])
def test_an_unknown_row_is_refused(name: str) -> None:
    """A row that does not exist is an error that names a near one."""
    with pytest.raises(ConfigError, match="unknown row"):
        acceptance_rows(TINY, only=[name], num_jobs=1)


class _Where(Struct, frozen=True):
    """A unit that tells in which process it ran."""

    cost: float

    def run(self) -> int:
        return os.getpid()


def test_what_is_timed_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of infinite cost run in this process, and the others not."""
    pytest.importorskip("joblib", reason="parallel runs need the extra 'lab'")
    others, timed = [_Where(1.0), _Where(2.0)], [_Where(math.inf)]
    places: list[int] = []

    def rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
        places.extend(results.of(unit) for unit in (*timed, *others))
        return []

    monkeypatch.setattr(run, "GROUPS", (Group("A1", lambda settings: [*others, *timed], rows),))
    assert acceptance_rows(TINY, num_jobs=2) == []
    assert places[0] == os.getpid()
    assert os.getpid() not in places[1:]


def test_units_are_shared_between_claims() -> None:
    """Two claims that need the same run name the same unit, whatever the slope where targets are ignored."""
    units = {group.claim_id: set(group.needs(FULL)) for group in GROUPS}
    assert len(units["A4"] & units["A5"]) == 5 * (2 + 3)
    other = play(FULL, "shortest_queue", slope=SLOPES[1])(5.0, 2101)
    assert shared(other) in units["A4"]


def test_seeds_of_choices_are_no_evaluation_seeds() -> None:
    """What is chosen is chosen on seeds that no row is measured on."""
    for settings in (FULL, QUICK):
        assert not set(settings.seeds) & set(settings.tuning_seeds)
    assert len(FULL.seeds) >= 5


@pytest.mark.parametrize("name", [name for name, player in PLAYERS.items() if player.estimator != "replay"])
def test_players_without_replay_decide_as_with_it(name: str) -> None:
    """A baseline played without mirrors or replays takes the decisions that it takes with them."""
    player = PLAYERS[name]
    if name in ("random_mix", "two_model", "bear_throughput"):
        pytest.skip("no registered policy, or one whose estimate is the point")
    unit = Play(policy=name, rate_per_s=9.0, seed=5, num_queries=250)
    work, pool = workload_of(unit), qwen3_pool()
    policy = make_policy(player.policy, rng=stream(5, "policy"), options=player.options)
    outcomes = simulate(work, pool, policy=policy, estimator=make_estimator("replay"), seed=5)
    for slope, found in unit.run().items():
        full = score(with_slope(work, 5, slope), pool, outcomes)
        assert found.shares == full.shares
        assert found.on_time_utility == full.on_time_utility


def test_a_workload_under_another_slope_keeps_its_queries() -> None:
    """Only targets change with the slope, and they are those of a workload built with it."""
    unit = Play(policy="bear", rate_per_s=5.0, seed=9, num_queries=50)
    other = replace(unit, slope=SLOPES[1])
    moved = with_slope(workload_of(unit), 9, SLOPES[1])
    assert (moved.ttft_target_s == workload_of(other).ttft_target_s).all()
    assert (moved.true_output_tokens == workload_of(other).true_output_tokens).all()


def test_utility_at_a_ttft_is_read_off_the_curve() -> None:
    """Between two points of a sweep the utility is linear in log TTFT; beyond its ends it is the end's."""
    points = [(10.0, 0.6), (0.1, 0.4), (1.0, 0.5)]
    assert utility_at(10**0.5, points) == pytest.approx(0.55)
    assert utility_at(0.01, points) == pytest.approx(0.4)
    assert np.isclose(utility_at(1.0, points), 0.5)


def test_every_claim_can_be_measured() -> None:
    """Each claim gives rows of its own on a tiny run (A1 has tests of its own, with the calibration)."""
    pytest.importorskip("scipy", reason="bounds and intervals need the extra 'lab'")
    claims = [group.claim_id for group in GROUPS]
    numbers = range(1, 24)
    assert claims == ["A1", "A1b", *(f"A{number}" for number in numbers[1:])]
    claims.remove("A1")
    rows = acceptance_rows(TINY, only=claims, num_jobs=1)
    assert set(claims) == {row.id.split("-", 1)[0] for row in rows}
    assert len({row.id for row in rows}) == len(rows)
    judged = {row.id.split("-", 1)[0] for row in rows if row.passed is not None}
    assert set(claims) - judged == {"A23"}
    assert all("QUICK" in row.setting for row in rows if row.id.split("-", 1)[0] not in ("A1b", "A10"))
