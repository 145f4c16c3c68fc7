"""Plays a load through a central queue onto decode workers, under one dispatcher: the lab of bid prices.

An event loop over arrivals, sequence ends and the dispatcher's own wishes; in the abstract clock of arXiv 2607.03948
all of them fall on whole periods. A dispatcher sees predicted lengths and what it sent, never what a device holds. It
refuses to drop a request: a run goes on until the last one has ended, and one that could run nowhere is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError, HeadwayError
from headway.lab.queue_device import Device, DeviceSpec
from headway.lab.queue_load import QueueLoad

Column = NDArray[np.float64]


class Dispatcher(Protocol):
    """Sends queued requests to devices. Requests and devices are numbers; times those of the load."""

    def bind(self, load: QueueLoad, devices: Sequence[DeviceSpec]) -> None:
        """Begin a run."""
        ...

    def ended(self, request: int, device: int, now: float) -> None:
        """A request it had sent has got its last token."""
        ...

    def release(self, queue: list[int], num_new: int, now: float) -> list[tuple[int, int]]:
        """(request, device) of those that go now. ``queue`` is in order of arrival, its last ``num_new`` just came.

        Called whenever something happened, with an empty queue too.
        """
        ...

    def next_release(self, now: float) -> float | None:
        """When to be called if nothing happens until then; None: on events only."""
        ...


class QueueOutcomes(Struct, frozen=True, eq=False, kw_only=True):
    """What became of each request, in order of arrival: its device, and when it was sent, joined, began and ended."""

    load: QueueLoad
    device: NDArray[np.int64]
    sent: Column
    joined: Column
    first_token: Column
    ended: Column
    num_preemptions: int


def play(load: QueueLoad, devices: Sequence[DeviceSpec], dispatcher: Dispatcher) -> QueueOutcomes:
    """What ``dispatcher`` makes of ``load``. Same arguments, same outcomes; some ten microseconds per request.

    Raises:
        ConfigError: no device, or a request that no device could ever run.
        HeadwayError: the dispatcher leaves requests in the queue for good, or sends what it does not have.
    """
    largest = max((one.kv_tokens for one in devices), default=0)
    final = int((load.prompt_tokens + load.output_tokens).max())
    if final > largest:
        raise ConfigError(f"a request grows to {final} KV tokens, and no device holds more than {largest}", key="load")
    return _Run(load, devices, dispatcher).play()


class _Run:
    """The state of one run."""

    def __init__(self, load: QueueLoad, devices: Sequence[DeviceSpec], dispatcher: Dispatcher) -> None:
        self.load, self.dispatcher = load, dispatcher
        self.devices = [Device(spec) for spec in devices]
        self.arrivals: list[float] = load.arrivals.tolist()
        self.prompt_tokens: list[int] = load.prompt_tokens.tolist()
        self.output_tokens: list[int] = load.output_tokens.tolist()
        num = len(load)
        self.device = [-1] * num
        self.sent, self.joined, self.first_token, self.ended = ([math.nan] * num for _ in range(4))
        self.queue: list[int] = []
        dispatcher.bind(load, devices)

    def play(self) -> QueueOutcomes:
        num, arrived, wish = len(self.arrivals), 0, math.inf
        while True:
            now = min(
                self.arrivals[arrived] if arrived < num else math.inf, wish, *(one.next_event for one in self.devices)
            )
            if now == math.inf:
                break
            self._run_devices(now)
            before = arrived
            while arrived < num and self.arrivals[arrived] <= now:
                self.queue.append(arrived)
                arrived += 1
            self._release(arrived - before, now)
            self._run_devices(now)
            wish = self._next_wish(now)
        if self.queue:
            raise HeadwayError(f"{len(self.queue)} requests were never sent, the first is {self.queue[0]}")
        return QueueOutcomes(
            load=self.load,
            device=np.array(self.device),
            sent=np.array(self.sent),
            joined=np.array(self.joined),
            first_token=np.array(self.first_token),
            ended=np.array(self.ended),
            num_preemptions=sum(one.num_preemptions for one in self.devices),
        )

    def _next_wish(self, now: float) -> float:
        wish = self.dispatcher.next_release(now) if self.queue else None
        if wish is None:
            return math.inf
        if not wish > now:
            raise HeadwayError(f"the dispatcher asked at {now:g} to be called at {wish:g}")
        return wish

    def _run_devices(self, now: float) -> None:
        for number, one in enumerate(self.devices):
            while one.next_event <= now:
                for time, request in one.step():
                    self.ended[request] = time
                    self.dispatcher.ended(request, number, now)
            for joined in one.joins:
                self.joined[joined.request] = joined.time
                self.first_token[joined.request] = joined.first_token_time
            one.joins.clear()

    def _release(self, num_new: int, now: float) -> None:
        released = self.dispatcher.release(self.queue, num_new, now)
        if not released:
            return
        for request, number in released:
            if self.device[request] >= 0 or self.arrivals[request] > now:
                raise HeadwayError(f"request {request} was sent but is not in the queue")
            self.device[request], self.sent[request] = number, now
            self.devices[number].submit(request, self.prompt_tokens[request], self.output_tokens[request], now)
        if len(released) == len(self.queue):
            self.queue.clear()
        else:
            gone = {request for request, _ in released}
            self.queue[:] = [request for request in self.queue if request not in gone]
