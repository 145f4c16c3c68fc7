"""The query mix that the shipped profiles' calibration figures are stated for: four tasks in equal shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NAMES = ("h100-qwen3-0.6b", "h100-qwen3-8b", "h100-qwen3-32b")
MAX_ANSWER_TOKENS = 1024

# Per task: short instructions, questions over passages, report summaries, stories.
_PROMPT = {
    "median": np.array([40, 1400, 9000, 42]),
    "log_sd": np.array([0.50, 0.22, 0.40, 0.35]),
    "min": np.array([10, 500, 1500, 10]),
    "max": np.array([400, 3500, 32768, 300]),
}
_ANSWER = {"median": np.array([160, 120, 820, 850]), "log_sd": np.array([0.75, 0.60, 0.35, 0.40])}
# Per model: verbosity, and the probability per task that an answer never ends by itself.
_MODELS = {
    "h100-qwen3-0.6b": (0.80, np.array([0.03, 0.03, 0.08, 0.08])),
    "h100-qwen3-8b": (0.90, np.array([0.005, 0.005, 0.012, 0.012])),
    "h100-qwen3-32b": (1.18, np.array([0.002, 0.002, 0.004, 0.004])),
}

Counts = NDArray[np.float64]


def four_task_mix(name: str, size: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], Counts, Counts]:
    """Task, prompt tokens and answer tokens of ``size`` queries on the model of profile ``name``."""
    verbosity, runaway = _MODELS[name]
    task = rng.integers(0, 4, size)
    prompt = _PROMPT["median"][task] * np.exp(_PROMPT["log_sd"][task] * rng.standard_normal(size))
    prompt = np.clip(prompt, _PROMPT["min"][task], _PROMPT["max"][task])
    answer = verbosity * _ANSWER["median"][task] * np.exp(_ANSWER["log_sd"][task] * rng.standard_normal(size))
    answer = np.clip(answer, 1, MAX_ANSWER_TOKENS)
    return task, prompt, np.where(rng.random(size) < runaway[task], MAX_ANSWER_TOKENS, answer)
