"""Upper bounds for the central queue: the offline linear program of small instances, and the fluid one of a load.

``offline_bound`` knows every arrival and every true length and may split requests over devices and starts: nothing that
sends whole requests as they come can reach more reward. ``fluid_values`` asks only that no device is given more
slot-periods than it has. ``static_prices`` solves the very problem whose dual the prices of ``bid_dual.py`` follow. All
need scipy (extra ``lab``), and all refuse to be an estimate of what a policy reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.errors import HeadwayError
from headway.lab.queue_load import QueueLoad
from headway.policy.bid_dual import Columns
from headway.policy.bid_plan import Devices

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

Grid = NDArray[np.float64]

#: The reward of starting a request on a device so many periods after its arrival.
Reward = Callable[[int, int, int], float]


def offline_bound(load: QueueLoad, devices: Devices, reward: Reward, *, last_start: int) -> float:
    """The largest sum of rewards ``reward(request, device, waited)`` over starts from each arrival to ``last_start``.

    Each request starts at most once in all, and every period has room for the slots and KV tokens of what runs in it.
    Variables are requests × devices × starts, for instances of some ten requests.

    Raises:
        HeadwayError: the solver found no optimum.
    """
    num_devices = len(devices)
    lengths = load.output_tokens.tolist()
    num_periods = last_start + max(lengths)
    rewards: list[float] = []
    entries: list[tuple[int, int, float]] = []  # row, column, amount
    first_request = 2 * num_devices * num_periods
    for request, (arrival, length, prompt) in enumerate(
        zip(load.arrivals.astype(int).tolist(), lengths, load.prompt_tokens.tolist(), strict=True)
    ):
        for device, speed in enumerate(devices.speeds.tolist()):
            for start in range(arrival, last_start + 1):
                column = len(rewards)
                rewards.append(reward(request, device, start - arrival))
                entries.append((first_request + request, column, 1.0))
                for since in range(-int(-length // speed)):
                    row = device * num_periods + start + since
                    entries.append((row, column, 1.0))
                    entries.append((num_devices * num_periods + row, column, prompt + 1 + speed * since))
    room = np.repeat((*devices.max_num_seqs, *devices.kv_tokens), num_periods).astype(np.float64)
    result = _maximum(np.array(rewards), entries, np.concatenate((room, np.ones(len(load)))))
    return float(-result.fun)


def fluid_values(load: QueueLoad, num_slots: NDArray[np.int64]) -> float:
    """The largest mean value if requests may be split over devices, each within its slot-periods while they arrive.

    One token takes a slot for a period; memory counts for nothing. The load must have values.
    """
    values = load.values
    assert values is not None
    num, num_devices = values.shape
    lengths, span = load.output_tokens.astype(np.float64), float(load.arrivals[-1])
    request, device = (part.ravel() for part in np.mgrid[:num, :num_devices])
    columns = np.arange(num * num_devices)
    rows = np.concatenate((device, num_devices + request))
    amounts = np.concatenate((lengths[request] / span, np.ones(len(columns))))
    entries = (rows, np.tile(columns, 2), amounts)
    result = _solve(values.ravel() / num, entries, np.concatenate((num_slots.astype(np.float64), np.ones(num))))
    return float(-result.fun)


class StaticPrices(NamedTuple):
    """The dual of the static program: prices like those of ``DualPrices.values``, and the optimum f(p)."""

    values: Grid
    optimum: float


def static_prices(columns: Columns, devices: Devices, scarcity: Grid, *, stride: int = 1) -> StaticPrices:
    """Prices that minimise ``d·p + mean max_g (r − a·p)₊`` over the columns, by the program of which they are the dual.

    ``scarcity`` is d, of shape (2, devices, priced periods).
    """
    _, num_devices, num_periods = scarcity.shape
    units = np.array(devices.kv_tokens) / np.array(devices.max_num_seqs)
    num = len(columns.reward)
    rewards: list[float] = []
    entries: list[tuple[int, int, float]] = []
    for request, place in zip(*np.nonzero(np.isfinite(columns.reward)), strict=True):
        _, length, base, reward = (part[request, place] for part in columns)
        device, column = int(columns.device[request, place]), len(rewards)
        rewards.append(float(reward) / num)
        entries.append((2 * num_devices * num_periods + int(request), column, 1.0))
        for period in range(int(length)):
            row, speed = device * num_periods + period, float(devices.speeds[device]) * stride
            entries.append((row, column, 1.0 / num))
            tokens = (float(base) + speed * period) / float(units[device])
            entries.append((num_devices * num_periods + row, column, tokens / num))
    result = _maximum(np.array(rewards), entries, np.concatenate((scarcity.ravel(), np.ones(num))))
    values = -np.asarray(result.ineqlin.marginals)[: scarcity.size].reshape(scarcity.shape)
    return StaticPrices(values, float(-result.fun))


def _maximum(rewards: Grid, entries: list[tuple[int, int, float]], room: Grid) -> OptimizeResult:
    rows, columns, amounts = (np.array(part) for part in zip(*entries, strict=True))
    return _solve(rewards, (rows, columns, amounts), room)


def _solve(rewards: Grid, entries: tuple[NDArray[np.int64], NDArray[np.int64], Grid], room: Grid) -> OptimizeResult:
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    rows, columns, amounts = entries
    matrix = csr_array((amounts, (rows, columns)), shape=(len(room), len(rewards)))
    result = linprog(-rewards, A_ub=matrix, b_ub=room, bounds=(0.0, None), method="highs")
    if not result.success:
        raise HeadwayError(f"the bound has no solution: {result.message}")
    return result
