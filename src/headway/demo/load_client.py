"""Plays a workload against a gateway: every query at its time, streamed, its first content token timed.

One event loop and no parsing beyond the first token and the last events, so that the client takes little of the
machine that the engines run on. It refuses to hide anything: whatever ends without a whole answer is an error with a
name, and a query still open when the patience after the last arrival ends is one too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import msgspec
from msgspec import Struct

from headway.demo.score import Served
from headway.demo.workload import MAX_TOKENS, DemoQuery

#: How much of a stream's end is kept to read usage and the engine's own figures from.
_TAIL_BYTES = 4096
_CONNECT_TIMEOUT_S = 10.0

#: Called with a query's outcome as soon as it is known.
OnServed = Callable[[Served], None]


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[object] | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _EngineFigures(Struct):
    ttft_s: float | None = None
    queue_s: float | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    x_headway_engine: _EngineFigures | None = None
    error: object = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _FailedError(Exception):
    """A query ended without a whole answer; the text says how, in few words that can be counted."""


async def play(
    queries: Sequence[DemoQuery],
    base_url: str,
    *,
    patience_s: float,
    on_sent: Callable[[], None] = lambda: None,
    on_served: OnServed = lambda served: None,
) -> list[Served]:
    """One outcome per query, in the order of ``queries``. Ends at most ``patience_s`` after the last arrival."""
    requests = [_request(query) for query in queries]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(base_url, connector=connector, timeout=timeout, auto_decompress=False) as session,
        asyncio.TaskGroup() as tasks,
    ):
        start_s = time.monotonic()
        end_s = start_s + queries[-1].arrival_s + patience_s
        sent: list[asyncio.Task[Served]] = []
        for query, request in zip(queries, requests, strict=True):
            await asyncio.sleep(start_s + query.arrival_s - time.monotonic())
            lateness_s = time.monotonic() - start_s - query.arrival_s
            serving = _serve(
                session, request, number=query.number, lateness_s=lateness_s, end_s=end_s, on_served=on_served
            )
            sent.append(tasks.create_task(serving))
            on_sent()
    return [task.result() for task in sent]


def _request(query: DemoQuery) -> tuple[dict[str, str], bytes]:
    """Headers and body, made before the run starts. The gateway forwards the lengths to the engine unread."""
    lengths = ",".join(f"{model}={answer.output_tokens}" for model, answer in query.answers.items())
    headers = {
        "content-type": "application/json",
        "x-request-id": f"demo-{query.number}",
        "x-slo-ttft-ms": f"{query.ttft_target_s * 1000:.3f}",
        "x-headway-sim-output-tokens": lengths,
    }
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": query.prompt}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return headers, msgspec.json.encode(body)


async def _serve(
    session: aiohttp.ClientSession,
    request: tuple[dict[str, str], bytes],
    *,
    number: int,
    lateness_s: float,
    end_s: float,
    on_served: OnServed,
) -> Served:
    answer = _Answer()
    error = None
    try:
        async with asyncio.timeout(end_s - time.monotonic()):
            await _read(session, request, answer)
    except _FailedError as failure:
        error = str(failure)
    except aiohttp.ClientError as failure:
        error = type(failure).__name__
    except TimeoutError:
        error = "unfinished when patience ended"
    served = Served(
        number=number,
        lateness_s=lateness_s,
        instance=answer.headers.get("x-headway-instance"),
        model=answer.headers.get("x-headway-model"),
        slo=answer.headers.get("x-headway-slo"),
        ttft_s=answer.ttft_s,
        predicted_ttft_s=_seconds(answer.headers.get("x-headway-predicted-ttft-ms")),
        engine_ttft_s=answer.engine.ttft_s,
        prompt_tokens=answer.usage.prompt_tokens,
        output_tokens=answer.usage.completion_tokens,
        error=error,
    )
    on_served(served)
    return served


async def _read(session: aiohttp.ClientSession, request: tuple[dict[str, str], bytes], answer: _Answer) -> None:
    headers, body = request
    start_s = time.monotonic()
    async with session.post("/v1/chat/completions", data=body, headers=headers) as response:
        answer.headers = response.headers
        if response.status != 200:
            raise _FailedError(f"HTTP {response.status}: {_error_code(await response.read())}")
        async for chunk in response.content.iter_any():
            now_s = time.monotonic()
            if answer.ttft_s is None and answer.has_content(chunk):
                answer.ttft_s = now_s - start_s
            answer.tail = (answer.tail + chunk)[-_TAIL_BYTES:]
    answer.finish()


class _Answer:
    """What has been seen of one streamed answer."""

    def __init__(self) -> None:
        self.headers: Mapping[str, str] = {}
        self.ttft_s: float | None = None
        self.tail = b""
        self.usage = _Usage()
        self.engine = _EngineFigures()
        self._head = b""

    def has_content(self, chunk: bytes) -> bool:
        """Whether ``chunk`` completes the first event with content. Called until it does."""
        *events, self._head = (self._head + chunk).split(b"\n\n")
        return any(_brings_content(event) for event in map(_event, events) if event)

    def finish(self) -> None:
        """Read the last events.

        Raises:
            _FailedError: the stream ended early, in an error, or without any content.
        """
        *events, _ = self.tail.split(b"\n\n")
        if len(self.tail) == _TAIL_BYTES:  # the first piece may lack its beginning
            events = events[1:]
        for event in map(_event, events):
            if event is None:
                continue
            if event.error is not None:
                raise _FailedError("the stream broke off with an error event")
            self.usage = event.usage or self.usage
            self.engine = event.x_headway_engine or self.engine
        if not events or _data(events[-1]) != b"[DONE]":
            raise _FailedError("the stream ended before [DONE]")
        if self.ttft_s is None:
            raise _FailedError("the stream held no content")


def _data(event: bytes) -> bytes:
    return event.removeprefix(b"data:").strip() if event.startswith(b"data:") else b""


def _event(event: bytes) -> _Event | None:
    """The JSON of one event; None for comments and the end mark."""
    data = _data(event)
    if not data or data == b"[DONE]":
        return None
    try:
        return _decode_event(data)
    except msgspec.MsgspecError as error:
        raise _FailedError("a malformed event") from error


def _brings_content(event: _Event) -> bool:
    deltas = [choice.delta for choice in event.choices]
    return any(delta.content or delta.reasoning_content or delta.tool_calls for delta in deltas)


def _error_code(body: bytes) -> str:
    """The code or type of an OpenAI error body."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error.get("code") or error.get("type"))
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return "no OpenAI error body"


def _seconds(milliseconds: str | None) -> float | None:
    """A header in ms as seconds; None where it is absent or no finite number (nothing was predicted)."""
    try:
        value = float(milliseconds or "nan") / 1000
    except ValueError:
        return None
    return value if math.isfinite(value) else None
