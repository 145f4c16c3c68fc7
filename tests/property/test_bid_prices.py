"""Bid prices against their formulas: prefix sums and difference arrays give what explicit sums over periods give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.policy.bid_admission import Room, Waiting, admit
from headway.policy.bid_dual import Columns, DualPrices
from headway.policy.bid_plan import MIN_OVERTIME, OVERTIME_SHARE, Devices, PlannedOccupancy
from reference_prices import Column, ReferencePrices

NUM_PERIODS = 12
DEVICES = st.integers(1, 3).flatmap(
    lambda num: st.builds(
        lambda slots, tokens, speeds: Devices(
            max_num_seqs=tuple(slots), kv_tokens=tuple(tokens), tokens_per_period=tuple(speeds)
        ),
        st.lists(st.integers(1, 6), min_size=num, max_size=num),
        st.lists(st.integers(20, 400), min_size=num, max_size=num),
        st.lists(st.sampled_from([1.0, 0.5, 2.0]), min_size=num, max_size=num),
    )
)


def requests_on(draw: st.DrawFn, num_devices: int) -> list[list[Column]]:
    """Requests with a column on one device, or on each; all columns of a request begin at one time."""
    everywhere = draw(st.booleans())
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        start = draw(st.integers(0, NUM_PERIODS - 1))
        devices = range(num_devices) if everywhere else [draw(st.integers(0, num_devices - 1))]
        one = st.tuples(st.integers(1, NUM_PERIODS), st.integers(0, 60).map(float), st.integers(0, 99))
        columns = [(device, *draw(one)) for device in devices]  # rewards that no charge and no other comes near
        requests.append(
            [Column(d, length, base, 0.0137 + 0.01 * r + 1e-4 * d, start) for d, length, base, r in columns]
        )
    return requests


def stacked(requests: list[list[Column]]) -> Columns:
    parts = [np.array([[column[part] for column in columns] for columns in requests]) for part in range(4)]
    return Columns(*parts)


@settings(max_examples=80, deadline=None)
@given(st.data(), DEVICES, st.sampled_from([1, 3]), st.booleans())
def test_steps_and_charges_are_those_of_the_formulas(
    data: st.DataObject, devices: Devices, stride: int, spread: bool
) -> None:
    """After any run of steps and periods gone by, prices and charges equal the explicit sums of the reference."""
    fast = DualPrices(devices, num_periods=NUM_PERIODS, stride=stride)
    slow = ReferencePrices(devices, NUM_PERIODS, stride)
    shape = (len(devices), NUM_PERIODS)
    for _ in range(data.draw(st.integers(1, 4))):
        requests = data.draw(st.composite(requests_on)(len(devices)))
        if not spread:
            requests = [[column._replace(start=0) for column in columns] for columns in requests]
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        size = data.draw(st.sampled_from([0.01, 0.3]))
        picks = rng.integers(len(requests), size=(2, 4))
        starts = np.array([columns[0].start for columns in requests])[picks]
        plenty = data.draw(st.sampled_from([0.0, 0.0, 9000.0]))  # where memory needs no look
        free_slots, free_tokens = rng.uniform(-1.0, 4.0, shape), rng.uniform(-50.0, 200.0, shape) + plenty
        scarcity = fast.scarcity(free_slots, free_tokens, 20.0)
        fast.steps(stacked(requests), picks, scarcity, size, starts if spread else None)
        for row in picks:
            slow.step([requests[number] for number in row], *scarcity.tolist(), size)
        gone = data.draw(st.integers(0, NUM_PERIODS + 1))
        fast.advance(gone)
        slow.advance(gone)
        assert fast.slots == pytest.approx(np.array(slow.slots), abs=1e-9)
        units = np.array(slow.units)[:, None]
        assert fast.tokens * units == pytest.approx(np.array(slow.tokens), abs=1e-9)
        firsts = [columns[0]._replace(start=0) for columns in requests]
        lengths = np.array([[column.num_periods] for column in firsts])
        bases = np.array([[column.base_tokens] for column in firsts])
        expected = [[slow.charge(one._replace(device=device)) for device in range(len(devices))] for one in firsts]
        assert fast.charges(lengths, bases) == pytest.approx(np.array(expected), abs=1e-9)


def test_scarcity_is_what_is_free_per_column() -> None:
    """d is (B − occupied)₊/N and (M − occupied)₊/N, memory in the device's KV tokens per slot."""
    devices = Devices(max_num_seqs=(4, 2), kv_tokens=(400, 100))
    prices = DualPrices(devices, num_periods=1)
    d = prices.scarcity(np.array([[3.0], [-1.0]]), np.array([[200.0], [25.0]]), 6.0)
    assert d == pytest.approx(np.array([[[0.5], [0.0]], [[200 / 100 / 6], [25 / 50 / 6]]]))


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 9),  # periods that go by before it
        st.sampled_from(["commit", "commit", "end", "catch_up"]),
        st.integers(1, 40),  # duration
        st.integers(0, 50),  # base tokens
        st.integers(0, 30),  # which request
    ),
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(DEVICES, EVENTS, st.booleans())
def test_the_plan_is_the_sum_of_its_spans(
    devices: Devices, events: list[tuple[int, str, int, int, int]], follow: bool
) -> None:
    """Slots and tokens of every period ahead are those of the spans committed, ended early or planned on."""
    horizon = 30
    plan = PlannedOccupancy(devices, horizon, follow=follow)
    spans: dict[int, list[float]] = {}  # request -> device, start, end, base
    now, number = 0, 0
    for gone, kind, duration, base, which in events:
        now += gone
        if kind == "commit":
            device = which % len(devices)
            plan.commit(number, device, now, duration, float(base))
            spans[number] = [device, now, now + min(duration, horizon), base]
            number += 1
        elif kind == "end" and which < number:
            plan.end(which, now)
            if follow:
                spans.pop(which, None)
        plan.catch_up(now)
        for request, span in list(spans.items()):
            if span[2] <= now and follow:
                span[2] = now + min(max(MIN_OVERTIME, int((now - span[1]) * OVERTIME_SHARE)), horizon)
            elif span[2] <= now:
                del spans[request]
        slots, tokens = plan.window(now)
        for device, speed in enumerate(devices.speeds):
            here = [span for span in spans.values() if span[0] == device]
            for ahead in range(horizon):
                live = [span for span in here if span[1] <= now + ahead < span[2]]
                assert slots[device, ahead] == len(live)
                assert tokens[device, ahead] == pytest.approx(sum(s[3] + speed * (now + ahead - s[1]) for s in live))
            assert plan.num_spans[device] == len(here)


class Planned:
    """What is planned on each device, in arrays of its own: slots and tokens of every period ahead."""

    def __init__(self, devices: Devices, slots: NDArray[np.float64], tokens: NDArray[np.float64]) -> None:
        self.devices, self.slots, self.tokens = devices, slots.copy(), tokens.copy()

    def growth(self, device: int, length: int, base: float) -> NDArray[np.float64]:
        return base + self.devices.speeds[device] * np.arange(length)

    def fits(self, device: int, length: int, base: float) -> bool:
        there = self.tokens[device, :length] + self.growth(device, length, base)
        has_slot = self.slots[device, 0] + 1 <= self.devices.max_num_seqs[device]
        return bool(has_slot and (there <= self.devices.kv_tokens[device]).all())

    def add(self, device: int, length: int, base: float) -> None:
        self.slots[device, :length] += 1
        self.tokens[device, :length] += self.growth(device, length, base)


@settings(max_examples=80, deadline=None)
@given(st.data(), DEVICES)
def test_admission_is_greedy_and_never_overfills(data: st.DataObject, devices: Devices) -> None:
    """The best margin that fits goes first, ties to the earlier request; no planned period exceeds slots or memory."""
    plan = PlannedOccupancy(devices, 40)
    num = len(devices)
    for period in (0, 7):
        num_waiting = data.draw(st.integers(1, 8))
        rng = np.random.default_rng(data.draw(st.integers(0, 999)))
        durations, bases = rng.integers(1, 40, (num_waiting, num)), rng.integers(0, 80, (num_waiting, num)) * 1.0
        margins = rng.choice([0.1, 0.2, 0.3, -0.2, -np.inf], (num_waiting, num))
        planned = Planned(devices, *plan.window(period))
        free = np.array(devices.max_num_seqs) - planned.slots[:, 0]
        waiting = Waiting([(period, row) for row in range(num_waiting)], durations, bases, margins)
        admitted = admit(plan, period, waiting, margins.copy(), Room(free, np.zeros(num)))
        left = set(range(num_waiting))
        for one in [*admitted, None]:
            options = [
                (margins[row, device], -row)
                for row in left
                for device in range(num)
                if margins[row, device] > -np.inf and planned.fits(device, durations[row, device], bases[row, device])
            ]
            if one is None:
                assert not options
                break
            assert (one.margin, -one.row) == max(options)
            span = (one.device, durations[one.row, one.device], bases[one.row, one.device])
            assert planned.fits(*span)
            planned.add(*span)
            left.remove(one.row)
        assert (plan.window(period)[0] == planned.slots).all()
        assert plan.window(period)[1] == pytest.approx(planned.tokens)
