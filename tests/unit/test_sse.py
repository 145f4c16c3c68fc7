"""The incremental reader of event streams: any cut, any line ending, and only what it is told to drop."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.gateway.sse import MAX_EVENT_BYTES, EventStream, Usage, usage_of_answer


def chunk(delta: dict[str, object] | None = None, **rest: object) -> str:
    """One chat event without its end."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": rest.pop("finish", None)}
    return "data: " + json.dumps({"id": "x", "choices": [choice], **rest}, ensure_ascii=False)


USAGE = 'data: {"id":"x","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
EVENTS = [
    ": keep-alive",
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "héllo"}),
    "event: message\n" + chunk({"content": "wörld 🚄"}),
    ": comment between",
    chunk({"content": "!"}, usage=None),
    chunk({}, finish="stop"),
    USAGE,
    "data: [DONE]",
]


def recording(line_end: str) -> bytes:
    """The events as bytes, with the given line ending throughout."""
    return "".join(event.replace("\n", line_end) + 2 * line_end for event in EVENTS).encode()


def check_facts(stream: EventStream) -> None:
    """What the recording holds."""
    assert stream.num_content == 3
    assert stream.usage == Usage(7, 3)
    assert stream.finished
    assert not stream.has_error


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_one_cut_anywhere_changes_nothing(line_end: str) -> None:
    """T17: cut once at every byte, also inside UTF-8 and line ends: same bytes, same facts."""
    data = recording(line_end)
    for cut in range(len(data) + 1):
        stream = EventStream()
        assert stream.feed(data[:cut]) + stream.feed(data[cut:]) + stream.flush() == data
        check_facts(stream)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_byte_by_byte_changes_nothing(line_end: str) -> None:
    """T17: fed one byte at a time, every byte leaves at once."""
    data = recording(line_end)
    stream = EventStream()
    for position in range(len(data)):
        byte = data[position : position + 1]
        assert stream.feed(byte) == byte
    check_facts(stream)


@given(cuts=st.lists(st.integers(0, 2000), max_size=12), line_end=st.sampled_from(["\n", "\r\n"]), drop=st.booleans())
def test_any_cuts_give_the_same_stream(cuts: list[int], line_end: str, drop: bool) -> None:
    """Whatever the cuts, all bytes pass but those of a dropped usage event."""
    data = recording(line_end)
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    stream = EventStream(drop_usage=drop)
    out = b"".join(stream.feed(data[a:b]) for a, b in pairwise(edges)) + stream.flush()
    dropped = (USAGE + 2 * line_end).encode()
    assert out == (data.replace(dropped, b"") if drop else data)
    check_facts(stream)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"refusal": "x"},
        {"content": None, "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"content": [{"type": "text", "text": "x"}]},
    ],
)
def test_the_first_token_is_content_reasoning_or_a_tool_call(delta: dict[str, object]) -> None:
    """The TTFT clock stops at the first delta that says something, of whatever kind."""
    stream = EventStream()
    stream.feed(chunk({"role": "assistant", "content": ""}).encode() + b"\n\n: comment\n\n")
    assert stream.num_content == 0
    stream.feed(chunk(delta).encode() + b"\n\n")
    assert stream.num_content == 1


def test_completions_count_text() -> None:
    """The completions endpoint carries its tokens in ``text``."""
    stream = EventStream()
    stream.feed(b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]}\n\n')
    assert stream.num_content == 0
    stream.feed(b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n')
    assert stream.num_content == 1


def test_comments_are_no_data() -> None:
    """``has_data`` waits for a byte that belongs to no comment, and does not wait longer than that."""
    stream = EventStream()
    for piece in (b": one\n\n", b":", b" two\n", b"\n", b"\r\n"):
        stream.feed(piece)
        assert not stream.has_data
    stream.feed(b"d")
    assert stream.has_data


def test_responses_api_streams_are_understood() -> None:
    """The Responses API names its events and ends without ``[DONE]``."""
    stream = EventStream("responses")
    stream.feed(b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n')
    assert (stream.has_data, stream.num_content) == (True, 0)
    stream.feed(b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n')
    assert stream.num_content == 1
    stream.feed(b'data: {"type":"response.completed","response":{"usage":{"input_tokens":4,"output_tokens":2}}}\n\n')
    assert stream.finished
    assert stream.usage == Usage(4, 2)


def test_an_upstreams_own_error_event_is_seen() -> None:
    """An engine that reports its failure inside the stream has not broken it off."""
    stream = EventStream()
    stream.feed(b'data: {"error":{"message":"boom"}}\n\n')
    assert stream.has_error


@pytest.mark.parametrize(
    "data", [b"data: {broken\n\n", b"data: 5\n\n", b'data: {"choices":7}\n\n', b"data\n\n", b"\n\n"]
)
def test_what_is_not_understood_passes(data: bytes) -> None:
    """Events of an unknown shape cross unchanged."""
    assert EventStream().feed(data) == data
    assert EventStream(drop_usage=True).feed(data) == data


def test_usage_with_content_is_never_dropped() -> None:
    """Only an event with empty choices may go; usage beside content belongs to the client."""
    data = (chunk({"content": "x"}, finish="stop", usage={"prompt_tokens": 1}) + "\n\n").encode()
    assert EventStream(drop_usage=True).feed(data) == data


def test_inside_event_tells_a_torn_event() -> None:
    """After a stream broke inside an event, an error event must begin on a line of its own."""
    stream = EventStream()
    stream.feed(b"data: {}\n\n")
    assert not stream.inside_event
    stream.feed(b'data: {"cho')
    assert stream.inside_event


def test_endless_events_do_not_fill_memory() -> None:
    """A stream without blank lines passes on, and is no longer kept."""
    stream = EventStream(drop_usage=True)
    piece = b"x" * (1 << 20)
    total = sum(len(stream.feed(piece)) for _ in range(MAX_EVENT_BYTES // len(piece) + 3))
    assert total == (MAX_EVENT_BYTES // len(piece) + 3) * len(piece)
    assert len(stream.flush()) == 0


def test_usage_of_whole_answers() -> None:
    """Usage is found in chat, embeddings and responses bodies, and its absence is None."""
    assert usage_of_answer(b'{"usage":{"prompt_tokens":5,"completion_tokens":2,"x":{}}}') == Usage(5, 2)
    assert usage_of_answer(b'{"usage":{"input_tokens":5,"output_tokens":2}}') == Usage(5, 2)
    assert usage_of_answer(b'{"usage":{"prompt_tokens":5}}') == Usage(5, 0)
    for body in (b"{}", b"", b"[]", b'{"usage":null}', b'{"usage":7}', b'{"usage":{"prompt_tokens":"x"}}'):
        assert usage_of_answer(body) is None


def test_line_ends_too_many_pass_too() -> None:
    """A blank line behind an event is no event, and is the client's all the same."""
    stream = EventStream(drop_usage=True)
    assert stream.feed(b"data: x\n\n\n") + stream.feed(b"\ndata: y\n\n") == b"data: x\n\n\n\ndata: y\n\n"
