"""Recorded workloads for a real engine: who asks when, for how many tokens, and with which token ids.

Lengths are rows of a published trace that fit the engine's context, arrivals are Poisson or bursty, and everything
follows from a seed, so the same workload can be sent again through another gateway. Prompts are token ids, because
lengths must be exact; what they say does not matter to a model of random weights. Nothing here sends or times.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import numpy as np
from msgspec import Struct

from headway._core import ReplayedEngine
from headway.lab.arrivals import mmpp2, poisson
from headway.lab.traces import load_trace
from headway.types import EngineLimits, EngineRequest, StepTime

DATA: Final = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[3] / "shared" / "data")
TRACE: Final = DATA / "traces" / "azure_llm_2023_conv.csv.gz"
CONTEXT_TOKENS: Final = 4096
#: Bursts: the high rate is this multiple of the low one.
BURST_RATIO: Final = 6.0
#: A request is decode-heavy when its answer is at least this share of its prompt.
DECODE_HEAVY_SHARE: Final = 0.5

Shape = Literal["poisson", "bursty", "decode_heavy"]
SHAPES: Final[tuple[Shape, ...]] = ("poisson", "bursty", "decode_heavy")
_ARRIVALS: Final = {"poisson": 0, "bursty": 1, "decode_heavy": 2}
#: Token ids of the models' vocabulary of 4,096 that stand for more than one byte.
_FIRST_ID, _LAST_ID = 300, 4000


class Asked(Struct, frozen=True):
    """One request of a workload. ``arrival_s`` counts from its beginning; ``prefix_tokens`` of the prompt are shared
    with all requests of the same ``prefix`` group."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: int = 0
    prefix_tokens: int = 0


def lengths(shape: Shape, num: int, seed: int) -> list[tuple[int, int]]:
    """``num`` (prompt, output) lengths drawn from the trace's rows; ``decode_heavy`` from those with long answers."""
    trace = load_trace(TRACE, context_tokens=CONTEXT_TOKENS - 1)
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    if shape == "decode_heavy":
        heavy = outputs >= DECODE_HEAVY_SHARE * prompts
        prompts, outputs = prompts[heavy], outputs[heavy]
    rows = np.random.default_rng([seed, _ARRIVALS[shape]]).integers(len(prompts), size=num)
    return [(int(prompts[row]), int(outputs[row])) for row in rows]


def mean_output_tokens(shape: Shape = "poisson") -> float:
    """The mean answer of the trace's rows that fit: what a length predictor could know beforehand."""
    trace = load_trace(TRACE, context_tokens=CONTEXT_TOKENS - 1)
    outputs = trace.output_tokens
    if shape == "decode_heavy":
        outputs = outputs[outputs >= DECODE_HEAVY_SHARE * trace.prompt_tokens]
    return float(outputs.mean())


def workload(shape: Shape, *, num: int, rate_per_s: float, seed: int) -> list[Asked]:
    """A workload of ``num`` requests at this mean rate."""
    rng = np.random.default_rng([seed, 17, _ARRIVALS[shape]])
    times = mmpp2(num, rate_per_s, BURST_RATIO, rng) if shape == "bursty" else poisson(num, rate_per_s, rng)
    return [
        Asked(number, float(time_s), prompt, output)
        for number, (time_s, (prompt, output)) in enumerate(zip(times, lengths(shape, num, seed), strict=True))
    ]


def sharing_workload(*, num: int, rate_per_s: float, seed: int) -> list[Asked]:
    """A workload whose prompts begin alike: six system prompts, on which three quarters of the requests build."""
    rng = np.random.default_rng([seed, 23])
    asked = workload("poisson", num=num, rate_per_s=rate_per_s, seed=seed)
    shared = [int(tokens) for tokens in rng.integers(100, 1500, size=6)]
    made = []
    for one in asked:
        group = int(rng.integers(1, 9))
        prefix_tokens = min(shared[group - 1], one.prompt_tokens - 1) if group <= len(shared) else 0
        made.append(
            Asked(one.number, one.arrival_s, one.prompt_tokens, one.output_tokens, group, max(prefix_tokens, 0))
        )
    return made


def token_ids(asked: Asked, seed: int) -> list[int]:
    """The prompt: the group's own tokens first, then the request's."""
    own = np.random.default_rng([seed, 29, asked.number]).integers(
        _FIRST_ID, _LAST_ID, asked.prompt_tokens - asked.prefix_tokens
    )
    common = np.random.default_rng([31, asked.prefix]).integers(_FIRST_ID, _LAST_ID, asked.prefix_tokens)
    return [*map(int, common), *map(int, own)]


def capacity_per_s(shape: Shape, limits: EngineLimits, step_time: StepTime, *, num: int = 200, seed: int = 7) -> float:
    """Requests per second of an engine that always has enough to do, by a replay of requests of other seeds."""
    engine = ReplayedEngine(limits, step_time)
    for number, (prompt, output) in enumerate(lengths(shape, num, seed)):
        engine.submit(
            EngineRequest(request_id=str(number), prompt_tokens=prompt, target_output_tokens=output, max_tokens=output)
        )
    busy_s = 0.0
    while engine.num_running or engine.num_waiting:
        busy_s += engine.step().time_s
    return num / busy_s
