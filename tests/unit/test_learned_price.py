"""Prices learned online: they come to the duals of the fluid problem, follow the traffic, and charge replicas alike."""

from __future__ import annotations

import numpy as np
import pytest

from headway.fleet import FleetView
from headway.policy.learned_price import EVERY, MIN_QUERIES, LearnedPrice, subgradient_steps
from headway.types import Candidate, Instance, Query
from pools import FAST, SLOW, instance, query

WORK_S = 0.5


def candidates(*rows: tuple[str, float], prompt_tokens: int = 1000) -> list[Candidate]:
    return [
        Candidate(name, "m", "feasible", utility, output_tokens=200.0, prompt_tokens=prompt_tokens)
        for name, utility in rows
    ]


def learned(fleet: FleetView, rows: list[list[Candidate]], gap_s: float, one: Query | None = None) -> LearnedPrice:
    """The prices after these queries, one every ``gap_s``."""
    price = LearnedPrice(window=128)
    price.bind(fleet)
    for number, row in enumerate(rows):
        price.charges(one or query(), row, [WORK_S] * len(row), gap_s * number)
    return price


def test_the_steps_come_to_the_duals_of_the_fluid_problem() -> None:
    """On stationary queries over two kinds and two resources the dual's value falls to the linear program's optimum,
    and the binding price to its dual."""
    optimize = pytest.importorskip("scipy.optimize", reason="the optimum needs the extra 'lab'")
    rng = np.random.default_rng(4)
    num, kinds, resources = 400, 2, 2
    utilities, demands = rng.uniform(0, 1, (kinds, num)), rng.uniform(0.1, 1, (resources, kinds, num))
    there = np.array([[0.10, 0.12], [0.5, 0.5]])
    rows = [
        np.where(np.arange(kinds)[:, None] == kind, demands[resource], 0.0).ravel()
        for resource in range(resources)
        for kind in range(kinds)
    ]
    rows += [np.tile(np.eye(num)[one], kinds) for one in range(num)]
    limits = np.concatenate((there.ravel() * num, np.ones(num)))
    best = optimize.linprog(-utilities.ravel(), A_ub=np.array(rows), b_ub=limits, method="highs")
    prices = np.zeros((resources, kinds))
    for step in (0.05, 0.01, 0.002, 0.0005):
        prices = subgradient_steps(prices, utilities, demands, there, step, num_steps=300)
    margins = utilities - (demands * prices[:, :, None]).sum(axis=0)
    value = (there * prices).sum() + np.maximum(margins.max(axis=0), 0.0).mean()
    assert value * num == pytest.approx(-best.fun, rel=2e-3)
    duals = -best.ineqlin.marginals[: kinds * resources].reshape(resources, kinds)
    assert np.abs(prices - duals).max() < 0.03


def test_nothing_is_charged_before_there_is_something_to_learn_from() -> None:
    """The first queries pay nothing, nor does anyone while there is more time than work."""
    fleet = FleetView([instance("a", step_time=SLOW)])
    rows = [candidates(("a", 0.8), prompt_tokens=9000)] * (MIN_QUERIES - 1)
    assert learned(fleet, rows, 1e-3).prices("a") == (0.0, 0.0)
    assert learned(fleet, rows * 6, 1e3).prices("a") == (0.0, 0.0)


def test_the_price_rises_with_the_rate_and_falls_again() -> None:
    """Queries that come faster than the engine works make its time dear; when they slow down it is cheap again."""
    fleet = FleetView([instance("a", step_time=SLOW)])
    rng = np.random.default_rng(1)
    rows = [candidates(("a", float(value)), prompt_tokens=9000) for value in rng.uniform(0.2, 0.9, 640)]
    price = learned(fleet, rows, 0.1)
    busy = price.prices("a")[0]
    assert busy > 0.2
    for number, row in enumerate(rows):
        price.charges(query(), row, [WORK_S], 64.0 + 100.0 * number)
    assert price.prices("a")[0] == 0.0


def test_what_could_never_be_in_time_makes_nothing_dear() -> None:
    """Queries too long for the engine to meet their target, even idle, bid for none of its time."""
    fleet = FleetView([instance("a", step_time=SLOW)])
    rows = [candidates(("a", 0.8), prompt_tokens=9000)] * 640
    assert learned(fleet, rows, 0.1, query(target_s=5.0)).prices("a")[0] > 0.0
    assert learned(fleet, rows, 0.1, query(target_s=0.05)).prices("a") == (0.0, 0.0)


def test_replicas_have_one_price_and_more_of_them_a_lower_one() -> None:
    """Instances that are alike are one kind; twice as many have twice the time, ill ones have none."""
    rng = np.random.default_rng(1)
    values = rng.uniform(0.2, 0.9, 640)
    names = ("a", "b")
    fleet = FleetView([instance(name, step_time=SLOW) for name in names])
    rows = [candidates(*((name, float(value)) for name in names), prompt_tokens=9000) for value in values]
    both = learned(fleet, rows, 0.35)
    assert both.prices("a") == both.prices("b")
    fleet.set_health("b", False)
    alone = learned(fleet, rows, 0.35)
    assert alone.prices("a")[0] > both.prices("a")[0] + 0.05


def test_hosted_instances_are_free_and_take_pressure_off() -> None:
    """An instance without a step time has no price; where it is as good, the engine beside it has none either."""
    engine, hosted = instance("a", step_time=SLOW), Instance(id="h", model="dear")
    rows = [candidates(("a", 0.8), ("h", 0.81), prompt_tokens=9000)] * 640
    price = learned(FleetView([engine, hosted]), rows, 0.1)
    assert price.prices("h") == (0.0, 0.0)
    assert price.prices("a") == (0.0, 0.0)
    assert price.charges(query(), rows[0], [WORK_S, None], 65.0) == [0.0, 0.0]


def test_prices_move_once_every_so_many_queries() -> None:
    """Between updates every query is charged by the same prices."""
    fleet = FleetView([instance("a", step_time=SLOW), instance("b", step_time=FAST)])
    price = LearnedPrice()
    price.bind(fleet)
    row = candidates(("a", 0.8), ("b", 0.1), prompt_tokens=9000)
    seen = []
    for number in range(MIN_QUERIES + 3 * EVERY):
        price.charges(query(), row, [WORK_S, WORK_S], 0.1 * number)
        seen.append(price.prices("a"))
    changes = [number + 1 for number in range(1, len(seen)) if seen[number] != seen[number - 1]]
    assert changes
    assert all(number % EVERY == 0 and number >= MIN_QUERIES for number in changes)
