"""Prices over time, as a diagnosis: what slots and what memory a sample of the load would be charged on each device.

A price per slot and one per token cannot be compared; what a request is charged for either can. Where the slots' part
is the larger the batch is scarce, where the memory's is the key-value cache; where both are near 0 nothing is. It looks
between routing periods and refuses to move anything.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.policy.bid_control import BidControl

Grid = NDArray[np.float64]

#: Requests of the load whose mean charge is taken.
_SAMPLE = 128


class PriceSeries(Struct, frozen=True, eq=False):
    """Mean charges in units of reward, by time and device: shapes (times,), (times, devices) twice, (times,)."""

    time: Grid
    slots: Grid
    tokens: Grid
    num_queued: Grid

    def means(self, *, after: float) -> tuple[float, float]:
        """Mean charges for slots and for memory over devices and the times from ``after`` on."""
        later = self.time >= after
        return float(self.slots[later].mean()), float(self.tokens[later].mean())


class PriceWatch:
    """Takes the charges every ``every`` units of time."""

    def __init__(self, every: float) -> None:
        self._every, self._due = every, 0.0
        self._rows: list[tuple[float, Grid, Grid, int]] = []

    def choose(self, durations: NDArray[np.int64], base_tokens: Grid, stride: int) -> None:
        """Take the sample from the load: requests × devices (or × 1), evenly over the run."""
        picks = np.linspace(0, len(durations) - 1, min(_SAMPLE, len(durations))).astype(int)
        self._num_periods, self._bases = -(-durations[picks] // stride), base_tokens[picks]

    def look(self, control: BidControl, num_queued: int, now: float) -> None:
        """Note the charges if it is time to."""
        if now < self._due:
            return
        self._due = now + self._every
        slots, tokens = control.prices.parts(self._num_periods, self._bases)
        self._rows.append((now, slots.mean(axis=0), tokens.mean(axis=0), num_queued))

    def series(self) -> PriceSeries:
        """What was noted."""
        times, slots, tokens, queued = zip(*self._rows, strict=True)
        return PriceSeries(np.array(times), np.array(slots), np.array(tokens), np.array(queued, np.float64))
