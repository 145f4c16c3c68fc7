"""BEAR with prices: what it charges, whom a newcomer harms, what it gives up and where that goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.assembly import build_router
from headway.config import parse_config
from headway.errors import ConfigError
from headway.estimate.registry import make_estimator
from headway.estimate.work import own_work
from headway.fleet import FleetView
from headway.fleet.at_risk import AtRisk
from headway.policy.options import Options
from headway.policy.priced_bear import PricedBearPolicy
from headway.policy.prices import KvSharePrice, VirtualQueuePrice
from headway.policy.registry import PRICES, make_policy
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import Candidate, Decision, Estimate, Instance, Query, Verdict
from pools import LIMITS, MODELS, SLOW, choice, instance, query, snapshot


def router(*instances: Instance, queued: dict[str, list[int]] | None = None, **options: float | str) -> Router:
    made = Router(
        fleet=FleetView(instances, stale_after_s=1e6),
        models=MODELS,
        policy=make_policy("priced_bear", rng=np.random.default_rng(1), options={"fallback": "least_work", **options}),
        estimator=make_estimator("replay"),
        predictor=PriorPredictor(MODELS),
        lambda_per_musd=1e-4,
    )
    for one in instances:
        if one.limits is not None:
            made.observe(snapshot(one.id, *(queued or {}).get(one.id, [])), 0.0)
    return made


def candidate(
    name: str, utility: float, ttft_s: float = 0.1, verdict: Verdict = "feasible", **figures: object
) -> Candidate:
    known: dict[str, object] = {"output_tokens": 200.0, "prompt_tokens": 1000, **figures}
    return Candidate(name, "m", verdict, utility, estimate=Estimate(ttft_s, ttft_s, 0.0, "replay"), **known)  # type: ignore[arg-type]


def send(made: Router, one: Query, now: float) -> Decision:
    """Decide and book, as the gateway does."""
    decision = made.decide(one, now)
    chosen = choice(decision)
    assert chosen.estimate is not None
    made.fleet.book(
        request_id=one.id,
        instance_id=chosen.instance_id,
        prompt_tokens=chosen.prompt_tokens or 1,
        predicted_output_tokens=chosen.output_tokens or 1.0,
        max_tokens=None,
        priority=0,
        now=now,
        predicted_ttft_s=chosen.estimate.ttft_s,
        predicted_wait_s=chosen.estimate.wait_s,
        due_s=None if decision.ttft_target_s is None else now + decision.ttft_target_s,
        utility=chosen.utility,
    )
    return decision


# ------------------------------------------------------------ price


def test_an_idle_pool_is_routed_as_by_bear() -> None:
    """Nothing is taken and nobody waits, so nothing is charged: the largest utility wins."""
    made = router(instance("fast"), instance("slow", model="dear", step_time=SLOW))
    decision = made.decide(query(1000, target_s=1.0), 0.0)
    assert choice(decision).instance_id == "slow"
    assert [(one.price, one.harm) for one in decision.candidates] == [(0.0, 0.0)] * 2


def test_a_query_leaves_the_bottleneck_to_those_who_gain_more() -> None:
    """With the dear engine's memory half taken its time has a price, which a long answer does not earn there."""
    fast, slow = instance("fast"), instance("slow", model="dear", step_time=SLOW)
    policy = PricedBearPolicy(np.random.default_rng(0), KvSharePrice(2.0))
    fleet = FleetView([fast, slow], stale_after_s=1e6)
    policy.bind(fleet)
    fleet.observe_snapshot(snapshot("fast"), 0.0)
    fleet.observe_snapshot(snapshot("slow", *[8000] * 20), 0.0)
    fleet.age(0.0)
    engine = fleet.views[1].engine
    assert engine is not None
    while engine.num_waiting:
        engine.step()
    share = 1.0 - engine.free_blocks / (LIMITS.num_blocks - 1)
    work_s = own_work(SLOW, LIMITS).seconds(1000.0, 200.0)
    pool = (candidate("fast", 0.5), candidate("slow", 0.5 + 2.0 * share * work_s - 0.001))
    assert policy.choose(query(), pool, 0.0) == 0
    assert policy.charged(pool)[1].price == pytest.approx(2.0 * share * work_s)
    pool = (candidate("fast", 0.5), candidate("slow", 0.5 + 2.0 * share * work_s + 0.001))
    assert policy.choose(query(), pool, 0.0) == 1


def test_the_price_follows_slots_where_these_are_scarcer() -> None:
    """An engine with few slots is full when they are taken, however much memory is free."""
    limits = replace(LIMITS, max_num_seqs=4)
    fleet, price = FleetView([instance("a", limits=limits)], stale_after_s=1e6), KvSharePrice()
    price.bind(fleet)
    fleet.observe_snapshot(replace(snapshot("a", 100, 100, 100, 100), limits=limits), 0.0)
    fleet.age(0.0)
    engine = fleet.views[0].engine
    assert engine is not None
    engine.step()
    assert price.share_taken(candidate("a", 0.5)) == 1.0


def test_without_a_replay_the_ledger_says_what_is_taken() -> None:
    """An engine that shows no state is as full as what was sent there and has not ended."""
    fleet, price = FleetView([instance("a")]), KvSharePrice()
    price.bind(fleet)
    assert price.share_taken(candidate("a", 0.5)) == 0.0
    fleet.book(
        request_id="q",
        instance_id="a",
        prompt_tokens=32_000,
        predicted_output_tokens=10.0,
        max_tokens=None,
        priority=0,
        now=0.0,
    )
    assert price.share_taken(candidate("a", 0.5)) == pytest.approx(2000 / (LIMITS.num_blocks - 1))
    assert KvSharePrice().share_taken(candidate("a", 0.5)) == 0.0  # not bound to any fleet


def test_the_virtual_queue_fills_with_what_is_sent_and_drains_with_time() -> None:
    """Work sent raises the price by V each second of it; c of every second of real time takes as much away."""
    price = VirtualQueuePrice(0.02, 0.5)
    one = candidate("a", 0.5)
    price.sent(one, 3.0, now=10.0)
    price.sent(one, 1.0, now=12.0)
    assert price.queue_s("a", 12.0) == pytest.approx(3.0)
    assert price.charges(query(), [one], [2.0], 14.0) == [pytest.approx(0.02 * 2.0 * 2.0)]
    assert price.queue_s("a", 100.0) == 0.0
    assert price.queue_s("b", 100.0) == 0.0
    assert price.charges(query(), [one], [None], 14.0) == [0.0]


# ------------------------------------------------------------ harm


def test_a_newcomer_pays_for_those_it_would_make_late() -> None:
    """A long prompt that would join the batch of a waiting short one is charged that one's utility."""
    slow = instance("slow", model="dear", step_time=SLOW)
    made = router(slow, queued={"slow": [500]})
    waiting = send(made, query(40, name="first", target_s=0.2), 0.0)
    assert choice(waiting).verdict == "feasible"
    newcomer = made.decide(query(6000, name="second", target_s=2.0), 0.0)
    assert choice(newcomer).harm == pytest.approx(choice(waiting).utility)
    short = made.decide(query(40, name="third", target_s=2.0), 0.0)
    assert choice(short).harm == 0.0
    made.fleet.first_token_seen("first", 0.0)
    assert choice(made.decide(query(6000, name="fourth", target_s=2.0), 0.0)).harm == 0.0


def test_harm_sends_the_newcomer_elsewhere() -> None:
    """The same newcomer takes the cheaper model where nobody waits, and the dear one when the waiting one is gone."""
    fast, slow = instance("fast"), instance("slow", model="dear", step_time=SLOW)
    made = router(fast, slow, queued={"slow": [500]})
    assert choice(send(made, query(40, name="first", target_s=0.2), 0.0)).instance_id == "slow"
    assert choice(made.decide(query(6000, name="second", target_s=2.0), 0.0)).instance_id == "fast"
    made.fleet.release("first", 0.0)
    assert choice(made.decide(query(6000, name="third", target_s=2.0), 0.0)).instance_id == "slow"


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0.01, 5), st.floats(0, 10), st.floats(-1, 1), st.integers(0, 30)),
        max_size=20,
    ),
    st.floats(0, 10),
    st.floats(0, 10),
)
def test_harm_is_the_utility_of_those_in_time_before_and_late_after(
    steps: list[tuple[float, float, float, float, int]], start_s: float, seconds: float
) -> None:
    """Against a plain list of everyone that waits, each with its end pushed out by every later booking."""
    risk = AtRisk()
    plain: dict[int, list[float]] = {}
    for name, (begin_s, length_s, slack_s, utility, leaver) in enumerate(steps):
        end_s, due_s = begin_s + length_s, begin_s + slack_s
        for one in plain.values():
            if one[0] > begin_s + 1e-3:
                one[0] = max(one[0], end_s)
        risk.join(str(name), begin_s, end_s, due_s, utility)
        plain[name] = [end_s, due_s, utility]
        risk.leave(str(leaver))
        plain.pop(leaver, None)
    harmed = [one[2] for one in plain.values() if start_s + 1e-3 < one[0] <= one[1] < start_s + seconds and one[2] > 0]
    assert risk.harm(start_s, start_s + seconds) == pytest.approx(sum(harmed))


# ------------------------------------------------------------ given up


def test_what_is_worth_less_than_its_place_is_given_up() -> None:
    """A feasible query whose best margin is below 0 goes where it is the least work; without that rule it stays."""
    fast, slow = instance("fast"), instance("slow", model="dear", step_time=SLOW)
    for least_work, chosen in ((True, 0), (False, 1)):
        policy = PricedBearPolicy(np.random.default_rng(0), KvSharePrice(), least_work=least_work)
        policy.bind(FleetView([fast, slow]))
        pool = (candidate("fast", -0.3, 9.0, "late"), candidate("slow", -0.2))
        assert policy.choose(query(), pool, 0.0) == chosen


def test_a_clock_that_is_not_trusted_neither_prices_nor_takes_what_is_given_up() -> None:
    """Its works mean nothing: nothing is charged there, and what is given up goes elsewhere, or stays if there is
    nowhere."""
    fast, slow = instance("fast"), instance("slow", model="dear", step_time=SLOW)
    fleet, policy = FleetView([fast, slow]), PricedBearPolicy(np.random.default_rng(0), KvSharePrice())
    policy.bind(fleet)
    fleet.views[0].clock_trusted = False
    pool = (candidate("fast", -0.3), candidate("slow", -0.4))
    assert policy.choose(query(), pool, 0.0) == 1
    fleet.views[1].clock_trusted = False
    assert policy.choose(query(), pool, 0.0) == 0
    assert [one.price for one in policy.charged(pool)] == [0.0, 0.0]


# ------------------------------------------------------------ what is said, and what may be set


def test_the_decision_tells_price_and_harm() -> None:
    """Every candidate shows what it was charged, and the reason says it of the chosen one; bear says nothing of it."""
    fast, slow = instance("fast"), instance("slow", model="dear", step_time=SLOW)
    made = router(fast, slow, queued={"slow": [500]})
    send(made, query(40, name="first", target_s=0.2), 0.0)
    decision = made.decide(query(6000, name="second", target_s=2.0), 0.0)
    dear = decision.candidates[1]
    assert dear.harm is not None
    assert dear.harm > 0.0
    assert "price 0.000, harm 0.000, margin" in decision.reason
    given_up = made.decide(query(6000, name="third", target_s=2.0, max_tokens=None), 0.0)
    assert "no instance in time has one above 0" not in given_up.reason
    late = made.decide(query(6000, name="fourth", target_s=1e-3), 0.0)
    assert choice(late).harm is None


def test_the_reason_says_that_nothing_was_worth_its_place() -> None:
    """A query that is given up though it could be in time is told so."""
    fast, slow = instance("fast"), instance("slow", model="dear", step_time=SLOW)
    made = router(fast, slow)
    made._lambda_per_usd = 1e7
    decision = made.decide(query(20_000, target_s=60.0), 0.0)
    assert choice(decision).instance_id == "fast"
    assert decision.reason.endswith("and no instance in time has one above 0")


@pytest.mark.parametrize("price", PRICES)
def test_every_price_rule_decides(price: str) -> None:
    """Each rule can be named, and decides on a pool with a hosted instance beside two engines."""
    hosted = Instance(id="hosted", model="dear")
    made = router(instance("fast"), instance("slow", model="dear", step_time=SLOW), hosted, price=price)
    for number in range(200):
        decision = send(made, query(500, name=f"q{number}", target_s=1.0), 0.01 * number)
        for one in decision.candidates:
            assert one.price is not None
            assert one.price >= 0.0
        assert decision.candidates[2].price == 0.0
        assert [one.harm is None for one in decision.candidates] == [
            one.verdict != "feasible" for one in decision.candidates
        ]


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"price": "kv_shares"}, "routing.price", "did you mean 'kv_share'"),
        ({"price": 0.5}, "routing.price", "unknown value '0.5'"),
        ({"price": "learned", "full_price_per_s": 0.5}, "routing.full_price_per_s", "belongs to price: kv_share"),
        ({"drain_share": 0.5}, "routing.drain_share", "belongs to price: virtual_queue"),
        ({"full_price_per_s": -1.0}, "routing.full_price_per_s", "at least 0"),
        ({"price": "virtual_queue", "queue_price_per_s2": float("nan")}, "routing.queue_price_per_s2", "finite"),
        ({"delta_per_ms": 1e-5}, "routing.delta_per_ms", "priced_bear does not take it"),
        ({"fallback": "least_wrok"}, "routing.fallback", "did you mean 'least_work'"),
    ],
)
def test_options_are_checked(options: Options, key: str, words: str) -> None:
    """An option of another rule, out of range or misspelt is an error that names the key."""
    with pytest.raises(ConfigError, match=words) as caught:
        make_policy("priced_bear", rng=np.random.default_rng(0), options=options)
    assert caught.value.key == key


POOL = """
models: [{name: qwen3-0.6b}, {name: qwen3-8b}]
instances:
  - {id: small, model: qwen3-0.6b, api_base: "http://127.0.0.1:1/v1", engine: vllm-0.32, profile: h100-qwen3-0.6b}
  - {id: medium, model: qwen3-8b, api_base: "http://127.0.0.1:2/v1", engine: vllm-0.32, profile: h100-qwen3-8b}
routing: {policy: priced_bear}
"""


@pytest.mark.parametrize(
    "routing", ["{policy: priced_bear}", *(f"{{policy: priced_bear, price: {p}}}" for p in PRICES)]
)
def test_a_configuration_names_it_like_any_policy(routing: str) -> None:
    """The policy's name is all that a pool's file needs; decisions are its own, and tell what was charged."""
    made = build_router(parse_config(POOL.replace("{policy: priced_bear}", routing)))
    one = replace(query(1000, target_s=1.0), prompt_tokens={"qwen3-0.6b": 1000, "qwen3-8b": 1000})
    decision = made.decide(one, 0.0)
    assert decision.policy == "priced_bear"
    assert all(one.price is not None for one in decision.candidates)


@pytest.mark.parametrize(
    ("routing", "key", "words"),
    [
        ("{policy: bear, price: learned}", "routing.price", "policy bear does not take it"),
        ("{policy: priced_bear, price: kv_shares}", "routing.price", "kv_share"),
        ("{policy: priced_bear, delta_per_ms: 1.0e-5}", "routing.delta_per_ms", "does not take it"),
    ],
)
def test_a_price_in_vain_is_refused_at_its_line(routing: str, key: str, words: str) -> None:
    """A price rule that the policy does not take, or that nobody knows, is an error at its place in the file."""
    with pytest.raises(ConfigError, match=words) as caught:
        build_router(parse_config(POOL.replace("{policy: priced_bear}", routing)))
    assert (caught.value.key, caught.value.line) == (key, 6)
