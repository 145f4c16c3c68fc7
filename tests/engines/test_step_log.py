"""``headway engine --step-log``: a served engine logs what it ran, and the log calibrates."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headway.calibrate.fit import held_out
from headway.calibrate.read_log import read_step_log
from headway.profiles import load_truth
from served_engines import EngineProcess


def test_a_served_engine_logs_every_step(start_engine: Callable[..., EngineProcess], tmp_path: Path) -> None:
    """After a request and a signal the log holds the prompt's step and one per further token, in simulated time."""
    path = tmp_path / "steps.jsonl"
    engine = start_engine("--step-log", str(path), "--time-scale", "0.05", "--seed", "3")
    body = {"prompt": list(range(700)), "max_tokens": 40, "ignore_eos": True}
    request = urllib.request.Request(f"{engine.url}/v1/completions", data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 40
    assert engine.end() == (0, "")

    log = read_step_log(path)
    truth = load_truth("h100-qwen3-8b")
    steps = log.steps
    assert log.header.engine_version == truth.engine_version
    assert log.header.hardware.startswith("simulated ")
    assert len(steps) == 40
    assert steps.column("prefill_tokens").tolist() == [700.0] + [0.0] * 39
    assert steps.column("decode_context").tolist() == [0.0, *np.arange(700.0, 739.0)]
    assert steps.outputs is not None
    assert steps.finished is not None
    assert (steps.outputs.sum(), steps.finished.sum()) == (40, 1)
    # One after another without a gap, in simulated seconds though the wall ran twenty times faster.
    assert np.abs(steps.start_s + steps.time_s - np.append(steps.start_s[1:], np.nan))[:-1].max() < 1e-6
    mape = held_out(truth.step_time, steps).mape
    assert mape is not None
    assert mape < 0.1
