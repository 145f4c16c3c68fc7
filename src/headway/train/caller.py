"""Asks one endpoint as often as it takes and as fast as it allows, within the run's budget.

Back-pressure (429, or 503 that says when to come again) makes the whole endpoint wait and costs no attempt; other
passing failures are tried again after a growing pause; what the endpoint refuses for good is not. Every attempt
reserves money of its own, for a broken answer may have been charged too.
"""

from __future__ import annotations

import asyncio
import random

import aiohttp
from msgspec import Struct

from headway.errors import ConfigError, HeadwayError
from headway.predict.tokens import count_tokens
from headway.train.chat_client import Reply, send
from headway.train.endpoints import Ask, Endpoint
from headway.train.limits import Budget, Pacer

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Persistence(Struct, frozen=True, kw_only=True):
    """How long to go on. ``attempts`` per request; ``timeout_s`` per attempt; ``patience_s`` of back-pressure in all.

    Raises:
        ConfigError: a value that allows no request at all.
    """

    attempts: int = 4
    timeout_s: float = 300.0
    patience_s: float = 600.0
    first_pause_s: float = _FIRST_PAUSE_S

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"must be at least 1, not {self.attempts}", key="--attempts")
        if not self.timeout_s > 0.0:
            raise ConfigError(f"must be above 0 seconds, not {self.timeout_s:g}", key="--timeout-s")


class Answered(Struct, frozen=True):
    """The last reply, what it cost, and what the attempts before it cost for nothing, in USD."""

    reply: Reply
    cost_usd: float
    wasted_usd: float


class Caller:
    """One endpoint with its pace. Safe to be used by many tasks at once."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        *,
        pacer: Pacer,
        budget: Budget,
        persistence: Persistence,
        seed: int = 0,
    ) -> None:
        self.endpoint = endpoint
        self._session, self._pacer, self._budget, self._persistence = session, pacer, budget, persistence
        self._rng = random.Random(f"{seed}:{endpoint.id}")

    async def call(self, ask: Ask) -> Answered | None:
        """The answer, or the last failure once attempts or patience are spent; None when the budget forbids it."""
        wasted_usd, waited_s, num_attempts, num_busy = 0.0, 0.0, 0, 0
        while True:
            answered = await self._once(ask)
            if answered is None:
                return None
            reply, cost_usd = answered
            last = Answered(reply, cost_usd, wasted_usd)
            if reply.status == "ok" or reply.unusable:
                return last
            wasted_usd += cost_usd
            if reply.status == "rejected":
                if not self.endpoint.adapt(reply.error):
                    return last
                continue
            if reply.busy:
                pause_s = reply.retry_after_s if reply.retry_after_s is not None else self._pause_s(num_busy)
                num_busy += 1
                waited_s += pause_s
                if waited_s > self._persistence.patience_s:
                    return last
                self._pacer.pause(asyncio.get_running_loop().time() + pause_s)
                continue
            num_attempts += 1
            if num_attempts >= self._persistence.attempts:
                return last
            await asyncio.sleep(self._pause_s(num_attempts - 1))

    async def _once(self, ask: Ask) -> tuple[Reply, float] | None:
        reservation = await self._budget.reserve(self.endpoint.most_usd(ask))
        if reservation is None:
            return None
        async with reservation:
            await self._turn()
            body = self.endpoint.body(ask)
            reply = await send(self._session, self.endpoint, body, timeout_s=self._persistence.timeout_s)
            if reply.billed:
                reservation.cost_usd = self._cost_usd(ask, reply)
            return reply, reservation.cost_usd

    async def _turn(self) -> None:
        """Wait for this endpoint's next turn, and again when it asked for a pause meanwhile."""
        clock = asyncio.get_running_loop().time
        while True:
            turn_s = self._pacer.take(clock())
            await asyncio.sleep(max(0.0, turn_s - clock()))
            if not self._pacer.is_paused(clock()):
                return

    def _cost_usd(self, ask: Ask, reply: Reply) -> float:
        """By the usage that was reported; where none was, by what was sent and seen."""
        prompt_tokens, output_tokens = reply.prompt_tokens, reply.output_tokens
        if prompt_tokens is None:
            prompt_tokens = ask.num_counted_tokens
        if output_tokens is None:
            output_tokens = count_tokens(reply.text) if reply.text else 0
        return self.endpoint.cost_usd(prompt_tokens, output_tokens)

    def _pause_s(self, num_before: int) -> float:
        """A pause that doubles each time, up to half a minute, and differs from task to task."""
        longest = min(_LONGEST_PAUSE_S, self._persistence.first_pause_s * 2.0 ** min(num_before, 16))
        return longest * self._rng.uniform(0.5, 1.0)


def first_error(group: BaseExceptionGroup[HeadwayError]) -> HeadwayError:
    """One of the errors that ended a group of tasks; the others have the same cause."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, HeadwayError)
    return error
