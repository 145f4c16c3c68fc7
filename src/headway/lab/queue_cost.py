"""What a routing period of bid-price control costs, in CPU time of this process.

A steady state under load: every device is full by plan but for a slot or so that came free, 200 requests wait, lengths
are exponential with mean 200. Timed is all that routing does: ends taken in, rewards, price steps, margins, admission.
It refuses to time wall clocks, or the making of arrivals and ends.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from headway.lab.queue_dispatch import PERIOD_S
from headway.policy.bid_admission import Waiting
from headway.policy.bid_control import BidControl, BidSettings
from headway.policy.bid_objective import Objective
from headway.policy.bid_plan import Devices

NUM_WAITING, MEAN_LENGTH, NUM_SLOTS, KV_TOKENS = 200, 200.0, 29, 118_784


def routing_ms(num_devices: int, *, num_periods: int, seed: int, settings: BidSettings | None = None) -> float:
    """The median CPU time of a routing period in milliseconds, after a fifth as many periods to warm up."""
    return median(routing_times_ms(num_devices, num_periods=num_periods, seed=seed, settings=settings))


def routing_times_ms(
    num_devices: int, *, num_periods: int, seed: int, settings: BidSettings | None = None
) -> list[float]:
    """CPU milliseconds of each routing period."""
    settings = BidSettings() if settings is None else settings
    rng = np.random.default_rng(seed)
    devices = Devices(max_num_seqs=(NUM_SLOTS,) * num_devices, kv_tokens=(KV_TOKENS,) * num_devices)
    control, objective = BidControl(devices, settings, rng), Objective()
    durations, prompts, arrivals = (np.zeros((NUM_WAITING, 1), np.int64) for _ in range(3))
    names = list(range(NUM_WAITING))
    for row in range(NUM_WAITING):
        durations[row], prompts[row] = _draw(rng, settings.horizon)
    ends: dict[int, int] = {}
    times_ms: list[float] = []
    warm_up = num_periods // 5
    for period in range(num_periods + warm_up):
        gone = [name for name, end in ends.items() if end <= period]
        start_ns = time.thread_time_ns()
        for name in gone:
            control.ended(name, period)
        control.arrived(len(gone), period)
        waited = period - arrivals
        rewards = objective.rewards(durations, waited, reward_periods=settings.reward_periods, period_s=PERIOD_S)
        admitted = control.route(period, Waiting(names, durations, (prompts + 1).astype(np.float64), rewards))
        times_ms.append((time.thread_time_ns() - start_ns) / 1e6)
        for name in gone:
            del ends[name]
        for one in admitted:
            ends[names[one.row]] = period + int(durations[one.row, 0])
            durations[one.row], prompts[one.row] = _draw(rng, settings.horizon)
            arrivals[one.row], names[one.row] = period, max(names) + 1
    return times_ms[warm_up:]


def _draw(rng: np.random.Generator, horizon: int) -> tuple[int, int]:
    """Periods and prompt tokens of a request."""
    return min(1 + int(rng.exponential(MEAN_LENGTH - 1.0)), horizon), int(rng.integers(100, 2000))
