"""Dispatchers of the central-queue lab: the project's own policies, driven in periods.

``AtOnce`` asks a choosing policy of the registry as each request arrives, with its count of requests on each device.
``CentralQueue`` is the central queue without prices: as many at a time as there are slots, first come or shortest
predicted answer first. ``BidPriceQueue`` drives :class:`~headway.policy.bid_control.BidControl`, the same object as in
the gateway. None of them sees a true length or a device's memory.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from headway.errors import ConfigError
from headway.lab.queue_device import DeviceSpec
from headway.lab.queue_load import QueueLoad
from headway.lab.queue_prices import PriceWatch
from headway.policy.base import Policy
from headway.policy.bid_admission import Waiting
from headway.policy.bid_control import BidControl, BidSettings
from headway.policy.bid_objective import Objective
from headway.policy.bid_plan import Devices
from headway.types import Candidate, Query

#: Seconds of a period of the abstract clock (arXiv 2607.03948).
PERIOD_S = 0.03


class AtOnce:
    """Sends every request as it arrives to the device that ``policy`` chooses; it waits there."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def bind(self, load: QueueLoad, devices: Sequence[DeviceSpec]) -> None:
        """Begin with nothing sent."""
        self._ids = [f"device-{number}" for number in range(len(devices))]
        self._num_sent = [0] * len(devices)

    def ended(self, request: int, device: int, now: float) -> None:
        """One less there."""
        self._num_sent[device] -= 1

    def release(self, queue: list[int], num_new: int, now: float) -> list[tuple[int, int]]:
        """All that is queued."""
        released = []
        for request in queue:
            candidates = [
                Candidate(name, "model", "feasible", num_outstanding=num)
                for name, num in zip(self._ids, self._num_sent, strict=True)
            ]
            query = Query(id=str(request), arrival_s=now, prompt_text="", prompt_tokens={})
            device = self._policy.choose(query, candidates, now)
            assert device is not None, "every device is choosable"
            self._num_sent[device] += 1
            released.append((request, device))
        return released

    def next_release(self, now: float) -> float | None:
        """Nothing waits."""
        return None


class CentralQueue:
    """Sends the first of the queue whenever a slot is free, to the device with the most free slots."""

    def __init__(self, order: Literal["fcfs", "shortest_first"]) -> None:
        self._shortest_first = order == "shortest_first"

    def bind(self, load: QueueLoad, devices: Sequence[DeviceSpec]) -> None:
        """Begin with every slot free."""
        self._lengths: list[int] = load.predicted_tokens.tolist()
        self._free = [one.max_num_seqs for one in devices]
        self._heap: list[tuple[int, int]] = []

    def ended(self, request: int, device: int, now: float) -> None:
        """A slot is free."""
        self._free[device] += 1

    def release(self, queue: list[int], num_new: int, now: float) -> list[tuple[int, int]]:
        """As many as there are free slots."""
        for request in queue[len(queue) - num_new :]:
            heapq.heappush(self._heap, (self._lengths[request] if self._shortest_first else 0, request))
        released, free = [], self._free
        while self._heap and (most := max(free)) > 0:
            device = free.index(most)
            free[device] -= 1
            released.append((heapq.heappop(self._heap)[1], device))
        return released

    def next_release(self, now: float) -> float | None:
        """Slots become free by events alone."""
        return None


class BidPriceQueue:
    """Releases by bid prices, in periods of ``period`` units of the load's time.

    ``objective`` None ranks by arrival alone; with ``num_steps`` 0 no price is ever charged: with the plan and without
    prices it is the central queue that passes over what does not fit.

    Raises:
        ConfigError: a request longer than the horizon.
    """

    def __init__(
        self,
        objective: Objective | None,
        settings: BidSettings,
        rng: np.random.Generator,
        *,
        period: float = 1.0,
        period_s: float = PERIOD_S,
        tokens_per_period: Sequence[float] = (),
        watch: PriceWatch | None = None,
    ) -> None:
        self._watch = watch
        self._objective, self._settings, self._rng = objective, settings, rng
        self._period, self._period_s = period, period_s
        self._tokens_per_period = tuple(tokens_per_period)
        self.control: BidControl | None = None
        self.num_routed = 0

    def bind(self, load: QueueLoad, devices: Sequence[DeviceSpec]) -> None:
        """Begin with an empty plan and prices of 0."""
        extra = int(devices[0].mixing)
        speeds = np.array(self._tokens_per_period or [1.0] * len(devices))
        alike = len(set(speeds.tolist())) == 1
        self._durations = np.ceil(load.predicted_tokens[:, None] / (speeds[:1] if alike else speeds)).astype(np.int64)
        self._durations += extra
        longest = int(self._durations.max(axis=0).min())
        if longest > self._settings.horizon:
            raise ConfigError(
                f"must reach the longest request of {longest} periods, not {self._settings.horizon}", key="horizon"
            )
        self._bases = (load.prompt_tokens[:, None] + 1 - extra).astype(np.float64)
        self._arrivals = np.floor(load.arrivals / self._period)
        self._values = load.values
        if self._watch is not None:
            self._watch.choose(self._durations, self._bases, self._settings.stride)
        self.control = BidControl(
            Devices(
                max_num_seqs=tuple(one.max_num_seqs for one in devices),
                kv_tokens=tuple(one.kv_tokens for one in devices),
                tokens_per_period=tuple(speeds.tolist()),
            ),
            self._settings,
            self._rng,
        )

    def ended(self, request: int, device: int, now: float) -> None:
        """The plan is told."""
        assert self.control is not None
        self.control.ended(request, math.floor(now / self._period))

    def release(self, queue: list[int], num_new: int, now: float) -> list[tuple[int, int]]:
        """What the prices let go."""
        control, period = self.control, math.floor(now / self._period)
        assert control is not None
        control.arrived(num_new, period)
        if self._watch is not None:
            self._watch.look(control, len(queue), now)
        if not queue or not control.has_room(period):
            return []
        rows = np.array(queue)
        durations = self._durations[rows]
        if self._objective is None:
            rewards = 1.0 - self._arrivals[rows][:, None] / (1.0 + self._arrivals[-1])
        else:
            rewards = self._objective.rewards(
                durations,
                (period - self._arrivals[rows])[:, None],
                reward_periods=self._settings.reward_periods,
                period_s=self._period_s,
                values=None if self._values is None else self._values[rows],
            )
        self.num_routed += 1
        admitted = control.route(period, Waiting(queue, durations, self._bases[rows], rewards))
        return [(queue[one.row], one.device) for one in admitted]

    def next_release(self, now: float) -> float | None:
        """The next period, where something might be let go that is not now."""
        control, period = self.control, math.floor(now / self._period)
        assert control is not None
        return (period + 1.0) * self._period if control.may_change and control.has_room(period) else None
