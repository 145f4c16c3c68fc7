"""The policy ``bid_price`` on fleets: what it releases, what it refuses, and how its plan follows the fleet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headway.assembly import build_router
from headway.config import parse_config
from headway.errors import ConfigError, RequestError
from headway.estimate.registry import make_estimator
from headway.fleet import FleetView
from headway.policy.base import HoldingPolicy
from headway.policy.bid_price import BidPricePolicy
from headway.policy.registry import make_policy
from headway.predict.prior import PriorPredictor
from headway.router import Router
from headway.types import Decision, EngineLimits, Instance, Outcome
from pools import FAST, LIMITS, MODELS, SLOW, admitted, instance, query, release_all, snapshot

ONE_SLOT = replace(LIMITS, max_num_seqs=1)


def router_of(*instances: Instance, shown: bool = True, **options: Any) -> tuple[Router, BidPricePolicy]:
    policy = make_policy("bid_price", rng=np.random.default_rng(0), options=options)
    assert isinstance(policy, BidPricePolicy)
    router = Router(
        fleet=FleetView(instances, stale_after_s=1e6),
        models=MODELS,
        policy=policy,
        estimator=make_estimator("replay"),
        predictor=PriorPredictor(MODELS),
    )
    for one in instances:
        if one.limits is not None and shown:
            router.observe(replace(snapshot(one.id), limits=one.limits), 0.0)
    return router, policy


def small(name: str, limits: EngineLimits = ONE_SLOT, model: str = "cheap") -> Instance:
    return instance(name, model=model, limits=limits)


def places(decisions: list[Decision]) -> dict[str, str]:
    return {one.query_id: one.candidate.instance_id for one in decisions if one.candidate is not None}


def test_it_is_a_holding_policy_that_wants_no_estimates() -> None:
    """The registry makes a policy that holds, and whose queue is judged without replays."""
    policy = make_policy("bid_price", rng=np.random.default_rng(0))
    assert isinstance(policy, HoldingPolicy)
    assert isinstance(policy, BidPricePolicy)
    assert policy.needs_estimates is False
    assert policy.next_release_s(0.0) is None


def test_the_shortest_answers_take_the_slots_and_the_others_wait() -> None:
    """With two slots the two shortest predicted answers go, one to each; an end lets the next one go."""
    router, policy = router_of(small("a"), small("b"))
    queue = admitted(router, *(query(name=f"q{number}", max_tokens=10 * (6 - number)) for number in range(5)))
    first = release_all(router, queue)
    assert set(places(first)) == {"q4", "q3"}
    assert set(places(first).values()) == {"a", "b"}
    assert "margin" in first[0].reason
    assert router.next_release_s(0.0) == pytest.approx(policy.period_s)
    assert release_all(router, queue, 0.01) == []
    router.observe(Outcome(query_id="q4", instance_id=places(first)["q4"], status="ok", ttft_s=0.1), 0.2)
    assert list(places(release_all(router, queue, 0.2))) == ["q2"]
    assert "no instance has room" in router.explain_held(*queue[0], 0.3).reason


def test_a_cancelled_query_gives_its_place_back() -> None:
    """What was planned of a query is free once it is gone, by its outcome or because its booking is gone."""
    router, policy = router_of(small("a"), small("b"))
    queue = admitted(router, *(query(name=f"q{number}") for number in range(4)))
    first = release_all(router, queue)
    router.observe(Outcome(query_id="q0", instance_id=places(first)["q0"], status="cancelled"), 0.1)
    assert list(places(release_all(router, queue, 0.1))) == ["q2"]
    router.fleet.release("q1", 0.2)
    assert list(places(release_all(router, queue, 0.2))) == ["q3"]
    assert set(policy.control.plan.requests()) == {"q2", "q3"}


def test_memory_is_planned_to_the_end_of_the_answer() -> None:
    """Two queries whose footprints overlap beyond the blocks do not run together, though there are slots."""
    limits = replace(LIMITS, num_blocks=101, max_model_len=1600)  # 1,600 tokens
    router, _ = router_of(small("a", limits))
    queue = admitted(router, *(query(900, name=f"q{number}") for number in range(2)))  # 900 + 200 each
    assert len(release_all(router, queue)) == 1
    assert release_all(router, queue, 0.05) == []


def test_a_query_that_can_never_run_by_plan_is_refused() -> None:
    """A predicted answer beyond the horizon is a 400 that says what to do; a shorter one waits."""
    router, _ = router_of(small("a"), horizon=100)
    with pytest.raises(RequestError, match=r"beyond|raise routing\.horizon") as caught:
        router.admit(query(name="long"), 0.0)
    assert caught.value.status == 400
    router.admit(query(name="short", max_tokens=20), 0.0)


def test_capacity_is_the_engines_and_speeds_are_its_step_times() -> None:
    """Slots and tokens come from the limits without the null block, tokens per period from the step time."""
    fast, slow = small("fast", LIMITS), instance("slow", step_time=SLOW, limits=ONE_SLOT)
    _, policy = router_of(fast, slow, period_s=0.02)
    devices = policy.control.devices
    assert devices.max_num_seqs == (256, 1)
    assert devices.kv_tokens == ((20000 - 1) * 16,) * 2
    named = FAST.named()
    step_s = named["b0"] + 0.5 * (256 * named["b1"] + devices.kv_tokens[0] * named["b2"])
    assert devices.tokens_per_period[0] == pytest.approx(0.02 / step_s)
    assert devices.tokens_per_period[1] < devices.tokens_per_period[0]
    _, median = router_of(small("a", LIMITS), small("b", LIMITS))
    assert median.period_s == pytest.approx(step_s)


def test_hosted_instances_take_part() -> None:
    """An outside API has a bounded number of places and no memory that binds."""
    router, policy = router_of(Instance(id="api", model="dear"), small("a"))
    queue = admitted(router, *(query(name=f"q{number}") for number in range(80)))
    released = places(release_all(router, queue))
    assert sum(place == "api" for place in released.values()) == 64
    assert policy.period_s > 0.0


def test_quality_weighs_where_it_is_asked_for() -> None:
    """With all weight on quality a lone query goes to the instance of larger utility."""
    router, _ = router_of(small("a"), small("b", model="dear"), quality=1.0, beta=0.0, gamma=0.0)
    assert places(release_all(router, admitted(router, query(10, max_tokens=5)))) == {"q": "b"}


def test_what_other_routers_sent_counts_as_taken() -> None:
    """An engine that shows requests which were not sent from here is as full as it shows."""
    router, _ = router_of(small("a"), small("b"))
    router.observe(replace(snapshot("a", 500, sequence=2), limits=ONE_SLOT), 0.0)
    queue = admitted(router, *(query(name=f"q{number}") for number in range(2)))
    assert set(places(release_all(router, queue)).values()) == {"b"}


def test_only_instances_that_may_be_chosen_are() -> None:
    """Unhealthy instances and those of other models get nothing; with none left a query is held with the reason."""
    router, _ = router_of(small("a"), small("b", model="dear"))
    queue = admitted(router, query(name="q0", candidates=("dear",)), query(name="q1"))
    router.fleet.set_health("a", False)
    assert places(release_all(router, queue)) in ({"q0": "b"}, {"q1": "b"})
    router.fleet.set_health("b", False)
    assert release_all(router, queue, 1.0) == []
    assert "no instance can take it now" in router.explain_held(*queue[0], 1.0).reason


def test_a_wait_target_of_its_own_counts() -> None:
    """With weight on waits alone, a query that can still meet its own target goes before one that cannot."""
    router, _ = router_of(small("a"), zeta2=1.0, beta=0.0, gamma=0.0)
    late, fine = query(name="late", target_s=0.5), query(name="fine", target_s=60.0)
    queue = admitted(router, late, fine)
    assert list(places(release_all(router, queue, 5.0))) == ["fine"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"beta": 0.0, "gamma": 0.0}, "routing.alpha"),
        ({"alpha": -1.0}, "routing.alpha"),
        ({"zeta2": float("nan")}, "routing.zeta2"),
        ({"horizon": 0.5}, "routing.horizon"),
        ({"horizon": 10.5}, "routing.horizon"),
        ({"stride": 20_000.0}, "routing.stride"),
        ({"history": "weekly"}, "routing.history"),
        ({"admission": "sometimes"}, "routing.admission"),
        ({"mode": "both"}, "routing.mode"),
        ({"period_s": -1.0}, "routing.period_s"),
    ],
)
def test_options_out_of_range_name_their_key(options: dict[str, float | str], key: str) -> None:
    """Every option that cannot be meant is a configuration error with its key."""
    with pytest.raises(ConfigError) as caught:
        make_policy("bid_price", rng=np.random.default_rng(0), options=options)
    assert caught.value.key == key


POOL = """
models: [{name: cheap, price: {input_per_1m: 0.1, output_per_1m: 0.2}}]
instances:
  - {id: a, model: cheap, api_base: "http://127.0.0.1:8101/v1", engine: vllm-0.32, profile: h100-qwen3-8b}
routing:
  policy: POLICY
  bid_price: OPTIONS
"""


def configured(options: str, policy: str = "bid_price") -> Router:
    return build_router(parse_config(POOL.replace("POLICY", policy).replace("OPTIONS", options)))


def test_a_configuration_sets_weights_and_learning() -> None:
    """``routing.bid_price`` reaches the policy; what it leaves out keeps its default."""
    router = configured("{zeta2: 2, wait_slo_s: 0.8, history: request, admission: threshold, horizon: 4096}")
    policy = router._policy
    assert isinstance(policy, BidPricePolicy)
    assert (policy._objective.zeta2, policy._objective.wait_slo_s, policy._objective.beta) == (2.0, 0.8, 1.0)
    settings = policy.control.settings
    assert (settings.history, settings.work_conserving, settings.horizon) == ("request", False, 4096)
    assert router.holds


@pytest.mark.parametrize(
    ("options", "policy", "key"),
    [
        ("{beta: 0, gamma: 0}", "bid_price", "routing.bid_price.alpha"),
        ("{zeta1: -1}", "bid_price", "routing.bid_price.zeta1"),
        ("{stride: 99999}", "bid_price", "routing.bid_price.stride"),
        ("{zeta2: 1}", "bear", "routing.bid_price.zeta2"),
        ("{zeta3: 1}", "bid_price", "routing.bid_price.zeta3"),
    ],
)
def test_a_configuration_that_cannot_be_meant_names_its_key(options: str, policy: str, key: str) -> None:
    """What is wrong in ``routing.bid_price`` is reported with its path; under another policy all of it is wrong."""
    with pytest.raises(ConfigError) as caught:
        configured(options, policy)
    assert caught.value.key == key
