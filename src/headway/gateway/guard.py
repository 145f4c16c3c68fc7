"""Ends a request's work from outside: when the client leaves, a time limit passes, or the server shuts down.

All of these cancel the one task that serves the request; ``claim`` turns that cancellation into the exception that
says why. One lazy timer per request: moving a limit later, once per chunk, is an attribute write. It refuses to swallow
a cancellation that is not its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Literal, Self

Message = MutableMapping[str, Any]  # ASGI's own messages
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Limit = Literal["first_byte", "idle", "deadline", "queue"]


class ClientGoneError(Exception):
    """The client closed its connection. There is nobody to answer."""


class ShutdownError(Exception):
    """The drain time of a shutdown is over."""


class LimitPassedError(Exception):
    """A time limit passed; ``limit`` says which."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        super().__init__(limit)


class Guard:
    """Watches one request from the end of its body to the end of its answer. Use as a context manager in its task."""

    __slots__ = (
        "_expires_s",
        "_limit",
        "_reason",
        "_receive",
        "_task",
        "_timer",
        "_timer_s",
        "_watch",
        "gone",
        "sending",
    )

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self.sending = False  # while it is true, the client is what is waited for
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reason: Exception | None = None
        self._expires_s = float("inf")
        self._limit: Limit = "deadline"
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._watch = asyncio.get_running_loop().create_task(self._wait_for_disconnect())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching: the answer is complete, so the server's own disconnect message means nothing more."""
        self._task = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def limit(self, limit: Limit, expires_s: float) -> None:
        """Let the work end at ``expires_s`` (monotonic) for the reason ``limit``, in place of the limit before."""
        self._limit, self._expires_s = limit, expires_s
        if expires_s < self._timer_s:
            self._arm()

    def push(self, expires_s: float) -> None:
        """Move the present limit later. Costs an attribute write."""
        self._expires_s = expires_s

    def shut_down(self) -> None:
        """End the work because the server stops."""
        self._fire(ShutdownError())

    def claim(self, cancelled: asyncio.CancelledError) -> Exception:
        """The reason of a cancellation that this guard caused.

        Raises:
            CancelledError: ``cancelled`` itself when somebody else caused it.
        """
        reason, self._reason = self._reason, None
        if reason is None or self._task is None:
            raise cancelled
        self._task.uncancel()
        return ClientGoneError() if self.gone else reason

    def _fire(self, reason: Exception) -> None:
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._task is not None:
            self.gone = True
            self._fire(ClientGoneError())

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._expires_s
        delay_s = max(0.0, self._expires_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer, self._timer_s = None, float("inf")
        if time.monotonic() < self._expires_s:
            self._arm()
        else:
            self._expires_s = float("inf")
            if self.sending:  # a client that reads nothing for so long is as good as gone
                self.gone = True
            self._fire(LimitPassedError(self._limit))
