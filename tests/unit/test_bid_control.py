"""Bid-price control in periods: history, rate shifts, admission against a threshold, and what prices are learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.policy.bid_admission import Waiting
from headway.policy.bid_control import BidControl, BidSettings
from headway.policy.bid_dual import Columns
from headway.policy.bid_history import ColumnHistory, RateShift
from headway.policy.bid_plan import Devices

TWO = Devices(max_num_seqs=(2, 2), kv_tokens=(1000, 1000))


def control(devices: Devices = TWO, **settings: Any) -> BidControl:
    return BidControl(devices, BidSettings(**{"horizon": 64, "stride": 1, **settings}), np.random.default_rng(0))


def waiting(*requests: tuple[str, int, float, float]) -> Waiting:
    names, durations, bases, rewards = zip(*requests, strict=True)
    num = len(names)
    return Waiting(
        names,
        np.array(durations)[:, None],
        np.array(bases, np.float64)[:, None],
        np.broadcast_to(np.array(rewards)[:, None], (num, 2)),
    )


def column(num_periods: int, reward: float = 0.5) -> Columns:
    return Columns(np.array(0), np.array(num_periods), np.array(1.0), np.array(reward))


def test_the_best_go_while_there_is_room_and_are_spread() -> None:
    """Of five requests the four of largest reward take the four slots, two on each device."""
    one = control()
    admitted = one.route(0, waiting(*((f"q{n}", 5, 10.0, 0.1 * (n + 1)) for n in range(5))))
    assert [found.row for found in admitted] == [4, 3, 2, 1]
    assert sorted(found.device for found in admitted) == [0, 0, 1, 1]
    assert not one.has_room(0)


def test_what_does_not_fit_is_passed_over() -> None:
    """A request whose span would overflow the memory lets a smaller one behind it go."""
    one = control(Devices(max_num_seqs=(4, 4), kv_tokens=(100, 100)))
    admitted = one.route(0, waiting(("huge", 5, 500.0, 0.9), ("small", 5, 50.0, 0.1)))
    assert [found.row for found in admitted] == [1]


def test_priority_comes_before_margin() -> None:
    """A request of lower priority value goes first whatever it brings; within a priority the best margin does."""
    one = control(Devices(max_num_seqs=(1, 1), kv_tokens=(100, 100)))
    queue = waiting(("a", 5, 1.0, 0.9), ("b", 5, 1.0, 0.1), ("c", 5, 1.0, 0.2))
    admitted = one.route(0, queue._replace(priorities=np.array([1, -3, -3])))
    assert [(found.row, found.margin) for found in admitted] == [(2, pytest.approx(0.2)), (1, pytest.approx(0.1))]


def test_an_early_end_gives_its_rest_back() -> None:
    """A slot planned for 50 periods is free again as soon as its request has ended."""
    one = control(Devices(max_num_seqs=(1, 1), kv_tokens=(100, 100)))
    one.route(0, waiting(("a", 50, 10.0, 0.5), ("b", 50, 10.0, 0.5)))
    assert not one.has_room(4)
    one.ended("a", 5)
    assert one.has_room(5)
    assert len(one.route(5, waiting(("c", 50, 10.0, 0.5)))) == 1


def test_a_plan_that_is_not_followed_keeps_to_its_predictions() -> None:
    """Without reconciling, an early end frees nothing, and a late one is not known: as the released code does it."""
    one = control(Devices(max_num_seqs=(1, 1), kv_tokens=(100, 100)), reconcile=False)
    one.route(0, waiting(("a", 10, 10.0, 0.5), ("b", 10, 10.0, 0.5)))
    one.ended("a", 5)
    assert not one.has_room(5)
    assert one.has_room(10)


def test_what_others_take_is_no_room() -> None:
    """Slots and tokens that an engine shows beyond the plan are not given away."""
    one = control(Devices(max_num_seqs=(2, 2), kv_tokens=(100, 100)))
    one.occupied_by_others([2.0, 0.0], [0.0, 60.0])
    admitted = one.route(0, waiting(("large", 5, 50.0, 0.9), ("small", 5, 20.0, 0.1)))
    assert [(found.row, found.device) for found in admitted] == [(1, 1)]


def test_a_threshold_holds_what_brings_too_little() -> None:
    """Without work conservation only margins above the threshold go, though slots are free."""
    strict = control(threshold=0.4, work_conserving=False)
    assert [found.row for found in strict.route(0, waiting(("low", 5, 1.0, 0.3), ("high", 5, 1.0, 0.5)))] == [1]
    free = control(threshold=0.4)
    assert len(free.route(0, waiting(("low", 5, 1.0, 0.3), ("high", 5, 1.0, 0.5)))) == 2


def test_prices_rise_where_slots_run_out_and_fall_where_they_do_not() -> None:
    """Fed for a while with more than fits, slots get a price and memory none; left alone it goes back to 0."""
    one = control(num_steps=5, minibatch=16, step_size=0.01)
    for period in range(60):
        one.route(period, waiting(*((f"{period}-{n}", 30, 1.0, 0.5) for n in range(6))))
    assert one.prices.slots[:, 0].min() > 0.01
    assert one.prices.tokens.max() == 0.0
    for request in one.plan.requests():
        one.ended(request, 60)
    one.history.forget_before(60)
    one.history.add(column(1, reward=0.0), 60)
    for period in range(60, 120):
        one.route(period, waiting((f"w{period}", 1, 1.0, 0.0)))
    assert one.prices.slots.max() == 0.0


def test_memory_gets_the_price_where_it_is_the_scarcer() -> None:
    """The same load with large footprints on small memories prices tokens, not slots."""
    one = control(Devices(max_num_seqs=(50, 50), kv_tokens=(200, 200)), minibatch=16, step_size=0.01)
    for period in range(60):
        one.route(period, waiting(*((f"{period}-{n}", 30, 60.0, 0.5) for n in range(6))))
    slots, tokens = one.prices.parts(np.array([[30]]), np.array([[60.0]]))
    assert tokens.max() > 10 * slots.max()


def test_prices_move_once_per_period() -> None:
    """A second look in the same period admits, and neither learns nor remembers again."""
    one = control()
    one.route(3, waiting(("a", 5, 1.0, 0.5)))
    assert len(one.history) == 1
    assert len(one.route(3, waiting(("b", 5, 1.0, 0.5)))) == 1
    assert len(one.history) == 1


def test_columns_of_a_period_or_of_each_request() -> None:
    """The paper keeps the best column of a period, the release each request's when it is first seen."""
    full = Devices(max_num_seqs=(1, 1), kv_tokens=(9, 9))  # nothing fits, so all stay
    queue = waiting(("a", 5, 100.0, 0.2), ("b", 7, 100.0, 0.6), ("c", 9, 100.0, 0.4))
    by_period, by_request = control(full), control(full, history="request")
    for period in range(3):
        by_period.route(period, queue)
        by_request.route(period, queue)
    assert by_period.history.columns().num_periods[:, 0].tolist() == [7, 7, 7]
    assert by_request.history.columns().num_periods[:, 0].tolist() == [5, 7, 9]
    ahead = control(full, history="ahead")
    ahead.route(0, queue)
    assert ahead.history.columns().device.tolist() == [[0, 1]] * 3


def test_the_history_is_a_window_with_a_memory_of_when() -> None:
    """The newest columns remain, those before a period can be dropped, and the rate is that of what is left."""
    history = ColumnHistory(3, 1)
    for period in (0, 10, 20, 30):
        history.add(column(period + 1), period)
    assert sorted(history.columns().num_periods[:, 0].tolist()) == [11, 21, 31]
    assert history.rate(30) == pytest.approx(3 / 21)
    history.forget_before(20)
    assert sorted(history.columns().num_periods[:, 0].tolist()) == [21, 31]
    history.add(column(99), 40)
    assert len(history) == 3


def test_a_rise_of_the_arrival_rate_is_told_once_and_a_steady_one_never() -> None:
    """A Poisson stream that doubles is a rise soon after; one that goes on as before, or slows down, is none."""
    rng = np.random.default_rng(4)

    def rises(rates: list[float]) -> list[int]:
        shift = RateShift(400)
        return [
            period
            for period, rate in enumerate(np.repeat(rates, 4000).tolist())
            if shift.arrived(int(rng.poisson(rate)), period)
        ]

    assert rises([0.4, 0.4, 0.4]) == []
    assert rises([0.4, 0.2]) == []
    (first, *more) = rises([0.4, 0.8])
    assert 4000 < first < 4500
    assert all(period < 4900 for period in more)


def test_a_rise_drops_old_columns_unless_told_not_to() -> None:
    """Columns older than the present window are forgotten at a rise."""
    for reset, expected in ((True, 1), (False, 2)):
        one = control(window=8, reset_on_rise=reset, history="request")
        one.route(0, waiting(("old", 5, 1.0, 0.5)))
        for period in range(100):
            one.arrived(1 if period < 80 else 20, period)
            if period == 95:
                one.route(period, waiting(("new", 5, 1.0, 0.5)))
        assert (one.num_resets > 0) is reset
        assert len(one.history) == expected


def test_what_can_never_run_is_told_apart() -> None:
    """Too long for the horizon, too large for every memory, or fine on one of the devices asked for."""
    one = control(Devices(max_num_seqs=(2, 2), kv_tokens=(100, 500)))
    both = np.array([0, 1])
    too_long = one.never_fits(both, np.array([65, 65]), np.array([1.0, 1.0]))
    assert too_long is not None
    assert "horizon" in too_long
    too_large = one.never_fits(both[:1], np.array([10]), np.array([95.0]))
    assert too_large is not None
    assert "104 KV tokens, and the largest instance holds 100" in too_large
    assert one.never_fits(both, np.array([10, 10]), np.array([95.0, 95.0])) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"horizon": 0},
        {"stride": 65},
        {"minibatch": 0},
        {"window": 0},
        {"reward_periods": 0},
        {"num_steps": -1},
        {"step_size": 0.0},
        {"step_size": float("nan")},
        {"num_columns": 0.0},
        {"history": "week"},
    ],
)
def test_settings_out_of_range_name_their_key(settings: dict[str, Any]) -> None:
    """Each setting that cannot be meant is an error with its key."""
    with pytest.raises(ConfigError) as caught:
        control(**settings)
    assert caught.value.key == f"routing.{next(iter(settings))}"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": (), "kv_tokens": ()},
        {"max_num_seqs": (0,), "kv_tokens": (10,)},
        {"max_num_seqs": (1,), "kv_tokens": (0,)},
        {"max_num_seqs": (1, 1), "kv_tokens": (10,)},
        {"max_num_seqs": (1,), "kv_tokens": (10,), "tokens_per_period": (0.0,)},
    ],
)
def test_devices_that_hold_nothing_are_refused(fields: dict[str, Any]) -> None:
    """No device, no slot, no memory or no speed is an error."""
    with pytest.raises(ConfigError, match="devices"):
        Devices(**fields)
