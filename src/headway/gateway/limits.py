"""Limits of one client: requests and tokens of the last minute, requests under way, money.

Counted in this process alone: two gateways with one key each give it the whole of its limits. A request takes its
place when it is let in and says at its end what it really was, so that nothing is counted twice or for ever. This file
is pure: it takes the times, and refuses to wait.
"""

from __future__ import annotations

import time
from collections import deque
from math import inf
from typing import Literal

from headway.config import KeyConfig
from headway.gateway.errors import BudgetSpentError, KeyLimitError

#: Requests and tokens are counted over this time, seconds.
WINDOW_S = 60.0


class Window:
    """A sum over the last :data:`WINDOW_S` that may not pass ``limit``."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.total = 0.0
        self._entries: deque[list[float]] = deque()  # [time_s, amount]

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` more would fit; 0 when it does now, infinite when it never will."""
        self._forget(now)
        if self.total + amount <= self.limit:
            return 0.0
        if amount > self.limit:
            return inf
        excess = self.total + amount - self.limit
        for time_s, taken in self._entries:
            excess -= taken
            if excess <= 0.0:
                return max(time_s + WINDOW_S - now, 1e-9)
        return 0.0

    def take(self, amount: float, now: float) -> list[float]:
        """Enter an amount; :meth:`correct` it when more is known."""
        entry = [now, amount]
        self._entries.append(entry)
        self.total += amount
        return entry

    def correct(self, entry: list[float], amount: float, now: float) -> None:
        """What an entry really was. One that has left the window already counts no more."""
        self._forget(now)
        if entry[0] > now - WINDOW_S:
            self.total += amount - entry[1]
        entry[1] = amount

    def _forget(self, now: float) -> None:
        entries = self._entries
        while entries and entries[0][0] <= now - WINDOW_S:
            self.total -= entries.popleft()[1]
        if not entries:
            self.total = 0.0  # no rounding error outlives the entries


class Budget:
    """Money spent in the present period. ``wall_s`` is Unix time; periods are those of UTC."""

    def __init__(self, limit_usd: float, period: Literal["day", "month", "total"]) -> None:
        self.limit_usd = limit_usd
        self.spent_usd = 0.0
        self.period_name = ""
        self._period = period

    def roll(self, wall_s: float) -> None:
        """Begin anew when a period has begun."""
        name = self._name(wall_s)
        if name != self.period_name:
            self.period_name, self.spent_usd = name, 0.0

    def restore(self, period_name: str, spent_usd: float) -> None:
        """Go on from what an earlier process had spent."""
        self.period_name, self.spent_usd = period_name, spent_usd

    def _name(self, wall_s: float) -> str:
        now = time.gmtime(wall_s)
        return {"day": time.strftime("%Y-%m-%d", now), "month": time.strftime("%Y-%m", now), "total": "total"}[
            self._period
        ]


class ClientLimits:
    """The limits of one client. ``num_inflight`` counts its requests under way."""

    def __init__(self, config: KeyConfig) -> None:
        self.name = config.name
        self.config = config
        self.num_inflight = 0
        self.requests = Window(inf if config.rpm is None else config.rpm)
        self.tokens = Window(inf if config.tpm is None else config.tpm)
        self.budget = Budget(inf if config.budget_usd is None else config.budget_usd, config.budget_period)

    def reconfigure(self, config: KeyConfig) -> None:
        """Other limits from now on; what was counted stays counted."""
        period_name, spent_usd = self.budget.period_name, self.budget.spent_usd
        self.config = config
        self.requests.limit = inf if config.rpm is None else config.rpm
        self.tokens.limit = inf if config.tpm is None else config.tpm
        self.budget = Budget(inf if config.budget_usd is None else config.budget_usd, config.budget_period)
        self.budget.restore(period_name, spent_usd)

    def enter(self, prompt_tokens: float, now: float, wall_s: float) -> Grant:
        """Let a request in.

        Raises:
            KeyLimitError: it would pass a limit; the reason names it, and when it may come again.
            BudgetSpentError: the budget of this period is spent.
        """
        config, budget = self.config, self.budget
        budget.roll(wall_s)
        if budget.spent_usd >= budget.limit_usd:
            raise BudgetSpentError(f"the budget of key '{self.name}' is spent: {budget.limit_usd:g} USD")
        if config.concurrency is not None and self.num_inflight >= config.concurrency:
            raise self._passed("key_concurrency", f"{config.concurrency} requests at a time", 1.0)
        wait_s = self.requests.wait_s(1, now)
        if wait_s > 0.0:
            raise self._passed("key_rpm", f"{config.rpm} requests per minute", wait_s)
        wait_s = self.tokens.wait_s(prompt_tokens, now)
        if wait_s > 0.0:
            raise self._passed("key_tpm", f"{config.tpm} tokens per minute", wait_s)
        self.requests.take(1, now)
        self.num_inflight += 1
        return Grant(self, self.tokens.take(prompt_tokens, now))

    def _passed(self, reason: str, limit: str, wait_s: float) -> KeyLimitError:
        return KeyLimitError(f"key '{self.name}' may make {limit}", retry_after_s=wait_s, reason=reason)


class Grant:
    """A request that was let in. Settle it once."""

    def __init__(self, limits: ClientLimits, tokens: list[float]) -> None:
        self.limits = limits
        self._tokens = tokens
        self._settled = False

    def settle(self, tokens: float, cost_usd: float, now: float, wall_s: float) -> None:
        """It is over: what it took and cost, over all its attempts. Idempotent."""
        if self._settled:
            return
        self._settled = True
        limits = self.limits
        limits.num_inflight -= 1
        limits.tokens.correct(self._tokens, tokens, now)
        limits.budget.roll(wall_s)
        limits.budget.spent_usd += cost_usd
