"""One upstream call: booked, sent, relayed, and settled exactly once, whatever its end.

What the client has seen decides what may follow. Before the first byte of the answer's body a failure may be followed
by another attempt elsewhere; after it, never. This file refuses to choose: the instance is given.
"""

from __future__ import annotations

import asyncio
import contextlib
from math import inf
from typing import TYPE_CHECKING, Literal

import aiohttp
import msgspec

from headway.errors import (
    HeadwayError,
    UpstreamConnectError,
    UpstreamError,
    UpstreamInterruptedError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from headway.gateway.decisions import DecisionRecord
from headway.gateway.errors import HeaderList, error_body
from headway.gateway.guard import LimitPassedError
from headway.gateway.headers import client_headers, upstream_headers
from headway.gateway.request import ClientRequest
from headway.gateway.splice import splice
from headway.gateway.sse import EventStream, Usage, usage_of_answer
from headway.gateway.upstream import translate
from headway.predict.base import cost_usd
from headway.types import Outcome, OutcomeStatus

if TYPE_CHECKING:
    from headway.gateway.chat import Exchange

Health = Literal["sound", "neutral", "failed", "unreachable"]

#: What an answer that is not streamed may take longer than a stream's first byte, seconds per token of ``max_tokens``.
SECONDS_PER_TOKEN_ALLOWED = 0.1
_MAX_ERROR_BYTES = 1 << 20
_INJECTED = b'{"include_usage":true}'


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


class Attempt:
    """One call to the chosen instance on behalf of an exchange. Await :meth:`run` once."""

    def __init__(self, exchange: Exchange, request: ClientRequest, record: DecisionRecord, number: int) -> None:
        candidate = record.decision.candidate
        assert candidate is not None
        self.exchange, self.request, self.record, self.candidate = exchange, request, record, candidate
        self.gateway = exchange.gateway
        self.target = self.gateway.targets[candidate.instance_id]
        self.ledger_id = self._free_id(exchange.request_id, number)
        self.saw_body = False
        self.stream: EventStream | None = None
        self.first_token_s: float | None = None
        self.usage: Usage | None = None
        self.http_status: int | None = None
        self.outcome: Outcome | None = None
        self._status: OutcomeStatus = "error"
        self._health: Health = "neutral"
        self._allowed_s = self.gateway.config.resilience.first_byte_timeout_s
        if not request.stream:  # no byte comes before the end of the answer
            tokens = request.max_tokens
            self._allowed_s = inf if tokens is None else self._allowed_s + SECONDS_PER_TOKEN_ALLOWED * tokens
        self._injects_usage = (
            request.stream
            and request.endpoint.reports_usage_on_demand
            and not request.asked_for_usage
            and not self.target.hosted
            and (request.stream_options is None or isinstance(request.stream_options, dict))
        )

    async def run(self) -> None:
        """Send the request and relay the answer.

        Raises:
            AttemptFailedError: nothing of an answer reached the client.
            UpstreamError: the answer broke after the client had seen some of it.
            ClientGoneError, ShutdownError: as the guard says.
        """
        self.started_s = self.gateway.clock()
        self._book()
        try:
            response = await self._send()
            try:
                await self._receive(response)
            finally:
                if response.content.at_eof():
                    response.release()
                else:
                    response.close()
        except asyncio.CancelledError as cancelled:
            raise self._ended_by(self.exchange.guard.claim(cancelled)) from None
        except AttemptFailedError:
            raise
        except UpstreamError as error:
            self._end("interrupted" if self.saw_body else "error", "unreachable" if _unreachable(error) else "failed")
            if self.exchange.started:
                raise
            reason = "unreachable" if _unreachable(error) else "protocol"
            raise AttemptFailedError(error, retryable=not self.saw_body, reason=reason) from error
        finally:
            self._settle()

    def _end(self, status: OutcomeStatus, health: Health) -> None:
        self._status, self._health = status, health

    def _ended_by(self, reason: Exception) -> Exception:
        """What a cancellation by the guard means here."""
        if not isinstance(reason, LimitPassedError):
            self._end("cancelled", "neutral")
            return reason
        self._end("timeout", "failed")
        name, limits = self.target.instance_id, self.gateway.config.resilience
        message = {
            "first_byte": f"instance '{name}' sent no first byte within {self._allowed_s:g} s",
            "idle": f"instance '{name}' fell silent for {limits.idle_timeout_s:g} s",
            "deadline": f"instance '{name}' gave no answer before the deadline of {limits.deadline_s:g} s",
        }[reason.limit]
        error = UpstreamTimeoutError(message, instance_id=name)
        if self.exchange.started:
            return error
        return AttemptFailedError(error, retryable=not self.saw_body and reason.limit != "deadline", reason="timeout")

    # ---- ledger and health ---------------------------------------------------------------------------------------

    def _free_id(self, request_id: str, number: int) -> str:
        """The id in the ledger and upstream: the client's, unless it names another request there."""
        view = self.gateway.fleet.views[self.gateway.fleet.index(self.candidate.instance_id)]
        free = request_id
        while free in self.gateway.fleet or free in view.released:
            number += 1
            free = f"{request_id}.{number}"
        return free

    def _book(self) -> None:
        candidate = self.candidate
        self.gateway.fleet.book(
            request_id=self.ledger_id,
            instance_id=candidate.instance_id,
            prompt_tokens=candidate.prompt_tokens or 1,
            predicted_output_tokens=candidate.output_tokens or 1.0,
            max_tokens=self.request.max_tokens,
            priority=self.request.priority,
            now=self.started_s,
        )
        self.gateway.health.dispatched(candidate.instance_id, self.ledger_id)

    def _settle(self) -> None:
        """Release the ledger entry by way of the outcome, once, and say what it means for the instance's health."""
        now = self.gateway.clock()
        stream, usage = self.stream, self.usage
        if stream is not None:
            usage = stream.usage
        num_content = 0 if stream is None else stream.num_content
        began = usage is not None or num_content > 0
        prompt_tokens = usage.prompt_tokens if usage is not None else self.candidate.prompt_tokens
        output_tokens = usage.output_tokens if usage is not None else num_content
        card = self.gateway.cards[self.candidate.model]
        self.outcome = self.record.outcome = Outcome(
            query_id=self.ledger_id,
            instance_id=self.candidate.instance_id,
            status=self._status,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.started_s,
            total_s=now - self.started_s,
            prompt_tokens=prompt_tokens if began else None,
            output_tokens=output_tokens if began else None,
            cost_usd=cost_usd(card, prompt_tokens or 0, output_tokens) if began else None,
            http_status=self.http_status,
        )
        self.gateway.router.observe(self.outcome, now)
        if self._health == "sound":
            self.gateway.health.succeeded(self.candidate.instance_id, self.ledger_id)
        elif self._health == "neutral":
            self.gateway.health.neutral(self.candidate.instance_id, self.ledger_id)
        else:
            self.gateway.health.failed(
                self.candidate.instance_id, self.ledger_id, unreachable=self._health == "unreachable"
            )
        self.gateway.telemetry.attempted(self.outcome, self.candidate.model)
        if usage is not None:
            self.gateway.token_ratio.observe(self.candidate.model, self.request.num_counted_tokens, usage.prompt_tokens)

    # ---- sending -------------------------------------------------------------------------------------------------

    async def _send(self) -> aiohttp.ClientResponse:
        exchange, request = self.exchange, self.request
        headers = upstream_headers(
            exchange.header_pairs,
            request_id=self.ledger_id,
            api_key=self.target.api_key,
            hosted=self.target.hosted,
        )
        expires_s = self.started_s + self._allowed_s
        if expires_s < exchange.deadline_s:
            exchange.guard.limit("first_byte", expires_s)
        else:
            exchange.guard.limit("deadline", exchange.deadline_s)
        exchange.sending()
        return await self.gateway.upstreams.send(
            self.target, request.endpoint.path, exchange.query_string, headers, self._body()
        )

    def _body(self) -> bytes:
        """The client's bytes, but for the model, the routing keys, and usage where only we want it."""
        request = self.request
        put: dict[str, bytes] = {}
        if request.model != self.candidate.model:
            put["model"] = msgspec.json.encode(self.candidate.model)
        if self._injects_usage:
            options = request.stream_options
            put["stream_options"] = (
                msgspec.json.encode({**options, "include_usage": True}) if isinstance(options, dict) else _INJECTED
            )
        if not put and not request.own_keys:
            return request.body
        return splice(request.body, put=put, remove=request.own_keys)

    # ---- receiving -----------------------------------------------------------------------------------------------

    async def _receive(self, response: aiohttp.ClientResponse) -> None:
        self.http_status = status = response.status
        if status in (408, 429) or status >= 500:
            answer = await self._read_refusal(response)
            self.exchange.received()
            self._end("error", "failed" if status >= 500 else "neutral")  # back-pressure is no sickness
            error = UpstreamProtocolError(
                f"instance '{self.target.instance_id}' answered {status}", instance_id=self.target.instance_id
            )
            raise AttemptFailedError(error, retryable=True, reason="upstream_status", answer=answer)
        if 200 <= status < 300 and response.content_type == "text/event-stream":
            await self._relay_events(response)
        else:
            body = await self._read_whole(response)
            self.exchange.received()
            if status < 300:
                self.usage = usage_of_answer(body)
            await self.exchange.answer(status, client_headers(response.raw_headers), body)
        self._end("ok" if status < 300 else "error", "sound")

    async def _relay_events(self, response: aiohttp.ClientResponse) -> None:
        """Pass a stream on as it comes."""
        self.stream = stream = EventStream(self.request.endpoint.dialect, drop_usage=self._injects_usage)
        if await self._begin_stream(response, stream):
            await self._continue_stream(response.content, stream)
        if not stream.finished and not stream.has_error:
            if not self.saw_body:
                name = self.target.instance_id
                raise UpstreamProtocolError(f"instance '{name}' ended its answer before it began", instance_id=name)
            raise self._interrupted("ended its stream without an end mark")
        await self.exchange.end_stream(stream.flush())

    async def _begin_stream(self, response: aiohttp.ClientResponse, stream: EventStream) -> bool:
        """Begin the answer with the first byte that is no comment; False when the upstream's ended without one.

        Until then a real status can still be given: comments that came before are held back, then passed on first.
        """
        held = b""
        while chunk := await self._read(response):
            held += stream.feed(chunk)
            if stream.has_data:
                now = self.gateway.clock()
                self.exchange.guard.limit("idle", now + self.gateway.config.resilience.idle_timeout_s)
                self.exchange.received()
                if stream.num_content:
                    self._first_token(now)
                await self.exchange.start_stream(response.status, client_headers(response.raw_headers))
                await self.exchange.send_body(held)
                return True
        return False

    async def _continue_stream(self, content: aiohttp.StreamReader, stream: EventStream) -> None:
        """The hot loop: read, look, pass on."""
        send, push, clock, feed = self.exchange.send, self.exchange.guard.push, self.gateway.clock, stream.feed
        idle_timeout_s = self.gateway.config.resilience.idle_timeout_s
        failure: Exception | None = None
        while True:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, OSError) as error:
                # What came in before the break is still in the buffer, behind the exception: it is the client's.
                failure, chunk = error, content._read_nowait(-1)
            if chunk:
                now = clock()
                push(now + idle_timeout_s)
                out = feed(chunk)
                if self.first_token_s is None and stream.num_content:
                    self._first_token(now)
                if out:
                    await send({"type": "http.response.body", "body": out, "more_body": True})
            if failure is not None:
                raise self._interrupted("broke off its answer") from failure
            if not chunk:
                return

    def _first_token(self, now: float) -> None:
        self.first_token_s = now
        self.gateway.fleet.first_token_seen(self.ledger_id, now)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes of the body, empty at its end."""
        content = response.content
        try:
            chunk = await content.readany()
        except (aiohttp.ClientError, OSError) as error:
            # What came in before the break is still in the buffer, behind the exception: it belongs to the client.
            chunk = content._read_nowait(-1)
            if not chunk:
                if not self.saw_body:
                    raise translate(error, self.target.instance_id) from error
                raise self._interrupted("broke off its answer") from error
        if chunk:
            self.saw_body = True
        return chunk

    async def _read_whole(self, response: aiohttp.ClientResponse) -> bytes:
        """The whole body; once it began, the idle limit holds for its pauses, and the deadline for all of it."""
        parts: list[bytes] = []
        idle_timeout_s = self.gateway.config.resilience.idle_timeout_s
        while chunk := await self._read(response):
            parts.append(chunk)
            idle_s = self.gateway.clock() + idle_timeout_s
            if idle_s < self.exchange.deadline_s:
                self.exchange.guard.limit("idle", idle_s)
            else:
                self.exchange.guard.limit("deadline", self.exchange.deadline_s)
        return b"".join(parts)

    def _interrupted(self, what: str) -> UpstreamInterruptedError:
        name, num_content = self.target.instance_id, 0 if self.stream is None else self.stream.num_content
        return UpstreamInterruptedError(
            f"instance '{name}' {what} after {num_content} content events", instance_id=name, num_tokens=num_content
        )

    async def _read_refusal(self, response: aiohttp.ClientResponse) -> UpstreamAnswer:
        """An error answer, as OpenAI clients can read it: what is no JSON is put into their shape."""
        body, headers = b"", client_headers(response.raw_headers)
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while len(body) < _MAX_ERROR_BYTES and (chunk := await response.content.readany()):
                body += chunk
        try:
            msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            body = error_body(f"instance '{self.target.instance_id}' answered {response.status}", "server_error")
            headers = [(name, value) for name, value in headers if name not in (b"content-type", b"content-encoding")]
            headers.append((b"content-type", b"application/json"))
        return UpstreamAnswer(response.status, headers, body)


def _unreachable(error: UpstreamError) -> bool:
    return isinstance(error, UpstreamConnectError)
