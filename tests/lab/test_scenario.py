"""Scenarios: what is wrong is told by file, line and key before anything runs; what is right fills its own gaps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.errors import ConfigError, DatasetError
from headway.lab.runs import plan
from headway.lab.scenario import load_scenario, parse_scenario
from small_scenario import SMALL

EXAMPLES = Path(__file__).parents[2] / "examples" / "scenarios"
DATA = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
#: Of files that its own commands make: see test_evaluated.
MADE = {EXAMPLES / "trained.yaml"}
#: What examples need that is not part of the project.
NEEDS = {"trace": "traces/azure_llm_2023_conv.csv.gz"}


def test_what_is_left_out_is_settled() -> None:
    """Policies by name alone are written out, and the baseline is the shortest queue where it takes part."""
    scenario = parse_scenario(SMALL)
    assert [one.name for one in scenario.policies] == ["bear", "label only", "shortest_queue"]
    assert scenario.baseline == "shortest_queue"
    assert scenario.file.workload.lambda_per_musd == 5e-4


@pytest.mark.parametrize("path", sorted(set(EXAMPLES.glob("*.yaml")) - MADE), ids=lambda path: path.stem)
def test_shipped_scenarios_can_be_planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example passes its checks, and each of its policies answers a query."""
    if path.stem in NEEDS and not (DATA / NEEDS[path.stem]).is_file():
        pytest.skip(f"set HEADWAY_DATA to the directory that holds {NEEDS[path.stem]}")
    monkeypatch.setenv("HEADWAY_DATA", str(DATA))
    settled, inputs = plan(load_scenario(path))
    assert {unit.key for unit in settled.units} == set(inputs)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_queries", "num_querys", r"s\.yaml:2:1: num_querys: unknown key; did you mean 'num_queries'\?"),
        ("seeds: [0, 1]", "seeds: [0, 1]\nseeds: [2]", r"s\.yaml:4:1: seeds: repeated key, first used in line 3"),
        ("- shortest_queue", "- shortest_que", r"s\.yaml:9:5: policies\[2\]: unknown policy .*'shortest_queue'"),
        ("policy: bear, label", "policy: baer, label", r"s\.yaml:8:6: policies\[1\]\.policy: unknown policy 'baer'"),
        ("fallback:", "fallbak:", r"s\.yaml:7:\d+: policies\[0\]\.options\.fallbak: unknown policy option"),
        ("least_work", "least_wrk", r"s\.yaml:7:\d+: policies\[0\]\.options\.fallback: unknown value 'least_wrk'"),
        ("rates_per_s: [6, 9]", "rates_per_s: [6, .nan]", r"s\.yaml:4:18: .*must be a finite number"),
        ("rates_per_s: [6, 9]", "rates_per_s: [9, 6]", r"s\.yaml:4:1: rates_per_s: must rise"),
        ("rates_per_s: [6, 9]", "rates_per_s: [-6, 9]", r"s\.yaml:4:15: rates_per_s\[0\]: .*> 0"),
        ("focus_rate_per_s: 9", "focus_rate_per_s: 7", r"s\.yaml:5:1: focus_rate_per_s: must be one of"),
        ("seeds: [0, 1]", "seeds: []", r"s\.yaml:3:1: seeds: needs at least one"),
        ("seeds: [0, 1]", "seeds: [1, 1]", r"s\.yaml:3:12: seeds\[1\]: 1 stands twice"),
        ("values: [0, 100]", "values: [100, 0]", r"s\.yaml:12:\d+: sweeps\[0\]\.values: .*rise"),
        ("label: label only", "label: bear", r"policies\[1\]: 'bear' stands twice"),
        ("name: small", "name: small\nbaseline: shortest", r"s\.yaml:2:1: baseline: .*did you mean 'shortest_queue'"),
        ("name: small", "name: small\npool: {copies: -1}", r"s\.yaml:2:\d+: pool\.copies: must be at least 0"),
        (
            "name: small",
            "name: small\npool: {instances: [{id: a, model: qwen3-9b, profile: h100-qwen3-8b}]}",
            r"s\.yaml:2:\d+: pool\.instances\[0\]\.model: unknown model 'qwen3-9b'; did you mean 'qwen3-8b'",
        ),
        (
            "name: small",
            "name: small\npool: {instances: [{id: a, model: qwen3-8b, profile: h100-qwen3-9b}]}",
            r"s\.yaml:2:\d+: pool\.instances\[0\]\.profile: .*did you mean 'h100-qwen3-8b'",
        ),
        (
            "name: small",
            "name: small\nworkload: {shares: {alpacca: 1}}",
            r"s\.yaml:2:\d+: workload\.shares\.alpacca: unknown task; did you mean 'alpaca'",
        ),
        ("name: small", "name: small\narrivals: {process: mmpp2}", r"s\.yaml:2:1: arrivals\.ratio: is missing"),
        ("name: small", "name: small\narrivals: {ratio: 3}", r"arrivals\.ratio: belongs to process: mmpp2"),
        (
            "name: small",
            "name: small\narrivals: {process: rate_shift, phases: [{start_s: 5, factor: 1}]}",
            r"s\.yaml:2:\d+: arrivals\.phases\[0\]: the first phase must start at 0",
        ),
        ("name: small", "name: small\nworkload: {trace: none.csv}", r"workload\.trace: there is no file"),
        ("sees: task_label", "estimator: replai", r"s\.yaml:8:\d+: policies\[1\]\.estimator: unknown estimator"),
    ],
)
def test_mistakes_are_told_where_they_stand(old: str, new: str, message: str) -> None:
    """A mistake in a scenario is an error that names file, line and key, before anything was simulated."""
    assert old in SMALL
    with pytest.raises(ConfigError, match=message):
        plan(parse_scenario(SMALL.replace(old, new, 1), path="s.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv:1: .*must name a column"),
        ("arrival_s,prompt_tokens,output_tokens\n", r"t\.csv: holds no usable row"),
        ("arrival_s,prompt_tokens,output_tokens\n0,10,5\n-1,10,5\n", r"t\.csv:3: 'arrival_s' must be .* not -1"),
        ("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,nan,5\n", r"t\.csv:3: 'prompt_tokens' must be .* not nan"),
    ],
)
def test_malformed_traces_are_told_by_line(tmp_path: Path, text: str, message: str) -> None:
    """An empty trace, a negative time or a length that is no number names the trace's file, line and column."""
    (tmp_path / "t.csv").write_text(text)
    scenario = SMALL.replace("name: small", "name: small\nworkload: {trace: t.csv}\narrivals: {process: trace}")
    with pytest.raises(DatasetError, match=message):
        plan(parse_scenario(scenario, path=str(tmp_path / "s.yaml")))


def test_traces_are_looked_for_beside_the_scenario_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace beside the scenario is taken, else the one of that name in HEADWAY_DATA, else the error says both."""
    beside, data = tmp_path / "s", tmp_path / "data"
    beside.mkdir()
    data.mkdir()
    text = SMALL.replace("name: small", "name: small\narrivals: {process: trace, file: t.csv}")
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"s\.yaml:2:\d+: arrivals\.file: there is no file .*HEADWAY_DATA"):
        parse_scenario(text, path=str(beside / "s.yaml"))
    monkeypatch.setenv("HEADWAY_DATA", str(data))
    for folder in (data, beside):
        (folder / "t.csv").write_text("arrival_s\n0\n1\n3\n")
        assert parse_scenario(text, path=str(beside / "s.yaml")).arrivals_trace == folder / "t.csv"


def test_keys_tell_worlds_apart() -> None:
    """What a unit is called does not change its key; anything that shapes its result does."""

    def keys(text: str) -> dict[str, str]:
        settled, _ = plan(parse_scenario(text))
        return {f"{unit.label} {unit.rate_per_s} {unit.sweep} {unit.value}": unit.key for unit in settled.units}

    small = keys(SMALL)
    assert keys(SMALL.replace("name: small", "name: other")) == small
    assert small["bear 9.0 snapshot_interval_ms 0.0"] == small["bear 9.0 None None"]
    assert small["bear 9.0 lambda_per_musd 0.0005"] == small["bear 9.0 None None"]
    assert small["bear 9.0 lambda_per_musd 0.0001"] != small["bear 9.0 None None"]
    assert not set(keys(SMALL.replace("num_queries: 120", "num_queries: 121")).values()) & set(small.values())
