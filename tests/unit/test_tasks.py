"""Task types by plain rules."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from headway.predict.tasks import TASK_TYPES, task_type

DATA = Path(os.environ.get("HEADWAY_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "prompts"
PASSAGES = "Answer using what follows.\n\n" + "Passage 1: The lake froze over that year. " * 80


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Please help me summarize this government report.\n\n" + "The committee met. " * 2000, "summarise"),
        ("SUMMARISE THE FOLLOWING in two lines: trains run.", "summarise"),
        ("The text.\n" * 60 + "\nWrite a summary of the above.", "summarise"),
        ("How do the guests describe their stay?\n\n" + "Review: we liked it. " * 1000, "summarise"),
        ("What government position was held by the woman who portrayed Corliss Archer?", "question"),
        ("which plant has more species panicum or populus", "question"),
        ('What film ends with the line "Are you ready?"', "question"),
        (PASSAGES + "\n\nQuestion: When did it freeze?\nAnswer:", "question"),
        ("A long document. " * 1000 + "\n\nWho signed it?", "question"),
        ("[ WP ] The last train never arrives .", "story"),
        ("[WP] The last train never arrives.", "story"),
        ("[ FF ] [ MP ] A Song and a Story", "story"),
        ("You are a novelist.\n[EU] Gandalf takes the train", "story"),
        ("Write a short story about a lighthouse.", "story"),
        ("write a python function that reverses a list", "code"),
        ("Fix this:\n```\nx = 1\n```", "code"),
        ("Calculate 15% of 500.", "math"),
        ("Solve for x: 2x + 4 = 10", "math"),
        ("Give three tips for staying healthy.", "instruct"),
        ("What are the benefits of exercising?", "instruct"),
        ("How does the stock market work?", "instruct"),
        ("How many bones are there in a human body?", "question"),
        ("The European Union (EU) grew again. Describe how.", "instruct"),
        ("", "instruct"),
        ("日本の首都", "instruct"),
    ],
)
def test_the_rules_name_the_task(prompt: str, expected: str) -> None:
    """Each rule recognises its own kind, in any case, and leaves the others alone."""
    assert task_type(prompt) == expected
    assert task_type(prompt.upper()) == expected


def test_the_middle_of_a_document_is_never_read() -> None:
    """A long prompt costs no more than a short one: only head and tail decide."""
    filler = "x" * 400
    assert task_type(f"Give a view.{filler}[WP] summarize python calculate?{filler}.") == "instruct"


@pytest.mark.parametrize(
    ("file", "expected", "share"),
    [
        ("alpaca", "instruct", 0.8),
        ("gov_report", "summarise", 1.0),
        ("long_summarization_leval", "summarise", 1.0),
        ("hotpotqa", "question", 0.97),
        ("writing_prompts", "story", 0.97),
    ],
)
def test_the_task_families_are_told_apart(file: str, expected: str, share: float) -> None:
    """On public prompt sets at least the stated share of each family gets its type."""
    path = DATA / f"{file}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"prompt files are not here: set HEADWAY_DATA to the directory that holds prompts/{path.name}")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        counts = Counter(task_type(json.loads(line)["prompt"]) for line in lines)
    assert set(counts) <= set(TASK_TYPES)
    assert counts[expected] >= share * counts.total()
