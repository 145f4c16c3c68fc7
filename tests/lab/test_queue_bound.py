"""Upper bounds of the central queue: no policy beats them, and prices come to their duals."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from headway.lab.queue_bound import fluid_values, offline_bound, static_prices
from headway.lab.queue_device import DeviceSpec
from headway.lab.queue_dispatch import BidPriceQueue, CentralQueue
from headway.lab.queue_load import QueueLoad
from headway.lab.queue_sim import Dispatcher, QueueOutcomes, play
from headway.policy.bid_control import BidSettings
from headway.policy.bid_dual import Columns, DualPrices
from headway.policy.bid_objective import Objective
from headway.policy.bid_plan import Devices
from queue_loads import load_of

pytest.importorskip("scipy", reason="bounds need the extra 'lab'")

OBJECTIVES = {
    "latency": Objective(),
    "tokens": Objective(alpha=1.0, beta=0.0, gamma=0.0),
    "waits": Objective(beta=0.0, gamma=0.0, zeta1=1.0, zeta2=1.0, wait_slo_s=2.0, latency_slo_s=8.0),
}
SETTINGS = BidSettings(horizon=32, stride=1, reward_periods=20)


def crowded(seed: int) -> QueueLoad:
    rng = np.random.default_rng(seed)
    return load_of(
        *((int(t), int(rng.integers(1, 20)), int(rng.integers(1, 9))) for t in sorted(rng.integers(0, 6, 9)))
    )


def reward(objective: Objective, load: QueueLoad, request: int, waited: float) -> float:
    """What a start is worth, less a little for every period waited, as the paper's run with an end has it."""
    found = objective.rewards(load.output_tokens[request], waited, reward_periods=20, period_s=1.0)
    return float(found) - 0.01 * waited


def reached(objective: Objective, outcomes: QueueOutcomes) -> float:
    waits = outcomes.joined - outcomes.load.arrivals
    return sum(reward(objective, outcomes.load, request, wait) for request, wait in enumerate(waits.tolist()))


def dispatchers(objective: Objective) -> dict[str, Dispatcher]:
    def bid(**fields: object) -> BidPriceQueue:
        settings = replace(SETTINGS, **fields)
        return BidPriceQueue(objective, settings, np.random.default_rng(0), period_s=1.0)

    return {
        "bid": bid(),
        "ahead": bid(history="ahead"),
        "plan": bid(num_steps=0),
        "by arrival": BidPriceQueue(None, replace(SETTINGS, num_steps=0), np.random.default_rng(0)),
    }


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kv_tokens", [40, 1000])
def test_no_policy_beats_the_bound(name: str, kv_tokens: int) -> None:
    """What any queue collects of small loads is at most the optimum of the program that knows all of them."""
    objective = OBJECTIVES[name]
    specs = [DeviceSpec(max_num_seqs=2, kv_tokens=kv_tokens)] * 2
    devices = Devices(max_num_seqs=(2, 2), kv_tokens=(kv_tokens,) * 2)
    for seed in range(4):
        load = crowded(seed)
        queues = dispatchers(objective)
        if kv_tokens == 1000:
            queues |= {"fcfs": CentralQueue("fcfs"), "shortest": CentralQueue("shortest_first")}
        found = {label: play(load, specs, queue) for label, queue in queues.items()}
        assert all(outcomes.num_preemptions == 0 for outcomes in found.values())
        last = int(max(outcomes.joined.max() for outcomes in found.values()))

        def of(request: int, device: int, waited: int, load: QueueLoad = load) -> float:
            return reward(objective, load, request, waited)

        bound = offline_bound(load, devices, of, last_start=last)
        for outcomes in found.values():
            assert reached(objective, outcomes) <= bound + 1e-6
        assert bound <= len(load) + 1e-6


def test_the_bound_is_reached_where_there_is_room_for_all() -> None:
    """With a slot for everyone the optimum starts each request at once."""
    load = crowded(0)
    devices = Devices(max_num_seqs=(9,), kv_tokens=(1000,))
    expected = sum(reward(Objective(), load, request, 0) for request in range(len(load)))
    found = offline_bound(
        load, devices, lambda request, _, waited: reward(Objective(), load, request, waited), last_start=9
    )
    assert found == pytest.approx(expected)


def toy(seed: int) -> tuple[Devices, Columns, NDArray[np.float64]]:
    """Two devices, 60 requests that may go to either, and so little free that a third of them or so can be taken."""
    rng = np.random.default_rng(seed)
    devices = Devices(max_num_seqs=(4, 4), kv_tokens=(200, 120))
    shape = (60, 2)
    lengths, bases = rng.integers(1, 9, (60, 1)), rng.integers(5, 40, (60, 1)) * 1.0
    columns = Columns(
        np.broadcast_to(np.arange(2), shape),
        np.broadcast_to(lengths, shape),
        np.broadcast_to(bases, shape),
        rng.uniform(0.2, 1.0, shape),
    )
    d = np.empty((2, 2, 8))
    d[0], d[1] = 0.15, 0.12
    return devices, columns, d


def dual_objective(columns: Columns, values: NDArray[np.float64], devices: Devices, d: NDArray[np.float64]) -> float:
    """f(p) = d·p + mean of the best (r − a·p)₊, summed period by period."""
    units = np.array(devices.kv_tokens) / np.array(devices.max_num_seqs)
    charges = np.zeros(columns.reward.shape)
    for period in range(values.shape[2]):
        here = columns.num_periods > period
        tokens = (columns.base_tokens + period) / units
        charges += here * (values[0, :, period] + tokens * values[1, :, period])
    return float((d * values).sum() + np.maximum(columns.reward - charges, 0.0).max(axis=1).mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prices_come_to_the_duals_of_the_program(seed: int) -> None:
    """On a history that stays the same, steps that shrink bring the dual to the optimum of the linear program, and the
    prices to where its own dual prices stand, as far as these are the only ones."""
    devices, columns, d = toy(seed)
    optimum = static_prices(columns, devices, d)
    assert dual_objective(columns, optimum.values, devices, d) == pytest.approx(optimum.optimum, rel=1e-6)
    prices = DualPrices(devices, num_periods=8)
    everyone = np.arange(60)[None, :]
    for number in range(6000):
        prices.steps(columns, everyone, d, 0.3 / (1.0 + number / 20.0))
    assert dual_objective(columns, prices.values, devices, d) == pytest.approx(optimum.optimum, rel=0.01)
    worth, exact = ((d * values).sum() for values in (prices.values, optimum.values))
    assert worth == pytest.approx(exact, rel=0.15)


def test_a_single_period_has_the_price_of_the_marginal_column() -> None:
    """Where each column takes one slot for one period, the price is the reward at which demand meets what is free."""
    devices = Devices(max_num_seqs=(4,), kv_tokens=(10_000,))
    num = 200
    rewards = np.linspace(0.0, 1.0, num)[:, None]
    columns = Columns(np.zeros((num, 1), np.int64), np.ones((num, 1), np.int64), np.ones((num, 1)), rewards)
    d = np.array([[[0.25]], [[10.0]]])
    prices = DualPrices(devices, num_periods=1)
    rng = np.random.default_rng(0)
    for number in range(3000):
        prices.steps(columns, rng.integers(num, size=(1, 64)), d, 0.5 / (1.0 + number / 10.0))
    assert prices.slots[0, 0] == pytest.approx(0.75, abs=0.01)
    assert static_prices(columns, devices, d).values[0, 0, 0] == pytest.approx(0.75, abs=0.01)
    assert prices.tokens[0, 0] == 0.0


def test_the_fluid_bound_gives_the_better_device_to_those_who_gain_most() -> None:
    """With room for half of the work on the better device, the half that gains more by it goes there."""
    load = replace(
        load_of((0, 1, 10), (0, 1, 10), (20, 1, 10), (20, 1, 10)),
        values=np.array([[1.0, 0.2], [1.0, 0.9], [0.8, 0.1], [0.8, 0.7]]),
    )
    assert fluid_values(load, np.array([1, 1])) == pytest.approx((1.0 + 0.9 + 0.8 + 0.7) / 4)
