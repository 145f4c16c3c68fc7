"""How fast and for how much outside endpoints may be asked: a pacer per endpoint, one budget per run.

The budget reserves the most that a request can cost before it is sent and settles what it did cost afterwards, so that
all requests in flight together stay within the limit. Neither knows HTTP; the pacer refuses to read a clock.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from headway.errors import ConfigError


class Pacer:
    """When the next request may be sent to one endpoint. ``per_s`` None means as soon as it likes.

    Raises:
        ConfigError: a rate that is not positive.
    """

    def __init__(self, per_s: float | None = None) -> None:
        if per_s is not None and not 0.0 < per_s < 1e6:
            raise ConfigError(f"must be a positive number of requests per second, not {per_s:g}", key="--rps")
        self._interval_s = 0.0 if per_s is None else 1.0 / per_s
        self._next_s = 0.0
        self._paused_until_s = 0.0

    def take(self, now: float) -> float:
        """Take the next turn: the time at which it comes, not before ``now``."""
        turn_s = max(now, self._next_s, self._paused_until_s)
        self._next_s = turn_s + self._interval_s
        return turn_s

    def is_paused(self, now: float) -> bool:
        """Whether a turn that was taken earlier has to be waited for again."""
        return now < self._paused_until_s

    def pause(self, until_s: float) -> None:
        """Send nothing until then: the endpoint said so."""
        self._paused_until_s = max(self._paused_until_s, until_s)


class Budget:
    """USD that may be spent; None is no limit. ``spent_usd`` starts with what earlier runs spent.

    Raises:
        ConfigError: a negative limit.
    """

    def __init__(self, limit_usd: float | None, spent_usd: float = 0.0) -> None:
        if limit_usd is not None and not limit_usd >= 0.0:
            raise ConfigError(f"must be at least 0 USD, not {limit_usd:g}", key="--budget-usd")
        self.limit_usd, self.spent_usd = limit_usd, spent_usd
        self.reserved_usd = 0.0
        self.exhausted = False
        self._changed = asyncio.Condition()

    async def reserve(self, most_usd: float) -> Reservation | None:
        """Set aside what a request may cost at most; None once it does not fit, and from then on for everybody.

        Waits while requests in flight may yet turn out cheaper than was set aside for them.
        """
        async with self._changed:
            while not self.exhausted:
                if self.limit_usd is None or self.spent_usd + self.reserved_usd + most_usd <= self.limit_usd:
                    self.reserved_usd += most_usd
                    return Reservation(self, most_usd)
                if self.reserved_usd <= 0.0:
                    self.exhausted = True
                    self._changed.notify_all()
                    break
                await self._changed.wait()
        return None

    async def settle(self, reserved_usd: float, cost_usd: float) -> None:
        """Give back what was set aside and count what was spent."""
        async with self._changed:
            self.reserved_usd -= reserved_usd
            if self.reserved_usd < 1e-12:  # sums of binary fractions leave crumbs
                self.reserved_usd = 0.0
            self.spent_usd += cost_usd
            self._changed.notify_all()


class Reservation:
    """Money set aside for one request: settled at ``cost_usd`` (set it) when the block ends, however it ends."""

    def __init__(self, budget: Budget, most_usd: float) -> None:
        self._budget, self._most_usd = budget, most_usd
        self.cost_usd = 0.0

    async def __aenter__(self) -> Reservation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._budget.settle(self._most_usd, self.cost_usd)
