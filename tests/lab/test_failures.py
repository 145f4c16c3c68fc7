"""The four known failures of learned routers: each found where it was built in, and not where it was not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from headway.lab.arrivals import poisson
from headway.lab.failures import Failure, failures, main, roster_suboptimality
from headway.lab.metrics import REFUSED, Outcomes, Status
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.workload import Workload, WorkloadSpec, four_task_workload

POOL = qwen3_pool()


def workload(num: int = 4_000, lambda_per_musd: float = 5e-4) -> Workload:
    arrivals = poisson(num, 8.0, np.random.default_rng(7))
    return four_task_workload(arrivals, WorkloadSpec(seed=7, lambda_per_musd=lambda_per_musd))


def answered(work: Workload, columns: NDArray[np.intp], pool: Pool = POOL) -> Outcomes:
    """Every query answered in time by the pool's instance at this position."""
    models = [work.models.index(one.instance.model) for one in pool.instances]
    outcomes = Outcomes.empty(work.num_queries)
    outcomes.chosen[:] = columns
    outcomes.status[:] = Status.OK
    outcomes.ttft_s[:] = 0.05
    outcomes.total_s[:] = 3.0
    outcomes.output_tokens[:] = work.true_output_tokens[np.arange(work.num_queries), np.array(models)[columns]]
    return outcomes


def at_random(work: Workload, num: int = 3) -> NDArray[np.intp]:
    return np.random.default_rng(11).integers(num, size=work.num_queries)


def thirds(values: NDArray[np.float64], work: Workload) -> NDArray[np.intp]:
    """0, 1 or 2 for the lowest, middle and highest third of a value within its task."""
    result = np.empty(len(values), np.intp)
    for task in np.unique(work.task):
        rows = work.task == task
        result[rows] = np.searchsorted(np.quantile(values[rows], [1 / 3, 2 / 3]), values[rows])
    return result


def found(work: Workload, columns: NDArray[np.intp]) -> dict[str, Failure]:
    return {one.name: one for one in failures(work, POOL, answered(work, columns))}


def test_sending_hard_queries_to_strong_models_is_not_blind() -> None:
    """A choice that rises with true difficulty within each task shows a correlation near 1."""
    work = workload()
    difficulty = 1.0 - work.true_quality.mean(axis=1)
    seeing = found(work, thirds(difficulty, work))["difficulty blindness"]
    assert not seeing.has_it
    assert seeing.value > 0.9
    assert seeing.reference is not None
    assert 0.0 < seeing.reference < seeing.value


@pytest.mark.parametrize("by", ["chance", "task", "ease"])
def test_what_does_not_follow_difficulty_within_a_task_is_blind(by: str) -> None:
    """Chance is blind; so is a router that knows hard tasks but no hard queries, and one that has it backwards."""
    work = workload()
    columns = {
        "chance": at_random(work),
        "task": np.array([0, 1, 1, 2])[work.task],
        "ease": thirds(work.true_quality.mean(axis=1), work),
    }[by]
    blind = found(work, columns)["difficulty blindness"]
    assert blind.has_it
    assert blind.value < 0.05


def with_equal_quality(work: Workload) -> Workload:
    return msgspec.structs.replace(work, true_quality=np.full_like(work.true_quality, 0.8))


def test_sending_long_answers_where_they_cost_most_is_reversal() -> None:
    """With equal quality long answers belong on cheap models; the other way round is the failure."""
    work = with_equal_quality(workload())
    length = np.log(work.true_output_tokens).mean(axis=1)
    right, wrong = found(work, 2 - thirds(length, work)), found(work, thirds(length, work))
    assert wrong["length reversal"].has_it
    assert wrong["length reversal"].value < 0.0
    assert not right["length reversal"].has_it
    assert right["length reversal"].value > 0.0


def test_not_looking_at_length_is_no_reversal() -> None:
    """Where long and short answers are spread alike there is nothing to reverse."""
    blind = found(workload(), at_random(workload()))["length reversal"]
    assert not blind.has_it
    assert abs(blind.value) < 0.02


def test_a_choice_by_task_alone_is_semantic_matching() -> None:
    """One model per task: the task tells all there is to tell."""
    work = workload()
    matching = found(work, np.array([0, 1, 2, 2])[work.task])["semantic matching"]
    assert matching.has_it
    assert matching.value > 0.99


def test_a_choice_by_each_querys_prediction_is_not() -> None:
    """Thirds of the predicted gain within a task leave the task nothing to tell; chance leaves nobody anything."""
    work = workload()
    gain = work.predicted_quality[:, 2] - work.predicted_quality[:, 0]
    for columns, most in ((thirds(gain, work), 0.05), (at_random(work), 0.5)):
        matching = found(work, columns)["semantic matching"]
        assert not matching.has_it
        assert matching.value < most


def in_turn(work: Workload) -> Callable[[Pool], Outcomes]:
    """Round robin over whatever pool there is, every answer in time."""
    return lambda pool: answered(work, np.arange(work.num_queries) % len(pool.instances), pool)


@pytest.mark.parametrize(
    ("quality", "dropped"), [((0.0, 0.9, 0.9), "h100-0.6b"), ((0.0, 0.1, 0.9), "h100-0.6b, h100-8b")]
)
def test_instances_that_only_do_harm_make_a_roster_suboptimal(quality: tuple[float, ...], dropped: str) -> None:
    """Round robin over models that answer badly gains by their loss, one after the other."""
    work = workload(400, lambda_per_musd=0.0)
    work = msgspec.structs.replace(work, true_quality=np.tile(quality, (work.num_queries, 1)))
    failure = roster_suboptimality(work, POOL, in_turn(work))
    assert failure.has_it
    assert failure.value == pytest.approx(max(quality) - np.mean(quality), abs=0.02)
    assert f"without {dropped})" in failure.measure


def test_instances_that_are_worth_their_place_do_not() -> None:
    """Where every model answers alike, a smaller pool is no better."""
    work = workload(400, lambda_per_musd=0.0)
    work = msgspec.structs.replace(work, true_quality=np.full_like(work.true_quality, 0.5))
    failure = roster_suboptimality(work, POOL, in_turn(work))
    assert not failure.has_it
    assert failure.value == 0.0


def test_refused_queries_make_no_choice_and_the_seed_makes_the_interval() -> None:
    """Only what was taken is judged; equal seeds give equal intervals around one value, which lies inside."""
    work = workload()
    outcomes = answered(work, at_random(work))
    outcomes.chosen[::3] = REFUSED
    outcomes.status[::3] = Status.REFUSED
    first, again, other = (failures(work, POOL, outcomes, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [one.value for one in first] == [one.value for one in other]
    assert first != other
    for one in first[:2]:
        assert one.interval.low is not None
        assert one.interval.high is not None
        assert one.interval.low < one.value < one.interval.high


def test_where_there_is_no_choice_there_is_no_judgement() -> None:
    """A pool of one model, a run of a few queries, a roster of one instance."""
    work = workload(200)
    single = qwen3_pool((0, 2, 0))
    with pytest.raises(ValueError, match="one model"):
        failures(work, single, answered(work, at_random(work, 2), single))
    with pytest.raises(ValueError, match="at least 100"):
        failures(workload(99), POOL, answered(workload(99), at_random(workload(99))))
    with pytest.raises(ValueError, match="two instances"):
        roster_suboptimality(work, qwen3_pool((1, 0, 0)), in_turn(work))


def test_the_command_prints_every_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The documented command runs, here on few queries."""
    main(200, 100)
    printed = capsys.readouterr().out
    for name in ("difficulty blindness", "length reversal", "semantic matching", "roster suboptimality"):
        assert printed.count(f"| {name} |") == 5
