"""The hot path: one client request from its bytes to the end of its answer, in raw ASGI.

It reads the body once, asks the router, makes at most ``resilience.attempts`` upstream calls, and records what came of
it. Every way out (answer, refusal, broken stream, client gone, shutdown) passes through one place, so that nothing is
counted twice or not at all. No framework stands between: a chunk costs one ``send``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import MutableMapping
from typing import Any

import msgspec

from headway.errors import HeadwayError, RequestError, UpstreamTimeoutError
from headway.gateway.attempt import Attempt
from headway.gateway.decisions import DecisionRecord, decision_header
from headway.gateway.errors import (
    DrainingError,
    HeaderList,
    KeyLimitError,
    OverloadedError,
    error_answer,
    error_event,
    retry_after,
    row_of,
)
from headway.gateway.guard import ClientGoneError, Guard, LimitPassedError, Receive, Send, ShutdownError
from headway.gateway.headers import decision_headers
from headway.gateway.limits import Grant
from headway.gateway.log import event, logger
from headway.gateway.queue import Held
from headway.gateway.relay import AttemptFailedError
from headway.gateway.request import ClientRequest, Endpoint, first_headers, parse_request, read_body, request_id
from headway.gateway.state import Gateway, rejection_reason
from headway.gateway.telemetry import OTHER, Served
from headway.types import Decision, Outcome

Scope = MutableMapping[str, Any]  # ASGI's own scope

#: Pause before the same instance is asked again because there is no other, seconds.
SAME_INSTANCE_PAUSE_S = 0.25
#: A decision that is longer than this as JSON is named by its path instead (HTTP clients bound a header's size).
_MAX_HEADER_BYTES = 6000


class Exchange:
    """One client request and its answer. Await :meth:`run` once."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self.gateway, self.endpoint = gateway, endpoint
        self.header_pairs: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.headers = first_headers(self.header_pairs)
        self.query_string: bytes = scope["query_string"]
        self.request_id = request_id(self.headers)
        self.guard = Guard(receive)
        self.started = False
        self.client = ""  # the name of its key, where keys are in use
        self.deadline_s = 0.0
        self._receive, self.send = receive, send
        self._arrival_s = gateway.clock()
        self._request: ClientRequest | None = None
        self._record: DecisionRecord | None = None
        self._attempt: Attempt | None = None
        self._status = 500
        self._error: str | None = None
        self._num_attempts = 0
        self._waited_s = 0.0  # on upstreams; the rest of the time before the answer began is our own
        self._sent_s: float | None = None
        self._grant: Grant | None = None
        self._tokens, self._cost_usd = 0, 0.0  # over all attempts
        self.trace = None if gateway.tracing is None else gateway.tracing.begin(self)

    async def run(self) -> None:
        """Serve the request. Raises nothing but a cancellation from outside."""
        self.gateway.num_inflight += 1
        try:
            await self._run()
        except ClientGoneError:
            self._status = 499
        except ShutdownError:
            await self._refuse(DrainingError())
        except HeadwayError as error:
            await self._refuse(error)
        except Exception as error:
            logger.exception("internal_error", extra={"fields": {"request_id": self.request_id}})
            await self._refuse(HeadwayError(type(error).__name__))
        finally:
            self.gateway.num_inflight -= 1
            self._account()

    async def _run(self) -> None:
        gateway = self.gateway
        if gateway.draining:
            raise DrainingError
        if gateway.num_inflight > gateway.config.server.max_inflight:
            raise OverloadedError
        limits = gateway.keys.client_of(self.headers)
        self.client = "" if limits is None else limits.name
        body = await read_body(self._receive, self.headers, int(gateway.config.server.max_body_mb * 1e6))
        self._arrival_s = gateway.clock()
        self.deadline_s = self._arrival_s + gateway.config.resilience.deadline_s
        request = self._request = parse_request(
            self.endpoint, self.headers, body, prefix_block_tokens=gateway.fleet.prefix_block_tokens
        )
        if limits is not None:
            self._grant = limits.enter(request.num_counted_tokens, self._arrival_s, time.time())
        with self.guard:
            gateway.guards.add(self.guard)
            try:
                await self._serve(request)
            except asyncio.CancelledError as cancelled:  # between attempts
                reason = self.guard.claim(cancelled)
                if isinstance(reason, LimitPassedError):
                    raise UpstreamTimeoutError("the deadline passed before another attempt") from None
                raise reason from None
            finally:
                gateway.guards.discard(self.guard)

    # ---- attempts ------------------------------------------------------------------------------------------------

    async def _serve(self, request: ClientRequest) -> None:
        attempts = self._attempts_left()
        excluded: frozenset[str] = frozenset()
        failure: AttemptFailedError | None = None
        while self._num_attempts < attempts:
            attempt = await self._place(request, excluded, failure)
            if attempt is None and failure is not None and _same_again(failure):
                self.guard.limit("deadline", self.deadline_s)
                await asyncio.sleep(SAME_INSTANCE_PAUSE_S)
                attempt = await self._place(request, frozenset(), failure)
            if attempt is None:
                break
            if failure is not None:
                self.gateway.telemetry.retried(failure.reason)
            try:
                return await attempt.run()
            except AttemptFailedError as failed:
                self.received()
                failure = failed
                event(
                    logging.WARNING,
                    "attempt_failed",
                    request_id=self.request_id,
                    instance=attempt.candidate.instance_id,
                    attempt=self._num_attempts,
                    error=str(failed),
                    cause=None if failed.error.__cause__ is None else repr(failed.error.__cause__),
                )
            if not failure.retryable:
                break
            excluded |= {attempt.candidate.instance_id}
        assert failure is not None
        await self._give_up(failure)

    def _attempts_left(self) -> int:
        """Upstream calls that this request may make: an SDK's own retries come out of the same budget, but one."""
        retried = self.headers.get(b"x-stainless-retry-count", b"")
        spent = int(retried) if retried.isdigit() and len(retried) < 4 else 0
        return max(1, self.gateway.config.resilience.attempts - spent)

    async def _place(
        self, request: ClientRequest, excluded: frozenset[str], failure: AttemptFailedError | None
    ) -> Attempt | None:
        """The next attempt; None when the router refuses and an earlier attempt has failed already."""
        if self.gateway.router.holds:
            return await self._hold(request, excluded, failure)
        gateway = self.gateway
        spent_s = 0.0 if failure is None else gateway.clock() - self._arrival_s
        query = gateway.query_of(request, self.request_id, self._arrival_s, spent_s=spent_s, excluded=excluded)
        record, refusal = gateway.decide(query, self.request_id, self._num_attempts + 1)
        if refusal is None:
            return self._begin(request, record)
        self._refused(record, refusal, failure)
        return None

    async def _hold(
        self, request: ClientRequest, excluded: frozenset[str], failure: AttemptFailedError | None
    ) -> Attempt | None:
        """As :meth:`_place`, by way of the central queue; the attempt is booked when it comes out."""
        gateway, number, since_s = self.gateway, self._num_attempts + 1, self._arrival_s
        spent_s = 0.0
        if failure is not None:
            since_s = gateway.clock()
            spent_s = since_s - self._arrival_s
        name = gateway.free_id(self.request_id, number)
        query = gateway.query_of(request, name, self._arrival_s, spent_s=spent_s, excluded=excluded)
        attempt: Attempt | None = None

        def take(decision: Decision) -> None:
            nonlocal attempt
            self._waited_s += decision.held_s or 0.0
            attempt = self._begin(request, gateway.keep(decision, query, self.request_id, number), ledger_id=name)
            attempt.book()

        held = Held(query, request_id=self.request_id, attempt=number, client=self.client, since_s=since_s, take=take)
        try:
            gateway.queue.admit(held)
            self.guard.limit("queue", min(since_s + gateway.config.queue.max_wait_s, self.deadline_s))
            try:
                await gateway.queue.wait(held)
            except asyncio.CancelledError as cancelled:
                self._left_queue(held, attempt, cancelled)
        except HeadwayError as refusal:
            decision = gateway.router.explain_held(query, since_s, gateway.clock())
            decision = msgspec.structs.replace(decision, reason=str(refusal))
            self._refused(gateway.keep(decision, query, self.request_id, number), refusal, failure)
            return None
        return attempt

    def _left_queue(self, held: Held, attempt: Attempt | None, cancelled: asyncio.CancelledError) -> None:
        """Out of the queue by the guard: its time is over, or nobody waits any more. Raises but where it was sent."""
        reason: BaseException = cancelled
        with contextlib.suppress(asyncio.CancelledError):
            reason = self.guard.claim(cancelled)
        if isinstance(reason, LimitPassedError):
            if attempt is None:  # else it was released in this very moment
                self.gateway.queue.expire(held, may_send=self.gateway.clock() < self.deadline_s)
            return
        if attempt is not None:
            attempt.abandon()
        else:
            self.gateway.telemetry.left_queue("cancelled", None)
        raise reason from None

    def _begin(self, request: ClientRequest, record: DecisionRecord, ledger_id: str | None = None) -> Attempt:
        self._num_attempts += 1
        self._record = record
        self._attempt = Attempt(self, request, record, self._num_attempts, ledger_id)
        return self._attempt

    def _refused(self, record: DecisionRecord, refusal: HeadwayError, failure: AttemptFailedError | None) -> None:
        """The router's refusal is raised, unless an earlier attempt has failed, whose failure says more."""
        if failure is not None:
            return
        self._record = record
        self.gateway.telemetry.rejected(rejection_reason(refusal))
        raise refusal

    async def _give_up(self, failure: AttemptFailedError) -> None:
        """Answer with the upstream's own refusal where there is one: same status, same bytes."""
        if failure.answer is None:
            raise failure.error
        answer = failure.answer
        headers = [(name, value) for name, value in answer.headers if name != b"x-should-retry"]
        headers.append((b"x-should-retry", b"false"))
        if answer.status == 429:
            headers.append((b"x-headway-reason", b"upstream"))
            if not any(name == b"retry-after" for name, _ in headers):
                headers.extend(retry_after(1.0))
        self._error = failure.reason
        await self.answer(answer.status, headers, answer.body)

    def charged(self, outcome: Outcome) -> None:
        """An attempt is over, and this is what it took."""
        self._tokens += (outcome.prompt_tokens or 0) + (outcome.output_tokens or 0)
        self._cost_usd += outcome.cost_usd or 0.0

    def sending(self) -> None:
        """From now on the time is the upstream's."""
        self._sent_s = self.gateway.clock()

    def received(self) -> None:
        """From now on the time is our own again."""
        if self._sent_s is not None:
            self._waited_s += self.gateway.clock() - self._sent_s
            self._sent_s = None

    # ---- the answer ----------------------------------------------------------------------------------------------

    async def answer(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Send a whole answer."""
        headers = [*headers, (b"content-length", b"%d" % len(body)), *self._own_headers()]
        self.started = True
        self._status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})
        self.guard.close()

    async def start_stream(self, status: int, headers: HeaderList) -> None:
        """Send status and headers of a stream."""
        kept = [(name, value) for name, value in headers if name != b"cache-control"]
        own = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *self._own_headers()]
        self.started = True
        self._status = status
        await self.send({"type": "http.response.start", "status": status, "headers": kept + own})

    async def send_body(self, chunk: bytes) -> None:
        """Pass bytes of a stream on."""
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_stream(self, chunk: bytes) -> None:
        """Pass the last bytes of a stream on and end it."""
        await self.send({"type": "http.response.body", "body": chunk, "more_body": False})
        self.guard.close()

    def _own_headers(self) -> HeaderList:
        headers: HeaderList = [(b"x-request-id", self.request_id.encode("ascii"))]
        record = self._record
        if record is not None and self._request is not None:
            explains, ignored = self.headers.get(b"x-headway-explain") == b"1", self._request.targets.ignored
            if explains and not self.gateway.keys.is_admin(self.headers):
                explains, ignored = False, (*ignored, "explain")
            headers += decision_headers(record.decision, record.id, ignored)
            if explains:
                text = decision_header(record)
                if len(text) <= _MAX_HEADER_BYTES:
                    headers.append((b"x-headway-decision-json", text))
                else:
                    headers.append((b"x-headway-explain", b"/decisions/" + record.id.encode("ascii")))
        overhead_s = self.gateway.clock() - self._arrival_s - self._waited_s
        headers.append((b"x-headway-overhead-ms", b"%.3f" % (overhead_s * 1e3)))
        return headers

    async def _refuse(self, error: HeadwayError) -> None:
        """Answer with an error: with its status, or as the last event of a stream that already began."""
        self._error = (error.code if isinstance(error, RequestError) else row_of(error).code) or type(error).__name__
        if isinstance(error, (DrainingError, OverloadedError)):
            self.gateway.telemetry.rejected(self._error)
        elif isinstance(error, KeyLimitError):
            self.gateway.telemetry.rejected(error.reason)
        elif isinstance(error, RequestError) and error.status == 401:
            self.gateway.telemetry.rejected("unauthorized")
        answer = error_answer(error)
        if self.started:
            self._status = answer.status
            inside_event = self._attempt is not None and self._attempt.relay.inside_event
            await self.end_stream((b"\n\n" if inside_event else b"") + error_event(error))
            return
        self.received()
        await self.answer(answer.status, [(b"content-type", b"application/json"), *answer.headers], answer.body)

    # ---- the account ---------------------------------------------------------------------------------------------

    def _account(self) -> None:
        """Count and log the request, whatever became of it."""
        gateway, request, attempt = self.gateway, self._request, self._attempt
        now = gateway.clock()
        if self._grant is not None:
            self._grant.settle(self._tokens, self._cost_usd, now, time.time())
            gateway.telemetry.charged(self.client, self._tokens, self._cost_usd)
        candidate = None if attempt is None else attempt.candidate
        outcome = None if attempt is None else attempt.outcome
        estimate = None if candidate is None else candidate.estimate
        ttft_s = None
        if attempt is not None and attempt.first_token_s is not None:
            ttft_s = attempt.first_token_s - self._arrival_s
        target_ms = None if request is None else request.targets.ttft_ms
        if target_ms is None:
            target_ms = gateway.config.routing.default_ttft_ms
        served = Served(
            operation=self.endpoint.operation,
            requested_model=OTHER if request is None else gateway.label_of(request.model),
            model=OTHER if candidate is None else candidate.model,
            instance=OTHER if candidate is None else candidate.instance_id,
            status=self._status,
            duration_s=now - self._arrival_s,
            ttft_s=ttft_s,
            target_s=None if target_ms is None else target_ms / 1e3,
            predicted_ttft_s=None if estimate is None else estimate.ttft_s,
            source=None if estimate is None else estimate.source,
        )
        gateway.telemetry.served(served, outcome)
        gateway.decision_log.note(
            self._record, request, served, outcome, client=self.client, attempts=self._num_attempts
        )
        if self.trace is not None:
            self.trace.end(served, request, self._record, outcome,
                           client=self.client, attempts=self._num_attempts, error=self._error)  # fmt: skip
        event(
            logging.INFO,
            "request",
            request_id=self.request_id,
            trace=None if self.trace is None else self.trace.trace_id,
            client=self.client or None,
            operation=served.operation,
            model=served.requested_model,
            instance=None if candidate is None else candidate.instance_id,
            status=self._status,
            error=self._error,
            attempts=self._num_attempts,
            decision=None if self._record is None else self._record.id,
            ttft_ms=None if ttft_s is None else round(ttft_s * 1e3, 2),
            predicted_ms=None if estimate is None else round(estimate.ttft_s * 1e3, 2),
            duration_ms=round(served.duration_s * 1e3, 2),
            prompt_tokens=None if outcome is None else outcome.prompt_tokens,
            output_tokens=None if outcome is None else outcome.output_tokens,
            prompt=request.prompt_text if request is not None and gateway.config.server.log_prompts else None,
        )


def _same_again(failure: AttemptFailedError) -> bool:
    """Whether the same instance may be asked once more when there is no other: not when it was slow or said when."""
    if failure.reason == "upstream_status" and failure.answer is not None:
        return failure.answer.status >= 500 and not any(name == b"retry-after" for name, _ in failure.answer.headers)
    return failure.reason == "protocol"
