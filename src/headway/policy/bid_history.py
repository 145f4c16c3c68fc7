"""What the prices are learned from: the columns seen lately, and when to forget them because the load has changed.

The paper keeps the best-margin column of each period, the released code one column per request when it is first seen
(arXiv 2607.03948); both go in here. A rise of the arrival rate makes old columns tell of an easier past: on a rise that
is no accident they are dropped. It refuses to choose columns or to know what they are worth.
"""

from __future__ import annotations

import math

import numpy as np

from headway.policy.bid_dual import Columns

#: A rise counts when the arrivals of a window exceed those expected by this many standard deviations, and this share.
SIGNIFICANT_SIGMAS, SIGNIFICANT_SHARE = 4.0, 0.15
#: Windows before the present one that tell the rate expected.
_REFERENCE_WINDOWS = 4
#: Bins of a window: a rise is looked for once per bin.
_BINS = 8


class ColumnHistory:
    """The newest ``window`` requests with what they would take and bring at each of ``num_places``, the oldest
    overwritten."""

    def __init__(self, window: int, num_places: int) -> None:
        self._window = window
        shape = (window, num_places)
        self._device, self._num_periods = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._base_tokens, self._reward = np.zeros(shape), np.zeros(shape)
        self._seen = np.zeros(window, np.int64)
        self._num_added = 0

    def __len__(self) -> int:
        return min(self._num_added, self._window)

    def add(self, column: Columns, period: int) -> None:
        """One request, seen in ``period``; each array of it a value for all places, or one for each."""
        place = self._num_added % self._window
        self._device[place], self._num_periods[place] = column.device, column.num_periods
        self._base_tokens[place], self._reward[place] = column.base_tokens, column.reward
        self._seen[place] = period
        self._num_added += 1

    def columns(self) -> Columns:
        """All of them, in no particular order; views."""
        num = len(self)
        return Columns(self._device[:num], self._num_periods[:num], self._base_tokens[:num], self._reward[:num])

    def forget_before(self, period: int) -> None:
        """Drop the requests seen before ``period``."""
        kept = np.nonzero(self._seen[: len(self)] >= period)[0]
        for column in (self._device, self._num_periods, self._base_tokens, self._reward, self._seen):
            column[: len(kept)] = column[kept]
        self._num_added = len(kept)

    @property
    def _oldest(self) -> int:
        return self._num_added % self._window

    def rate(self, period: int) -> float:
        """Columns per period since the oldest that is kept."""
        num = len(self)
        seen = self._seen[:num]
        return num / max(period + 1 - int(seen.min() if self._num_added <= self._window else seen[self._oldest]), 1)


class RateShift:
    """Tells when requests begin to arrive significantly faster than before.

    Compares the last ``window`` periods with up to four windows before them. After a rise the past is forgotten.
    """

    def __init__(self, window: int) -> None:
        self._bin_periods = max(1, math.ceil(window / _BINS))
        self._counts: list[int] = [0]
        self._bin = 0

    @property
    def window(self) -> int:
        """Periods of the present window."""
        return self._bin_periods * _BINS

    def arrived(self, num: int, period: int) -> bool:
        """Count ``num`` arrivals in ``period``, which never falls; whether the bins before it show a rise."""
        now = period // self._bin_periods
        gone = now - self._bin
        rose = False
        if gone > 0:
            rose = self._rose()
            if rose:
                del self._counts[:-_BINS]
            keep = _BINS * (_REFERENCE_WINDOWS + 1)
            self._counts.extend([0] * min(gone, keep))
            del self._counts[:-keep]
            self._bin = now
        self._counts[-1] += num
        return rose

    def _rose(self) -> bool:
        before, present = self._counts[:-_BINS], self._counts[-_BINS:]
        if len(before) < _BINS:
            return False
        expected = sum(before) * _BINS / len(before)
        rise = sum(present) - expected
        return rise > SIGNIFICANT_SHARE * expected and rise > SIGNIFICANT_SIGMAS * math.sqrt(max(expected, 1.0))
