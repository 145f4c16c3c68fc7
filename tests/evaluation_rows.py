"""Generated evaluation rows on which something can be learned: two tasks, told by the prompt, one beyond a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from headway.cli.main import main
from headway.train.dataset import EvaluationRow, write_rows

_WORDS = (
    "amber", "basin", "candle", "delta", "ember", "fjord", "garnet", "harbour", "island", "jetty", "kiln", "lantern",
    "meadow", "nettle", "orchard", "pebble", "quarry", "river", "saddle", "timber", "umbra", "valley", "willow",
)  # fmt: skip
MODELS = ("small-1b", "large-30b")


def made_rows(num_prompts: int = 110, *, seed: int = 0, first: int = 0) -> list[EvaluationRow]:
    """Both models' answers: the small one fails at proofs, which also run long. Prompts are unlike one another."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(first, first + num_prompts):
        hard = number % 2 == 1
        about = " ".join(rng.choice(_WORDS, 9))
        text = f"Prove step by step: {about} {number}." if hard else f"Name one fact of {about} {number}."
        for model, good in zip(MODELS, (0.2 if hard else 0.9, 0.8), strict=True):
            rows.append(
                EvaluationRow(
                    prompt_id=str(number), model=model, prompt=text, prompt_tokens=20, task="proof" if hard else "fact",
                    quality=float(np.clip(good + rng.normal(0.0, 0.1), 0.0, 1.0)),
                    output_tokens=int((400 if hard else 30) * rng.lognormal(0.0, 0.3)),
                )
            )  # fmt: skip
    return rows


def retold(rows: list[EvaluationRow], prompt_id: str, new_id: str, change: tuple[str, str]) -> list[EvaluationRow]:
    """The answers to one prompt once more under another id, its text changed from the one to the other."""
    return [
        structs.replace(row, prompt_id=new_id, prompt=(row.prompt or "").replace(*change))
        for row in rows
        if row.prompt_id == prompt_id
    ]


def write(path: Path, rows: list[EvaluationRow]) -> Path:
    """``rows`` in a file."""
    write_rows(path, rows)
    return path


def spoilt(path: Path, rows: list[EvaluationRow], line: int, **values: object) -> Path:
    """``rows`` in a file, with ``values`` in place of what stands in one line (from 1)."""
    lines = write(path, rows).read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **values})
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: object) -> int:
    """The command line in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code
