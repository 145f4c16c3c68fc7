"""What the models would really answer: length and quality of every query on every model, and its TTFT target.

Nothing here is visible to a router. There are two ways to draw, from the same distributions: :func:`answer` one query
at a time from (seed, model, query number), as the demo needs it, and :func:`draw_truth` in columns, each purpose and
model from a stream of its own. The two give unlike numbers for one seed. Each is the same for every policy; a model's
draws do not change with the others in the pool, and a longer workload begins with the shorter one. It refuses to be
tuned: each constant is a published or measured one, named beside it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.lab.beta import Column, beta_of_normal, beta_quantile, normal_cdf

Task = Literal["alpaca", "hotpotqa", "gov_report", "writing_prompts"]
TASKS: tuple[Task, ...] = get_args(Task)

#: An answer that never ends by itself runs to this many tokens (the completion cap of the measured runs).
COMPLETION_CAP_TOKENS = 8192
#: The longest prompt of the measured runs.
PROMPT_CAP_TOKENS = 32768

#: Prompt tokens, clipped lognormal: median, log-sd, min, max.
PROMPT_TOKENS: dict[Task, tuple[float, float, int, int]] = {
    "alpaca": (40, 0.50, 10, 400),
    "hotpotqa": (1400, 0.22, 500, 3500),
    "gov_report": (9000, 0.40, 1500, PROMPT_CAP_TOKENS),
    "writing_prompts": (42, 0.35, 10, 300),
}

#: TTFT target: 155 ms plus this many ms per prompt token, between the two bounds. The first slope is that of the
#: authors' launch scripts, the only one with which the upper bound is reached; the second is the printed one.
TARGET_SLOPE_MS_PER_TOKEN = 0.035
PRINTED_TARGET_SLOPE_MS_PER_TOKEN = 0.0035
TARGET_MIN_MS, TARGET_MAX_MS = 150.0, 1120.0

MEDIAN_TOKENS: dict[Task, float] = {"alpaca": 160, "hotpotqa": 120, "gov_report": 820, "writing_prompts": 850}
LOG_SD: dict[Task, float] = {"alpaca": 0.75, "hotpotqa": 0.60, "gov_report": 0.35, "writing_prompts": 0.40}
SHARED_LENGTH, SHARED_DIFFICULTY = 0.7, 0.6  # shares of variance that the models have in common
BETA_NU = 3.0


class ModelTruth(Struct, frozen=True, kw_only=True):
    """One model as it really behaves: verbosity ``k``, and per task the chance to loop and the mean judge score."""

    verbosity: float
    loop_probability: dict[Task, float]
    mean_quality: dict[Task, float]


def _by_task(alpaca: float, hotpotqa: float, gov_report: float, writing_prompts: float) -> dict[Task, float]:
    return dict(zip(TASKS, (alpaca, hotpotqa, gov_report, writing_prompts), strict=True))


MODELS: dict[str, ModelTruth] = {
    "qwen3-0.6b": ModelTruth(
        verbosity=0.80,
        loop_probability=_by_task(0.03, 0.03, 0.08, 0.08),
        mean_quality=_by_task(0.5349, 0.4098, 0.2902, 0.1773),
    ),
    "qwen3-8b": ModelTruth(
        verbosity=0.90,
        loop_probability=_by_task(0.005, 0.005, 0.012, 0.012),
        mean_quality=_by_task(0.8267, 0.8828, 0.8662, 0.5747),
    ),
    "qwen3-32b": ModelTruth(
        verbosity=1.18,
        loop_probability=_by_task(0.002, 0.002, 0.004, 0.004),
        mean_quality=_by_task(0.8885, 0.9269, 0.9593, 0.8069),
    ),
}


class Answer(Struct, frozen=True):
    """One model's real answer to one query: length in tokens, ended by ``max_tokens``, and quality in [0, 1]."""

    output_tokens: int
    quality: float


def answer(*, seed: int, model: str, number: int, task: Task, max_tokens: int) -> Answer:
    """Draw what ``model`` answers to query ``number``. Pure: equal arguments give an equal answer.

    Length: ``clip(k · median · exp(sd · z), 1, cap)`` with ``z = √.7 · shared + √.3 · own``, or the cap when the model
    loops. Quality: ``Beta(mν, (1 − m)ν)``, ν = 3, joined to the other models' by a Gaussian copula with .6 in common.
    """
    truth = MODELS[model]
    shared_length, shared_difficulty = np.random.default_rng((seed, number)).standard_normal(2).tolist()
    own = np.random.default_rng((seed, number, zlib.crc32(model.encode())))
    own_length, own_difficulty = own.standard_normal(2).tolist()
    z_length = math.sqrt(SHARED_LENGTH) * shared_length + math.sqrt(1 - SHARED_LENGTH) * own_length
    length = truth.verbosity * MEDIAN_TOKENS[task] * math.exp(LOG_SD[task] * z_length)
    if own.random() < truth.loop_probability[task]:
        length = COMPLETION_CAP_TOKENS
    z_quality = math.sqrt(SHARED_DIFFICULTY) * shared_difficulty + math.sqrt(1 - SHARED_DIFFICULTY) * own_difficulty
    mean = truth.mean_quality[task]
    quality = beta_quantile(normal_cdf(z_quality), mean * BETA_NU, (1 - mean) * BETA_NU)
    tokens = min(max(round(length), 1), COMPLETION_CAP_TOKENS, max_tokens)
    return Answer(tokens, quality)


def ttft_target_s(*, seed: int, number: int, prompt_tokens: int) -> float:
    """The TTFT target of query ``number`` in seconds: ``clip(u + (155 + s·p)·v, 150, 1120)`` ms.

    u ~ U(1, 5) and v ~ U(.98, 1.02) are drawn from (seed, number); p is ``prompt_tokens``.
    """
    u, v = np.random.default_rng((seed, number, zlib.crc32(b"target"))).random(2).tolist()
    target_ms: float = (1 + 4 * u) + (155 + TARGET_SLOPE_MS_PER_TOKEN * prompt_tokens) * (0.98 + 0.04 * v)
    return min(max(target_ms, TARGET_MIN_MS), TARGET_MAX_MS) / 1000


def stream(seed: int, *names: str) -> np.random.Generator:
    """A generator of its own for each purpose, so that one more draw here changes nothing there."""
    return np.random.default_rng((seed, *(zlib.crc32(name.encode()) for name in names)))


def scores(seed: int, purpose: str, model: str, num: int, shared: float) -> Column:
    """Standard normal scores of ``num`` queries on one model; models have ``shared`` of the variance in common."""
    common = stream(seed, purpose).standard_normal(num)
    common *= math.sqrt(shared)
    own = stream(seed, purpose, model).standard_normal(num)
    own *= math.sqrt(1 - shared)
    common += own
    return common


def model_truth(model: str) -> ModelTruth:
    """The truth of a model by name.

    Raises:
        ConfigError: nothing is known of it.
    """
    truth = MODELS.get(model)
    if truth is None:
        raise ConfigError(f"no truth is known of model {model!r}; there are {', '.join(MODELS)}", key="models")
    return truth


def per_task(values: dict[Task, float], tasks: NDArray[np.int8]) -> Column:
    """The value of each query's task; ``tasks`` indexes :data:`TASKS`."""
    return np.array([values[task] for task in TASKS])[tasks]


def draw_prompts(seed: int, tasks: NDArray[np.int8]) -> NDArray[np.int32]:
    """Prompt tokens of queries of these tasks."""
    median, log_sd, low, high = np.array([PROMPT_TOKENS[task] for task in TASKS]).T[:, tasks]
    lengths = median * np.exp(log_sd * stream(seed, "prompts").standard_normal(len(tasks)))
    rounded: NDArray[np.int32] = np.clip(np.rint(lengths), low, high).astype(np.int32)
    return rounded


def draw_truth(
    seed: int, tasks: NDArray[np.int8], models: Sequence[str], *, max_tokens: int = COMPLETION_CAP_TOKENS
) -> tuple[NDArray[np.int32], Column]:
    """Answer lengths in tokens and qualities in [0, 1], each of shape (queries, models).

    ``tasks`` indexes :data:`TASKS`. The distributions are those of :func:`answer`.

    Raises:
        ConfigError: an unknown model.
    """
    num = len(tasks)
    lengths = np.empty((num, len(models)), np.int32)
    qualities = np.empty((num, len(models)))
    for column, model in enumerate(models):
        truth = model_truth(model)
        natural = natural_length(seed, tasks, model)
        loops = stream(seed, "loop", model).random(num) < per_task(truth.loop_probability, tasks)
        natural[loops] = COMPLETION_CAP_TOKENS
        lengths[:, column] = np.clip(np.rint(natural), 1, min(COMPLETION_CAP_TOKENS, max_tokens))
        difficulty = scores(seed, "quality", model, num, SHARED_DIFFICULTY)
        for index, task in enumerate(TASKS):
            of_task = tasks == index
            mean = truth.mean_quality[task]
            qualities[of_task, column] = beta_of_normal(difficulty[of_task], mean * BETA_NU, (1 - mean) * BETA_NU)
    return lengths, qualities


def natural_length(seed: int, tasks: NDArray[np.int8], model: str) -> Column:
    """Where each answer would end by itself, in tokens before rounding and limits; loops are not in here."""
    lengths = scores(seed, "length", model, len(tasks), SHARED_LENGTH)
    lengths *= per_task(LOG_SD, tasks)
    np.exp(lengths, out=lengths)
    lengths *= per_task(MEDIAN_TOKENS, tasks)
    lengths *= model_truth(model).verbosity
    return lengths


def draw_ttft_targets(seed: int, prompt_tokens: NDArray[np.int32], slope_ms_per_token: float) -> Column:
    """TTFT targets in seconds, by the formula of :func:`ttft_target_s` for any slope."""
    u, v = stream(seed, "targets").random((len(prompt_tokens), 2)).T
    target_ms = (1 + 4 * u) + (155 + slope_ms_per_token * prompt_tokens) * (0.98 + 0.04 * v)
    targets_s: Column = np.clip(target_ms, TARGET_MIN_MS, TARGET_MAX_MS) / 1000
    return targets_s
