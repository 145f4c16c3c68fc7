"""One unit of a comparison: one policy at one rate on one seed, from its inputs to what is kept of it.

Inputs are plain values and files by name, so that a unit can be sent to another process and known again by a hash of
all that shapes its result: the inputs, what the pool's profiles and the traces hold, and the code that plays them. It
refuses to keep anything of the machine it ran on, so equal inputs leave equal bytes.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

import headway
from headway.errors import ConfigError
from headway.estimate.base import Estimator
from headway.estimate.registry import make_estimator
from headway.lab import arrivals as arrival_processes
from headway.lab.evaluated import evaluated_workload, held_out, stand_ins
from headway.lab.failures import Failure, failures
from headway.lab.metrics import REFUSED, Outcomes, Score, score
from headway.lab.pool import QWEN3_CARDS, LabInstance, Pool, lab_instance, qwen3_pool
from headway.lab.predictions import PredictorQuality
from headway.lab.reference_runs import NO_ESTIMATOR, make_player
from headway.lab.scenario import ArrivalsConfig, Option, PoolConfig, SightConfig, WorkloadConfig
from headway.lab.simulate import Sight, simulate
from headway.lab.traces import Trace, load_arrivals, load_trace
from headway.lab.truth import TASKS, stream
from headway.lab.workload import EQUAL_SHARES, Workload, WorkloadSpec, four_task_workload, trace_workload
from headway.policy.registry import POLICIES

#: Shares of all queries at which times to first token are kept.
QUANTILES: tuple[float, ...] = (*(round(0.02 * step, 2) for step in range(1, 50)), 0.99, 0.995, 0.999)
#: Queries of one run whose predicted and observed times are kept, evenly spaced.
NUM_PAIRS = 600
#: What shapes a result, as paths within the package.
_CODE = ("_core*.so", "types.py", "router.py", "fleet/*.py", "estimate/*.py", "policy/*.py", "predict/*.py", "lab/*.py")
_NOT_CODE = (
    "report.py",
    "overhead.py",
    "figures.py",
    "run_figures.py",
    "drawing.py",
    "tables.py",
    "reference_margins.py",
    "runs.py",
    "scenario.py",
    "speed.py",
    "length_table.py",
    "lps_figure.py",
)


class Inputs(Struct, frozen=True, kw_only=True):
    """All that one unit is played from. ``policy`` None asks for the fluid bound instead of a policy."""

    policy: str | None
    options: dict[str, Option]
    estimator: str | None
    clock: Literal["fitted", "exact"]
    rate_per_s: float
    seed: int
    num_queries: int
    pool: PoolConfig
    workload: WorkloadConfig
    arrivals: ArrivalsConfig
    sight: SightConfig
    on_infeasible: Literal["best_effort", "reject", "queue"]
    trace: str | None
    arrivals_trace: str | None
    keep_pairs: bool
    keep_failures: bool
    correcting: bool = False
    rows: str | None = None
    artifact: str | None = None


class ModelTtft(Struct, frozen=True, kw_only=True):
    """Mean predicted and observed time to first token of one model's answers. Queries without bound are counted, not
    averaged; None where there were none."""

    num: int
    num_unbounded: int
    predicted_mean_s: float | None
    observed_mean_s: float | None


class Record(Struct, frozen=True, kw_only=True):
    """What is kept of one unit. ``ttft_quantiles_s`` runs parallel to :data:`QUANTILES`, None where none came;
    ``pairs`` holds (predicted, observed) seconds by model. ``failures`` are empty where none were asked or the run
    leaves nothing to judge. ``bound`` is the fluid bound, where that was asked."""

    key: str
    score: Score | None
    ttft_quantiles_s: list[float | None]
    ttft_by_model: dict[str, ModelTtft]
    pairs: dict[str, list[tuple[float, float]]]
    failures: list[Failure] = []
    bound: float | None = None


def key_of(inputs: Inputs) -> str:
    """Thirty-two hex digits that change with anything that shapes the result."""
    paths = (inputs.trace, inputs.arrivals_trace, inputs.rows, inputs.artifact)
    names = [name for name in paths if name is not None]
    plain = replace(inputs, trace=None, arrivals_trace=None, rows=None, artifact=None)
    parts = [
        msgspec.json.encode(plain, order="sorted"),
        _pool_bytes(inputs.pool),
        *(_file_digest(name) for name in names),
        _code_digest(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def play(inputs: Inputs, key: str) -> Record:
    """Simulates one unit.

    Raises:
        ConfigError: an option, profile or name that is wrong; its key is that of the room that found it.
        DatasetError: a trace that is malformed; file and line are named.
    """
    pool, workload = build_pool(inputs.pool), build_workload(inputs)
    if inputs.policy is None:
        from headway.lab.fluid import fluid_bound

        bound = fluid_bound(workload, pool, inputs.rate_per_s).utility
        return Record(key=key, score=None, ttft_quantiles_s=[], ttft_by_model={}, pairs={}, bound=bound)
    outcomes = simulate(
        workload,
        _with_exact_clock(pool) if inputs.clock == "exact" else pool,
        policy=make_player(inputs.policy, inputs.options, stream(inputs.seed, "policy"), workload, pool),
        estimator=_estimator(inputs),
        seed=inputs.seed,
        sight=Sight(
            interval_s=inputs.sight.snapshot_interval_ms / 1000.0,
            ageing=inputs.sight.ageing,
            ledger=inputs.sight.ledger,
            shadow=inputs.sight.shadow,
        ),
        on_infeasible=inputs.on_infeasible,
        correcting=inputs.correcting,
    )
    models = {model: _by_model(pool, outcomes, model) for model in pool.models}
    return Record(
        key=key,
        score=score(workload, pool, outcomes),
        ttft_quantiles_s=_quantiles(outcomes.ttft_s),
        ttft_by_model={model: _ttft(outcomes, rows) for model, rows in models.items()},
        pairs={model: _pairs(outcomes, rows) for model, rows in models.items()} if inputs.keep_pairs else {},
        failures=_failures(workload, pool, outcomes) if inputs.keep_failures else [],
    )


def _estimator(inputs: Inputs) -> Estimator | None:
    if inputs.estimator == NO_ESTIMATOR or inputs.policy is None:
        return None
    return make_estimator(inputs.estimator or POLICIES[inputs.policy].estimator)


def build_pool(config: PoolConfig) -> Pool:
    """The pool of a scenario.

    Raises:
        ConfigError: a profile that does not exist, or one that contradicts its truth; ``.key`` names the entry.
    """
    return _pool(msgspec.json.encode(config))


@functools.lru_cache(maxsize=8)
def _pool(encoded: bytes) -> Pool:
    config = msgspec.json.decode(encoded, type=PoolConfig)
    if config.instances is None:
        return qwen3_pool(1 if config.copies is None else config.copies)
    instances: list[LabInstance] = []
    for index, one in enumerate(config.instances):
        try:
            first = lab_instance(one.id, one.model, one.profile, truth_name=one.truth)
        except ConfigError as error:
            raise ConfigError(str(error), key=f"pool.instances[{index}].profile") from error
        names = [one.id] if one.copies == 1 else [f"{one.id}-{copy}" for copy in range(1, one.copies + 1)]
        instances += [LabInstance(instance=replace(first.instance, id=name), truth=first.truth) for name in names]
    return Pool(instances=tuple(instances), cards=dict(QWEN3_CARDS))


def build_workload(inputs: Inputs) -> Workload:
    """The queries of a unit, in order of arrival.

    Raises:
        ConfigError, DatasetError: as :func:`play`.
    """
    config, num, rate_per_s = inputs.workload, inputs.num_queries, inputs.rate_per_s
    predictor = config.predictor
    spec = WorkloadSpec(
        seed=inputs.seed,
        models=build_pool(inputs.pool).models,
        predictor=PredictorQuality(
            quality_r2=predictor.quality_r2, length_log_r2=predictor.length_log_r2, length=predictor.length
        ),
        target_slope_ms_per_token=config.target_slope_ms_per_token,
        max_tokens=config.max_tokens,
        lambda_per_musd=config.lambda_per_musd,
    )
    if config.rows is not None and inputs.rows is not None and inputs.artifact is not None:
        prompts = held_out(inputs.rows, inputs.artifact, stand_ins(spec.models, config.rows.models))
        return evaluated_workload(prompts, _arrivals(inputs), spec)
    if inputs.trace is None:
        shares = EQUAL_SHARES if config.shares is None else {task: config.shares.get(task, 0.0) for task in TASKS}
        return four_task_workload(_arrivals(inputs), spec, shares=shares)
    trace = _trace(inputs.trace)
    if inputs.arrivals.process == "trace" and inputs.arrivals_trace is None:
        return trace_workload(trace, num, spec, rate_per_s=rate_per_s)
    return trace_workload(trace, num, spec, arrival_s=_arrivals(inputs))


def _arrivals(inputs: Inputs) -> NDArray[np.float64]:
    """Arrival times of the unit; the same pattern at every rate."""
    config, num, rate_per_s = inputs.arrivals, inputs.num_queries, inputs.rate_per_s
    rng = stream(inputs.seed, "arrivals")
    if config.process == "mmpp2":
        share, tau_s = config.high_share, config.correlation_s
        ratio = 1.0 if config.ratio is None else config.ratio
        return arrival_processes.mmpp2(num, rate_per_s, ratio, rng, high_share=share, correlation_s=tau_s)
    if config.process == "rate_shift":
        phases = [(one.start_s, one.factor * rate_per_s) for one in config.phases or []]
        return arrival_processes.rate_shift(num, phases, rng)
    if config.process == "trace" and inputs.arrivals_trace is not None:
        return arrival_processes.trace_shape(_trace_arrivals(inputs.arrivals_trace), num, num / rate_per_s, rng)
    return arrival_processes.poisson(num, rate_per_s, rng)


@functools.lru_cache(maxsize=2)
def _trace(name: str) -> Trace:
    return load_trace(Path(name))


@functools.lru_cache(maxsize=2)
def _trace_arrivals(name: str) -> list[float]:
    return load_arrivals(Path(name))


def _with_exact_clock(pool: Pool) -> Pool:
    """The pool with the engines' own step times where an estimator reads."""
    instances = [
        LabInstance(instance=replace(one.instance, step_time=one.truth.step_time), truth=one.truth)
        for one in pool.instances
    ]
    return replace(pool, instances=tuple(instances))


def _by_model(pool: Pool, outcomes: Outcomes, model: str) -> NDArray[np.intp]:
    """The answered queries of one model."""
    serving = [index for index, one in enumerate(pool.instances) if one.instance.model == model]
    taken = (outcomes.chosen != REFUSED) & np.isin(outcomes.chosen, serving) & np.isfinite(outcomes.ttft_s)
    return np.nonzero(taken)[0]


def _ttft(outcomes: Outcomes, rows: NDArray[np.intp]) -> ModelTtft:
    predicted_s, observed_s = outcomes.predicted_ttft_s[rows], outcomes.ttft_s[rows]
    bounded = np.isfinite(predicted_s)
    return ModelTtft(
        num=len(rows),
        num_unbounded=int((~bounded).sum()),
        predicted_mean_s=float(predicted_s[bounded].mean()) if bounded.any() else None,
        observed_mean_s=float(observed_s.mean()) if len(rows) else None,
    )


def _pairs(outcomes: Outcomes, rows: NDArray[np.intp]) -> list[tuple[float, float]]:
    bounded = rows[np.isfinite(outcomes.predicted_ttft_s[rows])]
    few = bounded[:: max(1, -(-len(bounded) // NUM_PAIRS))]
    columns = (outcomes.predicted_ttft_s[few].tolist(), outcomes.ttft_s[few].tolist())
    return [(round(predicted_s, 6), round(observed_s, 6)) for predicted_s, observed_s in zip(*columns, strict=True)]


def _failures(workload: Workload, pool: Pool, outcomes: Outcomes) -> list[Failure]:
    """Nothing for one model, and for runs too small to be judged."""
    try:
        return list(failures(workload, pool, outcomes))
    except ValueError:
        return []


def _quantiles(ttft_s: NDArray[np.float64]) -> list[float | None]:
    """Over every query; one that never got a first token is later than all others."""
    values = np.quantile(ttft_s, QUANTILES, method="higher").tolist()
    return [round(value, 6) if value != float("inf") else None for value in values]


def _pool_bytes(config: PoolConfig) -> bytes:
    return msgspec.json.encode(build_pool(config), order="sorted")


@functools.lru_cache(maxsize=8)
def _file_digest(name: str) -> bytes:
    return hashlib.sha256(Path(name).read_bytes()).digest()


@functools.cache
def _code_digest() -> bytes:
    """Of the files that play a unit: results of other code are played again, never mixed in."""
    root = Path(headway.__file__).parent
    files = sorted({path for pattern in _CODE for path in root.glob(pattern) if path.name not in _NOT_CODE})
    return hashlib.sha256(b"\0".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).digest()
