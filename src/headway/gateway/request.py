"""What a client asked for: names of headers and body keys exactly as the outside conventions have them.

The body is parsed once, for reading only; its bytes stay as they came. This file refuses to judge what is the
upstream's business (unknown fields, sampling parameters): it checks the model, the prompt's shape and what routing
itself uses, and names the parameter it turns down.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from headway.errors import RequestError
from headway.gateway.guard import ClientGoneError, Receive
from headway.gateway.sse import Dialect
from headway.predict.prefix import prefix_blocks
from headway.predict.prompt import both_ends, conversation
from headway.predict.tokens import prompt_text, prompt_tokens_of
from headway.types import MAX_COUNT

Headers = Mapping[bytes, bytes]

_MAX_ID_CHARS = 128


class Endpoint(NamedTuple):
    """One of the OpenAI paths that are routed. ``default_max_tokens`` is what engines take where the body is silent."""

    path: str
    operation: str
    prompt_fields: tuple[str, ...]
    max_tokens_fields: tuple[str, ...]
    default_max_tokens: int | None = None
    dialect: Dialect = "chat"
    reports_usage_on_demand: bool = False


CHAT = Endpoint(
    "/v1/chat/completions",
    "chat",
    ("messages",),
    ("max_completion_tokens", "max_tokens"),
    reports_usage_on_demand=True,
)
ENDPOINTS: dict[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        CHAT,
        Endpoint(
            "/v1/completions",
            "text_completion",
            ("prompt",),
            ("max_tokens",),
            default_max_tokens=16,
            reports_usage_on_demand=True,
        ),
        Endpoint("/v1/embeddings", "embeddings", ("input", "messages"), (), default_max_tokens=1),
        Endpoint("/v1/responses", "responses", ("input",), ("max_output_tokens",), dialect="responses"),
    )
}


class Targets(NamedTuple):
    """What the client wants of the answer. Milliseconds as they came in; ``ignored`` names what is not used yet."""

    ttft_ms: float | None
    quality_min: float | None
    max_cost_usd: float | None
    ignored: tuple[str, ...]


_NO_TARGETS = Targets(None, None, None, ())
_TARGET_HEADERS = frozenset((b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms"))


class ClientRequest(Struct, frozen=True, kw_only=True):
    """A checked request. ``body`` is as it came; ``own_keys`` are the routing keys to strip from it.

    Of a long prompt ``prompt_text`` is both ends; ``prompt_chars`` and the two after it are of all of it.
    """

    endpoint: Endpoint
    body: bytes
    model: str
    stream: bool
    prompt_text: str
    prompt_chars: int
    num_turns: int
    system_chars: int
    num_counted_tokens: int
    max_tokens: int | None
    priority: int
    targets: Targets
    asked_for_usage: bool
    stream_options: object
    own_keys: tuple[str, ...]
    prefix_blocks: tuple[int, ...] = ()


def first_headers(pairs: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Header name (lower case) → its first value."""
    return dict(reversed(pairs))


def request_id(headers: Headers) -> str:
    """The client's ``x-request-id`` or ``x-correlation-id``; a new one where there is none that can be a header."""
    for name in (b"x-request-id", b"x-correlation-id"):
        value = headers.get(name, b"").strip()
        if 0 < len(value) <= _MAX_ID_CHARS and value.isascii() and value.decode("ascii").isprintable():
            return value.decode("ascii")
    return secrets.token_hex(12)


def parse_request(
    endpoint: Endpoint, headers: Headers, body: bytes, *, prefix_block_tokens: int | None = None
) -> ClientRequest:
    """The request in ``body``; its prompt's blocks are named where ``prefix_block_tokens`` says how long one is.

    Raises:
        RequestError: no JSON object, no model, no prompt, or a target that is no possible value; ``param`` names it.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise RequestError("the body must name a 'model'", param="model")
    text = prompt_text(fields)
    num_turns, system_chars = conversation(fields.get("messages"))
    options = fields.get("stream_options")
    return ClientRequest(
        endpoint=endpoint,
        body=body,
        model=model,
        stream=fields.get("stream") is True,
        prompt_text=both_ends(text),
        prompt_chars=len(text),
        num_turns=num_turns,
        system_chars=system_chars,
        num_counted_tokens=min(prompt_tokens_of(fields), MAX_COUNT),
        max_tokens=_max_tokens(endpoint, fields),
        priority=_priority(fields),
        targets=_targets(headers, fields),
        asked_for_usage=isinstance(options, dict) and options.get("include_usage") is True,
        stream_options=options,
        own_keys=tuple(key for key in ("slo", "rso") if key in fields),
        prefix_blocks=() if prefix_block_tokens is None else prefix_blocks(fields, prefix_block_tokens),
    )


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """The whole body, as it came.

    Raises:
        RequestError: 413, it is larger than ``max_bytes``.
        ClientGoneError: the client left before its end.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise body_too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise body_too_large(max_bytes)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def body_too_large(max_bytes: int) -> RequestError:
    """The refusal of a body that exceeds ``server.max_body_mb``."""
    return RequestError(
        f"the body is larger than {max_bytes / 1e6:g} MB (server.max_body_mb)", status=413, code="request_too_large"
    )


def _max_tokens(endpoint: Endpoint, fields: Mapping[str, object]) -> int | None:
    """The cap of the answer; a value that is no positive count is the upstream's to refuse."""
    for name in endpoint.max_tokens_fields:
        value = fields.get(name)
        if type(value) is int and value > 0:
            return min(value, MAX_COUNT)
    return endpoint.default_max_tokens


def _priority(fields: Mapping[str, object]) -> int:
    value = fields.get("priority")
    if value is None:
        return 0
    if type(value) is not int or abs(value) > MAX_COUNT:
        raise RequestError("'priority' must be an integer; lower is sooner", param="priority")
    return value


def _targets(headers: Headers, fields: Mapping[str, object]) -> Targets:
    slo, rso = _object(fields, "slo"), _object(fields, "rso")
    if not slo and not rso and _TARGET_HEADERS.isdisjoint(headers):
        return _NO_TARGETS
    ttft = _first(
        (headers.get(b"x-slo-ttft-ms"), "x-slo-ttft-ms"),
        (headers.get(b"x-llm-d-slo-ttft-ms"), "x-llm-d-slo-ttft-ms"),
        (slo.get("ttft_ms"), "slo.ttft_ms"),
        (rso.get("ttft_slo_ms"), "rso.ttft_slo_ms"),
    )
    tpot = _first(
        (headers.get(b"x-slo-tpot-ms"), "x-slo-tpot-ms"),
        (headers.get(b"x-llm-d-slo-tpot-ms"), "x-llm-d-slo-tpot-ms"),
        (slo.get("tpot_ms"), "slo.tpot_ms"),
        (rso.get("tpot_slo_ms"), "rso.tpot_slo_ms"),
    )
    quality = _first((slo.get("quality_min"), "slo.quality_min"), (rso.get("quality_min"), "rso.quality_min"))
    budget = _first((slo.get("max_cost_usd"), "slo.max_cost_usd"), (rso.get("budget_cost"), "rso.budget_cost"))
    ignored = [f"slo.{key}" for key in slo if key not in ("ttft_ms", "tpot_ms", "quality_min", "max_cost_usd")]
    if tpot is not None:
        _number(*tpot, unit="milliseconds above 0", positive=True)
        ignored.insert(0, "tpot")
    return Targets(
        ttft_ms=None if ttft is None else _number(*ttft, unit="milliseconds above 0", positive=True),
        quality_min=None if quality is None else _number(*quality, unit="a quality from 0 to 1", most=1.0),
        max_cost_usd=None if budget is None else _number(*budget, unit="USD, at least 0"),
        ignored=tuple(ignored),
    )


def _object(fields: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"'{key}' must be an object", param=key)
    return value


def _first(*places: tuple[object, str]) -> tuple[object, str] | None:
    """(value, name) of the first place that says something."""
    return next((place for place in places if place[0] is not None), None)


def _number(value: object, name: str, *, unit: str, positive: bool = False, most: float = math.inf) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, bytes)):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and 0.0 <= number <= most) or (positive and number == 0.0):
        raise RequestError(f"'{name}' must be a number: {unit}", param=name)
    return number
