"""The names by which configuration, command line and lab ask for a policy: one row each.

A row is a factory, the line that help texts show, the options it takes and the estimator its rule is stated for.
Options that do not belong to the named policy are refused, so that a knob never turns in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headway.errors import ConfigError
from headway.policy.base import HoldingPolicy, Policy
from headway.policy.bear import BearPolicy, LagrangianBearPolicy
from headway.policy.bid_price import OPTIONS as BID_PRICE_OPTIONS
from headway.policy.bid_price import BidPricePolicy
from headway.policy.central_queue import CentralQueuePolicy
from headway.policy.history_percentiles import HistoryPercentilesPolicy
from headway.policy.latency_agnostic import LatencyAgnosticPolicy
from headway.policy.learned_price import LearnedPrice
from headway.policy.least_work import LeastWork
from headway.policy.options import Options, number, unknown, word
from headway.policy.power_of_two import PowerOfTwoPolicy
from headway.policy.priced_bear import PricedBearPolicy
from headway.policy.prices import (
    DRAIN_SHARE,
    FULL_PRICE_PER_S,
    QUEUE_PRICE_PER_S2,
    KvSharePrice,
    Price,
    VirtualQueuePrice,
)
from headway.policy.random_choice import RandomPolicy
from headway.policy.remaining_prefill import RemainingPrefillPolicy
from headway.policy.round_robin import RoundRobinPolicy
from headway.policy.routebalance import RouteBalancePolicy
from headway.policy.score import ScorePolicy
from headway.policy.shortest_queue import ShortestQueuePolicy
from headway.policy.unfinished_over_speed import UnfinishedOverSpeedPolicy

#: Where ``bear`` sends a query that no instance can answer in time.
FALLBACKS = ("least_ttft", "least_work")
#: How ``priced_bear`` finds what an instance's time is worth.
PRICES = ("kv_share", "virtual_queue", "learned")
#: Values with which an option asks for nothing: other policies let them pass.
_NEUTRAL = {"delta_per_ms": 0.0, "fallback": "least_ttft"}


class PolicyRow(NamedTuple):
    """How to make a policy, what it does in one line, the options it takes, and the estimator it is stated for.

    ``holds`` tells that it is a :class:`HoldingPolicy`: its queries wait in a central queue.
    """

    factory: Callable[[np.random.Generator, Options], Policy | HoldingPolicy]
    description: str
    options: tuple[str, ...] = ()
    estimator: str = "replay"
    holds: bool = False


def _make_bear(rng: np.random.Generator, options: Options) -> Policy:
    delta_per_ms = number(options, "delta_per_ms", 0.0)
    fallback = word(options, "fallback", "least_ttft", FALLBACKS)
    if delta_per_ms == 0.0:
        return BearPolicy(rng, least_work=LeastWork() if fallback == "least_work" else None)
    if fallback != "least_ttft":
        raise ConfigError(
            "has no meaning with delta_per_ms, under which no instance is too late", key="routing.fallback"
        )
    return LagrangianBearPolicy(rng, delta_per_ms=delta_per_ms, name="bear")


def _make_bear_throughput(rng: np.random.Generator, options: Options) -> Policy:
    fallback = word(options, "fallback", "least_ttft", FALLBACKS)
    return BearPolicy(rng, name="bear_throughput", least_work=LeastWork() if fallback == "least_work" else None)


def _make_priced_bear(rng: np.random.Generator, options: Options) -> Policy:
    fallback = word(options, "fallback", "least_ttft", FALLBACKS)
    rule = word(options, "price", "kv_share", PRICES)
    scales = {"full_price_per_s": "kv_share", "queue_price_per_s2": "virtual_queue", "drain_share": "virtual_queue"}
    for option, owner in scales.items():
        if option in options and rule != owner:
            raise ConfigError(f"belongs to price: {owner}, not to {rule}", key=f"routing.{option}")
    price: Price
    if rule == "kv_share":
        price = KvSharePrice(number(options, "full_price_per_s", FULL_PRICE_PER_S))
    elif rule == "virtual_queue":
        price = VirtualQueuePrice(
            number(options, "queue_price_per_s2", QUEUE_PRICE_PER_S2), number(options, "drain_share", DRAIN_SHARE)
        )
    else:
        price = LearnedPrice()
    return PricedBearPolicy(rng, price, least_work=fallback == "least_work")


POLICIES: dict[str, PolicyRow] = {
    "bear": PolicyRow(
        _make_bear,
        "largest utility among the instances in time, else the smallest TTFT; with delta_per_ms, largest U − δ·TTFT",
        ("delta_per_ms", "fallback"),
    ),
    "bear_lagrangian": PolicyRow(
        lambda rng, options: LagrangianBearPolicy(rng, delta_per_ms=number(options, "delta_per_ms", 0.0)),
        "largest U − δ·TTFT, whatever the target; at δ = 0 the same as latency_agnostic",
        ("delta_per_ms",),
    ),
    "bear_throughput": PolicyRow(
        _make_bear_throughput,
        "bear's rule on the prefill-throughput estimate instead of the replay",
        ("fallback",),
        "prefill_throughput",
    ),
    "priced_bear": PolicyRow(
        _make_priced_bear,
        "largest U − price − harm among the instances in time; where that is below 0, as where none is in time",
        ("fallback", "price", "full_price_per_s", "queue_price_per_s2", "drain_share"),
    ),
    "latency_agnostic": PolicyRow(
        lambda rng, _: LatencyAgnosticPolicy(rng), "largest utility, however late the answer would come"
    ),
    "score": PolicyRow(
        ScorePolicy,
        "largest utility less a price on the seconds to the answer's end",
        ("form", "price_per_s", "price", "decode_tokens_per_s", "token_s"),
    ),
    "routebalance": PolicyRow(
        RouteBalancePolicy,
        "largest weighted sum of quality, relative cheapness and relative quickness",
        ("weight_quality", "weight_cost", "weight_latency"),
    ),
    "history_percentiles": PolicyRow(
        HistoryPercentilesPolicy, "the model with the shortest observed tails of TTFT and TPOT", ("window", "warmup")
    ),
    "remaining_prefill": PolicyRow(
        lambda rng, _: RemainingPrefillPolicy(rng), "least fitted prefill time of residents and query"
    ),
    "unfinished_over_speed": PolicyRow(
        UnfinishedOverSpeedPolicy, "fewest requests under way per unit of a constant speed", ("speeds",)
    ),
    "shortest_queue": PolicyRow(lambda rng, _: ShortestQueuePolicy(rng), "fewest requests under way"),
    "power_of_two": PolicyRow(
        lambda rng, _: PowerOfTwoPolicy(rng), "of two instances drawn at random, the one with fewer requests"
    ),
    "round_robin": PolicyRow(lambda _, __: RoundRobinPolicy(), "every instance in turn"),
    "random": PolicyRow(lambda rng, _: RandomPolicy(rng), "any instance with the same probability"),
    "bid_price": PolicyRow(
        BidPricePolicy,
        "a central queue that releases what brings more than the slots and memory it will occupy are worth",
        BID_PRICE_OPTIONS,
        holds=True,
    ),
    "central_fcfs": PolicyRow(
        lambda _, options: CentralQueuePolicy("fcfs", options),
        "a central queue, first come first served, to the instance with the most free slots",
        ("hosted_slots",),
        holds=True,
    ),
    "central_shortest_first": PolicyRow(
        lambda _, options: CentralQueuePolicy("shortest_first", options),
        "a central queue, shortest predicted answer first, to the instance with the most free slots",
        ("hosted_slots",),
        holds=True,
    ),
}


def make_policy(name: str, *, rng: np.random.Generator, options: Options | None = None) -> Policy | HoldingPolicy:
    """A new policy by its registered name. ``rng`` is its own source of draws: give each policy one of its own.

    Options are those of its row, described with the policy. A neutral one (``delta_per_ms`` 0, ``fallback``
    ``least_ttft``) is let pass by every policy, so that one configuration can be replayed under all of them.

    Raises:
        ConfigError: an unknown name or option, with the nearest known one, or an option out of range.
    """
    row = POLICIES.get(name)
    if row is None:
        raise ConfigError(unknown("policy", name, POLICIES), key="routing.policy")
    known = {option for other in POLICIES.values() for option in other.options}
    for option, value in (options or {}).items():
        if option not in known:
            raise ConfigError(unknown("policy option", option, known), key=f"routing.{option}")
        if option not in row.options and value != _NEUTRAL.get(option):
            raise ConfigError(f"policy {name} does not take it", key=f"routing.{option}")
    return row.factory(rng, options or {})


def make_choosing_policy(name: str, *, rng: np.random.Generator, options: Options | None = None) -> Policy:
    """As :func:`make_policy`, for callers that drive ``choose`` themselves.

    Raises:
        ConfigError: as there, and for a policy that holds queries in a queue.
    """
    policy = make_policy(name, rng=rng, options=options)
    if isinstance(policy, HoldingPolicy):
        raise ConfigError(f"{name} holds queries in a queue, and here each must be sent at once", key="routing.policy")
    return policy
