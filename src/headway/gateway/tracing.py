"""OpenTelemetry spans of client requests and of the upstream calls below them, sent to a collector in the background.

An extra: this is the one file that imports OpenTelemetry, and it is imported only where ``telemetry.traces`` is set.
It refuses to hold prompts, answers, credentials or models that a client made up, and to disturb traffic: a collector
that is slow, wrong or away costs spans and never a request. Attribute names are those of the GenAI and HTTP conventions
(opentelemetry-semantic-conventions 0.66) where these have one; everything else begins with ``headway.``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from multidict import CIMultiDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter

from headway import __version__
from headway.config import TracesConfig
from headway.gateway.decisions import DecisionRecord
from headway.gateway.request import ClientRequest
from headway.gateway.telemetry import Served
from headway.types import Outcome

if TYPE_CHECKING:
    from headway.gateway.attempt import Attempt
    from headway.gateway.chat import Exchange

#: What one export may take, its retries included, seconds.
EXPORT_TIMEOUT_S = 5.0
#: How long a stop waits for the last spans to get away before it gives up trying again, seconds.
FLUSH_S = 3.0

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of a gateway and exports them. Await :meth:`close` at the end."""

    def __init__(self, config: TracesConfig, registry: CollectorRegistry) -> None:
        self._exporter = _CountingExporter(
            OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_TIMEOUT_S),
            Counter(
                "headway_trace_spans", "Spans by what became of them: exported, failed", ("result",), registry=registry
            ),
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample)), resource=_resource(), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("headway", __version__)

    def begin(self, exchange: Exchange) -> RequestTrace:
        """The span of a client request that begins now, below the client's own where its headers name one."""
        carrier: dict[str, list[str]] = {}
        for name, value in exchange.header_pairs:
            if name in (b"traceparent", b"tracestate"):
                carrier.setdefault(name.decode("ascii"), []).append(value.decode("latin-1"))
        endpoint = exchange.endpoint
        span = self.tracer.start_span(
            f"POST {endpoint.path}",
            _propagator.extract(carrier, Context()),
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "http.route": endpoint.path,
                "url.path": endpoint.path,
                "gen_ai.operation.name": endpoint.operation,
                "headway.request_id": exchange.request_id,
            },
        )
        return RequestTrace(self, span)

    async def close(self) -> None:
        """Send what is left, for a few seconds at most, and stop."""
        flushed = asyncio.ensure_future(asyncio.to_thread(self._provider.shutdown))
        await asyncio.wait({flushed}, timeout=FLUSH_S)
        if not flushed.done():
            self._exporter.shutdown()
        await flushed


class RequestTrace:
    """The span of one client request. :meth:`end` it once."""

    __slots__ = ("_span", "_tracing")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span

    @property
    def trace_id(self) -> str:
        """The trace's id, 32 hex digits."""
        return format_trace_id(self._span.get_span_context().trace_id)

    def call(self, attempt: Attempt, number: int) -> CallTrace:
        """The span of an upstream call that begins now, the request's ``number``-th."""
        candidate, request, target = attempt.candidate, attempt.request, attempt.target
        address = target.health_url  # has host and port of all its paths
        attributes = {
            "gen_ai.operation.name": request.endpoint.operation,
            # Both speak OpenAI's protocol; who is behind a hosted address cannot be told.
            "gen_ai.provider.name": "openai" if target.hosted else "vllm",
            "gen_ai.request.model": candidate.model,
            **_of_request(request),
            "server.address": address.host,
            "server.port": address.port,
            "headway.attempt": number,
            **_of_decision(attempt.record),
        }
        span = self._tracing.tracer.start_span(
            f"{request.endpoint.operation} {candidate.model}",
            set_span_in_context(self._span, Context()),
            SpanKind.CLIENT,
            _known(attributes),
        )
        return CallTrace(span)

    def end(
        self,
        served: Served,
        request: ClientRequest | None,
        record: DecisionRecord | None,
        outcome: Outcome | None,
        *,
        client: str,
        attempts: int,
        error: str | None,
    ) -> None:
        """The request is over: say what became of it. ``record`` is its last decision, ``outcome`` its last call's."""
        span, failed = self._span, served.status >= 400
        if span.is_recording():
            attributes: dict[str, str | int | float | bool | None] = {
                "http.response.status_code": served.status,
                "gen_ai.request.model": served.requested_model,
                "gen_ai.response.model": None if outcome is None else served.model,
                "gen_ai.response.time_to_first_chunk": served.ttft_s,
                **({} if request is None else _of_request(request)),
                **({} if record is None else _of_decision(record)),
                **({} if outcome is None else _of_outcome(outcome)),
                "headway.client": client or None,
                "headway.attempts": attempts,
                "error.type": (error or str(served.status)) if failed else None,
            }
            span.set_attributes(_known(attributes))
            if served.status >= 500:  # what the client did wrong is no error of a server's span
                span.set_status(StatusCode.ERROR, error)
        span.end()


class CallTrace:
    """The span of one upstream call. :meth:`end` it once."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def inject(self, headers: CIMultiDict[str]) -> None:
        """Put this span into ``headers`` in place of the client's, so that the engine's own spans hang below it."""
        if not self._span.get_span_context().is_valid:  # OTEL_SDK_DISABLED: as if nothing were configured
            return
        headers.popall("traceparent", None)
        headers.popall("tracestate", None)
        _propagator.inject(headers, set_span_in_context(self._span, Context()))

    def first_token(self) -> None:
        """The first token is here."""
        self._span.add_event("headway.first_token")

    def end(self, outcome: Outcome, *, unreachable: bool) -> None:
        """The call is over."""
        span, http_status = self._span, outcome.http_status
        if span.is_recording():
            error = None
            if outcome.status not in ("ok", "cancelled"):
                refused = http_status is not None and http_status >= 400
                error = "unreachable" if unreachable else str(http_status) if refused else outcome.status
                span.set_status(StatusCode.ERROR, error)
            attributes = {
                "http.response.status_code": http_status,
                "gen_ai.response.time_to_first_chunk": outcome.ttft_s,
                "error.type": error,
                **_of_outcome(outcome),
            }
            span.set_attributes(_known(attributes))
        span.end()


class _CountingExporter(SpanExporter):
    """Passes spans on to ``exporter`` and counts what became of them. Called from the exporting thread."""

    def __init__(self, exporter: SpanExporter, counter: Counter) -> None:
        self._exporter = exporter
        self._exported, self._failed = counter.labels("exported"), counter.labels("failed")
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = SpanExportResult.FAILURE
        try:
            if not self._closed:
                result = self._exporter.export(spans)
        finally:
            (self._exported if result is SpanExportResult.SUCCESS else self._failed).inc(len(spans))
        return result

    def shutdown(self) -> None:
        """Try nothing again; once, however often it is called."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()


def _resource() -> Resource:
    """Who speaks: as ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say, Headway without them."""
    found = Resource.create()
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        found = found.merge(Resource({SERVICE_NAME: "headway", "service.version": __version__}))
    return found


def _of_request(request: ClientRequest) -> dict[str, str | int | float | bool | None]:
    return {"gen_ai.request.stream": request.stream, "gen_ai.request.max_tokens": request.max_tokens}


def _of_decision(record: DecisionRecord) -> dict[str, str | int | float | bool | None]:
    """Why it goes where it goes."""
    decision, candidate = record.decision, record.decision.candidate
    estimate = None if candidate is None else candidate.estimate
    finite = estimate is not None and math.isfinite(estimate.ttft_s)
    return {
        "headway.decision_id": record.id,
        "headway.policy": decision.policy,
        "headway.reason": decision.reason,
        "headway.slo": decision.slo,
        "headway.ttft_target_s": decision.ttft_target_s,
        "headway.held_s": decision.held_s,
        "headway.decision_s": decision.decision_s,
        "headway.instance": None if candidate is None else candidate.instance_id,
        "headway.verdict": None if candidate is None else candidate.verdict,
        "headway.predicted_ttft_s": estimate.ttft_s if estimate is not None and finite else None,
        "headway.estimate_source": None if estimate is None else estimate.source,
    }


def _of_outcome(outcome: Outcome) -> dict[str, str | int | float | bool | None]:
    return {
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.output_tokens,
        "headway.outcome": outcome.status,
        "headway.cost_usd": outcome.cost_usd,
    }


def _known(
    attributes: dict[str, str | int | float | bool | None],
) -> dict[str, str | int | float | bool]:
    """Only what there is to say."""
    return {name: value for name, value in attributes.items() if value is not None}
