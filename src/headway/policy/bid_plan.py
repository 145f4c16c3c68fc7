"""Planned occupancy: which slots and how many KV tokens of each device are taken in every period ahead.

A request on a device is a span: one slot from its start for as many periods as its answer is predicted to take, and a
footprint that grows with every period. Spans are what greedy admission checks and what prices are made from. The plan
follows what really happens: an answer that ends early gives its rest back, one that outlives its prediction is planned
on (source of the spans: arXiv 2607.03948; the following is ours, the released code never does it). It refuses to know
requests that were not committed here, and knows no clock: periods are whole numbers that only rise.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError

Grid = NDArray[np.float64]

#: What is planned on for an answer that outlives its prediction: the larger of this many periods and a quarter of what
#: it has taken so far.
MIN_OVERTIME = 16
OVERTIME_SHARE = 0.25


class Devices(Struct, frozen=True, kw_only=True):
    """What the devices hold: slots, KV tokens, and tokens that one sequence gains in a period. One entry per device.

    Raises:
        ConfigError: no device, unlike numbers of entries, or a device that holds nothing.
    """

    max_num_seqs: tuple[int, ...]
    kv_tokens: tuple[int, ...]
    tokens_per_period: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        num = len(self.max_num_seqs)
        if num == 0 or len(self.kv_tokens) != num or len(self.tokens_per_period) not in (0, num):
            raise ConfigError("slots, KV tokens and speeds must have one entry per device", key="devices")
        for key, values in (("max_num_seqs", self.max_num_seqs), ("kv_tokens", self.kv_tokens)):
            if min(values) < 1:
                raise ConfigError(f"must be at least 1 on every device, not {min(values)}", key=f"devices.{key}")
        if any(not 0.0 < speed < float("inf") for speed in self.tokens_per_period):
            raise ConfigError("must be above 0 and finite on every device", key="devices.tokens_per_period")

    def __len__(self) -> int:
        return len(self.max_num_seqs)

    @property
    def speeds(self) -> Grid:
        """Tokens per period, 1 where nothing was said."""
        return np.array(self.tokens_per_period or (1.0,) * len(self), np.float64)


class Span(Struct):
    """A request's place on a device: from ``start`` to before ``end``, holding ``base_tokens`` in its first period."""

    device: int
    start: int
    end: int
    base_tokens: float


class PlannedOccupancy:
    """Slots and KV tokens taken on each device, in each of the next ``horizon`` periods.

    With ``follow`` off an end changes nothing and nobody is planned on: the plan is what was predicted, as released.
    """

    def __init__(self, devices: Devices, horizon: int, *, follow: bool = True) -> None:
        self.devices, self._horizon, self._follow = devices, horizon, follow
        shape = (len(devices), 3 * horizon)
        self._slots, self._tokens = np.zeros(shape), np.zeros(shape)
        self._first = 0  # the period of the first column
        self._ramp = np.arange(horizon, dtype=np.float64)
        self._speeds: list[float] = devices.speeds.tolist()
        self._kv_tokens = [float(tokens) for tokens in devices.kv_tokens]
        self._spans: dict[Hashable, Span] = {}
        self._ends: list[tuple[int, int, Hashable]] = []
        self._num_pushed = 0
        #: Spans that have not ended, and the sum of the footprints they are planned to grow to, by device.
        self.num_spans = [0] * len(devices)
        self._final_tokens = [0.0] * len(devices)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._spans

    def requests(self) -> list[Hashable]:
        """Those that are planned, in the order in which they were committed."""
        return list(self._spans)

    def window(self, period: int) -> tuple[Grid, Grid]:
        """Slots and KV tokens taken from ``period`` on, each of shape (devices, horizon); views, not copies."""
        self._make_room(period)
        here = slice(period - self._first, period - self._first + self._horizon)
        return self._slots[:, here], self._tokens[:, here]

    def commit(self, request: Hashable, device: int, period: int, duration: int, base_tokens: float) -> None:
        """Plan a request on a device from ``period`` on, for at most the horizon."""
        self._make_room(period)
        span = Span(device, period, period + min(duration, self._horizon), base_tokens)
        self._add(span, span.start, 1.0)
        self._spans[request] = span
        self._push(request, span)
        self.num_spans[device] += 1
        self._final_tokens[device] += self._final(span)

    def end(self, request: Hashable, period: int) -> None:
        """The request is gone before ``period``: its plan from there on is free. An unknown one changes nothing."""
        span = self._spans.get(request) if self._follow else None
        if span is None:
            return
        self._drop(request, span)
        if period < span.end:
            self._make_room(period)
            self._add(span, max(period, span.start), -1.0)

    def catch_up(self, period: int) -> None:
        """Plan on for every request that should have ended by ``period`` and has not. O(those)."""
        self._make_room(period)
        while self._ends and self._ends[0][0] <= period:
            end, _, request = heapq.heappop(self._ends)
            span = self._spans.get(request)
            if span is None or span.end != end:
                continue
            if not self._follow:
                self._drop(request, span)
                continue
            longer = max(MIN_OVERTIME, int((period - span.start) * OVERTIME_SHARE))
            self._final_tokens[span.device] -= self._final(span)
            begin, span.end = max(period, span.end), period + min(longer, self._horizon)
            self._add(span, begin, 1.0)
            self._final_tokens[span.device] += self._final(span)
            self._push(request, span)

    def surely_fits(self, device: int, final_tokens: float) -> bool:
        """Whether one more that grows to ``final_tokens`` fits whenever the others are at their largest. O(1)."""
        return self._final_tokens[device] + final_tokens <= self._kv_tokens[device]

    def headroom(self, device: int, period: int) -> Grid:
        """The largest first footprint of a newcomer that runs 1, 2, … periods from ``period`` on; shape (horizon,)."""
        tokens = self.window(period)[1][device]
        room = self._kv_tokens[device] - tokens - self._speeds[device] * self._ramp
        found: Grid = np.minimum.accumulate(room)
        return found

    def _drop(self, request: Hashable, span: Span) -> None:
        del self._spans[request]
        self.num_spans[span.device] -= 1
        self._final_tokens[span.device] -= self._final(span)

    def _final(self, span: Span) -> float:
        return span.base_tokens + self._speeds[span.device] * (span.end - span.start - 1)

    def _push(self, request: Hashable, span: Span) -> None:
        self._num_pushed += 1  # requests themselves need no order
        heapq.heappush(self._ends, (span.end, self._num_pushed, request))

    def _add(self, span: Span, begin: int, sign: float) -> None:
        here = slice(begin - self._first, span.end - self._first)
        num = span.end - begin
        if num <= 0:
            return
        device, speed = span.device, self._speeds[span.device]
        base = span.base_tokens + speed * (begin - span.start)
        self._slots[device, here] += sign
        self._tokens[device, here] += sign * (base + speed * self._ramp[:num])

    def _make_room(self, period: int) -> None:
        """Move the columns so that those of ``period`` and a horizon beyond it, twice over, are there."""
        gone = period - self._first
        if gone <= self._horizon:
            return
        for grid in (self._slots, self._tokens):
            kept = grid[:, gone:].copy()
            grid[:, : kept.shape[1]] = kept
            grid[:, kept.shape[1] :] = 0.0
        self._first = period
