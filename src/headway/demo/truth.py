"""What the demo's models would really answer: length and quality of every query on every model, and its TTFT target.

The draws depend on (seed, model, query number) and on the task alone, so every policy meets the same world. Nothing
here is visible to a router: lengths travel to the engines in a header that the gateway forwards unread, qualities only
to the score. It refuses to be tuned: each constant is a published or measured one, named beside it.
"""

from __future__ import annotations

import math
import zlib
from typing import Literal, get_args

import numpy as np
from msgspec import Struct

Task = Literal["alpaca", "hotpotqa", "gov_report", "writing_prompts"]
TASKS: tuple[Task, ...] = get_args(Task)

#: An answer that never ends by itself runs to this many tokens (the completion cap of the measured runs).
COMPLETION_CAP_TOKENS = 8192

#: TTFT target by the authors' launch scripts: 155 ms plus this many ms per prompt token, between the two bounds.
TARGET_SLOPE_MS_PER_TOKEN = 0.035
TARGET_MIN_MS, TARGET_MAX_MS = 150.0, 1120.0

_MEDIAN_TOKENS: dict[Task, float] = {"alpaca": 160, "hotpotqa": 120, "gov_report": 820, "writing_prompts": 850}
_LOG_SD: dict[Task, float] = {"alpaca": 0.75, "hotpotqa": 0.60, "gov_report": 0.35, "writing_prompts": 0.40}
_SHARED_LENGTH, _SHARED_DIFFICULTY = 0.7, 0.6  # shares of variance that the models have in common
_BETA_NU = 3.0


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
    z_length = math.sqrt(_SHARED_LENGTH) * shared_length + math.sqrt(1 - _SHARED_LENGTH) * own_length
    length = truth.verbosity * _MEDIAN_TOKENS[task] * math.exp(_LOG_SD[task] * z_length)
    if own.random() < truth.loop_probability[task]:
        length = COMPLETION_CAP_TOKENS
    z_quality = math.sqrt(_SHARED_DIFFICULTY) * shared_difficulty + math.sqrt(1 - _SHARED_DIFFICULTY) * own_difficulty
    mean = truth.mean_quality[task]
    quality = beta_quantile(normal_cdf(z_quality), mean * _BETA_NU, (1 - mean) * _BETA_NU)
    tokens = min(max(round(length), 1), COMPLETION_CAP_TOKENS, max_tokens)
    return Answer(tokens, quality)


def ttft_target_s(*, seed: int, number: int, prompt_tokens: int) -> float:
    """The TTFT target of query ``number`` in seconds: ``clip(u + (155 + s·p)·v, 150, 1120)`` ms.

    u ~ U(1, 5) and v ~ U(.98, 1.02) are drawn from (seed, number); p is ``prompt_tokens``.
    """
    u, v = np.random.default_rng((seed, number, zlib.crc32(b"target"))).random(2).tolist()
    target_ms: float = (1 + 4 * u) + (155 + TARGET_SLOPE_MS_PER_TOKEN * prompt_tokens) * (0.98 + 0.04 * v)
    return min(max(target_ms, TARGET_MIN_MS), TARGET_MAX_MS) / 1000


def normal_cdf(z: float) -> float:
    """Φ(z)."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def beta_quantile(probability: float, a: float, b: float) -> float:
    """The value below which a Beta(a, b) variate lies with ``probability``, to about 1e-9 (by bisection)."""
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = 0.5 * (low + high)
        if beta_cdf(middle, a, b) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below the mean
        return 1.0 - beta_cdf(1.0 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _beta_fraction(x, a, b))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """``1 + d1/(1 + d2/(1 + …))`` evaluated forwards (Wallis ratios rescaled by the modified Lentz recurrence)."""
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1, 300):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / (1.0 + term * d)
        c = 1.0 + term / c
        value *= c * d
        if abs(c * d - 1.0) < 1e-13:
            break
    return value
