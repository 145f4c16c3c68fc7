"""The names by which configuration, command line and lab ask for a policy: one row each.

A row is a factory and the line that help texts show. Options that do not belong to the named policy are refused, so
that a knob never turns in vain.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from headway.errors import ConfigError
from headway.policy.base import Policy
from headway.policy.bear import BearPolicy, LagrangianBearPolicy
from headway.policy.latency_agnostic import LatencyAgnosticPolicy
from headway.policy.random_choice import RandomPolicy
from headway.policy.round_robin import RoundRobinPolicy
from headway.policy.shortest_queue import ShortestQueuePolicy


class PolicyRow(NamedTuple):
    """How to make a policy, what it does in one line, and the options it takes."""

    factory: Callable[[np.random.Generator, Mapping[str, float]], Policy]
    description: str
    options: tuple[str, ...] = ()


def _make_bear(rng: np.random.Generator, options: Mapping[str, float]) -> Policy:
    delta_per_ms = options.get("delta_per_ms", 0.0)
    return LagrangianBearPolicy(rng, delta_per_ms=delta_per_ms) if delta_per_ms else BearPolicy(rng)


POLICIES: dict[str, PolicyRow] = {
    "bear": PolicyRow(
        _make_bear,
        "largest utility among the instances in time, else the smallest TTFT; with delta_per_ms, largest U − δ·TTFT",
        ("delta_per_ms",),
    ),
    "latency_agnostic": PolicyRow(
        lambda rng, _: LatencyAgnosticPolicy(rng), "largest utility, however late the answer would come"
    ),
    "shortest_queue": PolicyRow(lambda rng, _: ShortestQueuePolicy(rng), "fewest requests under way"),
    "round_robin": PolicyRow(lambda _, __: RoundRobinPolicy(), "every instance in turn"),
    "random": PolicyRow(lambda rng, _: RandomPolicy(rng), "any instance with the same probability"),
}


def make_policy(name: str, *, rng: np.random.Generator, options: Mapping[str, float] | None = None) -> Policy:
    """A new policy by its registered name. ``rng`` is its own source of draws: give each policy one of its own.

    Options: ``delta_per_ms`` (``bear``; 0 means the hard target). A zero option of another policy is let pass, so that
    one configuration can be replayed under every policy.

    Raises:
        ConfigError: an unknown name or option, with the nearest known one, or an option out of range.
    """
    row = POLICIES.get(name)
    if row is None:
        raise ConfigError(_unknown("policy", name, POLICIES), key="routing.policy")
    known = {option for other in POLICIES.values() for option in other.options}
    for option, value in (options or {}).items():
        if option not in known:
            raise ConfigError(_unknown("policy option", option, known), key=f"routing.{option}")
        if value and option not in row.options:
            raise ConfigError(f"policy {name} does not take it", key=f"routing.{option}")
    return row.factory(rng, options or {})


def _unknown(kind: str, name: str, known: Mapping[str, object] | set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown {kind} {name!r}; {hint}"
