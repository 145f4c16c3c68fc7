"""Request bodies of every shape: each is a request or a refusal that names what is wrong, and bytes stay as they came.

The bodies are made of the names that matter with values of every kind, so that most of them pass the first checks.
"""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines.openai_request import answer_tokens
from headway.engines.openai_request import parse as parse_for_engine
from headway.errors import RequestError
from headway.gateway.request import CHAT, ENDPOINTS, ClientRequest, Endpoint, parse_request, request_id
from headway.gateway.splice import splice
from headway.predict.prompt import conversation
from headway.predict.tokens import prompt_text, prompt_tokens_of

_TEXT = st.text(max_size=12) | st.sampled_from(["", " ", "\x00", "\ud800", "é" * 9, '"}', "\\", "auto"])
_LEAF = st.none() | st.booleans() | st.integers() | st.floats() | _TEXT
_VALUE = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=8
)
_PART = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["text", "input_text", "image_url"]) | _VALUE, "text": _VALUE}
)
_CONTENT = _VALUE | st.lists(_PART | _VALUE, max_size=3)
_CALL = st.fixed_dictionaries({}, optional={"function": _VALUE | st.fixed_dictionaries({"name": _VALUE})})
_MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "system", "developer", "assistant", "tool"]) | _VALUE,
        "content": _CONTENT,
        "tool_calls": _VALUE | st.lists(_CALL | _VALUE, max_size=2),
    },
)
_NUMBER = st.sampled_from([0, 1, -1, 800, 0.5, 1.5, -0.0, 1e308, 2**31, 2**63, 10**30, True, "800", math.nan, math.inf])
_TARGETS = st.dictionaries(
    st.sampled_from(["ttft_ms", "tpot_ms", "quality_min", "max_cost_usd", "ttft_slo_ms", "budget_cost", "e2e_ms"]),
    _NUMBER | _VALUE,
    max_size=4,
)
_PROMPT = _VALUE | st.lists(st.integers(-1, 10), max_size=4) | st.lists(st.lists(st.integers(-1, 10)), max_size=3)
_BODY = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("auto") | _VALUE,
        "messages": st.lists(_MESSAGE, max_size=3) | _VALUE,
        "prompt": _PROMPT,
        "input": _PROMPT,
        "instructions": _VALUE,
        "tools": _VALUE,
        "stream": st.booleans() | _VALUE,
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": _VALUE}) | _VALUE,
        "max_tokens": _NUMBER | _VALUE,
        "max_completion_tokens": _NUMBER | _VALUE,
        "max_output_tokens": _NUMBER | _VALUE,
        "priority": _NUMBER | _VALUE,
        "n": _NUMBER,
        "ignore_eos": st.booleans(),
        "min_tokens": _NUMBER,
        "slo": _TARGETS | _VALUE,
        "rso": _TARGETS | _VALUE,
    },
)
_BYTES = st.binary(max_size=40) | _BODY.map(lambda body: json.dumps(body).encode()) | _BODY.map(
    lambda body: json.dumps(body).encode()[:-1]
)  # fmt: skip
_HEADER = st.dictionaries(
    st.sampled_from([b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-llm-d-slo-ttft-ms", b"x-request-id", b"x-correlation-id"]),
    st.sampled_from([b"300", b"-1", b"nan", b"1e400", b"", b"abc", b"\xff", b"1_0"]) | st.binary(max_size=9),
    max_size=3,
)


@settings(max_examples=400)
@given(_BYTES, _HEADER, st.sampled_from(list(ENDPOINTS.values())))
def test_a_body_is_a_request_or_a_refusal(body: bytes, headers: dict[bytes, bytes], endpoint: Endpoint) -> None:
    """Nothing but RequestError comes out, with a status of the client's kind; a request holds possible values only."""
    try:
        request = parse_request(endpoint, headers, body)
    except RequestError as refusal:
        _check_refusal(refusal)
        return
    _check(request)
    name = request_id(headers)
    assert name.isascii()
    assert name.isprintable()
    assert 0 < len(name) <= 128


def _check_refusal(refusal: RequestError) -> None:
    assert 400 <= refusal.status < 500
    assert str(refusal)


def _check(request: ClientRequest) -> None:
    assert request.model
    assert 1 <= request.num_counted_tokens < 2**31
    assert request.max_tokens is None or 1 <= request.max_tokens < 2**31
    assert abs(request.priority) < 2**31
    targets = request.targets
    assert targets.ttft_ms is None or 0.0 < targets.ttft_ms < math.inf
    assert targets.quality_min is None or 0.0 <= targets.quality_min <= 1.0
    assert targets.max_cost_usd is None or 0.0 <= targets.max_cost_usd < math.inf
    fields = json.loads(request.body)
    sent = json.loads(splice(request.body, put={"model": b'"m"'}, remove=request.own_keys))
    expected = {name: value for name, value in fields.items() if name not in ("slo", "rso")} | {"model": "m"}
    assert json.dumps(sent, sort_keys=True) == json.dumps(expected, sort_keys=True)
    request.prompt_text.encode("utf-8", "surrogatepass")


@settings(max_examples=300)
@given(_BODY)
def test_text_and_tokens_are_told_of_the_same_bodies(body: dict[str, object]) -> None:
    """Whoever counts a prompt can also read it, and the other way round; a conversation has at least one turn."""
    try:
        body = msgspec.json.decode(json.dumps(body))
    except msgspec.DecodeError:  # half a character: such a body is refused as a whole
        return
    results = []
    for read in (prompt_text, prompt_tokens_of):
        try:
            results.append(read(body))
        except RequestError:
            results.append(None)
    text, tokens = results
    assert (text is None) == (tokens is None)
    if text is not None:
        assert isinstance(tokens, int)
        assert tokens >= 1
        num_turns, system_chars = conversation(body.get("messages"))
        assert num_turns >= 1
        assert system_chars >= 0


@settings(max_examples=300)
@given(_BYTES, st.booleans(), st.sampled_from([None, "5", "m=7,x=9", "=", "m=", "m=0", "9" * 30]))
def test_the_simulated_engine_refuses_what_it_cannot_do(body: bytes, chat: bool, header: str | None) -> None:
    """It answers or refuses, and an answer has a possible length."""
    try:
        request = parse_for_engine(body, chat=chat, model="m", max_model_len=4096)
        num_tokens = answer_tokens(request, "id", header=header, model="m", seed=1)
    except RequestError as refusal:
        _check_refusal(refusal)
        return
    assert num_tokens >= 1
    assert all(1 <= count < 4096 for count in request.prompt_tokens)


def test_deep_bodies_end_in_a_refusal() -> None:
    """A body nested a hundred thousand deep is refused, not a crash."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        deep = opening * 100_000 + "1" + closing * 100_000
        body = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "extra": {deep}}}'.encode()
        with pytest.raises(RequestError, match="not valid JSON"):
            parse_request(CHAT, {}, body)
