"""A comparison as a YAML file: pool, traffic, policies, rates and seeds, with nothing left to the command line.

Reading is strict, as for a pool's configuration: an unknown or repeated key, a policy or model nobody knows, a trace
that holds nothing are refused before anything runs, each where it stands. It refuses to run anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from headway.config.nodes import NodeReader, did_you_mean, read_text
from headway.errors import ConfigError
from headway.lab.arrivals import CORRELATION_S, HIGH_SHARE
from headway.lab.pool import QWEN3_CARDS
from headway.lab.truth import COMPLETION_CAP_TOKENS, TARGET_SLOPE_MS_PER_TOKEN, TASKS
from headway.lab.workload import LAMBDA_PER_MUSD
from headway.policy.registry import POLICIES

Name = Annotated[str, Meta(min_length=1, max_length=120)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Option = float | str | dict[str, float]

#: A policy whose utilities come from the task label alone, or that knows what none can know.
Sees = Literal["scenario", "task_label", "true_lengths", "truth"]
#: What every policy is held against and costs nothing: the task label alone, random mixtures of two models, one
#: threshold between two (see ``references``).
Reference = Literal["task_label", "random_mix", "two_model"]
REFERENCES: tuple[Reference, ...] = ("task_label", "random_mix", "two_model")
#: What a sweep may vary; the unit is in the name. ``burst_ratio`` is the ratio of the two rates of ``mmpp2``.
SweepOf = Literal["lambda_per_musd", "delta_per_ms", "snapshot_interval_ms", "burst_ratio"]


class InstanceConfig(Struct, frozen=True, kw_only=True):
    """``copies`` instances of a model. ``truth`` is the profile their engines run by, by default that of the name."""

    id: Name
    model: Name
    profile: Name
    truth: Name | None = None
    copies: Annotated[int, Meta(ge=1, le=1024)] = 1


class PoolConfig(Struct, frozen=True, kw_only=True):
    """Either ``copies`` of the Qwen3 trio (one number, or one per size) or a list of ``instances``."""

    copies: int | list[int] | None = None
    instances: list[InstanceConfig] | None = None


class PredictorConfig(Struct, frozen=True, kw_only=True):
    """How good predictions are; see ``PredictorQuality``."""

    quality_r2: Share = 0.06
    length_log_r2: Share = 0.30
    length: Literal["mean", "median"] = "mean"


class RowsConfig(Struct, frozen=True, kw_only=True):
    """Evaluation rows as the truth, and the artifact that predicts them. ``models`` says which of the rows' models
    stands in for a model of the pool, where it is called otherwise there."""

    file: Name
    artifact: Name
    models: dict[str, Name] = {}


class WorkloadConfig(Struct, frozen=True, kw_only=True):
    """Four tasks in ``shares`` (equal by default), the lengths of a ``trace``, or the prompts of ``rows``."""

    shares: dict[str, NonNegative] | None = None
    trace: Name | None = None
    rows: RowsConfig | None = None
    predictor: PredictorConfig = PredictorConfig()
    target_slope_ms_per_token: NonNegative = TARGET_SLOPE_MS_PER_TOKEN
    lambda_per_musd: NonNegative = LAMBDA_PER_MUSD
    max_tokens: Count = COMPLETION_CAP_TOKENS


class Phase(Struct, frozen=True, kw_only=True):
    """From ``start_s`` on, the rate is ``factor`` times that of the row."""

    start_s: NonNegative
    factor: Positive


class ArrivalsConfig(Struct, frozen=True, kw_only=True):
    """How queries come at each mean rate. ``trace`` without ``file`` takes the arrivals of the workload's trace."""

    process: Literal["poisson", "mmpp2", "trace", "rate_shift"] = "poisson"
    ratio: Positive | None = None
    high_share: Share = HIGH_SHARE
    correlation_s: Positive = CORRELATION_S
    file: Name | None = None
    phases: list[Phase] | None = None


class SightConfig(Struct, frozen=True, kw_only=True):
    """What the router sees: the engines' state at every decision (0), or snapshots this far apart.

    ``shadow``: no state at all, only what was sent, streams and gauges.
    """

    snapshot_interval_ms: NonNegative = 0.0
    ageing: bool = True
    ledger: bool = True
    shadow: bool = False


class PolicyConfig(Struct, frozen=True, kw_only=True):
    """A policy under a label of its own. Keys left out are the scenario's; only ``estimator`` is the policy's.

    ``clock: exact`` gives the estimator the engines' own step times, without their noise.
    """

    policy: Name
    label: Name | None = None
    options: dict[str, Option] = {}
    estimator: Name | None = None
    sees: Sees = "scenario"
    predictor: PredictorConfig | None = None
    clock: Literal["fitted", "exact"] = "fitted"
    sight: SightConfig | None = None
    on_infeasible: Literal["best_effort", "reject", "queue"] | None = None

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return self.label or self.policy


class SweepConfig(Struct, frozen=True, kw_only=True):
    """One thing varied at one rate (by default the scenario's focus), everything else as it stands."""

    of: SweepOf
    values: list[NonNegative]
    rate_per_s: Positive | None = None


class ScenarioFile(Struct, frozen=True, kw_only=True):
    """The keys of the file. ``correcting`` lets routers stretch replayed times by what they observe."""

    name: Name
    title: str = ""
    num_queries: Count = 4000
    seeds: list[Seed] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    rates_per_s: list[Positive]
    focus_rate_per_s: Positive | None = None
    pool: PoolConfig = PoolConfig(copies=1)
    workload: WorkloadConfig = WorkloadConfig()
    arrivals: ArrivalsConfig = ArrivalsConfig()
    sight: SightConfig = SightConfig()
    correcting: bool = False
    on_infeasible: Literal["best_effort", "reject", "queue"] = "best_effort"
    policies: list[str | PolicyConfig]
    baseline: Name | None = None
    references: list[Reference] = field(default_factory=lambda: list(REFERENCES))
    sweeps: list[SweepConfig] = []
    fluid_bound: bool = False


class Scenario(Struct, frozen=True, kw_only=True):
    """A checked scenario. ``policies`` are written out, ``focus_rate_per_s`` and ``baseline`` are settled, paths of
    files are resolved against the scenario's own place, then against ``HEADWAY_DATA``; ``locations``
    says where each key stands."""

    file: ScenarioFile
    policies: tuple[PolicyConfig, ...]
    baseline: str
    focus_rate_per_s: float
    trace: Path | None
    arrivals_trace: Path | None
    rows: Path | None
    artifact: Path | None
    path: str
    locations: dict[str, tuple[int, int]]

    def error(self, key: str, message: str) -> ConfigError:
        """A complaint about ``key``, placed at it or at the nearest key above it that the file holds."""
        return _error(self.path, self.locations, key, message)

    @contextmanager
    def blaming(self, key: str, **renamed: str) -> Iterator[None]:
        """Turns complaints of the rooms below into ones about this file: at their own key where they name one.

        ``renamed`` maps the first part of such a key to what it is called here.
        """
        try:
            yield
        except ConfigError as error:
            if error.line is not None:
                raise
            first, dot, rest = error.key.partition(".")
            place = f"{renamed[first]}{dot}{rest}" if first in renamed else error.key
            if _nearest(self.locations, place) is None:
                place = key
            raise self.error(place, str(error).removeprefix(f"{error.key}: ")) from None


def load_scenario(path: str | Path) -> Scenario:
    """The checked scenario in the file at ``path``.

    Raises:
        ConfigError: the file cannot be read or is wrong; path, line, column and dotted key are in its message.
    """
    return parse_scenario(read_text(path), path=str(path))


def parse_scenario(text: str, *, path: str = "<text>") -> Scenario:
    """The checked scenario in ``text``; traces are found relative to ``path``, else to the directory that the
    environment variable ``HEADWAY_DATA`` names.

    Raises:
        ConfigError: as :func:`load_scenario`.
    """
    reader = NodeReader(text, path)
    file = reader.read(ScenarioFile)
    policies = tuple(PolicyConfig(policy=one) if isinstance(one, str) else one for one in file.policies)
    rows = file.workload.rows
    scenario = Scenario(
        file=file,
        policies=policies,
        baseline=file.baseline or _default_baseline(policies),
        focus_rate_per_s=file.focus_rate_per_s or (file.rates_per_s[len(file.rates_per_s) // 2 :] or [1.0])[0],
        trace=_beside(path, file.workload.trace),
        arrivals_trace=_beside(path, file.arrivals.file),
        rows=_beside(path, rows.file if rows else None),
        artifact=_beside(path, rows.artifact if rows else None),
        path=path,
        locations=reader.locations,
    )
    _check_lists(scenario)
    _check_pool(scenario)
    _check_arrivals(scenario)
    _check_policies(scenario)
    _check_sweeps(scenario)
    return scenario


def _default_baseline(policies: tuple[PolicyConfig, ...]) -> str:
    names = [one.name for one in policies]
    return "shortest_queue" if "shortest_queue" in names or not names else names[-1]


def _beside(path: str, name: str | None) -> Path | None:
    if name is None:
        return None
    beside, data = Path(path).parent / name, os.environ.get("HEADWAY_DATA")
    return Path(data) / name if data and not beside.is_file() else beside


def _check_lists(scenario: Scenario) -> None:
    file = scenario.file
    for key, values in (("seeds", file.seeds), ("rates_per_s", file.rates_per_s), ("policies", file.policies)):
        if not values:
            raise scenario.error(key, "needs at least one entry")
    unique: list[tuple[str, Sequence[object]]]
    unique = [("seeds", file.seeds), ("rates_per_s", file.rates_per_s), ("references", file.references)]
    for key, entries in unique:
        for index, value in enumerate(entries):
            if value in entries[:index]:
                raise scenario.error(f"{key}[{index}]", f"{value} stands twice")
    if file.rates_per_s != sorted(file.rates_per_s):
        raise scenario.error("rates_per_s", "must rise from entry to entry")
    if scenario.focus_rate_per_s not in file.rates_per_s:
        raise scenario.error("focus_rate_per_s", "must be one of rates_per_s")


def _check_pool(scenario: Scenario) -> None:
    pool = scenario.file.pool
    if (pool.copies is None) == (pool.instances is None):
        raise scenario.error("pool", "give either copies or instances")
    for index, instance in enumerate(pool.instances or []):
        if instance.model not in QWEN3_CARDS:
            known = did_you_mean(instance.model, list(QWEN3_CARDS))
            raise scenario.error(f"pool.instances[{index}].model", f"unknown model {instance.model!r}{known}")


def _check_arrivals(scenario: Scenario) -> None:
    arrivals, workload = scenario.file.arrivals, scenario.file.workload
    for name in workload.shares or {}:
        if name not in TASKS:
            raise scenario.error(f"workload.shares.{name}", f"unknown task{did_you_mean(name, list(TASKS))}")
    takes = {"ratio": "mmpp2", "file": "trace", "phases": "rate_shift"}
    for name, process in takes.items():
        given = getattr(arrivals, name) is not None
        if given and arrivals.process != process:
            raise scenario.error(f"arrivals.{name}", f"belongs to process: {process}, not to {arrivals.process}")
        if not given and arrivals.process == process and not (name == "file" and workload.trace):
            raise scenario.error(f"arrivals.{name}", "is missing")
    if workload.trace is not None and workload.shares is not None:
        raise scenario.error("workload.shares", "a trace has no tasks")
    _check_rows(scenario)
    for key, path in (
        ("workload.trace", scenario.trace),
        ("arrivals.file", scenario.arrivals_trace),
        ("workload.rows.file", scenario.rows),
        ("workload.rows.artifact", scenario.artifact),
    ):
        if path is not None and not path.is_file():
            hint = "" if os.environ.get("HEADWAY_DATA") else "; HEADWAY_DATA names no directory to look in either"
            raise scenario.error(key, f"there is no file {path}{hint}")


def _check_rows(scenario: Scenario) -> None:
    """Rows bring tasks, lengths and predictions of their own."""
    if scenario.file.workload.rows is None:
        return
    for name in ("shares", "trace"):
        if getattr(scenario.file.workload, name) is not None:
            raise scenario.error(f"workload.{name}", "does not go with rows, which bring tasks and lengths")
    for where in ("workload", *(f"policies[{index}]" for index in range(len(scenario.policies)))):
        for name in ("quality_r2", "length_log_r2"):
            if (key := f"{where}.predictor.{name}") in scenario.locations:
                raise scenario.error(key, "does not go with rows, which the artifact predicts")


def _check_policies(scenario: Scenario) -> None:
    seen: set[str] = set()
    for index, one in enumerate(scenario.policies):
        where = f"policies[{index}]"
        if one.policy not in POLICIES:
            place = f"{where}.policy" if f"{where}.policy" in scenario.locations else where
            known = did_you_mean(one.policy, list(POLICIES))
            raise scenario.error(place, f"unknown policy {one.policy!r}{known}")
        if one.name in seen:
            raise scenario.error(where, f"{one.name!r} stands twice; give one of them a label")
        if one.predictor is not None and one.sees != "scenario":
            raise scenario.error(f"{where}.predictor", f"says otherwise than sees: {one.sees}")
        seen.add(one.name)
    if scenario.baseline not in seen:
        raise scenario.error(
            "baseline", f"no policy is called {scenario.baseline!r}{did_you_mean(scenario.baseline, list(seen))}"
        )


def _check_sweeps(scenario: Scenario) -> None:
    seen: set[str] = set()
    for index, sweep in enumerate(scenario.file.sweeps):
        where = f"sweeps[{index}]"
        if sweep.of in seen:
            raise scenario.error(f"{where}.of", f"{sweep.of} is swept twice")
        seen.add(sweep.of)
        if len(sweep.values) < 2 or any(low >= high for low, high in pairwise(sweep.values)):
            raise scenario.error(f"{where}.values", "needs at least two values that rise")
        if sweep.of == "burst_ratio" and sweep.values[0] < 1.0:
            raise scenario.error(f"{where}.values", "a ratio of rates is at least 1")
        if sweep.of == "delta_per_ms" and not any(takes_delta(one) for one in scenario.policies):
            raise scenario.error(where, "no policy of the scenario takes delta_per_ms")


def takes_delta(one: PolicyConfig) -> bool:
    """Whether a sweep of δ says anything of this policy."""
    return "delta_per_ms" in POLICIES[one.policy].options and one.options.get("fallback") in (None, "least_ttft")


def _nearest(locations: dict[str, tuple[int, int]], key: str) -> tuple[int, int] | None:
    while key:
        if key in locations:
            return locations[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return None


def _error(path: str, locations: dict[str, tuple[int, int]], key: str, message: str) -> ConfigError:
    line, column = _nearest(locations, key) or (None, None)
    return ConfigError(message, path=path, key=key, line=line, column=column)
