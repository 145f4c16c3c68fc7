"""Reading prompts files: what is taken, what is made up, and which complaint names which line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headway.errors import DatasetError
from headway.train.prompts import read_prompts


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_row_keeps_what_collecting_needs(tmp_path: Path) -> None:
    """Prompt or messages, id, task, reference and limit are kept; fields of other origin are named, not refused."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(
        tmp_path / "p.jsonl",
        {"id": 7, "prompt": "One?", "task": "qa", "reference": "1", "max_tokens": 5, "source": "x"},
        "",
        {"prompt_id": "m", "messages": messages},
    )
    read = read_prompts([path])
    one, two = read.prompts
    assert (one.prompt_id, one.prompt, one.task, one.reference, one.max_tokens) == ("7", "One?", "qa", "1", 5)
    assert one.chat == [{"role": "user", "content": "One?"}]
    assert (two.prompt_id, two.chat) == ("m", messages)
    assert read.ignored_fields == ["source"]


def test_a_prompt_without_an_id_gets_the_same_one_every_time(tmp_path: Path) -> None:
    """Ids are made from the text, so a repeated prompt is one prompt, and a second run finds its rows again."""
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"})
    with gzip.open(tmp_path / "q.jsonl.gz", "wt") as file:
        file.write('{"prompt": "b"}\n')
    read = read_prompts([path, tmp_path / "q.jsonl.gz"])
    assert [one.prompt for one in read.prompts] == ["a", "b"]
    assert read.num_repeats == 2
    assert read.prompts[0].prompt_id == read_prompts([path]).prompts[0].prompt_id


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ('{"task": "x"}', "either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "either 'prompt' or 'messages'"),
        ('{"prompt": " \\n"}', "blank"),
        ('{"messages": []}', "non-empty list"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        ('{"prompt": "a", "max_tokens": 0}', ">= 1"),
        ('{"prompt": "a", "reference": 4}', "reference"),
        ('{"prompt": "other", "prompt_id": "first"}', "another prompt at"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    """The complaint says file and line, and what is wrong there."""
    path = write(tmp_path / "p.jsonl", {"prompt": "fine", "prompt_id": "first"}, line)
    with pytest.raises(DatasetError) as caught:
        read_prompts([path])
    assert caught.value.line == 2
    assert str(caught.value).startswith(f"{path}:2: ")
    assert complaint in str(caught.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    """Nothing to ask is a mistake, not an empty success."""
    with pytest.raises(DatasetError, match="holds no prompt"):
        read_prompts([write(tmp_path / "p.jsonl", "")])
