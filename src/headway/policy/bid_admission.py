"""Greedy admission: the best margin first, committed if the whole planned span still fits.

Margins are sorted by priority and size, equal ones by arrival; what is committed takes room from those behind it. What
does not fit is passed over, so that a large request holds nobody back (source: arXiv 2607.03948). Where devices tie,
the one with the larger free share of slots gets it; without that rule two alike would fill up one after the other.
It refuses to know where margins come from.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.policy.bid_plan import PlannedOccupancy

Grid = NDArray[np.float64]
Index = NDArray[np.int64]

#: Margins of one request this close are equal.
_MARGIN_TIE = 1e-12


class Waiting(NamedTuple):
    """The queue, in order of arrival. Arrays are requests × devices, or × 1 where all devices are alike.

    ``durations`` in periods, ``base_tokens`` held in the first; ``rewards`` −inf where a request may not go.
    ``priorities`` (one per request, lower is sooner) come before margins; None where all are alike.
    """

    requests: Sequence[Hashable]
    durations: Index
    base_tokens: Grid
    rewards: Grid
    priorities: Index | None = None


class Admission(NamedTuple):
    """A request, by its place in the queue, that goes to a device now, and by what margin."""

    row: int
    device: int
    margin: float


class Room(NamedTuple):
    """Free slots of each device now, and KV tokens that are taken there beside the plan."""

    free_slots: Grid
    other_tokens: Grid


def admit(plan: PlannedOccupancy, period: int, waiting: Waiting, margins: Grid, room: Room) -> list[Admission]:
    """What goes now, best margin first, committed to ``plan``. ``margins`` (requests × devices) is used up.

    A margin of −inf is never admitted.
    """
    greedy = _Greedy(plan, period, waiting, margins, room)
    admitted: list[Admission] = []
    while len(admitted) < len(margins) and (best := greedy.best()) is not None:
        greedy.commit(best)
        admitted.append(best)
    return admitted


class _Greedy:
    """What is still open to whom."""

    def __init__(self, plan: PlannedOccupancy, period: int, waiting: Waiting, margins: Grid, room: Room) -> None:
        self._plan, self._period, self._waiting, self._margins = plan, period, waiting, margins
        self._lifts: list[float] | None = None
        if waiting.priorities is not None:
            lifts = _lifts(waiting.priorities, margins)
            self._margins = margins + lifts[:, None]
            self._lifts = lifts.tolist()
        self._free: list[float] = room.free_slots.tolist()
        self._others: list[float] = room.other_tokens.tolist()
        self._slots = plan.devices.max_num_seqs
        longest = waiting.durations.max(axis=0) - 1
        #: No request grows beyond this; one that begins with as much may still be shorter.
        self._largest: list[float] = (waiting.base_tokens.max(axis=0) + plan.devices.speeds * longest).tolist()
        for device in range(len(self._slots)):
            self._close(device)

    def best(self) -> Admission | None:
        num_devices = len(self._slots)
        row, device = divmod(int(self._margins.argmax()), num_devices)
        of_row: list[float] = self._margins[row].tolist()
        margin = of_row[device]
        if margin == -math.inf:
            return None
        for other in range(device + 1, num_devices):
            if of_row[other] >= margin - _MARGIN_TIE and self._is_freer(other, device):
                device = other
        return Admission(row, device, margin if self._lifts is None else margin - self._lifts[row])

    def commit(self, one: Admission) -> None:
        waiting, device = self._waiting, one.device
        duration = int(_column(waiting.durations, device)[one.row])
        base_tokens = float(_column(waiting.base_tokens, device)[one.row])
        self._plan.commit(waiting.requests[one.row], device, self._period, duration, base_tokens)
        self._free[device] -= 1.0
        self._margins[one.row] = -np.inf
        self._close(device)

    def _is_freer(self, one: int, other: int) -> bool:
        return self._free[one] * self._slots[other] > self._free[other] * self._slots[one]

    def _close(self, device: int) -> None:
        """Take a device out of the margins of those whose span does not fit on it any more."""
        others = self._others[device]
        if self._free[device] < 1.0:
            self._margins[:, device] = -np.inf
        elif not self._plan.surely_fits(device, self._largest[device] + others):
            room = self._plan.headroom(device, self._period) - others
            last = np.minimum(_column(self._waiting.durations, device), len(room)) - 1
            self._margins[_column(self._waiting.base_tokens, device) > room[last], device] = -np.inf


def _lifts(priorities: Index, margins: Grid) -> Grid:
    """What puts every margin of one priority above all those of the next."""
    finite = margins[np.isfinite(margins)]
    spread = 1.0 + (float(np.ptp(finite)) if len(finite) else 0.0)
    ranks = np.unique(priorities, return_inverse=True)[1]
    lifts: Grid = spread * (ranks.max() - ranks)
    return lifts


def _column(grid: NDArray[np.generic], device: int) -> NDArray[np.generic]:
    """One device's column of what may be alike for all."""
    return grid[:, device if grid.shape[1] > 1 else 0]
