"""Configurations of every shape: each is a pool or a complaint that says where, never anything else.

Two ways: a file that works, with pieces cut out, doubled, moved and replaced; and documents made of the keys that exist
with values of every kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.assembly import build_router
from headway.config import Config, parse_config
from headway.errors import ConfigError

_EXAMPLE = (Path(__file__).parents[2] / "examples" / "pool.yaml").read_text(encoding="utf-8")
_PIECES = [
    *"{}[],:#-&*!|>'\"%@`\t\n \\",
    "\x00",
    "é",
    "null",
    "~",
    "<<: *a",
    "&a ",
    "1e999",
    ".nan",
    "-1",
    "0x1f",
    "on",
    "- ",
]
_EDIT = st.tuples(st.integers(0, len(_EXAMPLE)), st.integers(0, 40), st.sampled_from(_PIECES) | st.text(max_size=3))
_LEAF = st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.text(max_size=6)
_WORD = st.sampled_from(["bear", "random", "a", "b", "m", "n", "auto", "all", "hosted", "vllm-0.32", "h100-qwen3-8b",
                         "http://127.0.0.1:9/v1", "tcp://127.0.0.1:7101", "env:X", "reject", "queue"])  # fmt: skip
_VALUE = st.recursive(
    _LEAF | _WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORD | st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def _section(*names: str) -> st.SearchStrategy[object]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, _VALUE)) | _VALUE


_MODEL = st.fixed_dictionaries({"name": st.sampled_from(["m", "n"]) | _VALUE}, optional={
    "price": _section("input_per_1m", "output_per_1m"), "context_tokens": _VALUE, "parameters": _VALUE,
    "prior": _section("quality", "output_tokens", "tasks"),
})  # fmt: skip
_INSTANCE = st.fixed_dictionaries(
    {"id": st.sampled_from(["a", "b"]) | _VALUE, "model": st.sampled_from(["m", "n"]) | _VALUE,
     "api_base": st.just("http://127.0.0.1:9/v1") | _VALUE},
    optional={"engine": _WORD | _VALUE, "profile": _WORD | _VALUE, "api_key": _VALUE,
              "limits": _section("max_num_seqs", "block_size", "watermark", "policy"),
              "snapshots": _section("shared_memory", "zeromq")},
)  # fmt: skip
_DOCUMENT = st.fixed_dictionaries(
    {"models": st.lists(_MODEL, max_size=2) | _VALUE, "instances": st.lists(_INSTANCE, max_size=2) | _VALUE},
    optional={
        "aliases": st.dictionaries(_WORD, _section("candidates"), max_size=2) | _VALUE,
        "routing": _section("policy", "lambda_per_musd", "delta_per_ms", "on_infeasible", "fallback", "predictor"),
        "queue": _section("max_length", "max_wait_s", "on_timeout"),
        "shadow": _section("policy", "predictor", "sample"),
        "feedback": _section("prompts", "outcomes", "wait_s", "max_mb", "num_files"),
        "resilience": _section("deadline_s", "attempts", "breaker_failures"),
        "keys": _section("clients", "admin", "file"),
        "server": _section("port", "max_body_mb", "drain_s"),
        "nonsense": _VALUE,
    },
)  # fmt: skip


def _pool_or_complaint(text: str) -> Config | None:
    try:
        config = parse_config(text, path="pool.yaml")
        build_router(config)
    except ConfigError as complaint:
        _check(complaint, text)
        return None
    return config


def _check(complaint: ConfigError, text: str) -> None:
    assert str(complaint).startswith("pool.yaml")
    assert complaint.line is None or 1 <= complaint.line <= text.count("\n") + 2


@settings(max_examples=150, deadline=None)
@given(st.lists(_EDIT, min_size=1, max_size=4))
def test_an_edited_file_is_a_pool_or_a_complaint(edits: list[tuple[int, int, str]]) -> None:
    """Whatever a slip of the hand does to a working file, the answer names path and, where known, line and key."""
    text = _EXAMPLE
    for place, length, piece in edits:
        text = text[:place] + piece + text[place + length :]
    _pool_or_complaint(text)


@settings(max_examples=250, deadline=None)
@given(_DOCUMENT)
def test_any_document_is_a_pool_or_a_complaint(document: dict[str, object]) -> None:
    """Known keys with values of every kind: a pool that is taken is one that a router can be built of."""
    _pool_or_complaint(yaml.safe_dump(document, allow_unicode=True))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_complaint(text: str) -> None:
    """No short text is a pool by chance."""
    with pytest.raises(ConfigError):
        parse_config(text, path="pool.yaml")
