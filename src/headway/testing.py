"""Fakes and builders for tests of what runs on Headway: a scripted upstream, snapshots, pools, a gateway in-process.

The fake upstream is a real HTTP server on 127.0.0.1, so that timeouts, disconnects and broken streams are real too. It
speaks OpenAI well enough for clients and gateway, and refuses to pretend to be an engine: it knows no batches, and for
timing that means something there is ``headway engine``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Literal, Self

import msgspec
import yaml
from aiohttp import web
from msgspec import Struct

from headway.assembly import load_predictor
from headway.config import Config, parse_config
from headway.gateway.predictors import Load
from headway.gateway.server import Server, listen
from headway.gateway.state import Gateway
from headway.types import EngineLimits, Snapshot, SnapshotRequest

#: Limits of the snapshots built here; small enough to think about.
LIMITS = EngineLimits(
    max_num_batched_tokens=32768, max_num_seqs=512, max_model_len=131072, block_size=16, num_blocks=23894
)
_names = itertools.count()


class Reply(Struct, frozen=True, kw_only=True):
    """What a fake upstream does with one request.

    A 200 without ``body`` or ``chunks`` is an OpenAI answer of ``num_tokens`` tokens, streamed when the request asks
    for it. ``delay_s`` passes before the headers, ``first_token_s`` before the first content event, ``interval_s``
    between events. ``comments`` are sent before the first event, ``interval_s`` apart. ``dies`` cuts the connection:
    before the headers, right after them, or after ``num_tokens`` content events; ``hangs`` never answers, with
    headers or without.
    """

    status: int = 200
    headers: dict[str, str] = {}
    body: bytes | None = None
    chunks: tuple[bytes, ...] | None = None
    content_type: str = "text/event-stream"
    num_tokens: int = 5
    token: str = "tok "
    prompt_tokens: int | None = None
    delay_s: float = 0.0
    first_token_s: float = 0.0
    interval_s: float = 0.0
    comments: int = 0
    dies: Literal["never", "before_headers", "after_headers", "after_tokens"] = "never"
    hangs: Literal["never", "before_headers", "after_headers"] = "never"


class Received(Struct, kw_only=True):
    """A request that reached a fake upstream. Times are monotonic seconds; ``disconnected_s`` is set if it hung up."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    arrived_s: float
    ended_s: float | None = None
    disconnected_s: float | None = None

    @property
    def json(self) -> dict[str, object]:
        """The body as JSON."""
        return msgspec.json.decode(self.body, type=dict[str, object])


Script = Reply | Sequence[Reply] | Callable[[Received], Reply]


class FakeUpstream:
    """A scripted OpenAI-compatible server on 127.0.0.1. Use as an async context manager.

    ``script`` is one reply for all requests, several for one after the other (the last repeats), or a function.
    ``requests`` holds what came in, ``num_probes`` the GETs of ``/health``; ``metrics`` is what ``/metrics`` serves.
    """

    def __init__(self, script: Script = Reply()) -> None:  # noqa: B008 - frozen
        self.script = script
        self.requests: list[Received] = []
        self.num_probes = 0
        self.num_open = 0
        self.healthy = True
        self.metrics = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """The base URL as a configuration's ``api_base``."""
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen: on a free port the first time, on the same one again after :meth:`stop`."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and cut every connection, as a killed process would."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            if runner.server is not None:
                for protocol in list(runner.server.connections):
                    if protocol.transport is not None:
                        protocol.transport.abort()
            await runner.cleanup()

    def reply_to(self, received: Received) -> Reply:
        """The scripted reply to the newest request."""
        if isinstance(self.script, Reply):
            return self.script
        if callable(self.script):
            return self.script(received)
        return self.script[min(len(self.requests), len(self.script)) - 1]

    async def _health(self, request: web.Request) -> web.Response:
        self.num_probes += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        received = Received(
            method=request.method,
            path=request.path,
            query=request.query_string,
            headers={name.lower(): value for name, value in request.headers.items()},
            body=await request.read(),
            arrived_s=time.monotonic(),
        )
        self.requests.append(received)
        self.num_open += 1
        try:
            return await self._act(request, received, self.reply_to(received))
        except asyncio.CancelledError:
            received.disconnected_s = time.monotonic()
            raise
        except ConnectionError:
            received.disconnected_s = time.monotonic()
            return web.Response()
        finally:
            self.num_open -= 1
            received.ended_s = time.monotonic()

    async def _act(self, request: web.Request, received: Received, reply: Reply) -> web.StreamResponse:
        if reply.delay_s:
            await asyncio.sleep(reply.delay_s)
        if reply.dies == "before_headers":
            return _cut(request)
        if reply.hangs == "before_headers":
            await asyncio.Event().wait()
        fields = received.json if received.body.startswith(b"{") else {}
        streamed = reply.chunks is not None or (fields.get("stream") is True and reply.status == 200)
        if reply.body is not None or not streamed:
            body = reply.body if reply.body is not None else _whole(reply, received.path, fields)
            headers = {"content-type": "application/json", **reply.headers}
            return web.Response(status=reply.status, body=body, headers=headers)
        return await self._stream(request, reply, received.path, fields)

    async def _stream(
        self, request: web.Request, reply: Reply, path: str, fields: dict[str, object]
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=reply.status, headers={"content-type": reply.content_type, **reply.headers}
        )
        await response.prepare(request)
        if reply.hangs == "after_headers":
            await asyncio.Event().wait()
        if reply.dies == "after_headers":
            await asyncio.sleep(0.01)  # let the headers out first
            return _cut(request)
        for _ in range(reply.comments):
            await response.write(b": keep-alive\n\n")
            await asyncio.sleep(reply.interval_s)
        if reply.first_token_s:
            await asyncio.sleep(reply.first_token_s)
        for index, chunk in enumerate(reply.chunks or _events(reply, path, fields)):
            if index and reply.interval_s:
                await asyncio.sleep(reply.interval_s)
            await response.write(chunk)
        if reply.dies == "after_tokens":
            await asyncio.sleep(0.01)
            return _cut(request)
        await response.write_eof()
        return response


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _usage(reply: Reply, fields: dict[str, object]) -> dict[str, int]:
    prompt = reply.prompt_tokens if reply.prompt_tokens is not None else 10
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply.num_tokens,
        "total_tokens": prompt + reply.num_tokens,
    }


def _whole(reply: Reply, path: str, fields: dict[str, object]) -> bytes:
    if reply.status != 200:
        error = {"message": f"scripted {reply.status}", "type": "fake", "param": None, "code": None}
        return json.dumps({"error": error}).encode()
    text = reply.token * reply.num_tokens
    head = {"id": "fake-1", "created": 0, "model": fields.get("model"), "usage": _usage(reply, fields)}
    if path.endswith("/embeddings"):
        data: list[object] = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}]
        return json.dumps({**head, "object": "list", "data": data}).encode()
    choice: dict[str, object] = {"index": 0, "finish_reason": "stop"}
    if path.endswith("/chat/completions"):
        choice["message"] = {"role": "assistant", "content": text}
        return json.dumps({**head, "object": "chat.completion", "choices": [choice]}).encode()
    choice["text"] = text
    return json.dumps({**head, "object": "text_completion", "choices": [choice]}).encode()


def _events(reply: Reply, path: str, fields: dict[str, object]) -> list[bytes]:
    """The events of a stream, as an engine sends them: role, content, finish reason, usage if asked for, the end."""
    chat = path.endswith("/chat/completions")
    head = {
        "id": "fake-1",
        "created": 0,
        "model": fields.get("model"),
        "object": "chat.completion.chunk" if chat else "text_completion",
    }

    def event(delta: dict[str, object], text: str, finish: str | None) -> bytes:
        choice: dict[str, object] = {
            "index": 0,
            "finish_reason": finish,
            **({"delta": delta} if chat else {"text": text}),
        }
        return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"

    events = [event({"role": "assistant", "content": ""}, "", None)] if chat else []
    events += [event({"content": reply.token}, reply.token, None)] * reply.num_tokens
    if reply.dies == "after_tokens":
        return events
    events.append(event({}, "", "stop"))
    options = fields.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        usage = json.dumps({**head, "choices": [], "usage": _usage(reply, fields)}).encode()
        events.append(b"data: " + usage + b"\n\n")
    return [*events, b"data: [DONE]\n\n"]


# ---- builders ----------------------------------------------------------------------------------------------------


def segment_name() -> str:
    """A shared-memory segment name that no other test uses."""
    return f"headway-test-{os.getpid()}-{next(_names)}"


def snapshot(
    *,
    running: Sequence[SnapshotRequest] = (),
    waiting: Sequence[SnapshotRequest] = (),
    sequence: int = 1,
    engine_s: float | None = None,
    limits: EngineLimits = LIMITS,
    instance_id: str = "fake",
    engine_version: str = "vllm-0.32.0",
) -> Snapshot:
    """A snapshot of an engine between steps, taken now; without requests an idle one."""
    held = sum(request.num_blocks for request in (*running, *waiting))
    return Snapshot(
        instance_id=instance_id,
        engine_version=engine_version,
        engine_start=1,
        sequence=sequence,
        engine_s=time.monotonic() if engine_s is None else engine_s,
        limits=limits,
        running=list(running),
        waiting=list(waiting),
        free_blocks=limits.num_blocks - 1 - held,
    )


def waiting_request(request_id: str, prompt_tokens: int, *, max_tokens: int = 1024) -> SnapshotRequest:
    """A request in an engine's queue of which nothing is computed."""
    return SnapshotRequest(request_id, prompt_tokens, 0, 0, 0, max_tokens, 0, 0.0, 0)


def pool(models: Sequence[dict[str, object]], instances: Sequence[dict[str, object]], **rest: object) -> Config:
    """A configuration from plain values, checked as a file's would be. ``rest`` holds the other top-level keys."""
    document = {"models": list(models), "instances": list(instances), "server": {"port": 0}, **rest}
    return parse_config(yaml.safe_dump(document, sort_keys=False))


class RunningGateway(Struct, frozen=True):
    """A gateway that serves at ``url`` (without ``/v1``), and its inside."""

    url: str
    gateway: Gateway
    server: Server


@contextlib.asynccontextmanager
async def running_gateway(
    config: Config, *, seed: int = 0, load: Load = load_predictor
) -> AsyncIterator[RunningGateway]:
    """A real server on a free port inside this event loop, stopped at the end."""
    gateway = Gateway(config, seed=seed, load=load)
    listening = asyncio.Event()
    server = Server(gateway, listen("127.0.0.1", 0), on_listening=lambda address: listening.set(), handle_signals=False)
    serving = asyncio.create_task(server.serve())
    waiting = asyncio.create_task(listening.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if serving.done():
        await serving
    try:
        yield RunningGateway(server.address, gateway, server)
    finally:
        server.should_exit = True
        await serving
