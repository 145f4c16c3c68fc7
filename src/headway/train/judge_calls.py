"""What a judge is asked about and what came of it: cases made of rows, the journal of calls, the judged rows.

A case is one prompt with all its whole answers. The journal begins with what all its calls have in common, then holds
one call per line. It refuses rows of one prompt that contradict each other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from headway.config.lines import read_lines
from headway.errors import ConfigError, DatasetError
from headway.train.dataset import EvaluationRow, write_rows
from headway.train.journal import Journal
from headway.train.judge_prompt import INSTRUCTIONS_ID


class JournalHead(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a journal: what all its calls have in common."""

    judge: str
    seed: int
    instructions: str = INSTRUCTIONS_ID


class JudgeCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One prompt put to the judge. ``case`` tells whether prompt, reference or an answer have changed since.

    ``order`` names the models in the order of their letters. ``scores`` maps each to its quality in [0, 1]; without
    it the prompt stays unjudged for ``reason``, and ``retriable`` says whether another run asks again. ``reply`` is
    the beginning of what could not be read.
    """

    prompt_id: str
    case: str
    order: list[str]
    scores: dict[str, float] | None = None
    reason: str = ""
    error: str = ""
    retriable: bool = True
    reply: str = ""
    num_asked: int = 1
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float = 0.0


class Case(Struct, frozen=True):
    """One prompt with all its answers, by model."""

    prompt_id: str
    request: str
    reference: str | None
    answers: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """Changes with anything that the judge is shown."""
        content = [self.request, self.reference, sorted(self.answers.items())]
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]


def cases_of(rows: Sequence[EvaluationRow]) -> list[Case]:
    """The prompts of ``rows`` that have a whole answer, in order of their first row.

    Raises:
        DatasetError: two rows of one prompt hold unlike prompts or references.
    """
    first: dict[str, EvaluationRow] = {}
    answers: dict[str, dict[str, str]] = {}
    for row in rows:
        known = first.setdefault(row.prompt_id, row)
        if (row.prompt, row.messages) != (known.prompt, known.messages):
            raise DatasetError(f"prompt {row.prompt_id!r} reads differently in two rows")
        if row.reference != known.reference:
            raise DatasetError(f"prompt {row.prompt_id!r} has different references in two rows")
        if row.status == "ok" and row.response is not None:
            answers.setdefault(row.prompt_id, {})[row.model] = row.response
    return [Case(name, first[name].text, first[name].reference, answers[name]) for name in first if name in answers]


async def open_calls(journal: Journal, head: JournalHead) -> list[JudgeCall]:
    """The calls that ``journal`` holds; a new one gets ``head`` as its first line.

    Raises:
        ConfigError: it was begun with another judge, seed or instructions.
        DatasetError: a line is malformed.
    """
    path = str(journal.path)
    calls = []
    found: JournalHead | None = None
    for number, line in read_lines(journal.path):
        try:
            if found is None:
                found = msgspec.json.decode(line, type=JournalHead)
            else:
                calls.append(msgspec.json.decode(line, type=JudgeCall))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DatasetError(f"is no journal of judge calls: {error}", path=path, line=number) from error
    if found is None:
        await journal.append(msgspec.json.encode(head) + b"\n")
    elif found != head:
        differing = [name for name in head.__struct_fields__ if getattr(found, name) != getattr(head, name)]
        was = ", ".join(f"{name} {getattr(found, name)}" for name in differing)
        raise ConfigError(f"was begun with {was}; give another --out, or the same again", path=path)
    return calls


class Written(NamedTuple):
    """Rows of a judged file: all, those with a score of this judge, those without a whole answer."""

    num_rows: int
    num_judged: int
    num_unanswered: int


def write_judged(
    out: Path, rows: Sequence[EvaluationRow], scores: Mapping[tuple[str, str], float], judge: str
) -> Written:
    """Write all ``rows`` with their scores by (prompt id, model), in place of any they had before; all or nothing.

    Raises:
        DatasetError: the file cannot be written.
    """
    judged = []
    num_unanswered = 0
    for row in rows:
        if row.status != "ok" or row.response is None:
            num_unanswered += 1
            judged.append(row)
            continue
        score = scores.get((row.prompt_id, row.model))
        judged.append(msgspec.structs.replace(row, quality=score, judge=None if score is None else judge))
    partial = out.with_name(f".partial-{out.name}")
    num_rows = write_rows(partial, judged)
    os.replace(partial, out)
    return Written(num_rows, sum(row.quality is not None for row in judged), num_unanswered)
