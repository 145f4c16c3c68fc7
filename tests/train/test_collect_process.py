"""``headway collect`` as a user runs it, against simulated engines: killed, resumed, and refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headway.cli.main import main
from headway.train.dataset import read_rows
from served_engines import EngineProcess

MODELS = ("small", "large")
NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineProcess]]:
    """Two engines on which a simulated second lasts a twentieth, so that an answer takes some 50 ms."""
    started = {model: EngineProcess("--time-scale", "0.05", model=model) for model in MODELS}
    yield started
    for engine in started.values():
        engine.end()


@pytest.fixture
def pool(engines: dict[str, EngineProcess], tmp_path: Path) -> Path:
    """The configuration of both."""
    document = {
        "models": [{"name": model, "price": {"input_per_1m": 1.0, "output_per_1m": 2.0}} for model in MODELS],
        "instances": [
            {"id": model, "model": model, "api_base": engines[model].url + "/v1", "engine": "vllm-0.32"}
            for model in MODELS
        ],
    }
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Question {i}?"}) + "\n" for i in range(NUM_PROMPTS)))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "headway", "collect", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)


def num_served(engine: EngineProcess) -> int:
    """Requests that an engine has finished, by its own count, those that were aborted included."""
    with urllib.request.urlopen(engine.url + "/metrics", timeout=10) as response:
        text = response.read().decode()
    counts = re.findall(r"^vllm:request_success_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


def test_a_killed_run_loses_nothing_and_pays_for_nothing_twice(
    engines: dict[str, EngineProcess], pool: Path, prompts: Path, tmp_path: Path
) -> None:
    """kill -9 in the middle, then the same command: every pair has one row, and the engines were asked once for each,
    but for the few requests that were in flight."""
    out = tmp_path / "rows.jsonl"
    arguments = (prompts, "--config", pool, "--out", out, "--concurrency", "2", "--max-tokens", "200", "--json")
    before = {model: num_served(engine) for model, engine in engines.items()}
    with subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline_s = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < 10:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    kept = [row for row in read_rows(out) if row.status == "ok"]
    assert 10 <= len(kept) < 2 * NUM_PROMPTS
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert sum(one["num_kept"] for one in summary["models"].values()) == len(kept)
    rows = list(read_rows(out))
    assert rows[: len(kept)] == kept
    pairs = Counter((row.prompt_id, row.model) for row in rows)
    assert set(pairs.values()) == {1}
    assert len(pairs) == 2 * NUM_PROMPTS
    assert all(row.status == "ok" and row.ttft_s is not None and row.output_tokens for row in rows)
    assert summary["total_cost_usd"] == pytest.approx(sum(row.cost_usd or 0.0 for row in rows))
    for model, engine in engines.items():
        asked = num_served(engine) - before[model]
        assert NUM_PROMPTS <= asked <= NUM_PROMPTS + 2, "at most what was in flight is asked again"


def test_the_account_is_printed_and_the_code_says_whether_it_is_whole(
    pool: Path, prompts: Path, tmp_path: Path
) -> None:
    """A table for people; code 1 while anything is missing, 0 when the same command finds nothing to do."""
    arguments = (prompts, "--config", pool, "--out", tmp_path / "rows.jsonl", "--limit", "4", "--max-tokens", "5")
    stopped = run(*arguments, "--budget-usd", "0.0001")
    assert stopped.returncode == 1
    assert "the next request may exceed the budget of 0.0001 USD" in stopped.stdout
    assert "the same command goes on from here" in stopped.stdout
    done = run(*arguments, "--models", "small", "large")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"small +4 +\d +\d +0 +0 +0 ", done.stdout)
    again = run(*arguments)
    assert again.returncode == 0
    assert "0.0000 USD now" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--models", "smal"), "--models: unknown model 'smal'; did you mean 'small'?"),
        (("--concurrency", "0"), "--concurrency: must be at least 1"),
        (("--limit", "0"), "--limit: must be at least 1"),
        (("--rps", "0"), "--rps: must be a positive number"),
        (("--budget-usd", "-1"), "--budget-usd: must be at least 0"),
        (("--body", "[1]"), "--body: must be a JSON object"),
        (("--body", '{"model": "x"}'), "--body: model cannot be set here"),
        (("--out", "rows.jsonl.gz"), "cannot be compressed"),
    ],
)
def test_wrong_options_are_usage_errors(
    pool: Path, prompts: Path, arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 2 and one line that names the option; nothing is asked."""
    given = ["collect", str(prompts), "--config", str(pool), *arguments]
    with pytest.raises(SystemExit) as ended:
        main(given if "--out" in arguments else [*given, "--out", str(pool.with_name("rows.jsonl"))])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_bad_prompts_file_is_named_by_line(pool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File and line, code 2, and no file of rows is begun."""
    path, out = tmp_path / "bad.jsonl", tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": }\n')
    with pytest.raises(SystemExit) as ended:
        main(["collect", str(path), "--config", str(pool), "--out", str(out)])
    assert ended.value.code == 2
    assert f"{path}:2: " in capsys.readouterr().err
    assert not out.exists()


def test_a_key_that_is_not_set_is_named(
    pool: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable is named at its line of the configuration before anything is asked."""
    document = yaml.safe_load(pool.read_text())
    document["instances"][1] |= {"api_key": "env:NO_SUCH_KEY_HERE", "engine": "hosted"}
    pool.write_text(yaml.safe_dump(document))
    with pytest.raises(SystemExit) as ended:
        main(["collect", str(prompts), "--config", str(pool), "--out", str(tmp_path / "rows.jsonl")])
    assert ended.value.code == 2
    assert "instances[1].api_key: the environment variable NO_SUCH_KEY_HERE is not set" in capsys.readouterr().err
