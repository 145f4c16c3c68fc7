"""Event streams of any bytes, cut anywhere: what passes is what came, and cuts change no fact."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.gateway.sse import Dialect, EventStream

_LEAF = st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6) | st.just("tok")
_VALUE = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip
_DELTA = st.dictionaries(st.sampled_from(["role", "content", "reasoning_content", "tool_calls", "refusal"]), _VALUE)
_CHOICE = st.fixed_dictionaries(
    {}, optional={"delta": _DELTA | _VALUE, "text": _VALUE, "finish_reason": st.just("stop") | _VALUE}
)
_USAGE = st.fixed_dictionaries({}, optional={"prompt_tokens": _VALUE, "completion_tokens": _VALUE}) | _VALUE
_CHAT = st.fixed_dictionaries(
    {}, optional={"choices": st.lists(_CHOICE | _VALUE, max_size=2) | _VALUE, "usage": _USAGE, "error": _VALUE}
)
_RESPONSES = st.fixed_dictionaries(
    {"type": st.sampled_from(["response.output_text.delta", "response.completed", "response.failed", "error"])},
    optional={"delta": _VALUE, "response": st.fixed_dictionaries({}, optional={"usage": _USAGE}) | _VALUE},
)
_DATA = st.one_of(_CHAT, _RESPONSES, _VALUE).map(json.dumps) | st.sampled_from(["[DONE]", " [DONE] ", "", "{", "null"])
_LINE = st.one_of(
    _DATA.map(lambda data: f"data: {data}"),
    _DATA.map(lambda data: f"data:{data}"),
    st.sampled_from([": comment", "event: message", "id: 7", "retry: 5", "data", ":", "\ufeffdata: {}", "x"]),
)
_EVENT = st.lists(_LINE, max_size=3)
_END = st.sampled_from(["\n", "\r\n"])
_STREAM = st.tuples(st.lists(_EVENT, max_size=6), _END, st.sampled_from(["", "\n", "\r", "data: {"])).map(
    lambda parts: ("".join(parts[1].join([*lines, ""]) + parts[1] for lines in parts[0]) + parts[2]).encode()
)
_BYTES = _STREAM | st.binary(max_size=60) | st.binary(max_size=30).map(lambda data: b"data: " + data + b"\n\n")
_CUTS = st.lists(st.integers(0, 400), max_size=8)


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(edges)]


def _facts(stream: EventStream) -> tuple[object, ...]:
    return stream.num_content, stream.usage, stream.finished, stream.has_error, stream.has_data, stream.inside_event


@settings(max_examples=500)
@given(_BYTES, _CUTS, st.sampled_from(["chat", "responses"]))
def test_bytes_pass_unchanged_and_cuts_change_nothing(data: bytes, cuts: list[int], dialect: Dialect) -> None:
    """Any bytes leave as they came, chunk by chunk, and any cuts give the facts of the uncut stream."""
    whole, cut = EventStream(dialect), EventStream(dialect)
    assert whole.feed(data) + whole.flush() == data
    for piece in _pieces(data, cuts):
        assert cut.feed(piece) == piece
    assert cut.flush() == b""
    assert _facts(cut) == _facts(whole)


_TEXTS = st.lists(
    st.sampled_from(
        [" word", "", '"', "\\", '\\"', "\\n", "\n", "\r", "\x1f", "\xe9", '","usage":{"prompt_tokens":1}', "}"]
    )
    | st.text(max_size=4),
    max_size=6,
)
_FRAMES = st.sampled_from([
    '{"choices":[{"index":0,"delta":{"content":"@"},"finish_reason":null}]}',
    '{"choices": [{"delta": {"content": "@"}}], "usage": null}',
    '{"choices":[{"delta":{"reasoning_content":"@","content":null}}]}',
    '{"choices":[{"delta":{"content":"x","reasoning":"@"}}]}',
    '{"choices":[{"delta":{"tool_calls":[{"text":"@"}]}}]}',
    '{"choices":[{"text":"@","finish_reason":null}]}',
    '{"choices":[{"delta":{"content":"@"}},{"delta":{}}]}',
    '{"choices":[{"delta":{"content":"@"},"finish_reason":"stop"}]}',
    '{"choices":[{"delta":{"content":"@"}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}',
    '{"choices":[{"delta":{"content":"@"}}],"error":{"text":"x"}}',
    '{"choices":[{"delta":{"role":"@"}}],"text":"@"}',
    '{"choices":[{"delta":["content","@"]}]}',
    '{"choices":[],"content":"@"}',
])  # fmt: skip


@settings(max_examples=500)
@given(st.lists(st.tuples(_FRAMES, _TEXTS), max_size=3), st.booleans(), st.booleans())
def test_events_alike_count_as_if_each_was_read(
    parts: list[tuple[str, list[str]]], is_escaped: bool, drops: bool
) -> None:
    """Events that come one by one and differ in their text alone give what the same bytes give in one piece."""
    events = [
        b"data: " + frame.replace("@", json.dumps(text)[1:-1] if is_escaped else text).encode() + b"\n\n"
        for frame, texts in parts
        for text in texts
    ]
    whole, single = EventStream(drop_usage=drops), EventStream(drop_usage=drops)
    out = whole.feed(b"".join(events)) + whole.flush()
    assert b"".join(single.feed(event) for event in events) + single.flush() == out
    assert _facts(single) == _facts(whole)


@settings(max_examples=500)
@given(_BYTES, _CUTS)
def test_only_whole_usage_events_are_dropped(data: bytes, cuts: list[int]) -> None:
    """An uncut stream loses exactly the events that would be dropped alone. Where cuts let a part of such an event out
    before it was known, the rest follows: nothing is torn, added or put out of order."""
    events = re.findall(rb"(?s).*?\n\r?\n|.+", data)
    kept = b"".join(event for event in events if _alone(event))
    whole, cut = EventStream(drop_usage=True), EventStream(drop_usage=True)
    assert whole.feed(data) + whole.flush() == kept
    out = b"".join(cut.feed(piece) for piece in _pieces(data, cuts)) + cut.flush()
    place = 0
    for event in events:
        if out.startswith(event, place) and (_alone(event) or not out.startswith(kept[place:], place)):
            place += len(event)
        else:
            assert not _alone(event)
    assert place == len(out)


def _alone(event: bytes) -> bytes:
    """What comes out of a stream of this one event."""
    stream = EventStream(drop_usage=True)
    return stream.feed(event) + stream.flush()
