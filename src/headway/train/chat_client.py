"""One chat request to an outside endpoint, from its bytes to a reply with text, tokens and times.

Whatever goes wrong comes back as a reply too, with a status and a reason, because each failure is an entry in
somebody's account. An answer counts as whole only when the endpoint said so: a stream needs its end mark or a finish
reason. It refuses to retry, to follow redirects and to keep cookies; that is for its caller.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta, Struct

from headway.train.endpoints import Endpoint
from headway.types import MAX_COUNT, OutcomeStatus

_CONNECT_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 32 << 20
_MAX_REASON_CHARS = 300
_BOUNDARY = re.compile(rb"\r?\n\r?\n")
#: The request itself was refused: asking again gives the same answer.
_REFUSED = frozenset({400, 413, 422})
#: The endpoint as a whole cannot be used: key, account, address or model are wrong.
_UNUSABLE = frozenset({401, 402, 403, 404, 405})
_UNUSABLE_CODES = frozenset({"insufficient_quota", "billing_not_active", "account_deactivated"})

_Tokens = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class Reply(Struct, frozen=True, kw_only=True):
    """What came of one request. ``reason`` is a short name of the failure, ``error`` says it in words.

    ``busy`` is back-pressure (429, or 503 that says when), ``unusable`` means that no request will do better there.
    ``billed`` tells that the endpoint may have charged for it. Times run from sending, in seconds.
    """

    status: OutcomeStatus
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    latency_s: float = 0.0
    reason: str = ""
    error: str = ""
    http_status: int | None = None
    retry_after_s: float | None = None
    busy: bool = False
    unusable: bool = False
    billed: bool = False


class _Usage(Struct):
    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None


class _Message(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _Choice(Struct):
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Body(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Body).decode


class _BrokenError(Exception):
    """The answer is not whole: a reason and words."""

    def __init__(self, reason: str, words: str) -> None:
        self.reason = reason
        super().__init__(words)


@asynccontextmanager
async def client_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session for :func:`send`, without limits, cookies or an identity of its own."""
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield session


async def send(session: aiohttp.ClientSession, endpoint: Endpoint, body: bytes, *, timeout_s: float) -> Reply:
    """The reply to one request; ``timeout_s`` covers all of it. Raises nothing but a cancellation."""
    answer = _Answer()
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_TIMEOUT_S, timeout_s))
    status: OutcomeStatus = "error"
    try:
        async with session.post(
            endpoint.url, data=body, headers=endpoint.headers, timeout=timeout, allow_redirects=False
        ) as response:
            answer.http_status = response.status
            if response.status != 200:
                return _refusal(endpoint, answer, response, await response.content.read(1 << 16))
            if response.content_type == "text/event-stream":
                await answer.read_events(response.content)
            else:
                answer.read_whole(await _read(response.content))
        return answer.reply("ok", "", "")
    except _BrokenError as broken:
        status = "interrupted" if answer.began else "error"
        return answer.reply(status, broken.reason, endpoint.redacted(str(broken)), billed=True)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        return answer.reply("error", "unreachable", f"{endpoint.id} cannot be reached: {_words(error)}")
    except TimeoutError:
        return answer.reply("timeout", "timeout", f"no whole answer within {timeout_s:g} s", billed=True)
    except (aiohttp.ClientError, OSError) as error:
        status = "interrupted" if answer.began else "error"
        return answer.reply(status, "broken_off", f"{endpoint.id} broke off: {_words(error)}", billed=True)


class _Answer:
    """What has been seen of one answer."""

    def __init__(self) -> None:
        self.http_status: int | None = None
        self._start_s = time.monotonic()
        self._first_token_s: float | None = None
        self._parts: list[str] = []
        self._usage = _Usage()
        self._finished = False

    @property
    def began(self) -> bool:
        """Whether anything of an answer was seen."""
        return bool(self._parts) or self._first_token_s is not None

    def read_whole(self, body: bytes) -> None:
        """Take in an answer that is not streamed."""
        event = self._decoded(body)
        message = event.choices[0].message if event.choices else None
        if message is None:
            raise _BrokenError("malformed", "the answer holds no message")
        self._parts.append(message.content or message.refusal or "")
        self._usage = event.usage or self._usage

    async def read_events(self, content: aiohttp.StreamReader) -> None:
        """Take in a stream up to its end."""
        buffer, num_bytes = b"", 0
        async for chunk in content.iter_any():
            now_s = time.monotonic()
            num_bytes += len(chunk)
            if num_bytes > _MAX_ANSWER_BYTES:
                raise _BrokenError("too_long", f"the answer is longer than {_MAX_ANSWER_BYTES} bytes")
            buffer += chunk
            if b"\n" not in chunk:
                continue
            *events, buffer = _BOUNDARY.split(buffer)
            for event in events:
                self._event(event, now_s)
        self._event(buffer, time.monotonic())  # some end without a blank line
        if not self._finished:
            raise _BrokenError("broken_off", "the stream ended before its end mark")

    def _event(self, event: bytes, now_s: float) -> None:
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if data == b"[DONE]":
            self._finished = True
        if not data or data == b"[DONE]":
            return
        body = self._decoded(data)
        self._usage = body.usage or self._usage
        for choice in body.choices or ():
            delta = choice.delta or _Message()
            text = delta.content or delta.refusal or ""
            if text:
                self._parts.append(text)
            if text or delta.reasoning_content or delta.reasoning or len(delta.tool_calls) > 4:
                self._first_token_s = self._first_token_s or now_s
            self._finished = self._finished or choice.finish_reason is not None

    @staticmethod
    def _decoded(data: bytes) -> _Body:
        try:
            body = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _BrokenError("malformed", f"the answer is malformed: {error}") from error
        if body.error:
            raise _BrokenError("reported_error", f"the answer holds an error: {_shortened(body.error)}")
        return body

    def reply(self, status: OutcomeStatus, reason: str, error: str, *, billed: bool = False) -> Reply:
        """What is known so far, as a reply."""
        first_s = self._first_token_s
        return Reply(
            status=status,
            text="".join(self._parts),
            prompt_tokens=self._usage.prompt_tokens,
            output_tokens=self._usage.completion_tokens,
            ttft_s=None if first_s is None else first_s - self._start_s,
            latency_s=time.monotonic() - self._start_s,
            reason=reason,
            error=error,
            http_status=self.http_status,
            billed=billed or status == "ok",
        )


async def _read(content: aiohttp.StreamReader) -> bytes:
    parts, num_bytes = [], 0
    async for chunk in content.iter_any():
        parts.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > _MAX_ANSWER_BYTES:
            raise _BrokenError("too_long", f"the answer is longer than {_MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)


def _refusal(endpoint: Endpoint, answer: _Answer, response: aiohttp.ClientResponse, body: bytes) -> Reply:
    """A status other than 200 as a reply."""
    code = ""
    message: object = body.decode("utf-8", "replace")
    try:
        fields = msgspec.json.decode(body)
        error = fields.get("error", fields)
        message = error.get("message", error) if isinstance(error, dict) else error
        code = str(error.get("code") or error.get("type") or "") if isinstance(error, dict) else ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, AttributeError):
        pass  # the text itself is all there is
    status = response.status
    retry_after_s = _retry_after_s(response)
    unusable = status in _UNUSABLE or code in _UNUSABLE_CODES
    words = endpoint.redacted(f"{endpoint.id} answered {status}: {_shortened(message)}")
    reply = answer.reply("rejected" if status in _REFUSED else "error", f"http_{status}", words)
    return msgspec.structs.replace(
        reply,
        retry_after_s=retry_after_s,
        busy=not unusable and (status == 429 or (status == 503 and retry_after_s is not None)),
        unusable=unusable,
    )


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """When to come again: ``retry-after-ms``, or ``Retry-After`` as seconds or as a date."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        text = response.headers.get(name)
        if text is None:
            continue
        try:
            return max(0.0, min(float(text) * scale, 1e6))
        except ValueError:
            pass
        try:
            return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, TypeError, OverflowError):
            pass
    return None


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "…"


def _words(error: BaseException) -> str:
    return _shortened(str(error) or type(error).__name__)
