"""One upstream call: booked, sent, relayed, and settled exactly once, whatever its end.

What the client has seen decides what may follow. Before the first byte of the answer's body a failure may be followed
by another attempt elsewhere; after it, never. This file refuses to choose: the instance is given.
"""

from __future__ import annotations

import asyncio
import time
from math import inf
from typing import TYPE_CHECKING, Literal

import msgspec

from headway.errors import UpstreamConnectError, UpstreamError, UpstreamTimeoutError
from headway.gateway.connection import Connection
from headway.gateway.decisions import DecisionRecord
from headway.gateway.errors import retry_after_of
from headway.gateway.guard import LimitPassedError
from headway.gateway.headers import upstream_headers
from headway.gateway.relay import AttemptFailedError, Relay
from headway.gateway.request import ClientRequest
from headway.gateway.splice import splice
from headway.predict.base import cost_usd
from headway.types import Outcome, OutcomeStatus

if TYPE_CHECKING:
    from headway.gateway.chat import Exchange
    from headway.gateway.tracing import CallTrace

Health = Literal["sound", "neutral", "failed", "unreachable"]

#: What an answer that is not streamed may take longer than a stream's first byte, seconds per token of ``max_tokens``.
SECONDS_PER_TOKEN_ALLOWED = 0.1
_INJECTED = b'{"include_usage":true}'


class Attempt:
    """One call to the chosen instance on behalf of an exchange. Await :meth:`run` once, or :meth:`abandon` it.

    ``ledger_id`` is its name in the ledger and upstream where the queue has given one already.
    """

    def __init__(
        self,
        exchange: Exchange,
        request: ClientRequest,
        record: DecisionRecord,
        number: int,
        ledger_id: str | None = None,
    ) -> None:
        candidate = record.decision.candidate
        assert candidate is not None
        self.exchange, self.request, self.record, self.candidate = exchange, request, record, candidate
        self.gateway = exchange.gateway
        self.target = self.gateway.targets[candidate.instance_id]
        self._card = self.gateway.cards[candidate.model]  # a reload may take the model away before the answer ends
        self.ledger_id = self._free_id(exchange.request_id, number) if ledger_id is None else ledger_id
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.outcome: Outcome | None = None
        self._number = number
        self._trace: CallTrace | None = None
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
        self.relay = Relay(
            exchange,
            candidate.instance_id,
            dialect=request.endpoint.dialect,
            drop_usage=self._injects_usage,
            idle_timeout_s=self.gateway.config.resilience.idle_timeout_s,
            on_first_token=self._first_token,
            secret=self.target.api_key,
        )

    async def run(self) -> None:
        """Send the request and relay the answer.

        Raises:
            AttemptFailedError: nothing of an answer reached the client.
            UpstreamError: the answer broke after the client had seen some of it.
            ClientGoneError, ShutdownError: as the guard says.
        """
        self.book()
        try:
            response = await self._send()
            try:
                await self.relay.run(response)
            finally:
                self.gateway.upstreams.end(self.target, response)
            self._end_by_answer()
        except asyncio.CancelledError as cancelled:
            raise self._ended_by(self.exchange.guard.claim(cancelled)) from None
        except AttemptFailedError as refused:
            self._end("error", self._health_of(refused))
            raise
        except UpstreamError as error:
            unreachable, saw_body = isinstance(error, UpstreamConnectError), self.relay.saw_body
            self._end("interrupted" if saw_body else "error", "unreachable" if unreachable else "failed")
            if self.exchange.started:
                raise
            reason = "unreachable" if unreachable else "protocol"
            raise AttemptFailedError(error, retryable=not saw_body, reason=reason) from error
        finally:
            self._settle()

    def abandon(self) -> None:
        """Take back the booking: nothing was sent, and nothing will be."""
        self._end("cancelled", "neutral")
        self._settle()

    def _end_by_answer(self) -> None:
        """The answer is complete. One that reports an error inside its own stream is none."""
        stream, status = self.relay.stream, self.relay.status or 0
        if stream is not None and stream.has_error:
            self._end("error", "neutral")
        else:
            self._end("ok" if status < 300 else "error", "sound")

    def _health_of(self, refused: AttemptFailedError) -> Health:
        """What a refusal says of the instance: 429, or 503 with a time to come again, is back-pressure, no sickness."""
        if refused.answer is None:
            return "neutral"
        status = refused.answer.status
        wait_s = retry_after_of(refused.answer.headers, time.time()) if status in (429, 503) else None
        if wait_s is not None:
            self.gateway.health.rest(self.candidate.instance_id, wait_s)
        return "failed" if status >= 500 and wait_s is None else "neutral"

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
            "queue": f"instance '{name}' was not asked in time",  # its timer outlived the queue by a moment
        }[reason.limit]
        error = UpstreamTimeoutError(message, instance_id=name)
        if self.exchange.started:
            return error
        return AttemptFailedError(
            error, retryable=not self.relay.saw_body and reason.limit != "deadline", reason="timeout"
        )

    # ---- ledger and health ---------------------------------------------------------------------------------------

    def _free_id(self, request_id: str, number: int) -> str:
        """The id in the ledger and upstream: the client's, unless it names another request there."""
        view = self.gateway.fleet.views[self.gateway.fleet.index(self.candidate.instance_id)]
        free = request_id
        while free in self.gateway.fleet or free in view.released:
            number += 1
            free = f"{request_id}.{number}"
        return free

    def book(self) -> None:
        """Enter the request in the ledger, and let its time run; once, however often it is called."""
        if self.started_s is not None:
            return
        self.started_s = self.gateway.clock()
        if self.exchange.trace is not None:
            self._trace = self.exchange.trace.call(self, self._number)
        candidate = self.candidate
        estimate, target_s = candidate.estimate, self.record.decision.ttft_target_s
        replayed = estimate if estimate is not None and estimate.raw_ttft_s is not None else None
        self.gateway.fleet.book(
            request_id=self.ledger_id,
            instance_id=candidate.instance_id,
            prompt_tokens=candidate.prompt_tokens or 1,
            predicted_output_tokens=candidate.output_tokens or 1.0,
            max_tokens=self.request.max_tokens,
            priority=self.request.priority,
            now=self.started_s,
            predicted_ttft_s=None if replayed is None else replayed.ttft_s,
            raw_ttft_s=None if replayed is None else replayed.raw_ttft_s,
            predicted_wait_s=None if replayed is None else replayed.wait_s,
            due_s=None if target_s is None else self.started_s + target_s,
            utility=candidate.utility,
            is_streamed=self.request.stream,
            prefix_blocks=self.request.prefix_blocks,
            counted_tokens=self.request.num_counted_tokens,
        )
        self.relay.watched = self.gateway.fleet.entry(self.ledger_id)
        self.gateway.health.dispatched(candidate.instance_id, self.ledger_id)

    def _settle(self) -> None:
        """Release the ledger entry by way of the outcome, once, and say what it means for the instance's health."""
        now, started_s = self.gateway.clock(), self.started_s
        assert started_s is not None, "what is settled was booked"
        usage, num_content = self.relay.usage, self.relay.num_content
        began = usage is not None or num_content > 0
        prompt_tokens = usage.prompt_tokens if usage is not None else self.candidate.prompt_tokens
        output_tokens = usage.output_tokens if usage is not None else num_content
        self.outcome = Outcome(
            query_id=self.ledger_id,
            instance_id=self.candidate.instance_id,
            status=self._status,
            ttft_s=None if self.first_token_s is None else self.first_token_s - started_s,
            total_s=now - started_s,
            prompt_tokens=prompt_tokens if began else None,
            output_tokens=output_tokens if began else None,
            cost_usd=cost_usd(self._card, prompt_tokens or 0, output_tokens) if began else None,
            http_status=self.relay.status,
        )
        if self._trace is not None:
            self._trace.end(self.outcome, unreachable=self._health == "unreachable")
        client, counted = self.exchange.client, usage is not None
        self.gateway.settle(self.record, self.request, self.outcome, now, client=client, counted=counted)
        if self._health == "sound":
            self.gateway.health.succeeded(self.candidate.instance_id, self.ledger_id)
        elif self._health == "neutral":
            self.gateway.health.neutral(self.candidate.instance_id, self.ledger_id)
        else:
            self.gateway.health.failed(
                self.candidate.instance_id, self.ledger_id, unreachable=self._health == "unreachable"
            )
        self.gateway.telemetry.attempted(self.outcome, self.candidate.model)
        self.exchange.charged(self.outcome)
        if usage is not None:
            self.gateway.token_ratio.observe(self.candidate.model, self.request.num_counted_tokens, usage.prompt_tokens)
        self.gateway.queue.wake()

    def _first_token(self, now: float) -> None:
        self.first_token_s = now
        self.gateway.fleet.first_token_seen(self.ledger_id, now)
        self.gateway.health.began(self.candidate.instance_id, self.ledger_id)
        if self._trace is not None:
            self._trace.first_token()

    # ---- sending -------------------------------------------------------------------------------------------------

    async def _send(self) -> Connection:
        exchange, request, started_s = self.exchange, self.request, self.started_s
        assert started_s is not None, "what is sent was booked"
        headers = upstream_headers(
            exchange.header_pairs,
            request_id=self.ledger_id,
            api_key=self.target.api_key,
            owns_credentials=self.target.hosted or self.gateway.keys.enforced,
        )
        if self._trace is not None:
            self._trace.inject(headers)
        expires_s = started_s + self._allowed_s
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
