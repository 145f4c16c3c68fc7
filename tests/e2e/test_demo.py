"""The demo as a user runs it: real processes, real sockets, figures that add up, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headway.predict.artifact import Array, encode_artifact
from headway.train.build import with_self_tests
from trained_artifacts import renamed

_GIVE_UP_S = 90.0
_QUICK = ("--qps", "8", "--seconds", "1", "--seed", "219")


@contextmanager
def _demo(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a script starts with & ignores it, and so would this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=_GIVE_UP_S)


def _children(demo_pid: int) -> list[str]:
    """Command lines of running processes that bear the demo's mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"headway-demo-{demo_pid}-" in command:
            found.append(command)
    return found


def _assert_nothing_left(demo_pid: int, tmp_path: Path) -> None:
    assert _children(demo_pid) == []
    assert list(Path("/dev/shm").glob(f"headway-demo-{demo_pid}-*")) == []
    assert list(tmp_path.glob("headway-demo-*")) == []


def _wait_for(condition: str, demo: subprocess.Popen[str]) -> None:
    """Wait until ``engines`` have been started, or the ``gateway`` too."""
    wanted = {"engines": " engine ", "gateway": " serve "}[condition]
    deadline_s = time.monotonic() + _GIVE_UP_S
    while not any(wanted in command for command in _children(demo.pid)):
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _short_prompts(tmp_path: Path) -> Path:
    """Two tasks whose answers are short under the seed below, so that the tests are quick."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"task": "alpaca", "prompt": "Name a colour."}\n{"task": "hotpotqa", "prompt": "Who wrote The Salt Road?"}\n'
    )
    return path


def test_json_figures_add_up_and_nothing_is_left(tmp_path: Path) -> None:
    """Under --json stdout is one JSON document, every query is answered, and all processes, segments and files go.

    The pool is idle, so the best model is in time everywhere: bear and latency_agnostic choose alike, and get answers
    of exactly the same length, quality and cost, for the truth is the same for every policy.
    """
    arguments = ("--prompts", str(_short_prompts(tmp_path)), *_QUICK, "--policies", "bear,latency_agnostic", "--json")
    with _demo(tmp_path, *arguments) as demo:
        stdout, stderr = demo.communicate(timeout=_GIVE_UP_S)
    assert demo.returncode == 0, stderr
    assert stderr == ""
    report = json.loads(stdout)
    assert report["workload"]["num_queries"] == 8
    assert report["workload"]["tasks"] == {"alpaca": 4, "hotpotqa": 4}
    bear, agnostic = report["policies"]
    assert (bear["policy"], agnostic["policy"]) == ("bear", "latency_agnostic")
    for figures in (bear, agnostic):
        assert (figures["num_queries"], figures["failed"], figures["errors"]) == (8, 0, {})
        assert sum(figures["shares"].values()) == pytest.approx(1.0)
        assert figures["shares"].keys() == {"h100-0.6b", "h100-8b", "h100-32b"}
        assert 0.0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]
        assert figures["ttft_error_p50_s"] is not None
        assert figures["ttft_error_p50_engine_s"] is not None
    for key in ("shares", "mean_output_tokens", "mean_quality", "mean_cost_usd"):
        assert bear[key] == agnostic[key]
    _assert_nothing_left(demo.pid, tmp_path)


def test_a_stranger_reads_a_table(tmp_path: Path) -> None:
    """Without --json the demo says what it does, prints a row per policy, a conclusion and the command to repeat."""
    prompts = str(_short_prompts(tmp_path))
    with _demo(tmp_path, "--prompts", prompts, *_QUICK, "--policies", "round_robin") as demo:
        stdout, stderr = demo.communicate(timeout=_GIVE_UP_S)
    assert demo.returncode == 0, stderr
    assert stderr == ""
    assert stdout.startswith("Three simulated engines")
    assert "round_robin reached on-time utility" in stdout
    command = f"headway demo --prompts {prompts} --qps 8 --seconds 1 --policies round_robin --seed 219"
    assert stdout.rstrip().endswith(command)


def test_a_trained_artifact_routes(tmp_path: Path) -> None:
    """By an artifact that finds the large model worthless all goes to the others; what answers are worth stays true.

    A model that the artifact does not know is named, and served all the same.
    """
    artifact = renamed({"qwen3-0.6b": "another"})
    worthless = [float(model.name != "qwen3-32b") for model in artifact.models]
    overall = replace(artifact.overall, quality=Array.of(np.array(worthless), "float64"))
    artifact = replace(artifact, overall=overall, serves_quality="constant", serves_length="constant")
    path = tmp_path / "some.hw"
    path.write_bytes(encode_artifact(with_self_tests(artifact)))
    arguments = ("--prompts", str(_short_prompts(tmp_path)), *_QUICK, "--policies", "bear", "--json")
    with _demo(tmp_path, *arguments, "--predictor", str(path)) as demo:
        stdout, stderr = demo.communicate(timeout=_GIVE_UP_S)
    assert demo.returncode == 0, stderr
    report = json.loads(stdout)
    assert (report["predictor"], report["cold_models"]) == ("some.hw", ["qwen3-0.6b"])
    (bear,) = report["policies"]
    assert (bear["failed"], bear["shares"]["h100-32b"]) == (0, 0.0)
    assert 0.0 < bear["mean_quality"] < 1.0


@pytest.mark.parametrize(
    ("when", "number"), [("engines", signal.SIGINT), ("gateway", signal.SIGINT), ("gateway", signal.SIGTERM)]
)
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, when: str, number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM, while the engines start or during the run, ends everything that was started."""
    with _demo(tmp_path, "--qps", "6", "--seconds", "60", "--policies", "bear") as demo:
        _wait_for(when, demo)
        demo.send_signal(number)
        _, stderr = demo.communicate(timeout=_GIVE_UP_S)
    assert demo.returncode == (130 if number == signal.SIGINT else 1)
    assert "Traceback" not in stderr
    _assert_nothing_left(demo.pid, tmp_path)


def test_a_dying_engine_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """When an engine is killed the demo says which, fails, and stops the others: a comparison without it is none."""
    with _demo(tmp_path, "--qps", "6", "--seconds", "60", "--policies", "bear") as demo:
        _wait_for("gateway", demo)
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().decode(errors="replace")
            except OSError:
                continue
            if f"headway-demo-{demo.pid}-h100-8b" in command:
                os.kill(int(path.parent.name), signal.SIGKILL)
        _, stderr = demo.communicate(timeout=_GIVE_UP_S)
    assert demo.returncode == 1
    assert "h100-8b ended with code -9" in stderr
    _assert_nothing_left(demo.pid, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "bear,fastest"), "fastest"),
        (("--qps", "0"), "--qps"),
        (("--prompts", "absent.jsonl"), "absent.jsonl"),
        (("--trace", "absent.csv"), "absent.csv"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """An unknown policy, an impossible rate or a missing file exits with 2 and names the culprit."""
    with _demo(tmp_path, *arguments, "--json") as demo:
        stdout, stderr = demo.communicate(timeout=_GIVE_UP_S)
    assert demo.returncode == 2
    assert message in stderr
    assert stdout == ""
