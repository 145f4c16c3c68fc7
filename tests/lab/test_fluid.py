"""The fluid bound: by hand, against its own constraints, and the capacity it rests on against a simulated engine."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headway._core import TruthEngine
from headway.errors import ConfigError
from headway.lab.arrivals import poisson
from headway.lab.fluid import fluid_bound, mean_work_s
from headway.lab.pool import Pool, lab_instance, qwen3_pool
from headway.lab.workload import Workload, WorkloadSpec, four_task_workload
from headway.types import ModelCard

pytest.importorskip("scipy", reason="the fluid bound needs the extra 'lab'")

#: One query of 1,000 prompt and 100 output tokens on the 8B's clock, by hand: prefill 2.0789e-2 + 5.1196e-4, decodes
#: 100·(2.5632e-5 + 4.6491e-8·1050), and 7.296e-3·100·1050/(23,893·16) of the constant.
WORK_S = 0.0213010 + 0.0074448 + 0.0020039


def alike(num: int, *, quality: tuple[float, ...] = (0.8,), models: tuple[str, ...] = ("qwen3-8b",)) -> Workload:
    """``num`` queries of 1,000 prompt and 100 output tokens, a second each to answer."""
    shape = (num, len(models))
    return Workload(
        arrival_s=np.arange(num, dtype=np.float64),
        task=np.zeros(num, np.int8),
        task_names=("one",),
        models=models,
        prompt_tokens=np.full(num, 1000, np.int32),
        ttft_target_s=np.full(num, 1.0),
        true_output_tokens=np.full(shape, 100, np.int32),
        true_quality=np.tile(quality, (num, 1)).astype(np.float64),
        predicted_output_tokens=np.full(shape, 100.0),
        predicted_quality=np.tile(quality, (num, 1)).astype(np.float64),
        max_tokens=8192,
    )


def one_8b() -> Pool:
    pool = qwen3_pool((0, 1, 0))
    return Pool(instances=pool.instances, cards={"qwen3-8b": ModelCard(name="qwen3-8b")})  # free of charge


def test_the_work_of_a_query_by_hand() -> None:
    """The mean work of equal queries is the hand-computed one."""
    assert mean_work_s(alike(3), one_8b().instances[0]) == pytest.approx(WORK_S, rel=1e-4)


@pytest.mark.parametrize(("load", "stable"), [(0.85, True), (1.2, False)])
def test_an_instance_is_stable_up_to_one_second_of_work_per_second(load: float, stable: bool) -> None:
    """Below rate·w = 1 nothing waits at the end of a long run, above it the queue has grown with time."""
    truth = one_8b().instances[0].truth
    engine = TruthEngine(
        truth.limits,
        truth.step_time,
        noise=truth.step_noise,
        stall_probability=truth.stall_probability,
        stall_mean_s=truth.stall_mean_s,
        gap_low_s=truth.host_gap_s[0],
        gap_high_s=truth.host_gap_s[1],
        seed=1,
    )
    arrivals = poisson(9000, load / WORK_S, np.random.default_rng(4)).tolist()
    for number, now in enumerate(arrivals):
        engine.run_until(now)
        engine.submit(
            str(number),
            prompt_tokens=1000,
            target_output_tokens=100,
            predicted_output_tokens=100.0,
            max_tokens=0,
            now=now,
        )
    if stable:
        assert engine.num_waiting < 20
    else:
        assert engine.num_waiting > 300


def test_below_capacity_every_query_counts() -> None:
    """A pool that can do all the work gives every query its best utility, and its time has no price."""
    bound = fluid_bound(alike(50), one_8b(), 0.5 / WORK_S)
    assert bound.utility == pytest.approx(0.8)
    assert bound.loads["h100-8b"] == pytest.approx(0.5, rel=1e-3)
    assert bound.prices["h100-8b"] == pytest.approx(0.0, abs=1e-9)
    assert (bound.shares["h100-8b"], bound.unserved) == pytest.approx((1.0, 0.0), abs=1e-9)


def test_above_capacity_the_rest_is_lost() -> None:
    """At twice the capacity half of the queries count, and a second of work is worth utility over work."""
    bound = fluid_bound(alike(50), one_8b(), 2.0 / WORK_S)
    assert bound.utility == pytest.approx(0.4, rel=1e-3)
    assert bound.loads["h100-8b"] == pytest.approx(1.0)
    assert bound.prices["h100-8b"] == pytest.approx(0.8 / WORK_S, rel=1e-3)
    assert bound.unserved == pytest.approx(0.5, abs=1e-3)


def test_equal_instances_share_alike() -> None:
    """Two instances of a kind carry twice the rate of one, each half of it."""
    one = fluid_bound(alike(50), one_8b(), 2.0 / WORK_S)
    twins = qwen3_pool((0, 2, 0))
    two = fluid_bound(alike(50), Pool(instances=twins.instances, cards=one_8b().cards), 4.0 / WORK_S)
    assert two.utility == pytest.approx(one.utility)
    assert two.loads == {name: pytest.approx(1.0) for name in twins.ids}
    assert two.shares == {name: pytest.approx(0.25, abs=1e-3) for name in twins.ids}


def test_what_would_be_late_alone_does_not_count() -> None:
    """A prompt whose prefill takes longer than its target is worth nothing, however good the answer."""
    late = msgspec.structs.replace(alike(10), ttft_target_s=np.full(10, 0.028))  # alone: .0073 + .0213 s
    assert fluid_bound(late, one_8b(), 1.0).utility == 0.0
    in_time = msgspec.structs.replace(alike(10), ttft_target_s=np.full(10, 0.029))
    assert fluid_bound(in_time, one_8b(), 1.0).utility == pytest.approx(0.8)


def test_what_costs_more_than_it_is_worth_stays_unserved() -> None:
    """A negative utility is worse than none."""
    pool = one_8b()
    dear = Pool(instances=pool.instances, cards={"qwen3-8b": ModelCard(name="qwen3-8b", output_per_1m_usd=20.0)})
    bound = fluid_bound(alike(10), dear, 1.0)  # 2,000 micro-USD cost 1.0, the answer is worth 0.8
    assert (bound.utility, bound.unserved) == (0.0, 1.0)


def test_the_better_model_is_filled_first() -> None:
    """Two models at a rate beyond the better one's capacity: it is full, and the other takes the rest."""
    models = ("qwen3-0.6b", "qwen3-8b")
    cards = {name: ModelCard(name=name) for name in models}
    pool = Pool(instances=(one_8b().instances[0], lab_instance("small", models[0], "h100-qwen3-0.6b")), cards=cards)
    bound = fluid_bound(alike(200, quality=(0.3, 0.8), models=models), pool, 1.25 / WORK_S)
    assert bound.loads["h100-8b"] == pytest.approx(1.0)
    assert bound.shares == {"h100-8b": pytest.approx(0.8, abs=2e-3), "small": pytest.approx(0.2, abs=2e-3)}
    assert bound.utility == pytest.approx(0.8 * 0.8 + 0.2 * 0.3, abs=2e-3)


def test_the_bound_falls_with_the_rate_and_rises_with_knowledge() -> None:
    """With four tasks more traffic lowers the bound, and knowing the truth raises it; one seed, one number."""
    workload = four_task_workload(poisson(1500, 8.0, np.random.default_rng(0)), WorkloadSpec(seed=3))
    pool = qwen3_pool()
    bounds = [fluid_bound(workload, pool, rate_per_s) for rate_per_s in (5.0, 8.0, 12.0)]
    assert bounds[0].utility > bounds[1].utility > bounds[2].utility > 0.5
    assert all(load <= 1.0 + 1e-9 for bound in bounds for load in bound.loads.values())
    assert fluid_bound(workload, pool, 8.0, knowledge="true").utility > bounds[1].utility
    assert fluid_bound(workload, pool, 8.0) == bounds[1]


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused(rate_per_s: float) -> None:
    """A rate that is not positive names its key."""
    with pytest.raises(ConfigError, match="rate_per_s"):
        fluid_bound(alike(2), one_8b(), rate_per_s)
