"""One table from every error of Headway to an HTTP status and an OpenAI error body.

The gateway answers errors in one shape only, ``{"error": {"message", "type", "param", "code"}}``. This file refuses
to improvise: an error class without a row is a bug that a test finds, and an unforeseen exception becomes a plain 500
that says nothing of its inside.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import NamedTuple

import msgspec

from headway.errors import (
    ArtifactError,
    ConfigError,
    DatasetError,
    EngineInputError,
    HeadwayError,
    NoInstanceError,
    ProfileError,
    RejectedError,
    RequestError,
    RoutingError,
    SnapshotError,
    SnapshotStaleError,
    SnapshotTornError,
    SnapshotVersionError,
    UpstreamConnectError,
    UpstreamError,
    UpstreamInterruptedError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)

HeaderList = list[tuple[bytes, bytes]]


class OverloadedError(RoutingError):
    """More requests are being served than ``server.max_inflight`` allows."""

    def __init__(self) -> None:
        super().__init__("the gateway serves as many requests as it may; try again", retry_after_s=1.0)


class QueueFullError(RejectedError):
    """The central queue is full of requests that come before this one."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s, best_ttft_s=math.inf, reason="queue_full")


class QueueTimeoutError(RejectedError):
    """The request was held for as long as it may be, and the policy did not release it."""

    def __init__(self, message: str, *, retry_after_s: float, best_ttft_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s, best_ttft_s=best_ttft_s, reason="queue_timeout")


class RestingError(RejectedError):
    """Every instance that could serve the request has asked to be left alone for a while."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s, best_ttft_s=math.inf, reason="upstream_resting")


class KeyLimitError(RoutingError):
    """A client's key has reached a limit; ``reason`` names it."""

    def __init__(self, message: str, *, retry_after_s: float, reason: str) -> None:
        self.reason = reason
        super().__init__(message, retry_after_s=retry_after_s)


class BudgetSpentError(KeyLimitError):
    """A client's budget is spent; trying again does not help before the next period."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=3600.0, reason="key_budget")


class DrainingError(RoutingError):
    """The gateway is shutting down and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down", retry_after_s=1.0)


class ErrorRow(NamedTuple):
    """``public`` says whether the exception's own message may reach the client."""

    status: int
    type: str
    code: str | None
    public: bool = False


_INTERNAL = ErrorRow(500, "server_error", "internal_error")

ERROR_TABLE: dict[type[HeadwayError], ErrorRow] = {
    HeadwayError: _INTERNAL,
    ConfigError: _INTERNAL,
    ProfileError: _INTERNAL,
    ArtifactError: _INTERNAL,
    EngineInputError: _INTERNAL,
    DatasetError: _INTERNAL,
    SnapshotError: _INTERNAL,
    SnapshotStaleError: _INTERNAL,
    SnapshotTornError: _INTERNAL,
    SnapshotVersionError: _INTERNAL,
    RequestError: ErrorRow(400, "invalid_request_error", None, public=True),  # its own status and code win
    RoutingError: ErrorRow(503, "server_error", "no_instance", public=True),
    NoInstanceError: ErrorRow(503, "server_error", "no_healthy_instance", public=True),
    RejectedError: ErrorRow(429, "rate_limit_error", "ttft_target_infeasible", public=True),
    QueueFullError: ErrorRow(429, "rate_limit_error", "queue_full", public=True),
    QueueTimeoutError: ErrorRow(429, "rate_limit_error", "queue_timeout", public=True),
    RestingError: ErrorRow(429, "rate_limit_error", "upstream_resting", public=True),
    KeyLimitError: ErrorRow(429, "rate_limit_error", "rate_limit_exceeded", public=True),
    BudgetSpentError: ErrorRow(429, "insufficient_quota", "insufficient_quota", public=True),
    OverloadedError: ErrorRow(429, "rate_limit_error", "max_inflight", public=True),
    DrainingError: ErrorRow(503, "server_error", "draining", public=True),
    UpstreamError: ErrorRow(502, "server_error", "upstream_error", public=True),
    UpstreamConnectError: ErrorRow(502, "server_error", "upstream_unreachable", public=True),
    UpstreamTimeoutError: ErrorRow(504, "timeout_error", "upstream_timeout", public=True),
    UpstreamProtocolError: ErrorRow(502, "server_error", "upstream_protocol_error", public=True),
    UpstreamInterruptedError: ErrorRow(502, "server_error", "upstream_interrupted", public=True),
}


class ErrorAnswer(NamedTuple):
    """What goes back to the client: status, extra headers, body."""

    status: int
    headers: HeaderList
    body: bytes


def error_body(message: str, type_: str, param: str | None = None, code: str | None = None) -> bytes:
    """An OpenAI error body as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


def error_event(error: HeadwayError) -> bytes:
    """The same as one server-sent event, for streams that already began."""
    return b"data: " + error_answer(error).body + b"\n\n"


def row_of(error: BaseException) -> ErrorRow:
    """The row of the nearest class in the table; anything foreign is an internal error."""
    for kind in type(error).__mro__:
        if kind in ERROR_TABLE:
            return ERROR_TABLE[kind]
    return _INTERNAL


def error_answer(error: BaseException) -> ErrorAnswer:
    """Status, headers and body for ``error``. SDKs are told not to retry what the gateway has already retried."""
    row = row_of(error)
    status, code, param, headers = row.status, row.code, None, HeaderList()
    message = str(error) if row.public else "the gateway failed on this request; see its log"
    if isinstance(error, RequestError):
        status, code, param = error.status, error.code, error.param
    if isinstance(error, RoutingError):
        headers += retry_after(error.retry_after_s)
    if isinstance(error, RejectedError):
        headers.append((b"x-headway-reason", error.reason.encode("ascii", "replace")))
        if math.isfinite(error.best_ttft_s):
            headers.append((b"x-headway-best-ttft-ms", b"%.1f" % (error.best_ttft_s * 1e3)))
    if isinstance(error, KeyLimitError):
        headers.append((b"x-headway-reason", error.reason.encode("ascii")))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, OverloadedError):
        headers.append((b"x-headway-reason", b"max_inflight"))
    if status == 413 or isinstance(error, DrainingError):
        headers.append((b"connection", b"close"))
    if isinstance(error, (UpstreamError, BudgetSpentError)):
        headers.append((b"x-should-retry", b"false"))
    return ErrorAnswer(status, headers, error_body(message, _type_of(row, status), param, code))


def retry_after(seconds: float) -> HeaderList:
    """``Retry-After`` in whole seconds, at least 1, and ``retry-after-ms``; an endless wait reads as one hour."""
    seconds = min(max(seconds, 0.0), 3600.0)
    return [(b"retry-after", b"%d" % max(1, math.ceil(seconds))), (b"retry-after-ms", b"%d" % math.ceil(seconds * 1e3))]


def retry_after_of(headers: Iterable[tuple[bytes, bytes]], wall_s: float) -> float | None:
    """Seconds that an upstream's ``retry-after-ms`` or ``Retry-After`` (seconds or a date) asks for; None without."""
    found = {name.lower(): value.strip() for name, value in headers}
    for name, unit_s in ((b"retry-after-ms", 1e-3), (b"retry-after", 1.0)):
        try:
            seconds = float(found[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    with contextlib.suppress(KeyError, ValueError, TypeError, UnicodeDecodeError):
        return max(parsedate_to_datetime(found[b"retry-after"].decode("ascii")).timestamp() - wall_s, 0.0)
    return None


def _type_of(row: ErrorRow, status: int) -> str:
    if row.status == status:
        return row.type
    if status == 429:
        return "rate_limit_error"
    return row.type if status < 500 or row.status >= 500 else "server_error"
