"""Policies that hold queries, on the simulated fleet: everything is accounted for, and time bounds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from msgspec.structs import replace

from headway.estimate.registry import make_estimator
from headway.lab.arrivals import poisson
from headway.lab.metrics import Outcomes, Status
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.runs import run
from headway.lab.scenario import parse_scenario
from headway.lab.simulate import Sight, simulate
from headway.lab.workload import Workload, WorkloadSpec, four_task_workload
from headway.policy.registry import make_policy


def workload(num: int = 300, rate_per_s: float = 8.0) -> Workload:
    return four_task_workload(poisson(num, rate_per_s, np.random.default_rng(1)), WorkloadSpec(seed=1))


def narrow_pool(max_num_seqs: int) -> Pool:
    """The three models, each with few slots, in the engines' truth and in what the router knows."""
    pool = qwen3_pool()
    instances = []
    for one in pool.instances:
        limits = replace(one.truth.limits, max_num_seqs=max_num_seqs)
        instances.append(
            replace(one, truth=replace(one.truth, limits=limits), instance=replace(one.instance, limits=limits))
        )
    return replace(pool, instances=type(pool.instances)(instances))


def play(
    work: Workload,
    policy: str,
    pool: Pool,
    *,
    sight: Sight | None = None,
    on_infeasible: Literal["best_effort", "reject", "queue"] = "best_effort",
    max_held_s: float = 1e9,
) -> Outcomes:
    return simulate(
        work,
        pool,
        policy=make_policy(policy, rng=np.random.default_rng(0)),
        estimator=make_estimator("replay"),
        seed=3,
        sight=sight,
        on_infeasible=on_infeasible,
        max_held_s=max_held_s,
    )


@pytest.mark.parametrize("policy", ["central_fcfs", "central_shortest_first"])
@pytest.mark.parametrize("sight", [Sight(), Sight(interval_s=0.25)])
def test_every_held_query_is_answered(policy: str, sight: Sight) -> None:
    """With eight slots per engine a burst waits in the queue, and all of it is answered, the same on every run."""
    work, pool = workload(rate_per_s=30.0), narrow_pool(8)
    outcomes = play(work, policy, pool, sight=sight)
    assert (outcomes.status == Status.OK).all()
    assert outcomes.ttft_s.max() > 5.0
    again = play(work, policy, pool, sight=sight)
    assert again.ttft_s.tobytes() == outcomes.ttft_s.tobytes()


def test_engines_never_hold_more_than_their_slots() -> None:
    """At no first token are more than four queries of that engine between first token and end."""
    work, pool = workload(rate_per_s=30.0), narrow_pool(4)
    outcomes = play(work, "central_fcfs", pool)
    for index in range(3):
        mine = outcomes.chosen == index
        begin_s = (work.arrival_s + outcomes.ttft_s)[mine]
        end_s = (work.arrival_s + outcomes.total_s)[mine]
        running = [(begin_s <= at_s).sum() - (end_s < at_s).sum() for at_s in begin_s]
        assert max(running) <= 4


def test_a_query_held_too_long_is_refused() -> None:
    """What is not released within ``max_held_s`` counts as refused, and nothing else is lost."""
    outcomes = play(workload(rate_per_s=30.0), "central_fcfs", narrow_pool(4), max_held_s=2.0)
    refused = outcomes.status == Status.REFUSED
    assert 0 < refused.sum() < len(refused)
    assert (outcomes.status[~refused] == Status.OK).all()


def test_queueing_the_infeasible_sends_nothing_late() -> None:
    """``on_infeasible: queue`` sends each query only where it was expected in time, counted from the release."""
    outcomes = play(workload(rate_per_s=14.0), "bear", qwen3_pool(), on_infeasible="queue", max_held_s=20.0)
    taken = outcomes.chosen >= 0
    assert outcomes.feasible[taken].all()
    assert (outcomes.status[taken] == Status.OK).all()


def test_a_scenario_may_name_policies_that_hold(tmp_path: Path) -> None:
    """Central queues and ``on_infeasible: queue`` stand in a scenario beside policies that choose."""
    text = """
name: held
num_queries: 80
seeds: [0]
rates_per_s: [12]
policies:
  - bear
  - central_fcfs
  - {policy: bear, label: waits, on_infeasible: queue}
"""
    run(parse_scenario(text, path="held.yaml"), tmp_path, jobs=1)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) >= 3
    assert {row["score"]["num_queries"] for row in rows} == {80}
