"""Changes single members of a JSON object in its bytes, leaving every other byte as it came.

Parsing and writing a body anew would change big integers, float text, key order and white space; an upstream must get
what the client sent but for what the gateway declares. The bytes must already have passed a JSON parser: this file
refuses to validate, it only finds where members begin and end. One pass, a few microseconds for a common body.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_TOP = re.compile(rb"[{}\[\],:]|" + _STRING, re.DOTALL)
#: Everything up to the next bracket; inside nested values nothing else matters.
_SKIP = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)
_SPACE = b" \t\r\n"
_OPENING = b"{["
_BRACKETS = b"{}[]"
_decode_text = msgspec.json.Decoder(str).decode


class Member(NamedTuple):
    """One member of the object: its name, and where its value and its whole text stand."""

    name: str
    start: int
    value_start: int
    value_end: int
    end: int


def members(body: bytes) -> list[Member]:
    """The members of the JSON object in ``body``, in order, repeated names included."""
    found: list[Member] = []
    position = body.index(b"{") + 1
    start, name, value_start = position, None, 0
    while True:
        match = _TOP.search(body, position)
        if match is None:
            raise ValueError("the bytes hold no complete JSON object")
        position = match.end()
        token = body[match.start()]
        if token in _OPENING:
            position = _end_of_nested(body, position)
        elif token == ord(":"):
            value_start = position
        elif token == ord('"'):
            if name is None:
                name = _decode_text(match.group())
        else:  # "," or "}"
            end = match.start()
            if name is not None:
                span = body[value_start:end]
                left = value_start + len(span) - len(span.lstrip(_SPACE))
                found.append(Member(name, start, left, value_start + len(span.rstrip(_SPACE)), end))
            if token == ord("}"):
                return found
            start, name = position, None


def splice(body: bytes, *, put: Mapping[str, bytes], remove: Collection[str] = ()) -> bytes:
    """``body`` with members set (in place where they are, else at its end) and others removed.

    Every member of a name is meant where it is repeated. Values are JSON as bytes.
    """
    found = members(body)
    pieces: list[bytes] = []
    for member in found:
        if member.name in remove:
            continue
        if member.name in put:
            before, after = body[member.start : member.value_start], body[member.value_end : member.end]
            pieces.append(before + put[member.name] + after)
        else:
            pieces.append(body[member.start : member.end])
    present = {member.name for member in found}
    pieces.extend(msgspec.json.encode(name) + b":" + value for name, value in put.items() if name not in present)
    head = body[: found[0].start if found else body.index(b"{") + 1]
    return head + b",".join(pieces) + body[found[-1].end if found else body.rindex(b"}") :]


def _end_of_nested(body: bytes, position: int) -> int:
    """Where the value that was just opened ends."""
    depth = 1
    while depth:
        match = _SKIP.match(body, position)
        position = (match.end() if match else position) + 1
        if position > len(body) or body[position - 1] not in _BRACKETS:
            raise ValueError("the bytes hold no complete JSON object")
        depth += 1 if body[position - 1] in _OPENING else -1
    return position
