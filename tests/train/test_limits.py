"""Paces and budgets: turns come no sooner than allowed, and requests in flight together stay within the limit."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.train.limits import Budget, Pacer

_USD = st.floats(0.0, 2.0)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40), st.floats(0.1, 100.0))
def test_turns_are_at_least_an_interval_apart(gaps_s: list[float], per_s: float) -> None:
    """However requests come, no two turns are nearer than the rate allows, and none comes before it was asked for."""
    pacer, now, turns = Pacer(per_s), 0.0, []
    for gap_s in gaps_s:
        now += gap_s
        turns.append(pacer.take(now))
        assert turns[-1] >= now
    assert all(later - sooner >= 1.0 / per_s - 1e-9 for sooner, later in pairwise(turns))


def test_a_pause_holds_for_everybody() -> None:
    """An endpoint that asks for ten seconds gets them, also from turns that were given out before."""
    pacer = Pacer()
    assert pacer.take(1.0) == 1.0
    pacer.pause(11.0)
    pacer.pause(5.0)  # a shorter one does not end it
    assert pacer.is_paused(10.9)
    assert not pacer.is_paused(11.0)
    assert pacer.take(2.0) == 11.0


@given(st.lists(st.tuples(_USD, st.floats(0.0, 1.0)), max_size=30), st.floats(0.0, 10.0), st.integers(1, 5))
def test_the_budget_is_never_exceeded(requests: list[tuple[float, float]], limit_usd: float, num_workers: int) -> None:
    """Spent and set aside together stay within the limit at every moment, when no request costs more than its most."""

    async def run() -> None:
        budget, todo = Budget(limit_usd), iter(requests)

        async def work() -> None:
            for most_usd, share in todo:
                reservation = await budget.reserve(most_usd)
                if reservation is None:
                    return
                async with reservation:
                    assert budget.spent_usd + budget.reserved_usd <= limit_usd + 1e-9
                    await asyncio.sleep(0)
                    reservation.cost_usd = most_usd * share

        await asyncio.gather(*(work() for _ in range(num_workers)))
        assert budget.reserved_usd == 0.0
        assert budget.spent_usd <= limit_usd + 1e-9
        if not budget.exhausted:
            assert next(todo, None) is None

    asyncio.run(run())


async def test_a_request_waits_for_those_in_flight_before_it_gives_up() -> None:
    """Money that was set aside and not spent goes to the next; once nothing is in flight, the budget is at its end."""
    budget = Budget(1.0, spent_usd=0.2)
    first = await budget.reserve(0.7)
    assert first is not None
    second = asyncio.create_task(budget.reserve(0.5))
    await asyncio.sleep(0)
    assert not second.done()
    async with first:
        first.cost_usd = 0.1
    reservation = await second
    assert reservation is not None
    third = asyncio.create_task(budget.reserve(0.6))
    async with reservation:
        reservation.cost_usd = 0.5
    assert await third is None
    assert budget.exhausted
    assert await budget.reserve(0.0) is None
    assert budget.spent_usd == pytest.approx(0.8)


def test_impossible_limits_are_refused() -> None:
    """A rate of nothing and a negative budget are mistakes."""
    with pytest.raises(ConfigError, match="--rps"):
        Pacer(0.0)
    with pytest.raises(ConfigError, match="--budget-usd"):
        Budget(-1.0)
    with pytest.raises(ConfigError, match="--budget-usd"):
        Budget(float("nan"))
