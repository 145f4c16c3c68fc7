"""Prompts files: what is read, what is dropped, and what a malformed one says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headway.demo.datasets import load_prompts
from headway.errors import DatasetError


def _write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def _rows(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_files_are_joined_by_task_family(tmp_path: Path) -> None:
    """Rows of all files land under the four tasks; other summaries count as reports, unknown tasks as instructions."""
    plain = _write(tmp_path / "a.jsonl", _rows({"task": "hotpotqa", "prompt": "Who?", "id": 1}, {"prompt": "Do it."}))
    packed = _write(
        tmp_path / "b.jsonl.gz",
        _rows(
            {"task": "gov_report", "prompt": "G"},
            {"task": "long_summarization", "prompt": "L"},
            {"task": "x", "prompt": "X"},
        ),
    )
    pool = load_prompts([plain, packed])
    assert pool.by_task == {"alpaca": ["Do it.", "X"], "hotpotqa": ["Who?"], "gov_report": ["G", "L"]}


def test_blank_and_endless_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    """A blank prompt and one beyond 32,768 tokens are left out, and the pool says how many were."""
    path = _write(tmp_path / "a.jsonl", _rows({"prompt": " "}, {"prompt": "x" * 4 * 32769}, {"prompt": "fine"}))
    pool = load_prompts([path])
    assert pool.by_task == {"alpaca": ["fine"]}
    assert pool.num_dropped == 2


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', 2, "truncated"),
        ('{"prompt": "a"}\n\n{"task": "alpaca"}\n', 3, "prompt"),
        ('{"prompt": 3}\n', 1, r"\$\.prompt"),
        ('["a"]\n', 1, "object"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, line: int, message: str) -> None:
    """A bad row raises a DatasetError with the file, the line and what is wrong with it."""
    path = _write(tmp_path / "bad.jsonl", text)
    with pytest.raises(DatasetError, match=message) as caught:
        load_prompts([path])
    assert (caught.value.path, caught.value.line) == (str(path), line)


@pytest.mark.parametrize("damage", ["absent", "not gzip", "cut short", "not UTF-8", "empty"])
def test_an_unreadable_file_is_named(tmp_path: Path, damage: str) -> None:
    """A file that is absent, damaged, no text or without a usable row raises a DatasetError with its path."""
    path = tmp_path / "p.jsonl.gz"
    if damage == "not gzip":
        path.write_text('{"prompt": "a"}\n')
    elif damage == "cut short":
        path.write_bytes(gzip.compress(_rows(*({"prompt": str(n)} for n in range(500))).encode())[:-200])
    elif damage == "not UTF-8":
        path.write_bytes(gzip.compress(b'{"prompt": "\xff\xfe"}\n'))
    elif damage == "empty":
        path.write_bytes(gzip.compress(b""))
    with pytest.raises(DatasetError) as caught:
        load_prompts([path])
    assert caught.value.path == str(path)
