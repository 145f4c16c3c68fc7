"""Takes an upstream's answer to the client: streams chunk by chunk as they come, everything else whole.

The first byte of a body is the watershed: before it a failure may be followed by another attempt, after it never. So
this file notes when it was seen, and holds a stream back until its first byte that is no comment: until then a real
status can still be given. It refuses to decide what a failure leads to; it says what happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headway.errors import HeadwayError, UpstreamInterruptedError, UpstreamProtocolError
from headway.fleet import LedgerEntry
from headway.gateway.connection import BrokenAnswerError, Connection
from headway.gateway.errors import HeaderList, error_body
from headway.gateway.guard import Guard, Send
from headway.gateway.headers import client_headers
from headway.gateway.sse import Dialect, EventStream, Usage, usage_of_answer
from headway.gateway.upstream import translate

if TYPE_CHECKING:
    from headway.gateway.chat import Exchange

_MAX_ERROR_BYTES = 1 << 20


class UpstreamAnswer(msgspec.Struct, frozen=True):
    """A whole answer of an upstream, read but not yet passed on."""

    status: int
    headers: HeaderList
    body: bytes


class AttemptFailedError(Exception):
    """An attempt that gave the client nothing. ``answer`` is the upstream's own refusal, where it gave one."""

    def __init__(
        self, error: HeadwayError, *, retryable: bool, reason: str, answer: UpstreamAnswer | None = None
    ) -> None:
        self.error, self.retryable, self.reason, self.answer = error, retryable, reason, answer
        super().__init__(str(error))


class Relay:
    """The way of one answer. ``idle_timeout_s`` bounds its pauses; ``on_first_token`` hears of the first token.

    ``secret`` is the credential the instance was called with: an error that repeats it gets ``***`` in its place.
    """

    def __init__(
        self,
        exchange: Exchange,
        instance_id: str,
        *,
        dialect: Dialect,
        drop_usage: bool,
        idle_timeout_s: float,
        on_first_token: Callable[[float], None],
        secret: str | None = None,
    ) -> None:
        self.saw_body = False
        self.status: int | None = None
        self.stream: EventStream | None = None
        self.watched: LedgerEntry | None = None  # is told how far the stream is
        self._exchange, self._instance_id = exchange, instance_id
        self._guard, self._clock = exchange.guard, exchange.gateway.clock
        self._dialect, self._drop_usage = dialect, drop_usage
        self._idle_timeout_s, self._on_first_token = idle_timeout_s, on_first_token
        self._usage: Usage | None = None
        self._unsent = b""  # the last bytes of a stream, which leave with its end
        self._secret = None if secret is None else secret.encode()

    @property
    def usage(self) -> Usage | None:
        """What the upstream reported, None before it did."""
        return self._usage if self.stream is None else self.stream.usage

    @property
    def num_content(self) -> int:
        """Content events of a stream so far."""
        return 0 if self.stream is None else self.stream.num_content

    @property
    def inside_event(self) -> bool:
        """Whether what the client has seen of a stream ends inside an event."""
        return self.stream is not None and self.stream.inside_event

    async def run(self, response: Connection) -> None:
        """Pass the answer on.

        Raises:
            AttemptFailedError: the instance refused (408, 429, 5xx); nothing was passed on.
            UpstreamProtocolError: it broke before the first byte of its body.
            UpstreamInterruptedError: it broke later.
        """
        self.status = status = response.status
        if status in (408, 429) or status >= 500:
            answer = await self._read_refusal(response)
            raise AttemptFailedError(
                self._broken(f"answered {status}"), retryable=True, reason="upstream_status", answer=answer
            )
        if 200 <= status < 300 and _is_event_stream(response.headers):
            await self._pass_events(response)
            return
        body = await self._read_whole(response)
        self._exchange.received()
        if status < 300:
            self._usage = usage_of_answer(body)
        elif self._secret is not None:
            body = body.replace(self._secret, b"***")
        await self._exchange.answer(status, client_headers(response.headers), body)

    # ---- streams -------------------------------------------------------------------------------------------------

    async def _pass_events(self, response: Connection) -> None:
        self.stream = stream = EventStream(self._dialect, drop_usage=self._drop_usage)
        if await self._begin(response, stream):
            await self._continue(response, stream)
        if not stream.finished and not stream.has_error:
            if not self.saw_body:
                raise self._broken("ended its answer before it began")
            raise self._interrupted("ended its stream without an end mark")
        self._guard.sending = True
        await self._exchange.end_stream(self._unsent + stream.flush())

    async def _begin(self, response: Connection, stream: EventStream) -> bool:
        """Begin the answer with the first byte that is no comment; False when the upstream's ended without one.

        Comments that came before are held back, then passed on first.
        """
        held = b""
        while chunk := await self._read(response):
            held += stream.feed(chunk)
            if stream.has_data:
                now = self._clock()
                self._guard.limit("idle", now + self._idle_timeout_s)
                self._exchange.received()
                if stream.num_content:
                    self._seen(stream, now)
                    self._on_first_token(now)
                await self._exchange.start_stream(response.status, client_headers(response.headers))
                await self._exchange.send_body(held)
                return True
        return False

    async def _continue(self, response: Connection, stream: EventStream) -> None:
        """The hot path: look at a chunk and pass it on, inside the call by which it came from the socket."""
        guard, clock, feed, send = self._guard, self._clock, stream.feed, self._exchange.send
        write_now = _writer_of(send)
        push, idle_timeout_s = guard.push, self._idle_timeout_s
        waits_for_token = stream.num_content == 0

        def take(chunk: bytes) -> Awaitable[None] | None:
            nonlocal waits_for_token
            out = feed(chunk)
            now = clock()
            self._seen(stream, now)
            if waits_for_token and stream.num_content:
                waits_for_token = False
                self._on_first_token(now)
            push(now + idle_timeout_s)
            if response.is_complete and stream.finished:
                self._unsent = out
                return None
            if not out or write_now(out):
                return None
            sending = send({"type": "http.response.body", "body": out, "more_body": True}).__await__()
            try:
                waits_for = next(sending)
            except StopIteration:
                return None
            return _Unsent(sending, waits_for, guard)

        push(clock() + idle_timeout_s)
        try:
            await response.pump(take)
        except BrokenAnswerError as error:
            raise self._interrupted("broke off its answer") from error

    def _seen(self, stream: EventStream, now: float) -> None:
        """Let the ledger know how far the answer is. No call beyond: this runs once per chunk."""
        watched = self.watched
        if watched is not None and stream.num_content > watched.num_events:
            watched.num_events, watched.last_event_s = stream.num_content, now

    # ---- whole answers -------------------------------------------------------------------------------------------

    async def _read_whole(self, response: Connection) -> bytes:
        """The whole body; once it began, the idle limit holds for its pauses, and the deadline for all of it."""
        parts: list[bytes] = []
        deadline_s = self._exchange.deadline_s
        while chunk := await self._read(response):
            parts.append(chunk)
            idle_s = self._clock() + self._idle_timeout_s
            if idle_s < deadline_s:
                self._guard.limit("idle", idle_s)
            else:
                self._guard.limit("deadline", deadline_s)
        return b"".join(parts)

    async def _read_refusal(self, response: Connection) -> UpstreamAnswer:
        """An error answer, as OpenAI clients can read it: what is no JSON is put into their shape."""
        body, headers = b"", client_headers(response.headers)
        with contextlib.suppress(BrokenAnswerError):
            while len(body) < _MAX_ERROR_BYTES and (chunk := await response.read()):
                body += chunk
        if self._secret is not None:
            body = body.replace(self._secret, b"***")
        try:
            msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            body = error_body(f"instance '{self._instance_id}' answered {response.status}", "server_error")
            headers = [(name, value) for name, value in headers if name not in (b"content-type", b"content-encoding")]
            headers.append((b"content-type", b"application/json"))
        return UpstreamAnswer(response.status, headers, body)

    async def _read(self, response: Connection) -> bytes:
        """The next bytes of the body, empty at its end."""
        try:
            chunk = await response.read()
        except BrokenAnswerError as error:
            if not self.saw_body:
                raise translate(error, self._instance_id) from error
            raise self._interrupted("broke off its answer") from error
        self.saw_body = self.saw_body or bool(chunk)
        return chunk

    def _broken(self, what: str) -> UpstreamProtocolError:
        return UpstreamProtocolError(f"instance '{self._instance_id}' {what}", instance_id=self._instance_id)

    def _interrupted(self, what: str) -> UpstreamInterruptedError:
        return UpstreamInterruptedError(
            f"instance '{self._instance_id}' {what} after {self.num_content} content events",
            instance_id=self._instance_id,
            num_tokens=self.num_content,
        )


class _Unsent:
    """The rest of a send that was begun outside of a task and has to wait for the client. Await it once."""

    def __init__(self, sending: Generator[Any, Any, None], waits_for: Any, guard: Guard) -> None:
        self._sending, self._waits_for, self._guard = sending, waits_for, guard

    def __await__(self) -> Generator[Any, Any, None]:
        self._guard.sending = True
        waits_for = self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = self._sending.throw(error)
                else:
                    waits_for = self._sending.send(sent)
        except StopIteration:
            self._guard.sending = False


def _writer_of(send: Send) -> Callable[[bytes], bool]:
    """Writes a chunk of a stream that has begun to the client; False where ``send`` has to do it, which may wait.

    It does what uvicorn's own ``send`` does to a chunk, without a message and a coroutine for each.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return lambda chunk: False
    flow, write = cycle.flow, cycle.transport.write

    def write_now(chunk: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    return write_now


def _is_event_stream(headers: HeaderList) -> bool:
    for name, value in headers:
        if name.lower() == b"content-type":
            return value.partition(b";")[0].strip().lower() == b"text/event-stream"
    return False
