"""Shadow prices of slots and KV memory, per device and period ahead, learned by projected subgradient steps.

Over the columns of a history the dual of "release what is worth most within what is free" is
``f(p) = d·p + mean (r − a·p)₊``, d being what is free and p ≥ 0 the prices (arXiv 2607.03948). A column takes one slot
and ``base + speed·θ`` KV tokens in each period θ below its duration, so ``a·p`` is a difference of prefix sums, plain
and summed twice, and a step adds up columns as differences at their ends: O(devices · periods + columns). Prices stand
at every ``stride``-th period, which at 1 are all of them. It refuses to know requests, queues or time: it moves prices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.policy.bid_plan import Devices

Grid = NDArray[np.float64]
Index = NDArray[np.int64]


class Columns(NamedTuple):
    """What candidates would take and bring: device, priced periods covered, KV tokens in the first, reward."""

    device: Index
    num_periods: Index
    base_tokens: Grid
    reward: Grid


class DualPrices:
    """Prices ``slots[g, i]`` and ``tokens[g, i]`` at priced periods i·stride from now on, and the steps that move them.

    Memory is counted in a device's KV tokens per slot, so that a column takes about as much of it as of the slots and
    both prices are learned as fast; in units of the whole memory (as released) that of memory hardly moves. Beyond the
    longest column seen every price is 0, and no work is done there.
    """

    def __init__(self, devices: Devices, *, num_periods: int, stride: int = 1) -> None:
        num = len(devices)
        self._width, self._reach = num_periods, 0
        self._units = np.array(devices.kv_tokens) / np.array(devices.max_num_seqs)  # KV tokens per slot
        self._speeds = devices.speeds * stride  # tokens gained between two priced periods
        self._ramp = self._speeds[:, None] * np.arange(num_periods) / self._units[:, None]
        #: Prices of a slot, and of the KV tokens per slot, shape (2, devices, num_periods).
        self.values = np.zeros((2, num, num_periods))
        # Prefix sums of both, and of the memory's prefix sums once more; a column of zeros in front.
        self._row = num_periods + 1
        self._sums = np.zeros((3, num, self._row))
        self._flat = self._sums.reshape(3, -1)
        self._steps, self._product = np.zeros((2, num, num_periods)), np.zeros((num, num_periods))
        self._summed = True

    @property
    def num_periods(self) -> int:
        """Priced periods."""
        return self._width

    @property
    def slots(self) -> Grid:
        """Reward per slot in each priced period, shape (devices, num_periods)."""
        found: Grid = self.values[0]
        return found

    @property
    def tokens(self) -> Grid:
        """Reward per KV token in each priced period, shape (devices, num_periods)."""
        found: Grid = self.values[1] / self._units[:, None]
        return found

    def scarcity(self, free_slots: Grid, free_tokens: Grid, num_columns: float) -> Grid:
        """d: what is free of both in each priced period, per column that asks for it; shape (2, devices, periods)."""
        d = np.empty(self.values.shape)
        np.multiply(free_slots, 1.0 / num_columns, out=d[0])
        np.multiply(free_tokens, 1.0 / (num_columns * self._units[:, None]), out=d[1])
        return np.maximum(d, 0.0, out=d)

    def advance(self, num_periods: int) -> None:
        """So many priced periods have gone by: each price keeps its period, those that come in are 0."""
        if num_periods <= 0 or self._reach == 0:
            return
        left = max(self._reach - num_periods, 0)
        self.values[:, :, :left] = self.values[:, :, num_periods : num_periods + left]
        self.values[:, :, left : self._reach] = 0.0
        self._reach, self._summed = left, False

    def steps(self, columns: Columns, picks: Index, scarcity: Grid, size: float, starts: Index | None = None) -> None:
        """A step per row of ``picks``, on the columns that it picks: ``p ← max(0, p − size·(d − mean of a, r > a·p))``.

        ``starts`` has the shape of ``picks`` and says in which priced period each column begins; all now by default.
        What of a column lies beyond the last priced period is free.
        """
        device, lengths = columns.device[picks], columns.num_periods[picks]
        base_tokens, reward = columns.base_tokens[picks], columns.reward[picks]
        speeds, units = self._speeds[device], self._units[device]
        ends = lengths if starts is None else np.minimum(lengths + starts, self._width)
        self._reach = max(self._reach, int(ends.max()))
        self._summed = False
        share, reach = size / picks.shape[1], self._reach
        at_start = base_tokens if starts is None else base_tokens - speeds * starts
        rows = device * self._row
        places, weights = rows + ends, _weights(at_start + speeds * ends, speeds, units)
        takes = np.empty((len(picks), 2, picks.shape[1]))
        takes[:, 0], takes[:, 1] = share, at_start * (share / units)
        if starts is not None:
            places = np.concatenate((places, rows + starts), axis=1)
            weights = np.concatenate((weights, -_weights(at_start + speeds * starts, speeds, units)), axis=2)
        num_places = self._flat.shape[1]
        both = np.concatenate((places, places + num_places), axis=1)
        amounts = np.empty((2, places.shape[1]))
        num_columns = picks.shape[1]
        ended, begun = amounts[:, :num_columns], amounts[:, num_columns:]
        values, added = self.values[:, :, :reach], self._steps[:, :, :reach]
        backwards, token_step, slot_step = added[:, :, ::-1], self._product[:, :reach], added[0]
        drift, ramp, zero = size * scarcity[:, :, :reach], self._ramp[:, :reach], 0.0
        for row in range(len(picks)):
            self._sum()
            charges = np.einsum("ij,ij->j", self._flat.take(places[row], axis=1), weights[row])
            if starts is not None:
                charges = charges[:num_columns] + charges[num_columns:]
            np.multiply(takes[row], reward[row] > charges, out=ended)
            if starts is not None:
                np.negative(ended, out=begun)
            last = np.bincount(both[row], amounts.ravel(), 2 * num_places).reshape(2, -1, self._row)
            # A column takes its share in every period before its end: sums from the far end.
            np.add.accumulate(last[:, :, reach:0:-1], -1, None, backwards)
            np.subtract(values, drift, out=values)
            np.add(values, added, out=values)
            np.multiply(ramp, slot_step, out=token_step)
            np.add(values[1], token_step, out=values[1])
            np.maximum(values, zero, out=values)
            self._summed = False

    def charges(self, num_periods: Index, base_tokens: Grid) -> Grid:
        """``a·p`` of requests on every device, shape (requests, devices): slots and memory together."""
        slots, tokens = self.parts(num_periods, base_tokens)
        slots += tokens
        return slots

    def parts(self, num_periods: Index, base_tokens: Grid) -> tuple[Grid, Grid]:
        """What slots and what memory are charged of requests on every device; shapes (requests, devices)."""
        self._sum()
        within = np.minimum(num_periods, self._reach)
        places = within + self._row * np.arange(len(self._speeds))
        slots, once, twice = (one.take(places) for one in self._flat)
        once *= base_tokens + self._speeds * within
        twice *= self._speeds
        once -= twice
        once /= self._units
        return slots, once

    def _sum(self) -> None:
        if self._summed:
            return
        reach, sums = self._reach, self._sums
        np.add.accumulate(self.values[:, :, :reach], -1, None, sums[:2, :, 1 : reach + 1])
        np.add.accumulate(sums[1, :, 1 : reach + 1], -1, None, sums[2, :, 1 : reach + 1])
        self._summed = True


def _weights(tokens: Grid, speeds: Grid, units: Grid) -> Grid:
    """What a charge takes of the three prefix sums at one end of its columns; ``tokens`` are those held there."""
    weights = np.empty((len(tokens), 3, tokens.shape[1]))
    weights[:, 0] = 1.0
    weights[:, 1] = tokens / units
    weights[:, 2] = speeds / -units
    return weights
