"""Reads a copy of a server-sent event stream while its bytes pass through untouched.

Chunks of a network are cut anywhere, also inside an event or a UTF-8 character; events end at a blank line, LF or CRLF.
The reader tells when the first token came, counts content events and finds usage, errors and the end. It refuses to
change bytes, with one exception: a usage event that only the gateway asked for is dropped.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct

Dialect = Literal["chat", "responses"]

#: A carriage return before it stays with the event. Written so that the search can jump from LF to LF.
_BOUNDARY = re.compile(rb"\n\r?\n")
_LINE_END = re.compile(rb"\r?\n")
#: Where a token's text begins in an event.
_TEXT_BEGINS = re.compile(rb'"(?:content|reasoning_content|reasoning|text)": ?"')
#: Text that ends at the next quote, for there is no escape in it, and that JSON and lines of events allow.
_PLAIN_TEXT = re.compile(rb'[^"\\\x00-\x1f]+')
#: Streams whose events differ in more than their text are not asked more often what they have in common.
_MAX_FRAMES = 8
_FIELD = re.compile(rb"(?:^|\n)(?!:)[^\r\n]")
#: An event longer than this is no longer parsed, only passed on (a stream without blank lines must not fill memory).
MAX_EVENT_BYTES = 16 << 20
_ABSENT = Raw()
_EMPTY = frozenset((b"", b"null", b'""', b"[]", b"{}"))


class Usage(NamedTuple):
    """Token counts as the upstream reports them."""

    prompt_tokens: int
    output_tokens: int


class _Delta(Struct, gc=False):
    content: Raw = _ABSENT
    reasoning_content: Raw = _ABSENT
    reasoning: Raw = _ABSENT
    tool_calls: Raw = _ABSENT
    function_call: Raw = _ABSENT
    refusal: Raw = _ABSENT


class _Choice(Struct, gc=False):
    delta: _Delta | None = None
    text: Raw = _ABSENT
    finish_reason: Raw = _ABSENT


class _ChatEvent(Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Raw = _ABSENT
    error: Raw = _ABSENT


class _ResponsesBody(Struct, gc=False):
    usage: Raw = _ABSENT


class _ResponsesEvent(Struct, gc=False):
    type: str = ""
    delta: Raw = _ABSENT
    response: _ResponsesBody | None = None


class _UsageBody(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Answer(Struct, gc=False):
    usage: Raw = _ABSENT


_decode_chat = msgspec.json.Decoder(_ChatEvent).decode
_decode_responses = msgspec.json.Decoder(_ResponsesEvent).decode
_decode_usage = msgspec.json.Decoder(_UsageBody).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


def usage_of_answer(body: bytes) -> Usage | None:
    """The usage a whole JSON answer reports, None where it reports none."""
    try:
        return _usage(_decode_answer(body).usage)
    except msgspec.MsgspecError:
        return None


class EventStream:
    """One stream on its way through. ``feed`` takes a chunk and returns the bytes to pass on at once.

    ``has_data`` is true from the first byte on that is no comment; ``num_content`` counts events with a non-empty
    content, reasoning or tool-call delta, so the first token came when it leaves 0. ``finished`` means that the
    upstream said so itself (``[DONE]``, a finish reason or a final event): an end without it is a broken stream.
    """

    __slots__ = (
        "_decode",
        "_drop_usage",
        "_frame",
        "_holding",
        "_is_plain",
        "_num_frames",
        "_num_sent",
        "_overflowed",
        "_scanned",
        "_tail",
        "finished",
        "has_data",
        "has_error",
        "num_content",
        "usage",
    )

    def __init__(self, dialect: Dialect = "chat", *, drop_usage: bool = False) -> None:
        self.has_data = False
        self.has_error = False
        self.finished = False
        self.num_content = 0
        self.usage: Usage | None = None
        self._decode = self._read_chat if dialect == "chat" else self._read_responses
        self._drop_usage = drop_usage
        self._frame: tuple[bytes, bytes] | None = None  # what stood around the text of a content event
        self._num_frames = 0
        self._is_plain = False  # the last event held content of one choice and nothing else
        self._holding = False
        self._tail = bytearray()
        self._num_sent = 0  # bytes of the tail that were passed on already
        self._scanned = 0
        self._overflowed = False

    @property
    def inside_event(self) -> bool:
        """Whether the last byte that was passed on stands inside an event."""
        return self._num_sent > 0 or self._overflowed

    def feed(self, chunk: bytes) -> bytes:
        """Bytes to pass on now: ``chunk`` itself, but for what belongs to a usage event that is being dropped."""
        if self._overflowed:
            return chunk
        tail = self._tail
        text: bytes | bytearray = chunk
        if not tail:
            frame = self._frame
            if (
                frame is not None
                and chunk.startswith(frame[0])
                and chunk.endswith(frame[1])
                and _PLAIN_TEXT.fullmatch(chunk, len(frame[0]), len(chunk) - len(frame[1]))
            ):  # only the text differs from an event that was read: one more content event, and nothing else
                self.num_content += 1
                return chunk
            end = chunk.find(b"\n\n")
            if end > 0 and end == len(chunk) - 2 and b"\r" not in chunk:  # one whole event, by far the most common
                num_content = self.num_content
                if self._event(chunk[:end]):
                    return b""
                if self.num_content > num_content and self._is_plain and self._num_frames < _MAX_FRAMES:
                    self._frame = _frame_of(chunk)
                    self._num_frames += 1
                return chunk
        if tail or not chunk.endswith((b"\n\n", b"\n\r\n")):
            tail += chunk
            text = tail
        out: list[bytes] = []
        start = 0
        for match in _BOUNDARY.finditer(text, self._scanned):
            end = match.end()
            dropped = self._event(bytes(text[start : match.start()])) and self._num_sent == 0
            if self._drop_usage and not dropped:
                out.append(bytes(text[start + self._num_sent : end]))
            self._num_sent = 0
            start = end
        if text is tail:
            del tail[:start]
            self._keep_tail(out)
        elif start < len(chunk):  # a line end too many behind the last event
            tail += chunk[start:]
            self._keep_tail(out)
        return b"".join(out) if self._drop_usage else chunk

    def flush(self) -> bytes:
        """What was held back when the stream ended; empty but for a cut usage event."""
        held = bytes(self._tail[self._num_sent :])
        self._num_sent = len(self._tail)
        return held

    def _keep_tail(self, out: list[bytes]) -> None:
        tail = self._tail
        self._scanned = max(0, len(tail) - 2)  # a boundary may begin in the last two bytes
        if not self.has_data:
            self.has_data = _FIELD.search(tail) is not None
        self._overflowed = len(tail) > MAX_EVENT_BYTES
        if self._overflowed or not self._holding:
            out.append(bytes(tail[self._num_sent :]))
            self._num_sent = len(tail)
        if self._overflowed:
            tail.clear()
            self._num_sent = 0

    def _event(self, event: bytes) -> bool:
        """Take in one event; True when it must not reach the client."""
        if b"\n" not in event and event.startswith(b"data:"):
            data = event[5:]
        else:
            lines = _LINE_END.split(event.removeprefix(b"\xef\xbb\xbf"))
            if not any(line and not line.startswith(b":") for line in lines):
                return False  # comments only
            data = b"\n".join(line[5:] for line in lines if line.startswith(b"data:"))
        self.has_data = True
        if data.endswith(b"[DONE]") and data.strip() == b"[DONE]":
            self.finished = True
            return False
        try:
            return self._decode(data)
        except msgspec.MsgspecError:
            return False  # not of a shape we know: it passes all the same

    def _read_chat(self, data: bytes) -> bool:
        event = _decode_chat(data)
        choices = event.choices
        if choices:
            for choice in choices:
                delta = choice.delta
                if delta is not None:
                    if (
                        _filled(delta.content)
                        or _filled(delta.reasoning_content)
                        or _filled(delta.reasoning)
                        or _filled(delta.tool_calls)
                        or _filled(delta.function_call)
                        or _filled(delta.refusal)
                    ):
                        self.num_content += 1
                        break
                elif _filled(choice.text):
                    self.num_content += 1
                    break
            for choice in choices:
                if _filled(choice.finish_reason):
                    self.finished = True
                    self._holding = self._drop_usage  # the usage event comes next
        self._is_plain = choices is not None and len(choices) == 1 and not self.finished
        if _filled(event.error):
            self.has_error = True
            self._is_plain = False
        if not _filled(event.usage):
            return False
        self._is_plain = False
        self.usage = _usage(event.usage) or self.usage
        return self._drop_usage and event.choices is not None and not choices

    def _read_responses(self, data: bytes) -> bool:
        event = _decode_responses(data)
        if event.type.endswith(".delta"):
            self.num_content += _filled(event.delta)
        elif event.type in ("response.completed", "response.incomplete", "response.failed"):
            self.finished = True
            self.has_error = event.type == "response.failed"
            if event.response is not None:
                self.usage = _usage(event.response.usage)
        elif event.type == "error":
            self.has_error = True
        return False


def _frame_of(event: bytes) -> tuple[bytes, bytes] | None:
    """What stands around the one text of a valid event, None where there is none or several might be meant."""
    places = list(_TEXT_BEGINS.finditer(event))
    if len(places) != 1:
        return None
    begin = places[0].end()
    text = _PLAIN_TEXT.match(event, begin)
    if text is None or event[text.end()] != ord('"'):
        return None
    return event[:begin], event[text.end() :]


def _filled(raw: Raw) -> bool:
    length = len(raw)
    return length > 4 or (length > 0 and bytes(raw) not in _EMPTY)


def _usage(raw: Raw) -> Usage | None:
    if not _filled(raw):
        return None
    try:
        body = _decode_usage(raw)
    except msgspec.MsgspecError:
        return None
    prompt = body.prompt_tokens if body.prompt_tokens is not None else body.input_tokens
    output = body.completion_tokens if body.completion_tokens is not None else body.output_tokens
    return Usage(prompt or 0, output or 0) if prompt is not None or output is not None else None
