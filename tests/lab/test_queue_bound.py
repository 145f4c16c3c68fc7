"""Upper bounds of the central queue: no policy beats them, and prices come to their duals."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

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


def toy(seed: int) -> tuple[Devices, Columns, np.ndarray]:
    """Two devices, 60 columns, and so little free that a third of the columns or so can be taken."""
    rng = np.random.default_rng(seed)
    devices = Devices(max_num_seqs=(4, 4), kv_tokens=(200, 120))
    num = 60
    columns = Columns(
        rng.integers(2, size=num), rng.integers(1, 9, num), rng.integers(5, 40, num) * 1.0, rng.uniform(0.2, 1.0, num)
    )
    d = np.empty((2, 2, 8))
    d[0], d[1] = 0.15, 0.12
    return devices, columns, d


def dual_objective(columns: Columns, prices: DualPrices, d: np.ndarray) -> float:
    charges = prices.charges(columns.num_periods[:, None], columns.base_tokens[:, None])
    own = charges[np.arange(len(columns.device)), columns.device]
    return float((d * prices.values).sum() + np.maximum(columns.reward - own, 0.0).mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_prices_come_to_the_duals_of_the_program(seed: int) -> None:
    """On a history that stays the same, steps that shrink bring the objective to its optimum, and charges to those of
    the program's dual prices."""
    devices, columns, d = toy(seed)
    optimum = static_prices(columns, devices, d)
    exact = DualPrices(devices, num_periods=8)
    exact.steps(columns, np.arange(60)[None, :], d, 1e-12)  # sizes its sums
    exact.values[:] = optimum.values
    exact._summed = False
    assert dual_objective(columns, exact, d) == pytest.approx(optimum.optimum, rel=1e-6)
    prices = DualPrices(devices, num_periods=8)
    everyone = np.arange(60)[None, :]
    for number in range(6000):
        prices.steps(columns, everyone, d, 0.3 / (1.0 + number / 20.0))
    assert dual_objective(columns, prices, d) == pytest.approx(optimum.optimum, rel=0.01)
    lengths, bases = columns.num_periods[:, None], columns.base_tokens[:, None]
    ours, theirs = (one.charges(lengths, bases)[np.arange(60), columns.device] for one in (prices, exact))
    admitted, best = columns.reward > ours, columns.reward > theirs
    assert (admitted == best).mean() >= 0.9


def test_a_single_period_has_the_price_of_the_marginal_column() -> None:
    """Where each column takes one slot for one period, the price is the reward at which demand meets what is free."""
    devices = Devices(max_num_seqs=(4,), kv_tokens=(10_000,))
    num = 200
    rewards = np.linspace(0.0, 1.0, num)
    columns = Columns(np.zeros(num, np.int64), np.ones(num, np.int64), np.ones(num), rewards)
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
