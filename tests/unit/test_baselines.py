"""The baselines that weigh load, by hand-computed examples on real fleets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.fleet import FleetView
from headway.policy.options import Option
from headway.policy.registry import make_policy
from headway.policy.remaining_prefill import RemainingPrefillPolicy
from headway.policy.residents import Residents
from headway.policy.score import ScorePolicy
from headway.types import Candidate, Estimate, Instance, Outcome, Query, SnapshotRequest, StepTime
from pools import CALIBRATION, LIMITS, book, instance, snapshot

QUERY = Query(id="q", arrival_s=0.0, prompt_text="", prompt_tokens={})
CLOCK = StepTime.linear(b0=0.01, b1=1e-4, b2=1e-6, b3=2e-8)


def candidate(name: str, *, outstanding: int = 0, **figures: object) -> Candidate:
    known: dict[str, object] = {
        "utility": 0.5,
        "quality": 0.6,
        "cost_usd": 1e-4,
        "output_tokens": 100.0,
        "prompt_tokens": 1000,
        "estimate": Estimate(0.3, 0.3, 0.0, "replay"),
    }
    return Candidate(name, name[0], "feasible", num_outstanding=outstanding, **{**known, **figures})  # type: ignore[arg-type]


def make(name: str, fleet: FleetView | None = None, seed: int = 0, **options: Option) -> object:
    policy = make_policy(name, rng=np.random.default_rng(seed), options=options)
    if fleet is not None:
        policy.bind(fleet)  # type: ignore[attr-defined]
    return policy


def chosen(policy: object, *pool: Candidate) -> str | None:
    index = policy.choose(QUERY, pool, 0.0)  # type: ignore[attr-defined]
    return None if index is None else pool[index].instance_id


def fleet_of(*instances: Instance, queued: dict[str, list[int]] | None = None) -> FleetView:
    """A fleet whose engines showed these waiting prompts, aged to the moment of their snapshots."""
    fleet = FleetView(instances, stale_after_s=1e6)
    for one in instances:
        if one.limits is not None:
            fleet.observe_snapshot(snapshot(one.id, *(queued or {}).get(one.id, [])), 0.0)
    fleet.age(0.0)
    return fleet


# ------------------------------------------------------------ what stands behind a candidate


def test_an_unbound_policy_knows_the_count_alone() -> None:
    """Without a fleet nothing but the candidate's own count is known, and a slot is taken to be free."""
    load = Residents().load(candidate("a", outstanding=3))
    assert load.num_requests == 3
    assert (load.prefill_tokens, load.decode_tokens, load.slot_free) == (0, 0.0, True)


def test_requests_of_other_routers_count_where_a_snapshot_shows_them() -> None:
    """The larger of the ledger's count and the residents shown: ours are in both, others in the second alone."""
    fleet = fleet_of(instance("a"), instance("b"), queued={"a": [100, 100, 100]})
    residents = Residents()
    residents.bind(fleet)
    assert residents.num_requests(candidate("a", outstanding=1)) == 3
    assert residents.num_requests(candidate("a", outstanding=4)) == 4
    assert residents.load(candidate("a", outstanding=1)).num_requests == 3


def test_a_stale_state_does_not_speak() -> None:
    """Where the state is stale the ledger speaks alone: prompts before the first token, predicted outputs always."""
    fleet = fleet_of(instance("a"), queued={"a": [100, 100]})
    book(fleet, "x", "a", prompt_tokens=700)
    book(fleet, "y", "a", prompt_tokens=300)
    fleet.first_token_seen("y", 0.0)
    fleet.views[0].stale = True
    residents = Residents()
    residents.bind(fleet)
    load = residents.load(candidate("a", outstanding=2))
    assert (load.num_requests, load.num_prefills, load.num_decodes) == (2, 1, 1)
    assert (load.prefill_tokens, load.prefill_pairs, load.decode_tokens) == (700, 700.0**2, 400.0)
    assert load.context_tokens == 300


def test_a_slot_is_free_below_max_num_seqs() -> None:
    """One resident less than max_num_seqs leaves a slot, as many leave none."""
    from msgspec.structs import replace

    limits = replace(LIMITS, max_num_seqs=2)
    fleet = FleetView([instance("a", limits=limits)], stale_after_s=1e6)
    residents = Residents()
    residents.bind(fleet)
    shown = replace(snapshot("a", 50, 50), limits=limits)
    fleet.observe_snapshot(shown, 0.0)
    fleet.age(0.0)
    assert not residents.load(candidate("a")).slot_free
    fleet.observe_snapshot(replace(shown, waiting=shown.waiting[:1], sequence=2), 0.0)
    fleet.age(0.0)
    assert residents.load(candidate("a")).slot_free


# ------------------------------------------------------------ shortest queue, power of two, unfinished over speed


def test_shortest_queue_sees_what_other_routers_sent() -> None:
    """An instance that looks empty by the ledger but shows three residents is longer than one with two of ours."""
    fleet = fleet_of(instance("a"), instance("b"), queued={"a": [100, 100, 100]})
    assert chosen(make("shortest_queue", fleet), candidate("a"), candidate("b", outstanding=2)) == "b"


def test_power_of_two_takes_the_emptier_of_two() -> None:
    """With two instances it is the shortest queue; with three the fullest is never chosen, the middle one sometimes."""
    pair = [candidate("a", outstanding=3), candidate("b", outstanding=2)]
    policy = make("power_of_two")
    assert {chosen(policy, *pair) for _ in range(20)} == {"b"}
    counts = Counter(chosen(policy, *pair, candidate("c", outstanding=9)) for _ in range(3000))
    assert set(counts) == {"a", "b"}
    assert abs(counts["b"] - 2000) < 120  # b wins the pairs (a, b) and (b, c): two of three


def test_power_of_two_draws_evenly_between_equals() -> None:
    """Equal counts give every instance the same share, and one seed the same sequence."""
    pool = [candidate(name) for name in "abc"]
    first, second = make("power_of_two", seed=3), make("power_of_two", seed=3)
    picks = [chosen(first, *pool) for _ in range(3000)]
    assert picks == [chosen(second, *pool) for _ in range(3000)]
    assert all(abs(count - 1000) < 120 for count in Counter(picks).values())


def test_unfinished_over_speed_divides_counts_by_speeds() -> None:
    """12/4 beats 4/1 and loses to 2/1, whichever way the speeds are given."""
    fleet = fleet_of(instance("a", model="cheap"), instance("b", model="dear"))
    for speeds in ({"a": 4.0, "b": 1.0}, {"cheap": 4.0, "dear": 1.0}, {"cheap": 9.0, "a": 4.0, "b": 1.0}):
        policy = make("unfinished_over_speed", fleet, speeds=speeds)
        assert chosen(policy, candidate("a", outstanding=12), candidate("b", outstanding=4)) == "a"
        assert chosen(policy, candidate("a", outstanding=12), candidate("b", outstanding=2)) == "b"


def test_speeds_default_to_calibrated_service_rates() -> None:
    """Without speeds the calibrated rates count; an instance that has none counts with their mean."""
    from msgspec.structs import replace

    fast = replace(instance("a"), calibration=replace(CALIBRATION, service_rate_per_s=6.0))
    fleet = fleet_of(fast, instance("b"), Instance(id="h", model="dear"))
    policy = make("unfinished_over_speed", fleet)
    pool = [candidate("a", outstanding=5), candidate("b", outstanding=2), candidate("h", outstanding=4)]
    assert chosen(policy, *pool) == "a"  # 5/6, 2/2, 4/4
    assert chosen(policy, pool[1], candidate("h", outstanding=3)) == "h"  # 2/2, 3/4


def test_equal_quotients_take_turns() -> None:
    """An idle pool is shared evenly, whatever the speeds."""
    fleet = fleet_of(instance("a"), instance("b"))
    policy = make("unfinished_over_speed", fleet, speeds={"a": 4.0, "b": 1.0})
    assert Counter(chosen(policy, candidate("a"), candidate("b")) for _ in range(10)) == {"a": 5, "b": 5}


# ------------------------------------------------------------ remaining prefill


def test_remaining_prefill_by_hand() -> None:
    """Σ c0 + a·p + b(p² + 2pc) with a = b1 + b3/2 and b = b3/2, over two residents and the query."""
    fleet = fleet_of(instance("a", step_time=CLOCK))
    half = SnapshotRequest("x", 2000, 500, 0, 32, 64, 0, 0.0, 0)
    shown = snapshot("a", 300, sequence=2)
    from msgspec.structs import replace

    free_blocks = LIMITS.num_blocks - 1 - 32
    fleet.observe_snapshot(replace(shown, running=[half], free_blocks=free_blocks), 0.0)
    fleet.age(0.0)
    policy = RemainingPrefillPolicy(np.random.default_rng(0))
    policy.bind(fleet)
    pairs = (1500**2 + 2 * 1500 * 500) + 300**2 + 1000**2
    expected_s = 3 * 0.01 + (1e-4 + 1e-8) * (1500 + 300 + 1000) + 1e-8 * pairs
    assert policy.prefill_s(candidate("a")) == pytest.approx(expected_s)


def test_remaining_prefill_takes_the_least() -> None:
    """A queue of one long prompt is longer than one of three short ones."""
    fleet = fleet_of(instance("a"), instance("b"), queued={"a": [9000], "b": [100, 100, 100]})
    assert chosen(make("remaining_prefill", fleet), candidate("a"), candidate("b")) == "b"


def test_remaining_prefill_makes_do_with_less() -> None:
    """Without a step time the calibrated throughput divides the tokens; with neither the router's estimate stands."""
    from msgspec.structs import replace

    calibrated = replace(instance("b"), step_time=None)
    fleet = fleet_of(calibrated, Instance(id="h", model="dear"))
    policy = RemainingPrefillPolicy(np.random.default_rng(0))
    policy.bind(fleet)
    book(fleet, "x", "b", prompt_tokens=3000)
    assert policy.prefill_s(candidate("b", outstanding=1)) == pytest.approx((3000 + 1000) / 20_000.0)
    assert policy.prefill_s(candidate("h")) == 0.3


# ------------------------------------------------------------ SCORE


def test_score_by_hand_in_seconds() -> None:
    """W = (300 + 1000)/20000 + 64/(25/0.01) and S = 0.01·100; fair and literal form with their own prices."""
    fleet = fleet_of(instance("a"), queued={"a": [300]})  # expected to give 64 tokens, its limit
    wait_s, service_s = 1300 / 20_000 + 64 / 2500, 1.0
    fair = ScorePolicy(np.random.default_rng(0), {})
    fair.bind(fleet)
    one = candidate("a", utility=0.4, quality=0.6, cost_usd=3e-4)
    assert fair.wait_s(one) == pytest.approx(wait_s)
    assert fair.service_s(one) == pytest.approx(service_s)
    assert fair.score(one) == pytest.approx(0.4 - 0.05 * (wait_s + service_s))
    literal = ScorePolicy(np.random.default_rng(0), {"form": "literal", "price": 1e-3})
    literal.bind(fleet)
    assert literal.score(one) == pytest.approx(0.6 - 1e-3 * (300.0 + wait_s + service_s))


def test_score_takes_rates_by_instance_or_model() -> None:
    """Given rates replace those of the calibration, an instance's own before its model's."""
    fleet = fleet_of(instance("a"), instance("b"), queued={"a": [300], "b": [300]})
    policy = ScorePolicy(
        np.random.default_rng(0), {"decode_tokens_per_s": {"cheap": 640.0, "b": 64.0}, "token_s": {"cheap": 0.02}}
    )
    policy.bind(fleet)
    assert policy.wait_s(candidate("a")) == pytest.approx(0.065 + 0.1)
    assert policy.wait_s(candidate("b")) == pytest.approx(0.065 + 1.0)
    assert policy.service_s(candidate("b")) == pytest.approx(2.0)


def test_score_learns_the_pace_of_an_unknown_instance() -> None:
    """Without a calibration the router's TTFT is the wait, and s is the average of what was seen."""
    fleet = fleet_of(Instance(id="h", model="dear"))
    policy = ScorePolicy(np.random.default_rng(0), {})
    policy.bind(fleet)
    assert policy.wait_s(candidate("h")) == 0.3
    assert policy.service_s(candidate("h")) == pytest.approx(2.0)  # 20 ms a token until something is seen
    for token_s in (0.05, 0.07):
        policy.observe(
            Outcome(
                query_id="x", instance_id="h", status="ok", ttft_s=1.0, total_s=1.0 + 10 * token_s, output_tokens=11
            ),
            0.0,
        )
    assert policy.service_s(candidate("h")) == pytest.approx(100 * (0.05 + 0.3 * 0.02))


def test_score_prefers_the_shorter_end_at_equal_utility() -> None:
    """Equal utilities go to the instance with less before it."""
    fleet = fleet_of(instance("a"), instance("b"), queued={"a": [9000]})
    assert chosen(make("score", fleet), candidate("a"), candidate("b")) == "b"
    assert chosen(make("score", fleet), candidate("a", utility=0.9), candidate("b")) == "a"


# ------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("name", "options", "key", "words"),
    [
        ("score", {"form": "fare"}, "routing.form", "did you mean 'fair'"),
        ("score", {"price_per_s": -1.0}, "routing.price_per_s", "at least 0"),
        ("score", {"price_per_s": "cheap"}, "routing.price_per_s", "must be a number"),
        ("score", {"token_s": 0.01}, "routing.token_s", "must map"),
        ("score", {"token_s": {"a": 0.0}}, "routing.token_s.a", "above 0"),
        ("routebalance", {"weight_cost": float("nan")}, "routing.weight_cost", "finite"),
        ("routebalance", {"weight_costs": 1.0}, "routing.weight_costs", "did you mean 'weight_cost'"),
        ("history_percentiles", {"window": 2.0}, "routing.window", "at least 3"),
        ("unfinished_over_speed", {"speeds": {"a": float("inf")}}, "routing.speeds.a", "finite"),
        ("shortest_queue", {"speeds": {"a": 1.0}}, "routing.speeds", "shortest_queue does not take it"),
        ("bear", {"fallback": "least_wrok"}, "routing.fallback", "did you mean 'least_work'"),
        ("bear", {"fallback": "least_work", "delta_per_ms": 1e-5}, "routing.fallback", "delta_per_ms"),
        ("round_robin", {"fallback": "least_work"}, "routing.fallback", "round_robin does not take it"),
    ],
)
def test_a_wrong_option_is_refused_by_name(name: str, options: dict[str, Option], key: str, words: str) -> None:
    """The error names the option, and the entry of it, with the nearest thing that exists."""
    with pytest.raises(ConfigError, match=words) as caught:
        make_policy(name, rng=np.random.default_rng(0), options=options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("name", "option"),
    [("unfinished_over_speed", "speeds"), ("score", "token_s"), ("score", "decode_tokens_per_s")],
)
def test_an_unknown_instance_in_an_option_is_refused(name: str, option: str) -> None:
    """A number for an instance that the fleet does not have is a mistake, told when the router is made."""
    with pytest.raises(ConfigError, match=r"unknown instance or model 'cheep'; did you mean 'cheap'") as caught:
        make(name, fleet_of(instance("a")), **{option: {"cheep": 1.0}})
    assert caught.value.key == f"routing.{option}.cheep"


def test_neutral_options_pass_everywhere() -> None:
    """One configuration can be replayed under every policy as long as it asks for nothing special."""
    for name in ("shortest_queue", "score", "bear_lagrangian", "bear_throughput"):
        make(name, delta_per_ms=0.0, fallback="least_ttft")
