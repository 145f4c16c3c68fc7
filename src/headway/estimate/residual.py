"""What observed times to first token say of an instance's step times: how to correct them, or to stop using them.

A wrong profile makes every replay wrong by about one factor, which shows in the ratio of observed to replayed TTFT. A
moderate factor is taken out: replayed times are stretched by it, within bounds, and by no more than the pairs seen are
sure of, so that noise around a right profile moves nothing. A factor beyond that is no correction but another engine:
the profile is stale, other estimates speak, and the replay is only compared, until it has been right for a while. Both
are told in numbers; nothing is hidden.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from msgspec import Struct

from headway.estimate.median import median_of_sorted

#: Pairs in which neither time reaches this say more about the network than about the clock, seconds.
FLOOR_S = 0.05
#: Replayed times are stretched by no more and no less.
CORRECTION_BOUNDS = (0.5, 2.0)
#: So many pairs are needed before anything is corrected.
_MIN_CORRECTED = 16
#: A stale profile is used again once so many of the last pairs are within the band.
_NUM_GOOD, _OF_LAST = 12, 16
#: A median within this many of its standard errors from no error at all is left alone.
_STANDARD_ERRORS = 2.5
#: A step towards the wanted correction with each pair, so that no single one makes a jump.
_GAIN = 0.2


class Residual(Struct, frozen=True):
    """The median of observed ÷ replayed TTFT over the last pairs; ``ratio`` is None before there are enough.

    ``correction`` is what replayed times are to be multiplied by; ``trusted`` False means that they are not to be used.
    """

    ratio: float | None
    num_pairs: int
    trusted: bool
    correction: float = 1.0


class _Watched:
    """One instance: logarithms of its last ratios, in the order they came and in that of their size, and what they
    have led to. Both orders, because an outcome comes with every answer and must cost microseconds."""

    __slots__ = ("_by_size", "_window", "correction", "logs", "num_since_lost", "said", "trusted")

    def __init__(self, window: int) -> None:
        self._window = window
        self.logs: deque[float] = deque()
        self._by_size: list[float] = []
        self.trusted = True
        self.num_since_lost = 0
        self.correction = 1.0
        self.said: Residual | None = None  # since the last pair

    def add(self, log: float) -> None:
        """Take the newest in the place of the oldest."""
        if len(self.logs) == self._window:
            del self._by_size[bisect_left(self._by_size, self.logs.popleft())]
        self.logs.append(log)
        insort(self._by_size, log)

    def keep_last(self, num: int) -> None:
        """Forget all but the last ``num``."""
        self.logs = deque(list(self.logs)[-num:])
        self._by_size = sorted(self.logs)

    @property
    def middle(self) -> float:
        """The median."""
        return median_of_sorted(self._by_size)

    def spread(self, middle: float) -> float:
        """The median distance from ``middle``."""
        return median_of_sorted(sorted([abs(one - middle) for one in self._by_size]))


class ResidualGate:
    """Watches each instance's ratio of observed to replayed TTFT over a window of pairs.

    Trust is lost when the median leaves [1/band, band], twice what a correction may be, and regained when 12 of the
    last 16 are back inside; before ``min_pairs`` an instance is trusted. The median, so that some stalls or a burst
    that joined a batch condemn nobody. Without ``correcting`` every correction stays 1.
    """

    def __init__(self, *, band: float = 4.0, window: int = 32, min_pairs: int = 8, correcting: bool = True) -> None:
        self._log_band, self._window, self._min_pairs = math.log(band), window, min_pairs
        self._correcting = correcting
        self._watched: dict[str, _Watched] = {}

    def observe(self, instance_id: str, replayed_s: float, observed_s: float) -> Residual:
        """Take a pair of an answered query, and say how the instance stands. ``replayed_s`` is not yet corrected."""
        watched = self._watched.get(instance_id)
        if watched is None:
            watched = self._watched[instance_id] = _Watched(self._window)
        if math.isfinite(replayed_s) and replayed_s > 0 and observed_s > 0 and max(replayed_s, observed_s) >= FLOOR_S:
            watched.add(math.log(observed_s / replayed_s))
            self._judge(watched)
            watched.said = None
        return self.residual(instance_id)

    def forget(self, instance_id: str) -> None:
        """Begin anew with an instance: its step time is another one."""
        self._watched.pop(instance_id, None)

    def residual(self, instance_id: str) -> Residual:
        """How the instance stands now."""
        watched = self._watched.get(instance_id)
        if watched is None:
            return Residual(None, 0, True)
        if watched.said is None:
            num_pairs = len(watched.logs)
            ratio = math.exp(watched.middle) if num_pairs >= self._min_pairs else None
            watched.said = Residual(ratio, num_pairs, watched.trusted, watched.correction)
        return watched.said

    def _judge(self, watched: _Watched) -> None:
        logs = watched.logs
        if len(logs) < self._min_pairs:
            return
        if watched.trusted:
            watched.trusted = abs(watched.middle) <= self._log_band
            watched.num_since_lost = 0
        else:
            watched.num_since_lost += 1
            last = list(logs)[-min(_OF_LAST, watched.num_since_lost) :]
            if sum(abs(one) <= self._log_band for one in last) >= _NUM_GOOD:
                watched.trusted = True
                watched.keep_last(len(last))  # what led to the loss is no longer true
        if self._correcting and len(watched.logs) >= _MIN_CORRECTED:
            step = _GAIN * (_wanted(watched) - math.log(watched.correction))
            low, high = CORRECTION_BOUNDS
            watched.correction = min(max(watched.correction * math.exp(step), low), high)


def _wanted(watched: _Watched) -> float:
    """Logarithm of the factor that the pairs are sure of: all of a median that stands out, the less of it the less it
    does."""
    middle = watched.middle
    spread = 1.4826 * watched.spread(middle)
    unsure = _STANDARD_ERRORS * 1.2533 * spread / math.sqrt(len(watched.logs))
    return 0.0 if abs(middle) <= unsure else middle * (1.0 - (unsure / middle) ** 2)
