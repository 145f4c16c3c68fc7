"""A decode worker of the central-queue lab: iterations of a batch whose composition changes only between them.

The engine of arXiv 2607.03948, not vLLM's: every running sequence gains one token in each iteration, newcomers join at
iteration boundaries in their own order, and a memory that overflows sends the newest back to the front of the local
queue, its tokens kept. A stretch of unchanged composition is one event in closed form. ``mixing`` gives each newcomer a
first iteration in which its prompt is computed; without it prompts were computed elsewhere. It refuses to know routers.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import NamedTuple

from msgspec import Struct

from headway.errors import ConfigError

_ROUNDING = 1e-9


class IterationTime(Struct, frozen=True, kw_only=True):
    """Duration ``fixed + per_sequence·n + per_token·Σ context`` of a decode iteration, of contexts before it.

    ``per_prompt_token`` is added in an iteration that computes prompts. In periods the default is the abstract clock of
    the paper: one period each.
    """

    fixed: float = 1.0
    per_sequence: float = 0.0
    per_token: float = 0.0
    per_prompt_token: float = 0.0


ABSTRACT = IterationTime()


class DeviceSpec(Struct, frozen=True, kw_only=True):
    """Slots, KV tokens and clock of one device.

    Raises:
        ConfigError: it holds nothing, or its clock stands still.
    """

    max_num_seqs: int
    kv_tokens: int
    time: IterationTime = ABSTRACT
    mixing: bool = False

    def __post_init__(self) -> None:
        for key in ("max_num_seqs", "kv_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, key)}", key=key)
        times = (self.time.fixed, self.time.per_sequence, self.time.per_token, self.time.per_prompt_token)
        if not self.time.fixed > 0.0 or min(times) < 0.0 or not all(map(math.isfinite, times)):
            raise ConfigError("must be finite, at least 0, and the fixed part above 0", key="time")


class Ended(NamedTuple):
    """A sequence that has got its last token."""

    time: float
    request: int


class Joined(NamedTuple):
    """A request that joined a batch for the first time, and the end of its first iteration."""

    time: float
    first_token_time: float
    request: int


class _Sequence(Struct):
    """A request on the device: tokens of its prompt, and of its answer, wanted and there when it last joined."""

    request: int
    prompt_tokens: int
    output_tokens: int
    done: int = 0
    joined: int = -1  # the iteration in which it joined


class Device:
    """One device. ``next_event`` is when something must be done: a sequence ends, memory runs short, newcomers join."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.num_preemptions = 0
        self.next_event = math.inf
        #: Requests that joined for the first time; to be emptied by its owner.
        self.joins: list[Joined] = []
        self._queue: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        self._ends: list[tuple[int, int, int]] = []  # iteration, request, iteration in which it joined
        self._iteration, self._time = 0, 0.0  # of the last boundary
        self._offset = 0  # footprint during the iteration after boundary i: offset + running·i
        self._prompt_tokens = 0  # that the next iteration computes
        self._short_iteration = -1  # the last at whose boundary memory ran short: nothing joins there
        self._extra = int(spec.mixing)

    @property
    def num_requests(self) -> int:
        """Running and in the local queue."""
        return len(self._running) + len(self._queue)

    @property
    def kv_tokens(self) -> int:
        """Tokens held during the iteration after the last boundary."""
        return self._offset + len(self._running) * self._iteration

    def submit(self, request: int, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """Put a request last in the local queue; it joins at the next boundary, at once where nothing runs.

        Raises:
            ConfigError: it could not run here even alone.
        """
        final = prompt_tokens + output_tokens
        if final > self.spec.kv_tokens:
            raise ConfigError(f"request {request} grows to {final} KV tokens, the device holds {self.spec.kv_tokens}")
        self._queue.append(_Sequence(request, prompt_tokens, output_tokens))
        if not self._running:
            self._time, self.next_event = now, now
        elif len(self._running) < self.spec.max_num_seqs:
            self.next_event = min(self.next_event, self._time_after(self._iterations_until(now)))

    def step(self) -> list[Ended]:
        """Do what is due at ``next_event``, and tell which sequences ended."""
        time = self.next_event
        iterations = 0 if not self._running else self._iterations_until(time)
        if iterations and self._prompt_tokens:
            self._prompt_tokens = 0
        self._time, self._iteration = time, self._iteration + iterations
        ended = []
        while self._ends and self._ends[0][0] <= self._iteration:
            _, request, joined = heapq.heappop(self._ends)
            one = self._running.get(request)
            if one is not None and one.joined == joined:
                self._leave(one)
                ended.append(Ended(time, request))
        if self._preempt():
            self._short_iteration = self._iteration
        if self._iteration != self._short_iteration:
            self.joins.extend(Joined(time, self._time_after(1), request) for request in self._join())
        self.next_event = self._find_next()
        return ended

    # ------------------------------------------------------------ iterations and time

    def _time_after(self, iterations: int) -> float:
        """When that many iterations of the present composition have passed since the last boundary."""
        if iterations == 0:
            return self._time
        one, num = self.spec.time, len(self._running)
        first = one.fixed + one.per_sequence * num + one.per_token * (self.kv_tokens - num)
        growth = one.per_token * num * iterations * (iterations - 1) / 2.0
        return self._time + iterations * first + growth + one.per_prompt_token * self._prompt_tokens

    def _iterations_until(self, time: float) -> int:
        """The fewest iterations of the present composition that last to ``time`` or beyond."""
        left = time - self._time - _ROUNDING
        if left <= 0.0:
            return 0
        one, num = self.spec.time, len(self._running)
        left -= one.per_prompt_token * self._prompt_tokens
        if left <= 0.0:
            return 1
        growth = one.per_token * num / 2.0
        first = one.fixed + one.per_sequence * num + one.per_token * (self.kv_tokens - num) - growth
        root = (
            left / first if growth == 0.0 else (math.sqrt(first * first + 4.0 * growth * left) - first) / 2.0 / growth
        )
        count = max(1, math.ceil(root))
        while count > 1 and self._time_after(count - 1) >= time - _ROUNDING:
            count -= 1
        while self._time_after(count) < time - _ROUNDING:
            count += 1
        return count

    def _find_next(self) -> float:
        if not self._running:
            return math.inf if not self._queue else self._time
        num = len(self._running)
        while self._ends[0][1] not in self._running or self._running[self._ends[0][1]].joined != self._ends[0][2]:
            heapq.heappop(self._ends)
        until = self._ends[0][0]
        if num > 1:  # a single sequence was checked to fit
            until = min(until, max(self._iteration + 1, (self.spec.kv_tokens - self._offset) // num + 1))
        return self._time_after(until - self._iteration)

    # ------------------------------------------------------------ who runs

    def _footprint(self, one: _Sequence) -> int:
        """Its part of ``_offset``: it holds prompt, answer and the token being made, but no token in a prompt's own."""
        return one.prompt_tokens + one.done - one.joined + 1 - self._extra

    def _join(self) -> list[int]:
        """Take in from the local queue what has a slot and room; those that had not run before."""
        room, new = self.spec.kv_tokens, []
        while self._queue and len(self._running) < self.spec.max_num_seqs:
            one = self._queue[0]
            held = one.prompt_tokens + one.done + 1 - self._extra
            if self._running and self.kv_tokens + held > room:
                break
            self._queue.popleft()
            if one.joined < 0:
                new.append(one.request)
            one.joined = self._iteration
            self._running[one.request] = one
            self._offset += self._footprint(one)
            if self._extra:
                self._prompt_tokens += one.prompt_tokens + one.done
            end = self._iteration + one.output_tokens - one.done + self._extra
            heapq.heappush(self._ends, (end, one.request, one.joined))
        return new

    def _leave(self, one: _Sequence) -> None:
        del self._running[one.request]
        self._offset -= self._footprint(one)

    def _preempt(self) -> bool:
        """Send the newest back while the coming iteration would overflow; whether any was."""
        any_sent = False
        while len(self._running) > 1 and self.kv_tokens > self.spec.kv_tokens:
            one = self._running[next(reversed(self._running))]
            self._leave(one)
            one.done += max(0, self._iteration - one.joined - self._extra)
            self._queue.appendleft(one)
            self.num_preemptions += 1
            any_sent = True
        return any_sent
