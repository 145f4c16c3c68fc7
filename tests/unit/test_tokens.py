"""Prompt tokens as gateway and simulated engine count them."""

from __future__ import annotations

import pytest

from headway.errors import RequestError
from headway.predict.tokens import count_tokens, messages_text, prompt_text, prompt_tokens_of


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 1),
        ("a", 1),
        ("abcd", 1),
        ("abcde", 2),
        ("é" * 4, 2),
        ("漢字", 2),
        ("🚆", 1),
        ("\ud800x", 1),
        ("x" * 4001, 1001),
    ],
)
def test_four_utf8_bytes_are_one_token_and_nothing_is_less_than_one(text: str, tokens: int) -> None:
    """The count is ceil(bytes/4), at least 1, lone surrogates included."""
    assert count_tokens(text) == tokens


def test_a_single_text_message_is_its_content() -> None:
    """One plain message needs no joining."""
    assert messages_text([{"role": "user", "content": "hello"}]) == "hello"


def test_messages_of_every_kind_are_flattened_in_order() -> None:
    """Text parts and tool calls count, pictures do not, null content is empty."""
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {}}, "this"],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": '{"a":1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "a train"},
    ]
    assert messages_text(messages) == 'be brief\nwhat is\nthis\nlook\n{"a":1}\na train'


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"messages": [{"role": "user", "content": "abcdefgh"}]}, 2),
        ({"prompt": "abcdefgh"}, 2),
        ({"prompt": ["abcd", "abcde"]}, 3),
        ({"prompt": [1, 2, 3, 4, 5]}, 5),
        ({"prompt": [[1, 2], [3]]}, 3),
        ({"prompt": ""}, 1),
        ({"input": "abcde"}, 2),
        ({"input": [7, 8, 9]}, 3),
        ({"input": [{"role": "user", "content": "abcd"}], "instructions": "abcd"}, 2),
    ],
)
def test_every_kind_of_body_is_counted(body: dict[str, object], tokens: int) -> None:
    """Chat, completions, embeddings and responses bodies all have a prompt length; token ids count one each."""
    assert prompt_tokens_of(body) == tokens


def test_tool_definitions_are_part_of_the_prompt() -> None:
    """Tools reach the model through the chat template, so they cost tokens."""
    body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert prompt_tokens_of({**body, "tools": tools}) > prompt_tokens_of(body) + 10


def test_text_of_a_body_is_what_the_predictor_reads() -> None:
    """Token ids have no text; several prompts stand one per line; instructions come first."""
    assert prompt_text({"prompt": "p"}) == "p"
    assert prompt_text({"prompt": ["a", "b"]}) == "a\nb"
    assert prompt_text({"prompt": [1, 2]}) == ""
    assert prompt_text({"messages": [{"content": "a"}, {"content": "b"}]}) == "a\nb"
    assert prompt_text({"input": "q", "instructions": "i"}) == "i\nq"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"prompt": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "a"}, {"content": 5}]}, "messages[1].content"),
        ({"messages": [{"content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1]"),
        ({"input": {}}, "input"),
    ],
)
def test_a_malformed_prompt_is_refused_by_name(body: dict[str, object], param: str) -> None:
    """Text and count refuse the same bodies, and name the field."""
    for read in (prompt_tokens_of, prompt_text):
        with pytest.raises(RequestError) as caught:
            read(body)
        assert caught.value.param == param
        assert caught.value.status == 400


@pytest.mark.parametrize("kind", [None, [], {}, 5, "image_url"])
def test_parts_of_other_types_add_nothing(kind: object) -> None:
    """Whatever stands for a part's type, it is the upstream's to judge; only text is counted."""
    body: dict[str, object] = {
        "messages": [{"content": [{"type": kind, "text": "x" * 40}, {"type": "text", "text": "hi"}]}]
    }
    assert prompt_text(body) == "hi"
    assert prompt_tokens_of(body) == 1
