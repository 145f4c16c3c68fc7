"""A workload: every query with its arrival, target, predictions and truth, in columns.

Built once from a seed and played unchanged under every policy and, with the same queries, at every rate. What a router
may see (prompt tokens, target, predictions) and what it may not (true lengths and qualities) stand side by side here;
only the simulator reads the latter. It refuses columns that no traffic could have, naming column and row.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError, DatasetError
from headway.lab.arrivals import scaled, stretch
from headway.lab.beta import Column, beta_of_normal
from headway.lab.predictions import PredictorQuality, log_signal, mean_below, predict_length, predict_quality
from headway.lab.traces import Trace
from headway.lab.truth import (
    BETA_NU,
    COMPLETION_CAP_TOKENS,
    MODELS,
    SHARED_DIFFICULTY,
    TARGET_SLOPE_MS_PER_TOKEN,
    TASKS,
    Task,
    draw_prompts,
    draw_truth,
    draw_ttft_targets,
    model_truth,
    per_task,
    scores,
    stream,
)

#: Utility lost per micro-USD (the published setting).
LAMBDA_PER_MUSD = 5e-4

EQUAL_SHARES: dict[Task, float] = dict.fromkeys(TASKS, 1.0)
#: A mix with few documents: mostly short instructions and questions, some stories.
CHAT_HEAVY: dict[Task, float] = {"alpaca": 0.60, "hotpotqa": 0.15, "gov_report": 0.05, "writing_prompts": 0.20}


class Workload(Struct, frozen=True, eq=False, kw_only=True):
    """N queries on M models. ``task`` indexes ``task_names``; matrices are (N, M), with columns as in ``models``.

    Times are seconds from the start, sorted; lengths are tokens, true ones at least 1 and at most ``max_tokens``;
    qualities lie in [0, 1]. ``candidates`` names, for each query, the models that may answer it (None: all), where some
    are bound to a model. ``note`` says what a reader of results should know of where the rows come from. The columns
    given become read-only.

    Raises:
        DatasetError: a column of the wrong shape, or a value that is NaN, negative or out of order; it names column and
            row (counted from 1).
    """

    arrival_s: Column
    task: NDArray[np.int8]
    task_names: tuple[str, ...]
    models: tuple[str, ...]
    prompt_tokens: NDArray[np.int32]
    ttft_target_s: Column
    true_output_tokens: NDArray[np.int32]
    true_quality: Column
    predicted_output_tokens: Column
    predicted_quality: Column
    max_tokens: int
    lambda_per_musd: float = LAMBDA_PER_MUSD
    note: str = ""
    candidates: tuple[tuple[str, ...] | None, ...] | None = None

    def __post_init__(self) -> None:
        num, num_models = len(self.arrival_s), len(self.models)
        if num == 0:
            raise DatasetError("column 'arrival_s' is empty: a workload needs at least one query")
        for name in ("task", "prompt_tokens", "ttft_target_s"):
            _require_shape(name, getattr(self, name), (num,))
        for name in _MATRICES:
            _require_shape(name, getattr(self, name), (num, num_models))
        _require("arrival_s", self.arrival_s, self.arrival_s >= 0, "must be at least 0")
        _require("arrival_s", self.arrival_s[1:], np.diff(self.arrival_s) >= 0, "must not be before the row above", 2)
        _require("task", self.task, (self.task >= 0) & (self.task < len(self.task_names)), "must index task_names")
        _require("prompt_tokens", self.prompt_tokens, self.prompt_tokens >= 1, "must be at least 1")
        _require("ttft_target_s", self.ttft_target_s, self.ttft_target_s > 0, "must be above 0")
        true, predicted = self.true_output_tokens, self.predicted_output_tokens
        _require("true_output_tokens", true, (true >= 1) & (true <= self.max_tokens), f"must be 1 to {self.max_tokens}")
        _require("predicted_output_tokens", predicted, predicted > 0, "must be above 0")
        for name in ("true_quality", "predicted_quality"):
            values = getattr(self, name)
            _require(name, values, (values >= 0) & (values <= 1), "must lie between 0 and 1")
        if self.candidates is not None and len(self.candidates) != num:
            raise DatasetError(f"column 'candidates' has {len(self.candidates)} rows, not {num}")
        for name in (*_MATRICES, "arrival_s", "task", "prompt_tokens", "ttft_target_s"):
            getattr(self, name).setflags(write=False)  # every policy must meet the same world

    @property
    def num_queries(self) -> int:
        """N."""
        return len(self.arrival_s)


_MATRICES = ("true_output_tokens", "true_quality", "predicted_output_tokens", "predicted_quality")


class WorkloadSpec(Struct, frozen=True, kw_only=True):
    """What every builder takes. ``target_slope_ms_per_token`` is s of the target formula (see ``truth``)."""

    seed: int = 0
    models: tuple[str, ...] = tuple(MODELS)
    predictor: PredictorQuality = PredictorQuality()
    target_slope_ms_per_token: float = TARGET_SLOPE_MS_PER_TOKEN
    max_tokens: int = COMPLETION_CAP_TOKENS
    lambda_per_musd: float = LAMBDA_PER_MUSD

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"must be at least 0, not {self.seed}", key="workload.seed")
        if not self.models:
            raise ConfigError("must name at least one model", key="workload.models")
        if self.max_tokens < 1:
            raise ConfigError(f"must be at least 1, not {self.max_tokens}", key="workload.max_tokens")
        for name in ("target_slope_ms_per_token", "lambda_per_musd"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"must be at least 0, not {getattr(self, name)!r}", key=f"workload.{name}")


def four_task_workload(
    arrival_s: Column, spec: WorkloadSpec, *, shares: Mapping[Task, float] = EQUAL_SHARES
) -> Workload:
    """The four-task workload at these arrivals: instructions, questions over passages, report summaries, stories.

    ``shares`` need not sum to 1. Everything but the arrivals depends on ``spec`` and ``shares`` alone, so one spec at
    two rates gives the same queries.

    Raises:
        ConfigError: an unknown task or model, or shares that are negative or all 0.
        DatasetError: as :class:`Workload`.
    """
    num, seed = len(arrival_s), spec.seed
    task = stream(seed, "tasks").choice(len(TASKS), num, p=_probabilities(shares)).astype(np.int8)
    prompt_tokens = draw_prompts(seed, task)
    lengths, qualities = draw_truth(seed, task, spec.models, max_tokens=spec.max_tokens)
    predicted_length, predicted_quality = np.empty(lengths.shape), np.empty(lengths.shape)
    for column, model in enumerate(spec.models):
        mean = per_task(model_truth(model).mean_quality, task)
        predicted_length[:, column] = predict_length(
            seed, task, lengths[:, column], model, spec.predictor, max_tokens=spec.max_tokens
        )
        predicted_quality[:, column] = predict_quality(
            seed, mean, qualities[:, column], model, spec.predictor.quality_r2
        )
    return Workload(
        arrival_s=arrival_s,
        task=task,
        task_names=TASKS,
        models=spec.models,
        prompt_tokens=prompt_tokens,
        ttft_target_s=draw_ttft_targets(seed, prompt_tokens, spec.target_slope_ms_per_token),
        true_output_tokens=lengths,
        true_quality=qualities,
        predicted_output_tokens=predicted_length,
        predicted_quality=predicted_quality,
        max_tokens=spec.max_tokens,
        lambda_per_musd=spec.lambda_per_musd,
    )


def trace_workload(
    trace: Trace,
    num_queries: int,
    spec: WorkloadSpec,
    *,
    rate_per_s: float | None = None,
    arrival_s: Column | None = None,
) -> Workload:
    """A stretch of consecutive rows of a trace, from a random place, around where the trace is shorter.

    Arrivals are the trace's own, scaled to ``rate_per_s`` where given; or ``arrival_s``. The recorded length is the
    true one on every model. A trace records no quality: it is drawn around each model's mean over the four tasks. The
    one task is called ``trace``.

    Raises:
        ConfigError: neither or both of a trace with arrivals and ``arrival_s``; a rate that is not positive.
        DatasetError: all arrivals of the stretch are equal, or as :class:`Workload`.
    """
    rng = stream(spec.seed, "stretch")
    if arrival_s is None:
        rows, arrival_s = _timed_stretch(trace, num_queries, rate_per_s, rng)
    elif rate_per_s is not None or len(arrival_s) != num_queries:
        raise ConfigError("give either rate_per_s or one arrival per query", key="workload.arrivals")
    else:
        rows = stretch(len(trace.prompt_tokens), num_queries, rng)
    prompt_tokens = trace.prompt_tokens[rows]
    lengths = np.minimum(trace.output_tokens[rows], spec.max_tokens)
    num_models = len(spec.models)
    true_quality, predicted_quality = np.empty((num_queries, num_models)), np.empty((num_queries, num_models))
    predicted_length = np.empty((num_queries, num_models))
    for column, model in enumerate(spec.models):
        mean = float(np.mean(list(model_truth(model).mean_quality.values())))
        difficulty = scores(spec.seed, "quality", model, num_queries, SHARED_DIFFICULTY)
        true = beta_of_normal(difficulty, mean * BETA_NU, (1 - mean) * BETA_NU)
        true_quality[:, column] = true
        means = np.full(num_queries, mean)
        predicted_quality[:, column] = predict_quality(spec.seed, means, true, model, spec.predictor.quality_r2)
        predicted_length[:, column] = _predict_recorded(lengths, trace, model, spec)
    return Workload(
        arrival_s=arrival_s,
        task=np.zeros(num_queries, np.int8),
        task_names=("trace",),
        models=spec.models,
        prompt_tokens=prompt_tokens,
        ttft_target_s=draw_ttft_targets(spec.seed, prompt_tokens, spec.target_slope_ms_per_token),
        true_output_tokens=np.repeat(lengths[:, None], num_models, axis=1),
        true_quality=true_quality,
        predicted_output_tokens=predicted_length,
        predicted_quality=predicted_quality,
        max_tokens=spec.max_tokens,
        lambda_per_musd=spec.lambda_per_musd,
        note=_trace_note(trace),
    )


def _timed_stretch(
    trace: Trace, num: int, rate_per_s: float | None, rng: np.random.Generator
) -> tuple[NDArray[np.intp], Column]:
    """Rows of a stretch, each after the gap before it, and their arrivals."""
    if trace.arrival_s is None or len(trace.arrival_s) < 2:
        raise ConfigError(f"{trace.name} has no arrivals of its own; give some", key="workload.arrivals")
    if rate_per_s is not None and not 0.0 < rate_per_s < float("inf"):
        raise ConfigError(f"must be positive and finite, not {rate_per_s!r}", key="workload.rate_per_s")
    gaps_s = np.diff(trace.arrival_s)
    gaps = stretch(len(gaps_s), num, rng)
    seconds = float(gaps_s[gaps].sum()) if rate_per_s is None else num / rate_per_s
    return gaps + 1, scaled(gaps_s[gaps], seconds)


def _predict_recorded(lengths: NDArray[np.int32], trace: Trace, model: str, spec: WorkloadSpec) -> Column:
    """Predictions of recorded lengths, lognormal around the whole trace's figures."""
    if spec.predictor.length_log_r2 == 1.0:
        return lengths.astype(np.float64)
    logs = np.log(trace.output_tokens)
    typical, log_sd = np.full(len(lengths), logs.mean()), np.full(len(lengths), max(float(logs.std()), 1e-9))
    r2 = spec.predictor.length_log_r2
    signal = log_signal(spec.seed, model, np.log(lengths), typical=typical, log_sd=log_sd, r2=r2)
    limit = float(min(spec.max_tokens, trace.output_tokens.max()))
    if spec.predictor.length == "median":
        return np.clip(np.exp(signal), 1.0, limit)
    rest_sd = log_sd * (1.0 - r2) ** 0.5
    return np.maximum(mean_below(signal, rest_sd, limit), 1.0)


def _trace_note(trace: Trace) -> str:
    dropped = f"{trace.num_dropped_empty} rows without tokens and {trace.num_dropped_long} beyond the context dropped"
    ticks = "" if trace.tick_s is None else f"; stamps spread over their {trace.tick_s:g} s tick"
    return f"{trace.name}: {dropped}{ticks}"


def _probabilities(shares: Mapping[Task, float]) -> Column:
    for task, share in shares.items():
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(TASKS)}"
            raise ConfigError(f"unknown task; {hint}", key=f"workload.shares.{task}")
        if not 0.0 <= share < float("inf"):
            raise ConfigError(f"must be at least 0, not {share!r}", key=f"workload.shares.{task}")
    weights = np.array([shares.get(task, 0.0) for task in TASKS], np.float64)
    if weights.sum() <= 0:
        raise ConfigError("must not all be 0", key="workload.shares")
    return weights / float(weights.sum())


def _require_shape(name: str, values: NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise DatasetError(f"column {name!r} has shape {values.shape}, not {shape}")


def _require(name: str, values: NDArray[np.generic], good: NDArray[np.bool_], rule: str, first_row: int = 1) -> None:
    """The first value that breaks the rule, or is not finite, is an error at its row (counted from 1)."""
    if values.dtype.kind == "f":
        good = good & np.isfinite(values)
    if good.all():
        return
    bad = tuple(int(place[0]) for place in np.nonzero(~good))
    raise DatasetError(f"column {name!r}, row {bad[0] + first_row}: {rule}, not {values[bad]!s}")
