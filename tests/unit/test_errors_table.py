"""Every error class has a row, and every answer the shape OpenAI clients expect."""

from __future__ import annotations

import inspect
import json
import math

import pytest

import headway.errors
from headway.errors import (
    ConfigError,
    HeadwayError,
    NoInstanceError,
    RejectedError,
    RequestError,
    UpstreamConnectError,
    UpstreamTimeoutError,
)
from headway.gateway.errors import ERROR_TABLE, OverloadedError, error_answer, error_event

CLASSES = [
    member for _, member in inspect.getmembers(headway.errors, inspect.isclass) if issubclass(member, HeadwayError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_class_has_a_row(kind: type[HeadwayError]) -> None:
    """A class of the error tree without a row of its own would answer with its parent's status by accident."""
    assert kind in ERROR_TABLE


@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (RequestError("x", param="model"), 400, "invalid_request_error", None),
        (RequestError("x", status=404, code="model_not_found"), 404, "invalid_request_error", "model_not_found"),
        (NoInstanceError("x"), 503, "server_error", "no_healthy_instance"),
        (UpstreamConnectError("x"), 502, "server_error", "upstream_unreachable"),
        (UpstreamTimeoutError("x"), 504, "timeout_error", "upstream_timeout"),
        (OverloadedError(), 429, "rate_limit_error", "max_inflight"),
        (ConfigError("x"), 500, "server_error", "internal_error"),
        (ValueError("x"), 500, "server_error", "internal_error"),
    ],
)
def test_answers_have_the_openai_shape(error: Exception, status: int, type_: str, code: str | None) -> None:
    """Each answer is ``{"error": {message, type, param, code}}`` with the status of its row."""
    answer = error_answer(error)
    body = json.loads(answer.body)["error"]
    assert (answer.status, body["type"], body["code"]) == (status, type_, code)
    assert set(body) == {"message", "type", "param", "code"}


def test_internal_messages_stay_inside() -> None:
    """What went wrong inside the gateway is for its log, not for the client."""
    assert b"secret-path" not in error_answer(ConfigError("secret-path")).body
    assert b"secret-path" not in error_answer(ValueError("secret-path")).body


def test_rejections_say_when_to_come_back() -> None:
    """A 429 carries Retry-After in whole seconds (at least 1), milliseconds, a reason and the best TTFT on offer."""
    error = RejectedError("x", retry_after_s=0.25, best_ttft_s=0.5, reason="ttft_target")
    headers = dict(error_answer(error).headers)
    assert headers[b"retry-after"] == b"1"
    assert headers[b"retry-after-ms"] == b"250"
    assert headers[b"x-headway-reason"] == b"ttft_target"
    assert headers[b"x-headway-best-ttft-ms"] == b"500.0"
    assert b"x-should-retry" not in headers


def test_endless_waits_are_still_headers() -> None:
    """An infinite drain time becomes an hour, not a crash."""
    error = RejectedError("x", retry_after_s=math.inf, best_ttft_s=math.inf, reason="ttft_target")
    assert dict(error_answer(error).headers)[b"retry-after"] == b"3600"


def test_clients_do_not_multiply_our_retries() -> None:
    """After our own attempts SDKs are told to leave it."""
    assert (b"x-should-retry", b"false") in error_answer(UpstreamTimeoutError("x")).headers


def test_errors_inside_a_stream_are_one_event() -> None:
    """The same body as one server-sent event."""
    event = error_event(UpstreamTimeoutError("x"))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
