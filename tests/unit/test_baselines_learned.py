"""The baselines that learn from outcomes, and what they learn with."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from headway.fleet import FleetView
from headway.policy.history_percentiles import HistoryPercentilesPolicy
from headway.policy.observed import OnlineRidge, RecentSamples, tpot_s
from headway.policy.residents import Load
from headway.policy.routebalance import RouteBalancePolicy
from headway.types import Candidate, Estimate, Instance, Outcome, OutcomeStatus, Query, StepTime
from pools import instance, snapshot

CLOCK = StepTime.linear(b0=0.01, b1=1e-4, b2=1e-6, b3=0.0)
IDLE = Load(0, 0, 0, 0, 0, 0.0, 0.0, 0, True)


def query(name: str = "q") -> Query:
    return Query(id=name, arrival_s=0.0, prompt_text="", prompt_tokens={})


def candidate(name: str, model: str = "m", *, outstanding: int = 0, **figures: object) -> Candidate:
    known: dict[str, object] = {"quality": 0.5, "cost_usd": 1e-4, "output_tokens": 100.0, "prompt_tokens": 1000}
    estimate = Estimate(0.3, 0.3, 0.0, "replay")
    return Candidate(
        name,
        model,
        "feasible",
        0.5,
        estimate=estimate,
        num_outstanding=outstanding,
        **{**known, **figures},  # type: ignore[arg-type]
    )


def outcome(
    instance_id: str,
    ttft_s: float,
    token_s: float,
    *,
    query_id: str = "x",
    num_tokens: int = 11,
    status: OutcomeStatus = "ok",
) -> Outcome:
    return Outcome(
        query_id=query_id,
        instance_id=instance_id,
        status=status,
        ttft_s=ttft_s,
        total_s=ttft_s + token_s * (num_tokens - 1),
        output_tokens=num_tokens,
    )


# ------------------------------------------------------------ samples and regression


def test_tpot_counts_the_tokens_after_the_first() -> None:
    """Ten further tokens in half a second are 50 ms each; failures and single tokens say nothing."""
    assert tpot_s(outcome("a", 1.0, 0.05)) == pytest.approx(0.05)
    assert tpot_s(outcome("a", 1.0, 0.05, num_tokens=1)) is None
    assert tpot_s(outcome("a", 1.0, 0.05, status="interrupted")) is None
    assert tpot_s(Outcome(query_id="x", instance_id="a", status="ok", total_s=1.0, output_tokens=9)) is None


def test_percentiles_are_those_of_the_window() -> None:
    """After any number of samples the percentile is that of the newest ones alone, by nearest rank."""
    rng = np.random.default_rng(0)
    recent, seen = RecentSamples(50), []
    for value in rng.integers(0, 30, 300).astype(float).tolist():
        recent.add(value)
        seen.append(value)
        window = sorted(seen[-50:])
        if len(seen) >= 3:
            for share in (0.5, 0.9, 0.95, 1.0):
                rank = next(i for i in range(len(window)) if (i + 1) / len(window) >= share - 1e-12)
                assert recent.percentile(share) == window[rank]


def test_an_average_speaks_below_three_samples() -> None:
    """Nothing before the first sample, then an average that gives the newest a weight of .3."""
    recent = RecentSamples(10)
    assert recent.percentile(0.95) is None
    recent.add(1.0)
    assert recent.percentile(0.95) == 1.0
    recent.add(2.0)
    assert recent.percentile(0.95) == pytest.approx(1.3)
    recent.add(3.0)
    assert recent.percentile(0.95) == 3.0


def test_the_regression_is_ridge_around_its_prior() -> None:
    """After every sample the weights are those of the closed form, from the prior on."""
    rng = np.random.default_rng(1)
    prior, scales, strength = np.array([0.02, 1e-4]), np.array([1.0, 50.0]), 4.0
    ridge = OnlineRidge(prior.tolist(), scales.tolist(), strength=strength)
    assert ridge.predict([1.0, 10.0]) == pytest.approx(0.021)
    rows, values = np.empty((0, 2)), np.empty(0)
    for _ in range(30):
        row = np.array([1.0, rng.uniform(0, 100)])
        value = 0.03 + 3e-4 * row[1] + rng.normal(0, 1e-3)
        ridge.observe(row.tolist(), value)
        rows, values = np.vstack([rows, row / scales]), np.append(values, value)
        closed = np.linalg.solve(strength * np.eye(2) + rows.T @ rows, strength * prior * scales + rows.T @ values)
        assert ridge.weights == pytest.approx((closed / scales).tolist())
    assert ridge.predict([1.0, 50.0]) == pytest.approx(0.045, abs=2e-3)


# ------------------------------------------------------------ history percentiles


def history(**options: float) -> HistoryPercentilesPolicy:
    return HistoryPercentilesPolicy(np.random.default_rng(0), options)


def choice(policy: HistoryPercentilesPolicy | RouteBalancePolicy, *pool: Candidate, name: str = "q") -> str:
    index = policy.choose(query(name), pool, 0.0)
    assert index is not None
    return pool[index].instance_id


def test_every_model_is_warmed_up_first() -> None:
    """The first 32 queries of each model are spread over the models, and over a model's instances by count."""
    policy = history()
    pool = [candidate("a", "small"), candidate("b", "large"), candidate("c", "large", outstanding=9)]
    assert Counter(choice(policy, *pool) for _ in range(64)) == {"a": 32, "b": 32}


def test_the_shorter_tails_win() -> None:
    """Mean of ratios to the best: (1 + 3)/2 against (1.5 + 1)/2; the slower start with the faster pace wins."""
    policy = history(warmup=0.0)
    pool = [candidate("a", "small"), candidate("b", "large")]
    choice(policy, *pool)
    for _ in range(3):
        policy.observe(outcome("a", 0.2, 0.03), 0.0)
        policy.observe(outcome("b", 0.3, 0.01), 0.0)
    assert {choice(policy, *pool) for _ in range(4)} == {"b"}
    for _ in range(3):
        policy.observe(outcome("b", 2.0, 0.01), 0.0)  # now (1 + 3)/2 against (10 + 1)/2
    assert {choice(policy, *pool) for _ in range(4)} == {"a"}


def test_the_tail_counts_not_the_middle() -> None:
    """One slow first token in ten decides at the 95th percentile."""
    policy = history(warmup=0.0)
    pool = [candidate("a", "small"), candidate("b", "large")]
    choice(policy, *pool)
    for number in range(10):
        policy.observe(outcome("a", 0.1 if number else 5.0, 0.02), 0.0)
        policy.observe(outcome("b", 0.4, 0.02), 0.0)
    assert choice(policy, *pool) == "b"


def test_an_unseen_model_counts_as_good_as_the_best() -> None:
    """Without an outcome yet a model ties with the best, and counts and turns decide."""
    policy = history(warmup=0.0)
    pool = [candidate("a", "small", outstanding=1), candidate("b", "large")]
    choice(policy, *pool)
    policy.observe(outcome("a", 0.2, 0.01), 0.0)
    assert choice(policy, *pool) == "b"


def test_failures_leave_no_trace_in_the_history() -> None:
    """A failed answer, and an instance never seen, change nothing."""
    policy = history(warmup=0.0)
    pool = [candidate("a", "small"), candidate("b", "large")]
    choice(policy, *pool)
    policy.observe(outcome("a", 9.0, 9.0, status="error"), 0.0)
    policy.observe(outcome("elsewhere", 0.1, 0.1), 0.0)
    assert {choice(policy, *pool) for _ in range(6)} == {"a", "b"}


# ------------------------------------------------------------ RouteBalance


def routebalance(fleet: FleetView | None = None, **options: float) -> RouteBalancePolicy:
    policy = RouteBalancePolicy(np.random.default_rng(0), options)
    if fleet is not None:
        policy.bind(fleet)
    return policy


def test_the_end_is_pace_times_tokens_ahead() -> None:
    """T = TPOT·(d/b + L), d/b being dropped while a slot is free; TPOT begins as the time of a decode batch."""
    policy = routebalance(FleetView([instance("a", step_time=CLOCK)]))
    one = candidate("a", output_tokens=100.0)
    token_s = 0.01 + 20 * 1e-4 + 30_000 * 1e-6
    busy = Load(25, 20, 20, 0, 0, 0.0, 4000.0, 30_000, True)
    assert policy.end_s(one, IDLE) == pytest.approx(0.01 * 100)
    assert policy.end_s(one, busy) == pytest.approx(token_s * 100)
    assert policy.end_s(one, busy._replace(slot_free=False)) == pytest.approx(token_s * (4000 / 20 + 100))


def test_the_weighted_sum_by_hand() -> None:
    """Thirds of quality, 1 − C/Cmax and 1 − T/Tmax: .9 of quality loses to half the cost and a third of the time."""
    fleet = FleetView([instance("a", step_time=CLOCK), instance("b", step_time=CLOCK)])
    good = candidate("a", quality=0.9, cost_usd=2e-4, output_tokens=300.0)  # (.9 + 0 + 0)/3
    quick = candidate("b", quality=0.2, cost_usd=1e-4, output_tokens=100.0)  # (.2 + .5 + .667)/3
    assert choice(routebalance(fleet), good, quick) == "b"
    assert choice(routebalance(fleet, weight_quality=1.0), good, quick) == "a"  # .9 against .2 + .389
    assert choice(routebalance(fleet, weight_cost=0.0, weight_latency=0.0), good, quick) == "a"


def test_the_pace_is_learned_from_the_load_at_the_decision() -> None:
    """Answers three times slower than the step time says make the prediction follow them."""
    policy = routebalance(FleetView([instance("a", step_time=CLOCK)]))
    before_s = policy.end_s(candidate("a"), IDLE)
    for number in range(200):
        name = str(number)
        choice(policy, candidate("a"), name=name)
        policy.observe(outcome("a", 0.1, 0.03, query_id=name), 0.0)
    assert before_s == pytest.approx(1.0)
    assert policy.end_s(candidate("a"), IDLE) == pytest.approx(3.0, rel=0.03)


def test_only_the_instance_that_answered_is_learned_from() -> None:
    """An outcome of an earlier attempt elsewhere, or of a query never seen, teaches nothing."""
    policy = routebalance(FleetView([instance("a", step_time=CLOCK), instance("b", step_time=CLOCK)]))
    choice(policy, candidate("a"))
    policy.observe(outcome("b", 0.1, 0.5, query_id="q"), 0.0)
    policy.observe(outcome("a", 0.1, 0.5, query_id="never seen"), 0.0)
    assert policy.end_s(candidate("a"), IDLE) == policy.end_s(candidate("b"), IDLE) == pytest.approx(1.0)
    policy.observe(outcome("a", 0.1, 0.5, query_id="q"), 0.0)
    assert policy.end_s(candidate("a"), IDLE) > policy.end_s(candidate("b"), IDLE)


def test_an_instance_without_a_clock_begins_with_its_calibration() -> None:
    """T_dec stands for a known instance without a step time, 20 ms a token for an unknown one."""
    from msgspec.structs import replace

    fleet = FleetView([replace(instance("a"), step_time=None), Instance(id="h", model="m")])
    policy = routebalance(fleet)
    assert policy.end_s(candidate("a"), IDLE) == pytest.approx(1.0)
    assert policy.end_s(candidate("h"), IDLE) == pytest.approx(2.0)


def test_residents_shown_slow_the_pace() -> None:
    """At equal figures the instance whose snapshot shows decodes loses to the idle one."""
    from headway.types import SnapshotRequest

    instances = [instance("a", step_time=CLOCK), instance("b", step_time=CLOCK)]
    fleet = FleetView(instances, stale_after_s=1e6)
    from msgspec.structs import replace

    busy = [SnapshotRequest(f"r{n}", 1000, 1009, 10, 64, 500, 0, 0.0, 0) for n in range(20)]
    shown = snapshot("a")
    fleet.observe_snapshot(replace(shown, running=busy, free_blocks=shown.free_blocks - 64 * 20), 0.0)
    fleet.observe_snapshot(snapshot("b"), 0.0)
    fleet.age(0.0)
    policy = routebalance(fleet)
    assert {choice(policy, candidate("a"), candidate("b")) for _ in range(4)} == {"b"}
