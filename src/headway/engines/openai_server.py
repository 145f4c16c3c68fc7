"""The HTTP face of a simulated engine: vLLM's OpenAI-compatible endpoints as a raw ASGI application.

Raw ASGI, because a token must cost little: no middleware, no response objects, one task per request and one that
watches for the client to go. A request whose client is gone leaves the engine at once. Errors have vLLM's shape. It
serves one model and offers nothing it cannot really do: no embeddings, no tokenizer, no log probabilities.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from headway.engines.openai_answer import DONE, AnswerWriter
from headway.engines.openai_request import OUTPUT_TOKENS_HEADER, CompletionRequest, answer_tokens, parse
from headway.engines.simulated import Generation, SimulatedEngine
from headway.engines.vllm_metrics import EngineMetrics
from headway.errors import EngineInputError, RequestError
from headway.types import EngineRequest

Message = MutableMapping[str, Any]  # ASGI's own loose typing
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_JSON: Final = (b"content-type", b"application/json")
_METRICS_TYPE: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_EVENT_STREAM: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_ERROR_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError"}
_MAX_ID_CHARACTERS: Final = 256


class OpenAIServer:
    """The ASGI application over one engine."""

    def __init__(self, engine: SimulatedEngine, metrics: EngineMetrics, *, model: str, seed: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._model = model
        self._seed = seed
        self._created = int(time.time())
        self._ids = np.random.default_rng([seed, zlib.crc32(model.encode())])
        self._routes: dict[str, tuple[str, Callable[[], tuple[Headers, bytes]]]] = {
            "/v1/models": ("GET", self._models),
            "/health": ("GET", lambda: ([], b"")),
            "/metrics": ("GET", lambda: ([_METRICS_TYPE], metrics.exposition(engine.view))),
            "/version": ("GET", lambda: ([_JSON], msgspec.json.encode({"version": engine.truth.engine_version}))),
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        try:
            if path in ("/v1/chat/completions", "/v1/completions"):
                _require_method(method, "POST", path)
                await self._complete(scope, receive, send, chat=path == "/v1/chat/completions")
                return
            if path not in self._routes:
                raise RequestError(f"{path} is not served here", status=404)
            expected, answer = self._routes[path]
            _require_method("GET" if method == "HEAD" else method, expected, path)
            headers, body = answer()
            await _answer(send, 200, headers, b"" if method == "HEAD" else body)
        except RequestError as error:
            await _answer(send, error.status, [_JSON], _error_body(error))

    async def _complete(self, scope: Message, receive: Receive, send: Send, *, chat: bool) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        arrival_s = time.monotonic()
        headers = dict(scope["headers"])
        limits = self._engine.truth.limits
        request = parse(
            body,
            chat=chat,
            model=self._model,
            max_model_len=limits.max_model_len,
            block_tokens=limits.block_size if limits.prefix_caching else None,
        )
        client_id = self._request_id(headers)
        progress = asyncio.Event()
        wanted = self._engine_requests(request, client_id, headers.get(OUTPUT_TOKENS_HEADER.encode()))
        generations = [
            self._engine.submit(one, arrival_s=arrival_s, on_progress=progress.set, prefix_blocks=blocks)
            for one, blocks in zip(wanted, request.prefix_blocks or [()] * len(wanted), strict=True)
        ]
        watcher = asyncio.create_task(self._cancel_on_disconnect(receive, generations))
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{client_id}"
        writer = AnswerWriter(answer_id=answer_id, model=self._model, chat=chat, generations=generations)
        exchange = _Exchange(send, client_id, writer, generations, progress)
        try:
            if request.stream:
                await exchange.stream(include_usage=request.include_usage)
            else:
                await exchange.send_whole()
        finally:
            watcher.cancel()
            for generation in generations:
                self._engine.cancel(generation)

    def _engine_requests(self, request: CompletionRequest, client_id: str, header: bytes | None) -> list[EngineRequest]:
        """One per prompt. All are made before any is queued, so that a wrong one leaves nothing behind."""
        stated = None if header is None else header.decode("latin-1")
        wanted = []
        for index, prompt_tokens in enumerate(request.prompt_tokens):
            request_id = f"chatcmpl-{client_id}" if request.chat else f"cmpl-{client_id}-{index}"
            target = answer_tokens(request, request_id, header=stated, model=self._model, seed=self._seed)
            try:
                wanted.append(
                    EngineRequest(
                        request_id=request_id,
                        prompt_tokens=prompt_tokens,
                        target_output_tokens=target,
                        max_tokens=request.max_tokens,
                        priority=request.priority,
                    )
                )
            except EngineInputError as error:
                raise RequestError(str(error), param=error.field) from error
        return wanted

    async def _cancel_on_disconnect(self, receive: Receive, generations: Sequence[Generation]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for generation in generations:
            self._engine.cancel(generation)

    def _request_id(self, headers: dict[bytes, bytes]) -> str:
        stated = headers.get(b"x-request-id", b"").decode("latin-1")[:_MAX_ID_CHARACTERS]
        return stated or self._ids.bytes(16).hex()

    def _models(self) -> tuple[Headers, bytes]:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "headway",
            "max_model_len": self._engine.truth.limits.max_model_len,
        }
        return [_JSON], msgspec.json.encode({"object": "list", "data": [card]})


class _Exchange:
    """One answer on its way to the client. Where a generation was aborted, because the client or the engine is going,
    the body is left unfinished: that tells it from a whole answer."""

    def __init__(
        self,
        send: Send,
        client_id: str,
        writer: AnswerWriter,
        generations: Sequence[Generation],
        progress: asyncio.Event,
    ) -> None:
        self._send = send
        self._headers: Headers = [(b"x-request-id", client_id.encode("latin-1", "replace"))]
        self._writer = writer
        self._generations = generations
        self._progress = progress

    async def stream(self, *, include_usage: bool) -> None:
        """Send every token as it comes."""
        send = self._send
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM + self._headers})
        while await self._next_progress():
            events = self._writer.new_events()
            if self._ended():
                usage = self._writer.usage_event() if include_usage else b""
                await send({"type": "http.response.body", "body": events + usage + DONE})
                return
            await send({"type": "http.response.body", "body": events, "more_body": True})

    async def send_whole(self) -> None:
        """Send the answer once it is complete."""
        while await self._next_progress():
            if self._ended():
                await _answer(self._send, 200, [_JSON, *self._headers], self._writer.whole())
                return

    async def _next_progress(self) -> bool:
        """Wait for something new; False when a generation was aborted."""
        await self._progress.wait()
        self._progress.clear()
        return all(generation.finish_reason != "abort" for generation in self._generations)

    def _ended(self) -> bool:
        return all(generation.finish_reason is not None for generation in self._generations)


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None when the client went away before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def _require_method(method: str, expected: str, path: str) -> None:
    if method != expected:
        raise RequestError(f"{path} takes {expected}, not {method}", status=405)


def _error_body(error: RequestError) -> bytes:
    kind = _ERROR_TYPES.get(error.status, "BadRequestError")
    details = {"message": str(error), "type": kind, "param": error.param, "code": error.code or error.status}
    return msgspec.json.encode({"error": details})
