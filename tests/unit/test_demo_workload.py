"""The demo's workload: seeded, in equal shares, with the lengths and arrival shape that were asked for."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headway.demo.pool import POOL, RunningEngine, gateway_config
from headway.demo.prompt_text import write_prompt
from headway.demo.workload import WorkloadSpec, build_workload
from headway.errors import ConfigError
from headway.lab.truth import MODELS, TASKS, Task, answer
from headway.predict.tasks import task_type
from headway.predict.tokens import count_tokens


def test_equal_specs_give_equal_workloads() -> None:
    """A workload is a function of its spec, and another seed gives another one."""
    spec = WorkloadSpec(qps=8, seconds=3, seed=5)
    assert build_workload(spec) == build_workload(spec)
    other = build_workload(WorkloadSpec(qps=8, seconds=3, seed=6))
    assert [q.prompt for q in other.queries] != [q.prompt for q in build_workload(spec).queries]


def test_the_generated_workload_has_equal_shares_and_the_stated_lengths() -> None:
    """Four tasks a quarter each, with the median prompt tokens of the measured workload."""
    workload = build_workload(WorkloadSpec(qps=8, seconds=60))
    assert workload.summary.tasks == dict.fromkeys(TASKS, 120)
    medians = {task: statistics.median(q.prompt_tokens for q in workload.queries if q.task == task) for task in TASKS}
    assert medians["alpaca"] == pytest.approx(40, rel=0.15)
    assert medians["hotpotqa"] == pytest.approx(1400, rel=0.1)
    assert medians["gov_report"] == pytest.approx(9000, rel=0.15)
    assert medians["writing_prompts"] == pytest.approx(42, rel=0.15)
    assert all(q.prompt_tokens == count_tokens(q.prompt) for q in workload.queries)


@pytest.mark.parametrize(
    ("task", "kind", "num_tokens"),
    [
        ("alpaca", "instruct", (10, 40, 400)),
        ("hotpotqa", "question", (500, 1400, 3500)),
        ("gov_report", "summarise", (1500, 9000, 32768)),
        ("writing_prompts", "story", (10, 42, 300)),
    ],
)
def test_generated_prompts_have_their_task_form_and_length(task: Task, kind: str, num_tokens: tuple[int, ...]) -> None:
    """The gateway's rules tell each generated task apart, and a prompt counts what was asked but for a few words."""
    rng = np.random.default_rng(0)
    for wanted in num_tokens:
        for _ in range(20):
            prompt = write_prompt(task, wanted, rng)
            assert task_type(prompt) == kind
            assert count_tokens(prompt) <= wanted + 12
            assert count_tokens(prompt) >= min(wanted - 8, 0.9 * wanted)


def test_files_are_cycled_in_equal_shares(tmp_path: Path) -> None:
    """Each task of the files gets an equal share, its rows all used once before any comes again."""
    rows = [("gov_report", f"g{n}") for n in range(2)] + [("alpaca", f"a{n}") for n in range(5)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"task": task, "prompt": prompt}) + "\n" for task, prompt in rows))
    workload = build_workload(WorkloadSpec(qps=10, seconds=2, prompts=(path,)))
    assert workload.summary.tasks == {"alpaca": 10, "gov_report": 10}
    counts = Counter(q.prompt for q in workload.queries)
    assert counts == {**{f"g{n}": 5 for n in range(2)}, **{f"a{n}": 2 for n in range(5)}}
    assert {q.prompt for q in workload.queries[:4] if q.task == "gov_report"} == {"g0", "g1"}


def test_poisson_arrivals_keep_the_rate() -> None:
    """Without a trace qps × seconds queries arrive within the time, at irregular gaps."""
    arrivals = [q.arrival_s for q in build_workload(WorkloadSpec(qps=20, seconds=20)).queries]
    assert len(arrivals) == 400
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] <= arrivals[-1] <= 20
    gaps = np.diff(arrivals)
    assert 0.85 < gaps.std() / gaps.mean() < 1.15


def test_the_trace_file_is_used(tmp_path: Path) -> None:
    """A named trace shapes the arrivals and stands in the summary."""
    path = tmp_path / "t.csv"
    path.write_text("arrival_s\n" + "".join(f"{n * n}\n" for n in range(9)))
    workload = build_workload(WorkloadSpec(qps=4, seconds=2, trace=path))
    assert workload.summary.arrivals == "t.csv"
    assert [q.arrival_s for q in workload.queries] == pytest.approx([n * n / 32 for n in range(1, 9)])


@pytest.mark.parametrize("spec", [{"qps": 0}, {"qps": math.inf}, {"seconds": -1}, {"seconds": math.nan}, {"seed": -1}])
def test_impossible_rates_are_refused(spec: dict[str, float]) -> None:
    """A rate or time that is not positive, or a negative seed, names its option."""
    with pytest.raises(ConfigError, match=f"--{next(iter(spec))}"):
        build_workload(WorkloadSpec(**{"qps": 8, "seconds": 1, **spec}))  # type: ignore[arg-type]


def test_the_priors_are_the_means_of_the_truth() -> None:
    """What the configuration tells the gateway is each model's mean per task, within 3 % or a few samples' noise."""
    for model in POOL:
        for task, (quality, output_tokens) in model.prior.items():
            assert quality == pytest.approx(MODELS[model.name].mean_quality[task], abs=6e-4)
            draws = [
                answer(seed=2, model=model.name, number=n, task=task, max_tokens=1024).output_tokens for n in range(800)
            ]
            assert output_tokens == pytest.approx(statistics.fmean(draws), rel=0.08)


def test_the_gateway_configuration_tells_nothing_of_a_query() -> None:
    """Two seeds make one configuration: no draw of the truth is in it."""
    engines = {model.name: RunningEngine("http://127.0.0.1:1", "segment") for model in POOL}
    text = gateway_config("bear", engines)
    assert "policy: bear" in text
    assert "seed" not in text
