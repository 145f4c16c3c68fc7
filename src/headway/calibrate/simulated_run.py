"""Runs a simulated engine under a calibration load in virtual time and keeps its step log in memory.

The load is made to teach a clock, not to be anyone's traffic: prompts and answers log-uniform over their whole range,
arrivals in blocks from nearly idle to overloaded, in random order, so that earlier and later steps cover the same
ground. It refuses to read the truth for anything but the engine's own clock.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.calibrate.step_table import StepTable, feature_matrix
from headway.engines.simulated import FinishReason, SimulatedEngine
from headway.engines.step_log import LoggedStep, StepSink
from headway.profiles import TruthProfile
from headway.types import EngineRequest

#: Load of a block relative to what the engine can serve.
_LOADS: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
_BLOCK_QUERIES: Final = 25
_PROMPT_TOKENS: Final = (16, 32_768)
_ANSWER_TOKENS: Final = (16, 1_024)


class Load(Struct, frozen=True, eq=False):
    """Queries in order of arrival: seconds from the start, prompt tokens, answer tokens."""

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    answer_tokens: NDArray[np.int64]


class StepList:
    """A step sink in memory."""

    def __init__(self) -> None:
        self._steps: list[LoggedStep] = []

    def write(self, step: LoggedStep) -> None:
        """Append one step."""
        self._steps.append(step)

    def table(self) -> StepTable:
        """The steps that held a request, as columns."""
        steps = [step for step in self._steps if step.requests]
        return StepTable(
            np.array([step.start_s for step in steps]),
            np.array([step.time_s for step in steps]),
            feature_matrix(steps),
            np.array([float(step.num_outputs) for step in steps]),
            np.array([float(step.num_finished) for step in steps]),
        )


def calibration_load(num_queries: int, service_rate_per_s: float, seed: int) -> Load:
    """Queries that cover an engine's range; ``service_rate_per_s`` is roughly what it can serve of them."""
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_queries // _BLOCK_QUERIES)
    loads = np.concatenate([rng.permutation(_LOADS) for _ in range(-(-num_blocks // len(_LOADS)))])[:num_blocks]
    rate_per_s = service_rate_per_s * np.repeat(loads, _BLOCK_QUERIES)[:num_queries]
    return Load(
        np.cumsum(rng.exponential(1.0 / rate_per_s)),
        _log_uniform(rng, _PROMPT_TOKENS, num_queries),
        _log_uniform(rng, _ANSWER_TOKENS, num_queries),
    )


def _log_uniform(rng: np.random.Generator, bounds: tuple[int, int], size: int) -> NDArray[np.int64]:
    low, high = bounds
    return np.exp(rng.uniform(np.log(low), np.log(high + 1), size)).astype(np.int64)


def run_load(truth: TruthProfile, load: Load, *, seed: int, step_sink: StepSink) -> None:
    """Let a simulated engine serve the whole load in virtual time, every step going to ``step_sink``."""
    run = _Run(truth, seed, step_sink)
    arrivals = load.arrival_s.tolist()
    requests = list(zip(load.prompt_tokens.tolist(), load.answer_tokens.tolist(), strict=True))
    number, end_s = 0, run.engine.begin()
    while number < len(arrivals) or end_s is not None:
        if number < len(arrivals) and (end_s is None or arrivals[number] < end_s):
            run.now_s = arrivals[number]
            run.submit(number, *requests[number])
            number += 1
            end_s = end_s if end_s is not None else run.engine.begin()
        else:
            assert end_s is not None
            run.now_s = end_s
            run.engine.end()
            end_s = run.engine.begin()


class _Run:
    """The engine, its virtual clock, and an observer that wants to know nothing."""

    def __init__(self, truth: TruthProfile, seed: int, step_sink: StepSink) -> None:
        self.now_s = 0.0
        self.engine = SimulatedEngine(
            truth, seed=seed, instance_id="calibration", observer=self, step_sink=step_sink, clock=lambda: self.now_s
        )

    def submit(self, number: int, prompt_tokens: int, answer_tokens: int) -> None:
        request = EngineRequest(request_id=str(number), prompt_tokens=prompt_tokens, target_output_tokens=answer_tokens)
        self.engine.submit(request, arrival_s=self.now_s, on_progress=lambda: None)

    def first_token(self, ttft_s: float, queue_s: float) -> None: ...
    def preempted(self, num_requests: int) -> None: ...
    def step(self, prompt_tokens: int, output_tokens: int) -> None: ...
    def finished(self, reason: FinishReason) -> None: ...
