"""What must hold of a key's limits, whatever comes when: never more than allowed, never longer to wait than needed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import KeyConfig
from headway.gateway.errors import BudgetSpentError, KeyLimitError
from headway.gateway.limits import WINDOW_S, Budget, ClientLimits, Grant, Window

STEPS = st.lists(
    st.tuples(
        st.one_of(st.floats(0, 40), st.sampled_from([0.0, 20.0, 30.0, 60.0])), st.integers(0, 30), st.integers(0, 30)
    ),
    max_size=60,
)


@given(st.integers(1, 60), STEPS)
def test_a_window_never_holds_more_than_its_limit(limit: int, steps: list[tuple[float, int, int]]) -> None:
    """Over any 60 s what was let in is within the limit; who must wait fits exactly then, and not earlier."""
    window, now, taken = Window(limit), 0.0, []
    for pause_s, amount, _ in steps:
        now += pause_s
        wait_s = window.wait_s(amount, now)
        if wait_s == 0.0:
            window.take(amount, now)
            taken.append((now, amount))
        elif amount > limit:
            assert wait_s == math.inf
        else:
            assert 0.0 < wait_s <= WINDOW_S + 1e-9
            then = now + wait_s + 1e-6
            assert sum(one for at, one in taken if at > then - WINDOW_S) + amount <= limit
            before = now + wait_s - 1e-6
            assert sum(one for at, one in taken if at > before - WINDOW_S) + amount > limit
        assert sum(one for at, one in taken if at > now - WINDOW_S) <= limit


@given(STEPS)
def test_corrections_count_once(steps: list[tuple[float, int, int]]) -> None:
    """After any corrections the total is what the entries of the last 60 s really were; what is gone stays gone."""
    window, now = Window(math.inf), 0.0
    entries: list[tuple[float, list[float]]] = []
    for pause_s, amount, actual in steps:
        now += pause_s
        entries.append((now, window.take(amount, now)))
        if actual % 3 == 0:
            entry = entries[actual % len(entries)][1]
            window.correct(entry, actual, now)
        window.wait_s(0, now)  # forgets what is too old
        assert window.total == pytest.approx(sum(entry[1] for at, entry in entries if at > now - WINDOW_S))


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=40))
def test_places_are_given_back_once(concurrency: int, moves: list[bool]) -> None:
    """The number under way is that of the grants not yet settled, however often one is settled."""
    limits = ClientLimits(KeyConfig(name="a", sha256="a" * 64, concurrency=concurrency))
    under_way: list[Grant] = []
    for comes in moves:
        if comes and len(under_way) < concurrency:
            under_way.append(limits.enter(1, 0.0, 0.0))
        elif comes:
            with pytest.raises(KeyLimitError, match="at a time"):
                limits.enter(1, 0.0, 0.0)
        elif under_way:
            grant = under_way.pop()
            grant.settle(1, 0.1, 0.0, 0.0)
            grant.settle(1, 0.1, 0.0, 0.0)
        assert limits.num_inflight == len(under_way)


def test_budgets_begin_anew_with_their_period() -> None:
    """A day's budget is free again at midnight UTC, a month's with the month, a total never."""
    midnight_s = 1_798_761_600.0  # 2027-01-01 00:00 UTC
    for period, again in (("day", True), ("month", True), ("total", False)):
        budget = Budget(1.0, period)  # type: ignore[arg-type]
        budget.roll(midnight_s - 1)
        budget.spent_usd = 1.0
        budget.roll(midnight_s - 0.5)
        assert budget.spent_usd == 1.0
        budget.roll(midnight_s + 1)
        assert (budget.spent_usd == 0.0) is again


def test_other_limits_keep_what_was_counted() -> None:
    """A lower limit counts what was there before, and a higher budget goes on from what was spent."""
    limits = ClientLimits(KeyConfig(name="a", sha256="a" * 64, rpm=10, budget_usd=1.0))
    for _ in range(5):
        limits.enter(1, 0.0, 0.0).settle(1, 0.2, 0.0, 0.0)
    with pytest.raises(BudgetSpentError):
        limits.enter(1, 1.0, 0.0)
    limits.reconfigure(KeyConfig(name="a", sha256="a" * 64, rpm=5, budget_usd=2.0))
    with pytest.raises(KeyLimitError) as caught:
        limits.enter(1, 1.0, 0.0)
    assert (caught.value.reason, caught.value.retry_after_s) == ("key_rpm", 59.0)
    assert limits.budget.spent_usd == pytest.approx(1.0)
