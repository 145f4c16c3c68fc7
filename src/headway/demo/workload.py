"""The demo's workload: which query arrives when, with which target, and what each model would answer to it.

Built once from a seed and played unchanged under every policy. Prompts come from files or from ``prompt_text``, arrival
times from a trace's shape or a Poisson process. It refuses to know anything of routing.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.demo.datasets import PromptPool, load_prompts
from headway.demo.prompt_text import write_prompt
from headway.errors import ConfigError
from headway.lab.arrivals import trace_shape
from headway.lab.traces import load_arrivals
from headway.lab.truth import (
    MODELS,
    PROMPT_TOKENS,
    TARGET_SLOPE_MS_PER_TOKEN,
    TASKS,
    Answer,
    Task,
    answer,
    ttft_target_s,
)
from headway.predict.tokens import count_tokens

#: ``max_tokens`` of every query, whatever its task: the router learns nothing from it.
MAX_TOKENS = 1024


class WorkloadSpec(Struct, frozen=True, kw_only=True):
    """What to play. Without ``prompts`` the text is generated, without ``trace`` arrivals are a Poisson process."""

    qps: float
    seconds: float
    seed: int = 0
    prompts: tuple[Path, ...] = ()
    trace: Path | None = None

    @property
    def num_queries(self) -> int:
        """Arrivals in ``seconds`` at the mean rate ``qps``, at least 1."""
        return max(1, round(self.qps * self.seconds))


class DemoQuery(Struct, frozen=True, kw_only=True):
    """One query, ``arrival_s`` after the start of the run. ``answers`` is the truth per model, hidden from routers."""

    number: int
    arrival_s: float
    task: Task
    prompt: str
    prompt_tokens: int
    ttft_target_s: float
    answers: dict[str, Answer]


class WorkloadSummary(Struct, frozen=True, kw_only=True):
    """The workload as the report shows it, enough to repeat it."""

    qps: float
    seconds: float
    seed: int
    num_queries: int
    prompts: list[str]
    num_prompts_dropped: int
    arrivals: str
    tasks: dict[str, int]
    mean_prompt_tokens: float
    max_tokens: int = MAX_TOKENS
    target_slope_ms_per_token: float = TARGET_SLOPE_MS_PER_TOKEN


class Workload(Struct, frozen=True):
    """All queries in order of arrival, and their summary."""

    queries: list[DemoQuery]
    summary: WorkloadSummary


def build_workload(spec: WorkloadSpec) -> Workload:
    """The workload of ``spec``; equal specs give equal workloads.

    Raises:
        ConfigError: a rate or duration that is not positive, or a negative seed.
        DatasetError: a malformed prompts or trace file.
    """
    for key, value in (("qps", spec.qps), ("seconds", spec.seconds)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"must be a positive number, not {value}", key=f"--{key}")
    if spec.seed < 0:
        raise ConfigError(f"must be at least 0, not {spec.seed}", key="--seed")
    pool = load_prompts(spec.prompts) if spec.prompts else None
    arrivals = _arrivals(spec)
    prompts = _from_pool(pool, spec.seed) if pool else _generated(spec.seed)
    queries = [
        _query(spec.seed, number, float(arrival_s), task, prompt)
        for number, (arrival_s, (task, prompt)) in enumerate(zip(arrivals, islice(prompts, len(arrivals)), strict=True))
    ]
    tasks = Counter(query.task for query in queries)
    summary = WorkloadSummary(
        qps=spec.qps,
        seconds=spec.seconds,
        seed=spec.seed,
        num_queries=len(queries),
        prompts=[path.name for path in spec.prompts] or ["generated"],
        num_prompts_dropped=pool.num_dropped if pool else 0,
        arrivals=spec.trace.name if spec.trace else "poisson",
        tasks={task: tasks[task] for task in TASKS if tasks[task]},
        mean_prompt_tokens=round(sum(query.prompt_tokens for query in queries) / len(queries), 1),
    )
    return Workload(queries, summary)


def _query(seed: int, number: int, arrival_s: float, task: Task, prompt: str) -> DemoQuery:
    prompt_tokens = count_tokens(prompt)
    return DemoQuery(
        number=number,
        arrival_s=arrival_s,
        task=task,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        ttft_target_s=ttft_target_s(seed=seed, number=number, prompt_tokens=prompt_tokens),
        answers={
            model: answer(seed=seed, model=model, number=number, task=task, max_tokens=MAX_TOKENS) for model in MODELS
        },
    )


def _rng(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for each purpose, so that one more draw here changes nothing there."""
    return np.random.default_rng((seed, zlib.crc32(purpose.encode())))


def _arrivals(spec: WorkloadSpec) -> NDArray[np.float64]:
    """Arrival times within [0, seconds], ``num_queries`` of them."""
    rng = _rng(spec.seed, "arrivals")
    if spec.trace is None:  # a Poisson process, given the number of its arrivals
        return np.sort(rng.uniform(0.0, spec.seconds, spec.num_queries))
    return trace_shape(load_arrivals(spec.trace), spec.num_queries, spec.seconds, rng)


def _task_order(tasks: Sequence[Task], rng: np.random.Generator) -> Iterator[Task]:
    """Endless rounds, each holding every task once in a random order: equal shares over any stretch."""
    while True:
        for index in rng.permutation(len(tasks)):
            yield tasks[index]


def _from_pool(pool: PromptPool, seed: int) -> Iterator[tuple[Task, str]]:
    """Each task's prompts in a seeded order, over and over."""
    shuffled = {
        task: [prompts[index] for index in _rng(seed, task).permutation(len(prompts))]
        for task, prompts in pool.by_task.items()
    }
    taken: Counter[Task] = Counter()
    for task in _task_order(list(shuffled), _rng(seed, "tasks")):
        yield task, shuffled[task][taken[task] % len(shuffled[task])]
        taken[task] += 1


def _generated(seed: int) -> Iterator[tuple[Task, str]]:
    """Prompts of the four tasks, written to measure."""
    rngs = {task: _rng(seed, task) for task in TASKS}
    for task in _task_order(TASKS, _rng(seed, "tasks")):
        median, log_sd, smallest, largest = PROMPT_TOKENS[task]
        length = round(median * float(np.exp(log_sd * rngs[task].standard_normal())))
        yield task, write_prompt(task, min(max(length, smallest), largest), rngs[task])
