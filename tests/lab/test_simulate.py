"""The simulated fleet: every query accounted for, the same seed the same outcomes, and the gateway's own rules."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headway.estimate.registry import make_estimator
from headway.lab.arrivals import poisson
from headway.lab.metrics import Outcomes, Status, score
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.simulate import Sight, simulate
from headway.lab.workload import Workload, WorkloadSpec, four_task_workload
from headway.policy.registry import make_policy


def workload(num: int = 600, rate_per_s: float = 8.0, seed: int = 1) -> Workload:
    return four_task_workload(poisson(num, rate_per_s, np.random.default_rng(seed)), WorkloadSpec(seed=seed))


def play(
    work: Workload,
    policy: str = "bear",
    *,
    pool: Pool | None = None,
    estimator: str = "replay",
    seed: int = 3,
    sight: Sight | None = None,
    reject: bool = False,
) -> Outcomes:
    return simulate(
        work,
        pool or qwen3_pool(),
        policy=make_policy(policy, rng=np.random.default_rng(0)),
        estimator=make_estimator(estimator),
        seed=seed,
        sight=sight,
        on_infeasible="reject" if reject else "best_effort",
    )


def columns(outcomes: Outcomes) -> list[bytes]:
    return [getattr(outcomes, name).tobytes() for name in outcomes.__struct_fields__]


def test_every_query_is_answered_and_accounted_for() -> None:
    """Each query is chosen an instance, gets a first token, then its end, with the true length of that model."""
    work = workload()
    outcomes = play(work)
    rows = np.arange(len(work.arrival_s))
    assert (outcomes.status == Status.OK).all()
    assert (outcomes.ttft_s > 0).all()
    assert (outcomes.total_s >= outcomes.ttft_s).all()
    assert (outcomes.output_tokens == work.true_output_tokens[rows, outcomes.chosen]).all()


def test_same_seed_same_bytes_other_seed_other_noise() -> None:
    """A run is a function of its arguments; the seed draws the step noise."""
    work = workload()
    assert columns(play(work)) == columns(play(work))
    assert columns(play(work)) != columns(play(work, seed=4))


def test_bear_leads_on_time_utility() -> None:
    """At 8 queries per second BEAR is worth more than the three simple policies."""
    work = workload(2000)
    pool = qwen3_pool()
    worth = {
        policy: score(work, pool, play(work, policy)).on_time_utility
        for policy in ("bear", "round_robin", "shortest_queue", "latency_agnostic")
    }
    assert max(worth, key=worth.__getitem__) == "bear"
    assert worth["bear"] > 1.2 * worth["shortest_queue"]


def test_the_replay_predicts_what_the_engines_do() -> None:
    """With the state seen at every decision the replay's error is a few per cent, the throughput estimate's is not."""
    work, pool = workload(2000), qwen3_pool()
    error = {name: score(work, pool, play(work, estimator=name)).ttft_mape for name in ("replay", "prefill_throughput")}
    assert error["replay"] < 0.08
    assert error["prefill_throughput"] > 2 * error["replay"]


def test_true_figures_do_not_reach_the_router() -> None:
    """Other true qualities change no decision; nor do other true lengths before the first of them shows."""
    work = workload(300)
    same = msgspec.structs.replace(work, true_quality=1.0 - work.true_quality)
    assert play(work).chosen.tobytes() == play(same).chosen.tobytes()
    longer = msgspec.structs.replace(work, true_output_tokens=np.full_like(work.true_output_tokens, 8192))
    assert play(work).chosen[:5].tobytes() == play(longer).chosen[:5].tobytes()


def test_stale_snapshots_with_ageing_and_ledger_cost_little() -> None:
    """Snapshots 400 ms apart lose a little with ageing and ledger, and much without either."""
    work, pool = workload(2000), qwen3_pool()

    def worth(sight: Sight) -> float:
        return score(work, pool, play(work, sight=sight)).on_time_utility

    fresh = worth(Sight())
    aged = worth(Sight(interval_s=0.4))
    frozen = worth(Sight(interval_s=0.4, ageing=False, ledger=False))
    assert aged > 0.97 * fresh
    assert frozen < aged


def test_rejected_queries_are_refused_not_lost() -> None:
    """Under ``reject`` what cannot be in time is refused, and stays in every count."""
    work = workload(800, 14.0)
    outcomes = play(work, reject=True)
    refused = outcomes.chosen < 0
    assert 0 < refused.sum() < len(refused)
    assert (outcomes.status[refused] == Status.REFUSED).all()
    assert np.isinf(outcomes.ttft_s[refused]).all()
    assert score(work, qwen3_pool(), outcomes).refused == pytest.approx(refused.mean())


def test_policies_that_ask_nobody_choose_the_same_without_an_estimator() -> None:
    """Leaving the estimator out changes no choice of a policy that looks at no estimate, only the figures."""
    work = workload(400)
    for policy in ("round_robin", "random", "latency_agnostic"):
        bare = simulate(
            work, qwen3_pool(), policy=make_policy(policy, rng=np.random.default_rng(0)), estimator=None, seed=3
        )
        assert bare.chosen.tobytes() == play(work, policy).chosen.tobytes()
        assert np.isnan(bare.predicted_ttft_s).all()


def test_many_instances_share_the_load() -> None:
    """Six instances at twice the rate are all used, and at least as good as three."""
    work, pool = workload(1200, 16.0), qwen3_pool(2)
    outcomes = play(work, pool=pool)
    assert len(np.unique(outcomes.chosen)) == 6
    assert score(work, pool, outcomes).attainment > 0.95
