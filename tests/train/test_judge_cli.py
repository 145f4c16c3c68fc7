"""``headway judge`` and ``judge agree`` as a user runs them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml

from headway.cli.main import main
from headway.testing import FakeUpstream, Received, Reply
from headway.train.dataset import EvaluationRow, read_rows, write_rows
from outside_endpoints import said, verdict

ROWS = [
    EvaluationRow(prompt_id=f"p{i}", model=model, prompt=f"{i}?", response=f"{model} {i}", reference=f"large {i}")
    for i in range(3)
    for model in ("small", "large")
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", ROWS)
    return tmp_path / "rows.jsonl"


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def sound(received: Received) -> Reply:
    return said(verdict(received, lambda text: 9.0 if text.startswith("large") else 4.0))


async def test_a_judge_of_the_pool_brings_address_key_and_prices(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--judge NAME --config pool.yaml``: the same file as the gateway's is all it takes."""
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    async with FakeUpstream(sound) as upstream:
        document = {
            "models": [{"name": "judge-1", "price": {"input_per_1m": 1000, "output_per_1m": 1000}}],
            "instances": [{"id": "j", "model": "judge-1", "api_base": upstream.url, "api_key": "env:JUDGE_KEY"}],
        }
        (tmp_path / "pool.yaml").write_text(yaml.safe_dump(document))
        command = ["judge", rows, "--judge", "judge-1", "--config", tmp_path / "pool.yaml", "--out",
                   tmp_path / "judged.jsonl"]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headway", *map(str, command), stdout=asyncio.subprocess.PIPE
        )
        stdout, _ = await process.communicate()
    assert process.returncode == 0
    assert b"6 of 6 rows scored by judge-1" in stdout
    assert b"0.0360 USD now" in stdout
    assert upstream.requests[0].headers["authorization"] == "Bearer sk-judge"
    assert [row.quality for row in read_rows(tmp_path / "judged.jsonl")] == [0.4, 0.9] * 3


def test_rules_and_agreement(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rules score the same rows; ``agree`` compares the two files, in figures and in words."""
    assert run("judge", rows, "--metric", "exact", "--out", tmp_path / "exact.jsonl") == 0
    assert "6 of 6 rows scored by exact, mean 0.500" in capsys.readouterr().out
    assert run("judge", rows, "--metric", "rouge", "--out", tmp_path / "rouge.jsonl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["mean_quality"] == pytest.approx(0.75)
    assert run("judge", "agree", tmp_path / "exact.jsonl", tmp_path / "rouge.jsonl") == 0
    out = capsys.readouterr().out
    assert "6 answers to 3 prompts scored by both, 3 pairs (3 without a tie)" in out
    assert "same best answer" in out
    assert run("judge", "agree", tmp_path / "exact.jsonl", tmp_path / "rouge.jsonl", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pairwise"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert report["mean_difference"]["value"] == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--judge: give one of --judge and --metric"),
        (("--judge", "x", "--metric", "exact"), "--judge: give one of"),
        (("--judge", "x"), "--config: say in which pool 'x' is found"),
        (("--judge", "http://127.0.0.1:9/v1"), "--judge-model: say what the endpoint calls the judge"),
        (("--judge", "ftp://x", "--judge-model", "j"), "--judge: must be a URL"),
        (("--judge", "http://x/v1", "--judge-model", "j", "--api-key", "sk-x"), "--api-key: takes env:NAME"),
        (("--judge", "http://x/v1", "--judge-model", "j", "--api-key", "env:NO_SUCH_KEY_HERE"), "NO_SUCH_KEY_HERE"),
        (("--judge", "http://x/v1", "--judge-model", "j", "--verdicts", "0"), "--verdicts: must be at least 1"),
        (("--judge", "http://x/v1", "--judge-model", "j", "--attempts", "0"), "--attempts: must be at least 1"),
        (("--metric", "exact", "--pattern", "x"), "--pattern: goes with --metric regex only"),
    ],
)
def test_wrong_options_are_usage_errors(
    rows: Path, tmp_path: Path, arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 2, one line that names the option, and nothing is written."""
    assert run("judge", rows, "--out", tmp_path / "out.jsonl", *arguments) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert "sk-x" not in err
    assert not (tmp_path / "out.jsonl").exists()


def test_an_unknown_judge_of_the_pool_is_named(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest model of the pool is offered."""
    document = {"models": [{"name": "judge-1"}],
                "instances": [{"id": "j", "model": "judge-1", "api_base": "http://x/v1"}]}  # fmt: skip
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(document))
    options = ("--judge", "judge-2", "--config", tmp_path / "pool.yaml", "--out", tmp_path / "out.jsonl")
    assert run("judge", rows, *options) == 2
    assert "--judge: unknown model 'judge-2'; did you mean 'judge-1'?" in capsys.readouterr().err


def test_the_input_is_never_written_over(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that were paid for are not replaced by their judged form."""
    before = rows.read_bytes()
    assert run("judge", rows, "--metric", "exact", "--out", rows) == 2
    assert "--out: must not be the file of rows itself" in capsys.readouterr().err
    assert rows.read_bytes() == before
