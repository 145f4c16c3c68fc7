"""Shadow prices of slots and KV memory, per device and period ahead, learned by projected subgradient steps.

Over the columns of a history the dual of "release what is worth most within what is free" is
``f(p) = d·p + mean (r − a·p)₊``, d being what is free and p ≥ 0 the prices (arXiv 2607.03948). A column takes one slot
and ``base + speed·θ`` KV tokens in each period θ below its duration, so ``a·p`` is a difference of prefix sums, plain
and summed twice, and a step adds up columns as differences at their ends: O(devices · periods + columns). Prices stand
at every ``stride``-th period, which at 1 are all of them. It refuses to know requests, queues or time: it moves prices.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.policy.bid_plan import Devices

_Number = TypeVar("_Number", np.float64, np.int64)
Grid = NDArray[np.float64]
Index = NDArray[np.int64]


class Columns(NamedTuple):
    """What requests would take and bring where they may go: arrays of shape (requests, places), often one place each.

    Device, priced periods covered, KV tokens in the first, reward; a reward of −inf where a request may not go.
    """

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
        self.units = np.array(devices.kv_tokens) / np.array(devices.max_num_seqs)
        #: Tokens gained between two priced periods, and KV tokens per slot, by device.
        self.speeds = devices.speeds * stride
        self._ramp = self.speeds[:, None] * np.arange(num_periods) / self.units[:, None]
        #: Prices of a slot, and of the KV tokens per slot, shape (2, devices, num_periods).
        self.values = np.zeros((2, num, num_periods))
        # Prefix sums of both, and of the memory's prefix sums once more; a column of zeros in front.
        self._row = num_periods + 1
        self._sums = np.zeros((3, num, self._row))
        self._flat, self._begins = self._sums.reshape(3, -1), self._row * np.arange(num)
        self._steps, self._product = np.zeros((2, num, num_periods)), np.zeros((num, num_periods))
        self._summed, self._memory_is_priced = True, False

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
        found: Grid = self.values[1] / self.units[:, None]
        return found

    def scarcity(self, free_slots: Grid, free_tokens: Grid, num_columns: float) -> Grid:
        """d: what is free of both in each priced period, per column that asks for it; shape (2, devices, periods)."""
        d = np.empty(self.values.shape)
        np.multiply(free_slots, 1.0 / num_columns, out=d[0])
        np.multiply(free_tokens, 1.0 / (num_columns * self.units[:, None]), out=d[1])
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
        """A step per row of ``picks``, on the requests that it picks: ``p ← max(0, p − size·(d − mean of a))``, the
        mean over all of them, a being that of the device with the best margin if this is above 0, else 0.

        ``starts`` has the shape of ``picks`` and says in which priced period each request begins; all now by default.
        What lies beyond the last priced period is free.
        """
        batches = _Batches(columns, picks, starts, self)
        reach = self._reach = max(self._reach, batches.reach)
        self._summed = False
        with_memory = self._memory_is_priced or batches.may_exceed(scarcity[1, :, :reach])
        kinds = 2 if with_memory else 1
        values, added = self.values[:kinds, :, :reach], self._steps[:kinds, :, :reach]
        backwards, token_step, slot_step = added[:, :, ::-1], self._product[:, :reach], added[0]
        drift, ramp = size * scarcity[:kinds, :, :reach], self._ramp[:, :reach]
        for row in range(len(picks)):
            self._sum()
            last = batches.taken(row, self._flat[: 2 * kinds - 1], size).reshape(kinds, -1, self._row)
            # A column takes its share in every period before its end: sums from the far end.
            np.add.accumulate(last[:, :, reach:0:-1], -1, None, backwards)
            np.subtract(values, drift, out=values)
            np.add(values, added, out=values)
            if with_memory:
                np.multiply(ramp, slot_step, out=token_step)
                np.add(values[1], token_step, out=values[1])
            np.maximum(values, 0.0, out=values)
            self._summed, self._memory_is_priced = False, with_memory
        if with_memory:
            self._sum()
            if not self._sums[1, :, reach].any():
                self._memory_is_priced = False
                self._sums[1:] = 0.0

    def charges(self, num_periods: Index, base_tokens: Grid) -> Grid:
        """``a·p`` of requests on every device, shape (requests, devices): slots and memory together."""
        self._sum()
        if not self._memory_is_priced:
            found: Grid = self._flat[0].take(np.minimum(num_periods, self._reach) + self._begins)
            return found
        slots, tokens = self.parts(num_periods, base_tokens)
        slots += tokens
        return slots

    def parts(self, num_periods: Index, base_tokens: Grid) -> tuple[Grid, Grid]:
        """What slots and what memory are charged of requests on every device; shapes (requests, devices)."""
        self._sum()
        within = np.minimum(num_periods, self._reach)
        slots, once, twice = self._flat.take(within + self._begins, axis=1)
        once *= base_tokens + self.speeds * within
        twice *= self.speeds
        once -= twice
        once /= self.units
        return slots, once

    def _sum(self) -> None:
        if self._summed:
            return
        reach, sums = self._reach, self._sums
        kinds = 2 if self._memory_is_priced else 1  # else those of memory are 0 already
        np.add.accumulate(self.values[:kinds, :, :reach], -1, None, sums[:kinds, :, 1 : reach + 1])
        if kinds == 2:
            np.add.accumulate(sums[1, :, 1 : reach + 1], -1, None, sums[2, :, 1 : reach + 1])
        self._summed = True


class _Batches:
    """The columns of some steps, prepared together: arrays of shape (steps, columns, places)."""

    def __init__(self, columns: Columns, picks: Index, starts: Index | None, prices: DualPrices) -> None:
        device, lengths = columns.device.take(picks, axis=0), columns.num_periods.take(picks, axis=0)
        base_tokens, reward = columns.base_tokens.take(picks, axis=0), columns.reward.take(picks, axis=0)
        speeds, units, rows = prices.speeds.take(device), prices.units.take(device), device * (prices.num_periods + 1)
        begins = None if starts is None else starts[:, :, None]
        ends = lengths if begins is None else np.minimum(lengths + begins, prices.num_periods)
        at_start = base_tokens if begins is None else base_tokens - speeds * begins
        self.reach = int(ends.max())
        self._num = len(prices.units) * (prices.num_periods + 1)
        self._device, self._reward, self._tokens = device, reward, at_start / units
        self._end = _End(rows + ends, (at_start + speeds * ends) / units, speeds / units)
        self._begin = None
        if begins is not None:
            self._begin = _End(rows + begins, (at_start + speeds * begins) / units, speeds / units)
        self._rows = np.arange(picks.shape[1])

    def may_exceed(self, there: Grid) -> bool:
        """Whether a step's columns could together take more memory than is ``there``, wherever they all went.

        If not, and no memory has a price, none will get one: then it need not be looked at.
        """
        num_steps, num_devices = len(self._device), len(there)
        places = self._device + num_devices * np.arange(num_steps)[:, None, None]
        most = np.bincount(places.ravel(), self._end.tokens.ravel(), minlength=num_steps * num_devices)
        return bool((most.reshape(num_steps, -1) > there.min(axis=1) * len(self._rows)).any())

    def taken(self, row: int, sums: Grid, size: float) -> Grid:
        """Slots and tokens of the columns worth their charge in one step, summed at their ends and scaled to a step.

        Of the slots alone where ``sums`` are only those of the slots.
        """
        margins = self._reward[row] - self._end.charges(row, sums)
        if self._begin is not None:
            margins += self._begin.charges(row, sums)
        best = None if margins.shape[1] == 1 else (self._rows, margins.argmax(axis=1))
        slots: Grid = np.where(_at(margins, best) > 0.0, size / len(self._rows), 0.0)
        amounts = slots
        if len(sums) > 1:
            amounts = np.concatenate((slots, slots * _at(self._tokens[row], best)))
        last = self._summed(self._end, row, best, amounts)
        if self._begin is not None:
            np.subtract(last, self._summed(self._begin, row, best, amounts), out=last)
        return last

    def _summed(self, end: _End, row: int, best: tuple[Index, Index] | None, amounts: Grid) -> Grid:
        places = _at(end.places[row], best)
        kinds = len(amounts) // len(places)
        both = places if kinds == 1 else np.concatenate((places, places + self._num))
        return np.bincount(both, weights=amounts, minlength=kinds * self._num).astype(np.float64, copy=False)


class _End:
    """One end of each column: where its prefix sums are, and what a charge takes of those of memory."""

    def __init__(self, places: Index, tokens: Grid, speeds: Grid) -> None:
        """``tokens`` are those held at that end, and ``speeds`` those gained per priced period, in units."""
        self.places, self.tokens, self._speeds = places, tokens, speeds

    def charges(self, row: int, sums: Grid) -> Grid:
        """The charges up to these ends in one step."""
        found: Grid
        if len(sums) == 1:
            found = sums[0].take(self.places[row])
            return found
        found, once, twice = sums.take(self.places[row], axis=1)
        once *= self.tokens[row]
        twice *= self._speeds[row]
        found += once
        found -= twice
        return found


def _at(grid: NDArray[_Number], best: tuple[Index, Index] | None) -> NDArray[_Number]:
    """Each column's value at its best place; None where there is but one."""
    found: NDArray[_Number] = grid[:, 0] if best is None else grid[best]
    return found
