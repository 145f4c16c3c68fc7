"""Traces over real sockets: spans as a collector gets them, what the engines get, and that nothing depends on it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from gateway_clients import CHAT, RawClient, chat, metrics, pool_of, until
from headway.config import load_config, parse_config
from headway.errors import ConfigError
from headway.gateway.state import Gateway
from headway.testing import FakeUpstream, Reply, pool, running_gateway

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1,other=2"}


class Collector:
    """An OTLP/HTTP collector on 127.0.0.1 that keeps what it gets; ``status`` is its answer, ``hangs`` gives none."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.status, self.hangs = 200, False
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self.headers.append(dict(request.headers))
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(status=self.status)

    @property
    def telemetry(self) -> dict[str, object]:
        return {"traces": {"otlp": self.url}}

    @property
    def spans(self) -> list[SimpleNamespace]:
        """All spans so far, decoded: ids in hex, attributes as a dict."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = attributes_of(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    found += [decoded(span, service) for span in scope.spans]
        return found

    def span(self, name: str) -> SimpleNamespace:
        """The one span of this name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    @property
    def root(self) -> SimpleNamespace:
        return self.span(f"POST {CHAT}")


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def decoded(span: Any, service: str) -> SimpleNamespace:
    return SimpleNamespace(
        name=span.name, kind=span.kind, service=service, trace=span.trace_id.hex(), id=span.span_id.hex(),
        parent=span.parent_span_id.hex(), state=span.trace_state, attributes=attributes_of(span.attributes),
        events=[(event.name, event.time_unix_nano) for event in span.events], failed=span.status.code == 2,
        status=span.status.message, begin=span.start_time_unix_nano, end=span.end_time_unix_nano,
    )  # fmt: skip


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs headway[tracing]")
    pytest.importorskip("opentelemetry.sdk.trace", reason="needs headway[tracing]")
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield collector
    await runner.cleanup()


async def test_a_request_is_a_span_and_every_upstream_call_one_below_it(
    session: aiohttp.ClientSession, collector: Collector
) -> None:
    """The client's trace goes on through gateway and engines; the spans tell decision, failover, tokens and TTFT."""
    async with FakeUpstream(Reply(status=500)) as broken, FakeUpstream(Reply(prompt_tokens=9, num_tokens=4)) as sound:
        models = [{"name": "m", "price": {"input_per_1m": 1.0, "output_per_1m": 2.0}}]
        instances = [
            {"id": name, "model": "m", "api_base": one.url, "engine": "vllm-0.32", "profile": "h100-qwen3-8b"}
            for name, one in (("a", broken), ("b", sound))
        ]
        config = pool(models, instances, routing={"policy": "round_robin"}, telemetry=collector.telemetry)
        async with running_gateway(config) as gateway:
            headers = {**SAMPLED, "x-request-id": "traced", "x-slo-ttft-ms": "900"}
            body = chat(max_tokens=50)
            async with session.post(gateway.url + CHAT, json=body, headers=headers) as response:
                await response.read()
                decision = response.headers["x-headway-decision"]
            ids = [(one.requests[0].headers["traceparent"], one.requests[0].headers["tracestate"])
                   for one in (broken, sound)]  # fmt: skip
    root = collector.root
    calls = sorted((span for span in collector.spans if span.name == "chat m"), key=lambda span: span.begin)
    assert len(collector.spans) == 3
    assert (root.trace, root.parent, root.kind, root.service) == (TRACE, PARENT, 2, "headway")
    assert [(call.trace, call.parent, call.kind) for call in calls] == [(TRACE, root.id, 3)] * 2
    assert ids == [(f"00-{TRACE}-{call.id}-01", "vendor=1,other=2") for call in calls]
    assert root.state == "vendor=1,other=2"
    refused, served = calls
    assert (refused.failed, refused.attributes["error.type"], refused.events) == (True, "500", [])
    assert refused.attributes["http.response.status_code"] == 500
    assert not served.failed
    ((event, at),) = served.events
    assert event == "headway.first_token"
    assert root.begin <= served.begin <= at <= served.end <= root.end
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "m",
        "gen_ai.request.stream": True, "gen_ai.request.max_tokens": 50, "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 4, "server.address": "127.0.0.1", "headway.attempt": 2, "headway.instance": "b",
        "headway.policy": "round_robin", "headway.verdict": "feasible", "headway.decision_id": decision,
        "headway.outcome": "ok", "headway.cost_usd": pytest.approx(17e-6), "http.response.status_code": 200,
        "server.port": int(sound.url.removesuffix("/v1").rpartition(":")[2]),
    }  # fmt: skip
    assert expected.items() <= served.attributes.items()
    assert served.attributes["headway.predicted_ttft_s"] > 0
    assert served.attributes["headway.estimate_source"] == "shadow"
    assert served.attributes["gen_ai.response.time_to_first_chunk"] > 0
    expected = {
        "http.request.method": "POST", "http.route": CHAT, "http.response.status_code": 200, "headway.attempts": 2,
        "headway.request_id": "traced", "gen_ai.request.model": "auto", "gen_ai.response.model": "m",
        "gen_ai.usage.output_tokens": 4, "headway.instance": "b", "headway.decision_id": decision,
    }  # fmt: skip
    assert expected.items() <= root.attributes.items()
    assert (root.failed, "error.type" in root.attributes) == (False, False)


@pytest.mark.parametrize(
    ("sample", "traceparent", "trace", "kept", "num_spans"),
    [
        (1.0, f"00-{TRACE}-{PARENT}-00", TRACE, False, 0),
        (0.0, f"00-{TRACE}-{PARENT}-01", TRACE, True, 2),
        (0.0, None, None, False, 0),
        (1.0, "00-1", None, True, 2),
        (1.0, f"00-{'0' * 32}-{PARENT}-01", None, True, 2),
    ],
)
async def test_the_client_says_whether_its_trace_is_kept(
    session: aiohttp.ClientSession,
    collector: Collector,
    *,
    sample: float,
    traceparent: str | None,
    trace: str | None,
    kept: bool,
    num_spans: int,
) -> None:
    """Its flag rules over ``sample``; without a usable ``traceparent`` a new trace begins, without its state."""
    async with FakeUpstream() as upstream:
        config = pool_of(upstream, telemetry={"traces": {"otlp": collector.url + "/v1/traces", "sample": sample}})
        headers = {"tracestate": "vendor=1"} | ({} if traceparent is None else {"traceparent": traceparent})
        async with running_gateway(config) as gateway:
            async with session.post(gateway.url + CHAT, json=chat(), headers=headers) as response:
                await response.read()
        seen = upstream.requests[0].headers
    version, found, parent, flags = seen["traceparent"].split("-")
    assert (version, bool(int(flags, 16) & 1), len(collector.spans)) == ("00", kept, num_spans)
    assert found == trace if trace is not None else (len(found), found == TRACE) == (32, False)
    assert (parent == PARENT, "tracestate" in seen) == (False, trace is not None)


async def test_spans_hold_no_text_and_no_secret(
    session: aiohttp.ClientSession, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither prompt nor answer, no key, and no model that a client made up; the collector's own key reaches it."""
    monkeypatch.setenv("TEST_CLIENT_KEY", "sk-client-secret")
    monkeypatch.setenv("TEST_POOL_KEY", "sk-pool-secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20sk-collector")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-gateway")
    async with FakeUpstream(Reply(token="answertext ")) as upstream:
        instance = {"id": "a", "model": "m", "api_base": upstream.url, "api_key": "env:TEST_POOL_KEY"}
        keys = {"clients": [{"name": "team", "key": "env:TEST_CLIENT_KEY"}]}
        config = pool([{"name": "m"}], [instance], keys=keys, telemetry=collector.telemetry)
        async with running_gateway(config) as gateway:
            for model, key in (("m", "sk-client-secret"), ("made-up", "sk-client-secret"), ("m", "sk-wrong-secret")):
                headers = {"authorization": f"Bearer {key}"}
                body = chat(model, content="prompttext", user="usertext")
                async with session.post(gateway.url + CHAT, json=body, headers=headers) as response:
                    await response.read()
    sent = b"".join(collector.bodies)
    roots = [span for span in collector.spans if span.parent == ""]
    assert sorted(root.attributes["http.response.status_code"] for root in roots) == [200, 401, 404]
    assert {root.service for root in roots} == {"our-gateway"}
    assert "team" in [root.attributes.get("headway.client") for root in roots]
    for text in (b"prompttext", b"usertext", b"answertext", b"made-up", b"secret"):
        assert text not in sent
    assert {headers["Authorization"] for headers in collector.headers} == {"Bearer sk-collector"}


@pytest.mark.parametrize(
    ("script", "body", "status", "failed", "error", "calls"),
    [
        (Reply(), chat("none"), 404, False, "model_not_found", []),
        (Reply(status=422), chat(), 422, False, "422", [("error", "422")]),
        (Reply(status=503), chat(), 503, True, "upstream_status", [("error", "503")] * 2),
        (Reply(dies="before_headers"), chat(), 502, True, "upstream_protocol_error", [("error", "error")] * 2),
        (Reply(dies="after_tokens"), chat(), 502, True, "upstream_interrupted", [("interrupted", "interrupted")]),
        (Reply(hangs="before_headers"), chat(), 504, True, "upstream_timeout", [("timeout", "timeout")] * 2),
    ],
)
async def test_what_went_wrong_is_in_the_spans(
    session: aiohttp.ClientSession,
    collector: Collector,
    *,
    script: Reply,
    body: dict[str, object],
    status: int,
    failed: bool,
    error: str,
    calls: list[tuple[str, str]],
) -> None:
    """A client's own mistakes are no error of the request's span; refusals, broken streams and silence are."""
    async with FakeUpstream(script) as first, FakeUpstream(script) as second:
        limits = {"first_byte_timeout_s": 0.1}
        config = pool_of(first, second, resilience=limits, telemetry=collector.telemetry)
        async with running_gateway(config) as gateway:
            async with session.post(gateway.url + CHAT, json=body) as response:
                await response.read()
    root = collector.root
    assert (root.attributes["http.response.status_code"], root.failed) == (status, failed)
    assert root.attributes["error.type"] == error
    found = [span for span in collector.spans if span is not root and span.parent == root.id]
    assert [(span.attributes["headway.outcome"], span.attributes["error.type"]) for span in found] == calls
    assert all(span.failed for span in found)


async def test_clients_that_leave_end_their_spans(collector: Collector) -> None:
    """A stream that its client cut is 499 and cancelled, and no error."""
    async with FakeUpstream(Reply(num_tokens=1000, interval_s=0.01)) as upstream:
        async with running_gateway(pool_of(upstream, telemetry=collector.telemetry)) as gateway:
            async with RawClient(gateway.url, chat()) as client:
                await client.read_until(b"tok")
            await until(lambda: gateway.gateway.num_inflight == 0)
    call = collector.span("chat m")
    assert (call.attributes["headway.outcome"], call.failed, call.parent) == ("cancelled", False, collector.root.id)
    assert (collector.root.attributes["http.response.status_code"], collector.root.failed) == (499, False)


async def test_time_in_the_queue_is_told(
    session: aiohttp.ClientSession, collector: Collector, one_slot: dict[str, object]
) -> None:
    """A held request's span is as long as its stay; its call begins at the release."""
    async with FakeUpstream(Reply(delay_s=0.05)) as upstream:
        async with running_gateway(pool_of(upstream, **one_slot, telemetry=collector.telemetry)) as gateway:

            async def ask() -> None:
                async with session.post(gateway.url + CHAT, json=chat()) as response:
                    await response.read()

            await asyncio.gather(ask(), ask())
    calls = sorted((span for span in collector.spans if span.name == "chat m"), key=lambda span: span.begin)
    assert calls[1].begin >= calls[0].end
    (root,) = [span for span in collector.spans if span.id == calls[1].parent]
    held_s = root.attributes["headway.held_s"]
    assert held_s == calls[1].attributes["headway.held_s"] > 0
    assert root.begin + held_s * 1e9 <= root.end


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "away"])
async def test_a_broken_collector_disturbs_nobody(
    session: aiohttp.ClientSession, collector: Collector, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Requests are served while it errs, hangs or is away; lost spans are counted, and the gateway still stops."""
    from headway.gateway import tracing

    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(tracing, "FLUSH_S", 0.1)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector.status, collector.hangs = 400, trouble == "hangs"
    telemetry = collector.telemetry
    if trouble == "away":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            telemetry = {"traces": {"otlp": f"http://127.0.0.1:{unused.getsockname()[1]}"}}
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream, telemetry=telemetry)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert (response.status, (await response.read()).count(b'"tok "')) == (200, 5)
        for _ in range(500):
            if 'headway_trace_spans_total{result="failed"} 2.0' in (text := await metrics(session, gateway)):
                break
            await asyncio.sleep(0.01)
        assert 'headway_trace_spans_total{result="failed"} 2.0' in text
        async with session.post(gateway.url + CHAT, json=chat()) as response:
            assert response.status == 200
    assert bool(collector.bodies) == (trouble != "away")


async def test_exported_spans_are_counted_and_logged_requests_name_their_trace(
    session: aiohttp.ClientSession,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From a line of the log to its trace: both have the id. Spans go out while the gateway runs, too."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with caplog.at_level("INFO", "headway"):
        async with FakeUpstream() as upstream:
            async with running_gateway(pool_of(upstream, telemetry=collector.telemetry)) as gateway:
                async with session.post(gateway.url + CHAT, json=chat()) as response:
                    await response.read()
                await until(lambda: len(collector.spans) == 2)
                await asyncio.sleep(0.05)
                text = await metrics(session, gateway)
    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    assert line.fields["trace"] == collector.root.trace  # type: ignore[attr-defined]
    assert 'headway_trace_spans_total{result="exported"} 2.0' in text


async def test_a_gateway_that_is_told_to_end_sends_its_last_spans(
    session: aiohttp.ClientSession, collector: Collector, tmp_path: Path
) -> None:
    """SIGTERM right after an answer: its spans arrive; what the collector refuses is in the log, as JSON too."""
    collector.status = 400
    async with FakeUpstream() as upstream:
        path = tmp_path / "pool.yaml"
        instances = [{"id": "a", "model": "m", "api_base": upstream.url}]
        document = {"models": [{"name": "m"}], "instances": instances, "telemetry": collector.telemetry}
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headway", "serve", str(path), "--port", "0", stdout=PIPE, stderr=PIPE
        )
        try:
            assert process.stdout is not None
            address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
            async with session.post(address + CHAT, json=chat()) as response:
                await response.read()
            process.send_signal(signal.SIGTERM)
            _, log = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0
    assert [span.name for span in collector.spans] == ["chat m", f"POST {CHAT}"]
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert len([name for name in events if name.startswith("Failed to export")]) == 1


async def test_traces_change_with_a_restart_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reload that turns them on says that it did not."""
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.partition("telemetry")[0] + "server: {port: 0}\n", encoding="utf-8")
    with caplog.at_level("WARNING", "headway"):
        async with running_gateway(load_config(path)) as gateway:
            path.write_text(POOL % 'otlp: "http://127.0.0.1:9"' + "server: {port: 0}\n", encoding="utf-8")
            assert gateway.gateway.reloader.reload("test")
            assert gateway.gateway.tracing is None
    found = [record.fields for record in caplog.records if record.getMessage() == "needs_restart"]  # type: ignore[attr-defined]
    assert [fields["key"] for fields in found] == ["telemetry"]


async def test_without_traces_a_clients_trace_passes_untouched(session: aiohttp.ClientSession) -> None:
    """The gateway is then no part of the trace: the engine sees the client's own ids."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat(), headers=SAMPLED) as response:
            assert response.status == 200
        seen = upstream.requests[0].headers
    assert {name: seen[name] for name in SAMPLED} == SAMPLED


def test_without_traces_nothing_of_opentelemetry_is_loaded() -> None:
    """Who does not ask for traces pays nothing for them, installed or not."""
    program = (
        "import sys\nfrom headway.gateway.app import App\nfrom headway.gateway.state import Gateway\n"
        "from headway.testing import pool\n"
        "App(Gateway(pool([{'name': 'm'}], [{'id': 'a', 'model': 'm', 'api_base': 'http://127.0.0.1:9/v1'}])))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


POOL = """models: [{name: m}]
instances: [{id: a, model: m, api_base: "http://127.0.0.1:9/v1"}]
telemetry:
  traces: {%s}
"""


@pytest.mark.parametrize(
    ("traces", "key", "message"),
    [
        ("otlp: collector:4318", "telemetry.traces.otlp", "http or https URL such as http://127.0.0.1:4318"),
        ('otlp: "http://u:p@c:4318"', "telemetry.traces.otlp", "OTEL_EXPORTER_OTLP_HEADERS"),
        ('otlp: "http://c:4318", sample: 2', "telemetry.traces.sample", "1"),
        ('otlp: "http://c:4318", rate: 1', "telemetry.traces.rate", "unknown"),
        ("sample: 1", "telemetry.traces", "otlp"),
    ],
)
def test_wrong_settings_are_named(traces: str, key: str, message: str) -> None:
    """A complaint has the key, where it stands, and what is wrong."""
    with pytest.raises(ConfigError) as caught:
        parse_config(POOL % traces)
    assert caught.value.key.startswith(key)
    assert caught.value.line == 4
    assert message in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces without the packages are a configuration error that says what to install."""
    monkeypatch.delitem(sys.modules, "headway.gateway.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(ConfigError, match=r"telemetry.traces.*pip install 'headway\[tracing\]'") as caught:
        Gateway(parse_config(POOL % 'otlp: "http://127.0.0.1:4318"'))
    assert caught.value.line == 4
