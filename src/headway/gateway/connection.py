"""One HTTP/1.1 connection to a model instance: requests out as bytes, answers in as they come.

Made for streams of many small chunks: while somebody takes an answer's body, a chunk goes from the socket to it in one
call, and no task is woken for it. It refuses to know pools, retries and what is in a body. What came in before a
connection broke can be read first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import httptools

#: Unread bytes of a body beyond which nothing more is read from the socket.
_HIGH_WATER_BYTES = 1 << 17
#: Status line and headers of an answer may take this much.
_MAX_HEAD_BYTES = 1 << 18

#: Takes bytes of a body at once; what is still to be awaited before the next may come, else None.
Take = Callable[[bytes], Awaitable[None] | None]


class BrokenAnswerError(Exception):
    """A connection ended, or spoke no HTTP, before its answer was complete. ``closed``: by the peer, without a word."""

    def __init__(self, what: str, *, closed: bool = False) -> None:
        self.closed = closed
        super().__init__(what)


class Connection(asyncio.Protocol):
    """A connection and the answer to the last request on it.

    ``status`` and ``headers`` (as they came) are there once :meth:`ask` returns, until the next; then the body is read
    by :meth:`read`, or by :meth:`pump`, piece by piece or in one go. ``is_complete`` tells that all of it has come in,
    :attr:`reusable` that it was read too and another request may be sent; where none may, :meth:`close` it.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since_s = 0.0  # for the pool it lies in
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # what the parser calls with each piece of a body
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._num_unread = 0
        self._num_head_bytes = 0
        self._is_asked = self._has_head = self.is_complete = self._keeps_alive = False
        self._ends_with_connection = True
        self._is_interim = self._is_paused = False
        self._failure: BrokenAnswerError | None = None
        self._take: Take | None = None
        self._waiter: asyncio.Future[Awaitable[None] | None] | None = None

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end and the peer keeps the connection for another request."""
        transport = self._transport
        return (
            self.is_complete
            and self._keeps_alive
            and not self._parts
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() == 0
        )

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    async def ask(self, pieces: Sequence[bytes]) -> None:
        """Send a request, and wait for the status and the headers of its answer.

        Raises:
            BrokenAnswerError: they did not come.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise BrokenAnswerError("closed the connection", closed=True)
        self.status, self.headers, self._num_head_bytes = 0, [], 0
        self._has_head = self.is_complete = self._keeps_alive = False
        self._ends_with_connection = self._is_asked = True
        for piece in pieces:
            transport.write(piece)
        while not self._has_head:
            if self._failure is not None:
                raise self._failure
            await self._news()

    async def read(self) -> bytes:
        """The next bytes of the body, empty at its end.

        Raises:
            BrokenAnswerError: the connection broke before the end, and all that came in was read.
        """
        while not self._parts:
            if self._failure is not None:
                raise self._failure
            if self.is_complete:
                return b""
            await self._news()
        return self._read_now()

    async def pump(self, take: Take) -> None:
        """Give the rest of the body to ``take``, chunk by chunk as it comes.

        Raises:
            BrokenAnswerError: as :meth:`read`.
            Exception: what ``take`` raised.
        """
        while True:
            rest = None
            if self._parts:
                rest = take(self._read_now())
            elif self._failure is not None:
                raise self._failure
            elif self.is_complete:
                return
            else:
                self._take = take
                try:
                    rest = await self._news()
                finally:
                    self._take = None
            if rest is not None:
                await rest

    async def _news(self) -> Awaitable[None] | None:
        """Wait until something came; what a ``take`` left to be awaited."""
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _wake(self, rest: Awaitable[None] | None = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(rest)

    def _read_now(self) -> bytes:
        parts = self._parts
        chunk = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._num_unread = 0
        if self._is_paused:
            self._is_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return chunk

    # ---- what the event loop calls -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take in bytes, and give what they hold of the body to whoever waits for it."""
        if not self._is_asked:
            self._keeps_alive = False
            self.close()
            return
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._spoke_no_http(error)
        take, waiter = self._take, self._waiter
        if take is not None and waiter is not None and not waiter.done():
            parts = self._parts
            if parts:
                chunk = parts[0] if len(parts) == 1 else b"".join(parts)
                parts.clear()
                try:
                    rest = take(chunk)
                except Exception as error:
                    waiter.set_exception(error)
                    return
                if rest is not None:
                    waiter.set_result(rest)
                    return
            if self.is_complete or self._failure is not None:
                waiter.set_result(None)
            return
        if self._parts:
            self._note_unread(len(data))
        if self._has_head or self._failure is not None:
            self._wake()
        else:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self._spoke_no_http(None)
                self._wake()

    def _note_unread(self, num_bytes: int) -> None:
        self._num_unread += num_bytes
        transport = self._transport
        if self._num_unread > _HIGH_WATER_BYTES and transport is not None and not transport.is_closing():
            self._is_paused = True
            transport.pause_reading()

    def _spoke_no_http(self, cause: Exception | None) -> None:
        self._keeps_alive = False
        self.close()
        if not self.is_complete and self._failure is None:
            self._failure = BrokenAnswerError("spoke no HTTP")
            self._failure.__cause__ = cause

    def eof_received(self) -> bool:
        """The peer has said all: the connection ends."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Note how it ended."""
        self._transport = None
        if self._is_asked and not self.is_complete and self._failure is None:
            if self._has_head and self._ends_with_connection and exc is None:
                self.is_complete = True
            else:
                self._failure = BrokenAnswerError(
                    "broke off its answer" if self._has_head else "closed the connection", closed=exc is None
                )
                self._failure.__cause__ = exc
        self._wake()

    # ---- what the parser calls -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request."""
        if self.is_complete:
            raise BrokenAnswerError("answered more than it was asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; what comes behind the body is none."""
        if self._has_head:
            return
        self.headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """Note the status; an interim answer (1xx) is passed over."""
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers = []
            self._is_interim, self._ends_with_connection = True, True
            return
        self.status, self._has_head = status, True

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        if self._is_interim:
            self._is_interim = False
            return
        self.is_complete = True
        self._is_asked = False
        self._keeps_alive = bool(self._parser.should_keep_alive())
