"""Reads prompts files (.jsonl), gzipped or not, for the demo's workload.

Rows that no engine of the demo could take (blank, or longer than the context) are dropped and counted. It refuses to
guess at anything malformed: a :class:`~headway.errors.DatasetError` names the file and the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from headway.config.lines import decode_lines
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
        for _, row in decode_lines(path, decoder):
            if not row.prompt.strip() or count_tokens(row.prompt) > PROMPT_CAP_TOKENS:
                num_dropped += 1
            else:
                by_task[_TASK_NAMES.get(row.task, "alpaca")].append(row.prompt)
    pool = PromptPool({task: prompts for task, prompts in by_task.items() if prompts}, num_dropped)
    if not pool.by_task:
        raise DatasetError(f"holds no usable prompt ({num_dropped} blank or longer than {PROMPT_CAP_TOKENS} tokens)",
                           path=", ".join(map(str, paths)))  # fmt: skip
    return pool
