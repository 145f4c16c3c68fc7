"""Reads prompts files (.jsonl) and arrival traces (.csv), gzipped or not, for the demo's workload.

Rows that no engine of the demo could take (blank, or longer than the context) are dropped and counted. It refuses to
guess at anything malformed: a :class:`~headway.errors.DatasetError` names the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from headway.errors import DatasetError
from headway.lab.truth import PROMPT_CAP_TOKENS, TASKS, Task
from headway.predict.tokens import count_tokens

#: Names that data sets use for the four tasks; every other name is an instruction.
_TASK_NAMES: dict[str, Task] = {
    **{task: task for task in TASKS},
    "long_summarization": "gov_report",
    "summarization": "gov_report",
    "hotpot_qa": "hotpotqa",
    "writingprompts": "writing_prompts",
}


class PromptPool(Struct, frozen=True):
    """Prompts per task, in file order, and how many rows were left out as blank or too long."""

    by_task: dict[Task, list[str]]
    num_dropped: int


class _Row(Struct):
    prompt: str
    task: str = ""


def load_prompts(paths: Sequence[Path]) -> PromptPool:
    """The prompts of all files together. An unknown or missing ``task`` counts as ``alpaca``, a plain instruction.

    Raises:
        DatasetError: a file cannot be read, a line is no object with a text ``prompt``, or nothing usable is left.
    """
    by_task: dict[Task, list[str]] = {task: [] for task in TASKS}
    num_dropped = 0
    decoder = msgspec.json.Decoder(_Row)
    for path in paths:
        for number, line in _lines(path):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise DatasetError(str(error), path=str(path), line=number) from error
            if not row.prompt.strip() or count_tokens(row.prompt) > PROMPT_CAP_TOKENS:
                num_dropped += 1
            else:
                by_task[_TASK_NAMES.get(row.task, "alpaca")].append(row.prompt)
    pool = PromptPool({task: prompts for task, prompts in by_task.items() if prompts}, num_dropped)
    if not pool.by_task:
        raise DatasetError(f"holds no usable prompt ({num_dropped} blank or longer than {PROMPT_CAP_TOKENS} tokens)",
                           path=", ".join(map(str, paths)))  # fmt: skip
    return pool


def load_trace(path: Path) -> list[float]:
    """The arrival times of a trace in seconds, sorted: its column ``arrival_s``.

    Raises:
        DatasetError: the file cannot be read, has no such column, a value is no finite number, or all are equal.
    """
    rows = csv.reader(line for _, line in _lines(path))
    header = next(rows, None)
    if header is None or "arrival_s" not in header:
        raise DatasetError("the first line must name a column 'arrival_s'", path=str(path), line=1)
    column = header.index("arrival_s")
    arrivals = []
    for row in rows:
        if not row:
            continue
        try:
            arrivals.append(float(row[column]))
        except (ValueError, IndexError) as error:
            raise DatasetError("'arrival_s' must be a number", path=str(path), line=rows.line_num) from error
        if not math.isfinite(arrivals[-1]):
            raise DatasetError("'arrival_s' must be finite", path=str(path), line=rows.line_num)
    arrivals.sort()
    if not arrivals or arrivals[0] == arrivals[-1]:
        raise DatasetError("needs at least two different arrival times", path=str(path))
    return arrivals


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, numbered from 1; its name tells whether it is gzipped."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except UnicodeDecodeError as error:
        raise DatasetError("is not UTF-8 text", path=str(path), line=number + 1) from error
    except (OSError, EOFError, zlib.error) as error:  # gzip reports damage as any of the three
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DatasetError(f"cannot be read: {reason}", path=str(path)) from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")
