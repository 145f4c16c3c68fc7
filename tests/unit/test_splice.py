"""Changing a member of a JSON body leaves every other byte as it came."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.gateway.splice import splice

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


def test_only_the_model_changes() -> None:
    """T30: white space, big integers, float text, escapes and nested namesakes survive byte for byte."""
    body = (
        b' { "model" :\t"auto" , "seed": 123456789012345678901234567890,\n "t":1.0e5, "x": {"model": "q", '
        b'"a":[1,{"b":"}\\"]\\\\"}]} ,"u":"\\u00e9" }\n'
    )
    assert splice(body, put={"model": b'"m"'}) == body.replace(b'"auto"', b'"m"')


def test_members_are_removed_with_their_comma() -> None:
    """Removing the first, a middle, the last and the only member leaves valid JSON."""
    body = b'{"slo": {"ttft_ms": 1}, "a" : 1, "rso":[], "b":2, "slo":3}'
    assert splice(body, put={}, remove=("slo", "rso")) == b'{ "a" : 1, "b":2}'
    assert splice(b'{"slo":1}', put={}, remove=("slo",)) == b"{}"


def test_new_members_come_last() -> None:
    """What is not there yet is appended, also to an empty object."""
    assert splice(b'{"a":1 }', put={"b": b"[2]"}) == b'{"a":1 ,"b":[2]}'
    assert splice(b"{ }", put={"b": b"2"}) == b'{"b":2}'


def test_repeated_and_escaped_names_are_found() -> None:
    """Every spelling of a name is meant, or an upstream would read another model than the router did."""
    body = b'{"model":"x","mod\\u0065l":"y"}'
    assert splice(body, put={"model": b'"m"'}) == b'{"model":"m","mod\\u0065l":"m"}'


@pytest.mark.parametrize("body", [b"{", b'{"a":1', b'{"a":[1}', b'{"a":[', b'{"a":{"b":"}'])
def test_incomplete_objects_end(body: bytes) -> None:
    """Bytes that no parser accepted raise instead of looping."""
    with pytest.raises(ValueError):
        splice(body, put={"a": b"2"})


@given(
    fields=st.dictionaries(st.text(max_size=8), JSON, max_size=6),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
)
def test_result_equals_the_edited_object(fields: dict[str, object], indent: int | None, ascii_only: bool) -> None:
    """For any object, splicing bytes and editing the parsed object come to the same."""
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    edited = {name: value for name, value in fields.items() if name != "slo"} | {"model": "m"}
    assert json.loads(splice(body, put={"model": b'"m"'}, remove=("slo",))) == edited
