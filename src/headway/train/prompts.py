"""Reads prompts files for ``headway collect``: one JSON object per line, gzipped or not.

A row holds ``prompt`` or OpenAI ``messages``, and may hold ``prompt_id`` (or ``id``), ``task``, ``reference`` and
``max_tokens``; other fields are passed over and named. A prompt without an id gets one made from its text, so that the
same file always gives the same ids. It refuses to guess: what is malformed is a
:class:`~headway.errors.DatasetError` that names file and line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headway.config.lines import read_lines
from headway.errors import DatasetError, RequestError
from headway.predict.tokens import count_tokens, messages_text
from headway.types import MAX_COUNT


class PromptRow(Struct, frozen=True, kw_only=True):
    """One prompt to be asked. Exactly one of ``prompt`` and ``messages`` is given."""

    prompt_id: str
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    task: str | None = None
    reference: str | None = None
    max_tokens: int | None = None

    @property
    def chat(self) -> list[dict[str, object]]:
        """The chat messages to send."""
        return self.messages if self.messages is not None else [{"role": "user", "content": self.prompt}]

    @property
    def num_counted_tokens(self) -> int:
        """Prompt tokens by the project's count without a tokenizer."""
        return count_tokens(messages_text(self.chat))


class PromptFile(Struct, frozen=True):
    """Prompts in file order, the fields that were passed over, and how many repeats of a whole row were dropped."""

    prompts: list[PromptRow]
    ignored_fields: list[str]
    num_repeats: int


class _Fields(Struct, kw_only=True):
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    prompt_id: Annotated[str, Meta(min_length=1, max_length=512)] | int | None = None
    id: Annotated[str, Meta(min_length=1, max_length=512)] | int | None = None
    task: str | None = None
    reference: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None


def read_prompts(paths: Sequence[Path]) -> PromptFile:
    """The prompts of all files, one after the other.

    Raises:
        DatasetError: a file cannot be read, a line is malformed, an id stands for two different prompts, or there is
            no prompt at all.
    """
    found: dict[str, PromptRow] = {}
    places: dict[str, str] = {}
    ignored: dict[str, None] = {}
    num_repeats = 0
    for path in paths:
        for number, line in read_lines(path):
            if not line.strip():
                continue
            prompt = _prompt(line, path, number, ignored)
            known = found.setdefault(prompt.prompt_id, prompt)
            where = places.setdefault(prompt.prompt_id, f"{path}:{number}")
            if known is prompt:
                continue
            if known != prompt:
                what = f"the id {prompt.prompt_id!r} stands for another prompt at {where}"
                raise DatasetError(what, path=str(path), line=number)
            num_repeats += 1
    if not found:
        raise DatasetError("holds no prompt", path=", ".join(map(str, paths)))
    return PromptFile(list(found.values()), list(ignored), num_repeats)


def _prompt(line: str, path: Path, number: int, ignored: dict[str, None]) -> PromptRow:
    try:
        fields = msgspec.json.decode(line)
        row = msgspec.convert(fields, _Fields)
        if (row.prompt is None) == (row.messages is None):
            raise ValueError("a row needs either 'prompt' or 'messages'")
        text = row.prompt if row.prompt is not None else messages_text(row.messages)
        if not text.strip():
            raise ValueError("the prompt is blank")
    except (ValueError, RecursionError, RequestError) as error:  # msgspec's own errors are ValueErrors
        raise DatasetError(str(error), path=str(path), line=number) from error
    for name in fields:
        if name not in _Fields.__struct_fields__:
            ignored[name] = None
    name = row.prompt_id if row.prompt_id is not None else row.id
    return PromptRow(
        prompt_id=str(name) if name is not None else _made_id(row),
        prompt=row.prompt,
        messages=row.messages,
        task=row.task,
        reference=row.reference,
        max_tokens=row.max_tokens,
    )


def _made_id(row: _Fields) -> str:
    asked = row.prompt if row.prompt is not None else row.messages
    return "p-" + hashlib.sha256(msgspec.json.encode(asked, order="deterministic")).hexdigest()[:16]
