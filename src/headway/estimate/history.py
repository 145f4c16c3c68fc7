"""Time to first token by what an instance was seen to do lately: all there is of a hosted API, and of a lost replay.

Recent times to first token, their median and 90 % quantile, and how they rise with the prompt where the window shows
that. Medians throughout: one slow cold start must not condemn an instance. Requests that wait for their first token
count too, those that are being answered do not: beyond the usual number they add to the wait, and where none of them
has been answered for longer than usual the instance is taken to be at least that slow, so that one which accepts and
never answers gets nothing more. It refuses to speak from fewer than three samples; another estimator does then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headway.estimate.median import median_of_sorted
from headway.fleet import FleetView, InstanceView
from headway.types import Estimate, Instance, Outcome, Query

#: Fewer samples than this say nothing.
MIN_SAMPLES = 3
_WINDOW_SAMPLES = 64
_UNKNOWN_RATIO_P90 = 2.0
_UNKNOWN_CONCURRENCY = 25
#: From so many samples on, whose outer thirds differ by so many prompt tokens, a slope per token is sought.
_MIN_LINE_SAMPLES, _MIN_LINE_TOKENS = 9, 256


class Fallback(Protocol):
    """An estimator that can be asked about one instance."""

    def estimate_one(self, view: InstanceView, prompt_tokens: int, now: float) -> Estimate: ...
    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None: ...


class _Sample(NamedTuple):
    """A time to first token. ``prompt_tokens`` None: the instance never said, and nothing of an answer came."""

    end_s: float
    ttft_s: float
    prompt_tokens: int | None


class _Seen(NamedTuple):
    """What the recent outcomes of one instance amount to: ``base_s + token_s · prompt tokens``, until ``expires_s``."""

    base_s: float
    token_s: float
    least_s: float
    beyond_p90_s: float
    usual_waiting: float
    expires_s: float

    def ttft_s(self, prompt_tokens: int) -> float:
        return max(self.base_s + self.token_s * prompt_tokens, self.least_s)


class _Window:
    """Recent outcomes of one instance: times to first token, and (end time, time until anything of it was seen)."""

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque(maxlen=_WINDOW_SAMPLES)
        self.waits: deque[tuple[float, float]] = deque(maxlen=_WINDOW_SAMPLES)
        self.is_new = False
        self._seen: _Seen | None = None

    def seen(self, now: float, max_age_s: float) -> _Seen | None:
        """What the last samples amount to; None where they are too few, or have grown older than ``max_age_s``."""
        if self.is_new:
            self.is_new = False
            self._seen = self._summary(max_age_s)
        return None if self._seen is None or now > self._seen.expires_s else self._seen

    def _summary(self, max_age_s: float) -> _Seen | None:
        since_s = self.samples[-1].end_s - max_age_s if self.samples else 0.0
        fresh = self.samples if self.samples and self.samples[0].end_s >= since_s else self._since(since_s)
        if len(fresh) < MIN_SAMPLES:
            return None
        ttfts_s = [ttft_s for _, ttft_s, _ in fresh]
        known = sorted((tokens, ttft_s) for _, ttft_s, tokens in fresh if tokens is not None)
        token_s = _slope_s(known)
        rests = ttfts_s
        if token_s > 0.0:
            usual_tokens = median_of_sorted([tokens for tokens, _ in known])
            rests = [ttft_s - token_s * (usual_tokens if tokens is None else tokens) for _, ttft_s, tokens in fresh]
        rests = sorted(rests)
        base_s = rests[(len(rests) - 1) // 2]
        return _Seen(
            base_s=base_s,
            token_s=token_s,
            least_s=min(ttfts_s),
            beyond_p90_s=rests[math.ceil(0.9 * len(rests)) - 1] - base_s,
            usual_waiting=self._usual_waiting(since_s),
            expires_s=fresh[-MIN_SAMPLES].end_s + max_age_s,
        )

    def _since(self, since_s: float) -> list[_Sample]:
        return [one for one in self.samples if one.end_s >= since_s]

    def _usual_waiting(self, since_s: float) -> float:
        """Little's law over the window: outcomes per second × the mean time for which they waited."""
        fresh = [(end_s, wait_s) for end_s, wait_s in self.waits if end_s >= since_s]
        if not fresh:
            return 0.0
        waits = [wait_s for _, wait_s in fresh]
        span_s = max(fresh[-1][0] - fresh[0][0], *waits, 1e-3)
        return sum(waits) / span_s


class HistoryEstimator:
    """The median of the last 64 times to first token within ``max_age_s``; ``fallback`` before three of them.

    Each 25 requests beyond the number that usually waits for a first token add it once more, so that simultaneous
    requests spread. A slow instance that gets no traffic is forgotten after ``max_age_s`` and thereby tried again.
    """

    name = "history"

    def __init__(self, fallback: Fallback, *, max_age_s: float = 120.0) -> None:
        self._fallback = fallback
        self._max_age_s = max_age_s
        self._windows: dict[str, _Window] = {}

    def estimate(self, query: Query, fleet: FleetView, prompt_tokens: Sequence[int], now: float) -> list[Estimate]:
        """One estimate per instance in fleet order."""
        return [self.estimate_one(view, tokens, now) for view, tokens in zip(fleet.views, prompt_tokens, strict=True)]

    def estimate_one(self, view: InstanceView, prompt_tokens: int, now: float) -> Estimate:
        """The estimate of one instance; other estimators fall back on it."""
        window = self._windows.get(view.instance.id)
        seen = None if window is None else window.seen(now, self._max_age_s)
        if seen is None:
            found = self._fallback.estimate_one(view, prompt_tokens, now)
        else:
            usual_s = seen.ttft_s(prompt_tokens)
            crowd = 1.0 + max(0.0, len(view.unanswered) - seen.usual_waiting) / _UNKNOWN_CONCURRENCY
            ttft_s = usual_s * crowd
            p90_s = (usual_s + seen.beyond_p90_s) * crowd
            found = Estimate(ttft_s, p90_s, ttft_s - usual_s, self.name, view.snapshot_age_s)
        silent_s = _silent_s(view, now)
        if silent_s <= found.ttft_p90_s:
            return found
        return Estimate(silent_s, silent_s * _UNKNOWN_RATIO_P90, silent_s, found.source, found.snapshot_age_s)

    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None:
        """Remember an outcome's TTFT, and for how long it waited."""
        self._fallback.observe(outcome, instance, now)
        window = self._windows.get(instance.id)
        if window is None:
            window = self._windows[instance.id] = _Window()
        ttft_s = outcome.ttft_s
        if ttft_s is None and outcome.status in ("timeout", "cancelled") and outcome.total_s is not None:
            # No token came in all that time: the TTFT is at least this, which is news only where it is slow.
            known = window.seen(now, self._max_age_s)
            usual_s = _USUAL_TTFT_S if known is None else known.ttft_s(outcome.prompt_tokens or 0)
            ttft_s = outcome.total_s if outcome.total_s > usual_s else None
        if ttft_s is not None:
            window.samples.append(_Sample(now, ttft_s, outcome.prompt_tokens))
            window.is_new = True
        wait_s = outcome.total_s if outcome.ttft_s is None else outcome.ttft_s
        if wait_s is not None and outcome.status not in ("error", "rejected"):
            window.waits.append((now, wait_s))
            window.is_new = True


#: Where nothing is known, a request given up without a token after less than this says nothing, seconds.
_USUAL_TTFT_S = 0.5


def _silent_s(view: InstanceView, now: float) -> float:
    """For how long an instance with streams under way has given none of them its first token, seconds."""
    eldest = next((entry for entry in view.unanswered.values() if entry.is_streamed), None)
    if eldest is None:
        return 0.0
    since_s = eldest.booked_s if view.answered_s is None else max(eldest.booked_s, view.answered_s)
    return now - since_s


def _slope_s(known: Sequence[tuple[int, float]]) -> float:
    """Seconds per prompt token of sorted (tokens, TTFT) by Tukey's resistant line: between the medians of the outer
    thirds. At least 0."""
    if len(known) < _MIN_LINE_SAMPLES or known[-1][0] - known[0][0] < _MIN_LINE_TOKENS:
        return 0.0
    third = len(known) // 3
    low, high = known[:third], known[-third:]
    span_tokens = median_of_sorted([tokens for tokens, _ in high]) - median_of_sorted([tokens for tokens, _ in low])
    if span_tokens < _MIN_LINE_TOKENS:
        return 0.0
    low_s, high_s = (median_of_sorted(sorted(ttft_s for _, ttft_s in third_of)) for third_of in (low, high))
    return max((high_s - low_s) / span_tokens, 0.0)
