"""Runs a scenario's units in parallel and keeps each result as one JSON line, so that a run can be broken off.

A directory holds ``plan.json`` (what the scenario asks, unit by unit) and ``results.jsonl`` (what was found, by key). A
unit whose key is there is not played again, and results are read in the order of the plan, whatever the order they came
in. It refuses to use a result of other inputs or other code, and to read a file that is damaged but at its very end.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headway.errors import ConfigError, DatasetError
from headway.lab.scenario import (
    ArrivalsConfig,
    PolicyConfig,
    PredictorConfig,
    Reference,
    Scenario,
    ScenarioFile,
    SightConfig,
    SweepOf,
    takes_delta,
)

if TYPE_CHECKING:
    from headway.lab.unit import Inputs, Record

#: Where units are played: in processes of this machine, or on a Ray cluster.
Backend = Literal["loky", "ray"]
#: What the fluid bound is called among the policies.
FLUID_BOUND = "fluid bound"


class Unit(Struct, frozen=True, kw_only=True):
    """Where a result belongs. ``sweep`` None is the comparison over rates; else ``value`` is what the sweep varied.

    ``reference`` is the one that ``label`` is a run of, None for policies and the fluid bound.
    """

    label: str
    rate_per_s: float
    seed: int
    sweep: SweepOf | None = None
    value: float | None = None
    key: str = ""
    reference: Reference | None = None


class Plan(Struct, frozen=True, kw_only=True):
    """A scenario as it was asked, with the settings that were left open filled in, and its units."""

    scenario: ScenarioFile
    labels: list[str]
    baseline: str
    focus_rate_per_s: float
    instances: dict[str, str]
    units: list[Unit]


class Results(Struct, frozen=True, kw_only=True):
    """The plan and what was found so far, in the plan's order."""

    plan: Plan
    found: list[tuple[Unit, Record]]

    @property
    def num_missing(self) -> int:
        """Units without a result yet."""
        return len(self.plan.units) - len(self.found)

    def of(self, label: str, rate_per_s: float) -> dict[int, Record]:
        """One policy at one rate, by seed."""
        asked = (label, rate_per_s, None, None)
        return {u.seed: r for u, r in self.found if (u.label, u.rate_per_s, u.sweep, u.reference) == asked}

    def swept(self, sweep: SweepOf, label: str, value: float) -> dict[int, Record]:
        """One policy at one value of a sweep, by seed."""
        return {u.seed: r for u, r in self.found if (u.sweep, u.label, u.value) == (sweep, label, value)}


class Summary(Struct, frozen=True, kw_only=True):
    """What a run did. Units with equal inputs are played once; ``num_kept`` had been played before."""

    num_units: int
    num_played: int
    num_kept: int


def need(module: str, extra: str = "lab") -> None:
    """Checks that an optional package is here.

    Raises:
        ConfigError: it is not, and the extra that holds it.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        message = f"needs {module}, which comes with the extra '{extra}': pip install 'headway[{extra}]'"
        raise ConfigError(message) from error


def plan(scenario: Scenario) -> tuple[Plan, dict[str, Inputs]]:
    """All units of a scenario, and the inputs of each by key; every setting was tried once on a query or two.

    Raises:
        ConfigError: a setting that no room takes, at its place in the scenario's file.
        DatasetError: a malformed trace, at its line.
    """
    from headway.lab.unit import build_pool, build_workload, key_of

    with scenario.blaming("pool"):
        pool = build_pool(scenario.file.pool)
    if scenario.file.fluid_bound:
        need("scipy")
    first = Unit(label="", rate_per_s=scenario.file.rates_per_s[0], seed=scenario.file.seeds[0])
    with scenario.blaming("workload", predictor="workload.predictor"):
        build_workload(_inputs(scenario, None, first))
    for index, one in enumerate(scenario.policies):
        _try(scenario, index, replace(first, label=one.name))
    units: list[Unit] = []
    inputs: dict[str, Inputs] = {}
    for unit, asked in _units(scenario, pool.models):
        key = key_of(asked)
        units.append(replace(unit, key=key))
        inputs.setdefault(key, asked)
    settled = Plan(
        scenario=scenario.file,
        labels=[one.name for one in scenario.policies],
        baseline=scenario.baseline,
        focus_rate_per_s=scenario.focus_rate_per_s,
        instances={one.instance.id: one.instance.model for one in pool.instances},
        units=units,
    )
    return settled, inputs


def run(
    scenario: Scenario,
    out: Path,
    *,
    jobs: int | None = None,
    backend: Backend = "loky",
    told: Callable[[int, int], None] | None = None,
) -> Summary:
    """Plays what is not in ``out`` yet, ``jobs`` units at a time (by default one per core this process may use).

    ``backend`` ``ray`` plays them on the Ray cluster this process belongs to, or on a local one it starts; there the
    default is one per core of the cluster. ``told`` hears (done, all) after each unit.

    Raises:
        ConfigError, DatasetError: as :func:`plan`, or results in ``out`` that cannot be read.
    """
    settled, inputs = plan(scenario)
    jobs = jobs or (_ray_cores() if backend == "ray" else len(os.sched_getaffinity(0)))
    if jobs > 1 or backend == "ray":
        need("joblib")
    out.mkdir(parents=True, exist_ok=True)
    known = _read_records(out / "results.jsonl")
    missing = {key: one for key, one in inputs.items() if key not in known}
    _write(out / "plan.json", msgspec.json.format(msgspec.json.encode(settled), indent=1) + b"\n")
    num_done = len(inputs) - len(missing)
    if told is not None:
        told(num_done, len(inputs))
    with (out / "results.jsonl").open("ab") as file:
        play_all = _play_on_ray if backend == "ray" else _play_all
        for record in play_all(missing, min(jobs, len(missing))):
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            num_done += 1
            if told is not None:
                told(num_done, len(inputs))
    return Summary(num_units=len(settled.units), num_played=len(missing), num_kept=len(inputs) - len(missing))


def load_results(out: Path) -> Results:
    """What the runs in ``out`` found for the plan there.

    Raises:
        ConfigError: no plan is there.
        DatasetError: a file there is damaged.
    """
    path = out / "plan.json"
    try:
        settled = msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}; 'headway lab run' writes it", path=str(path)) from None
    except msgspec.DecodeError as error:
        raise DatasetError(str(error), path=str(path)) from None
    records = _read_records(out / "results.jsonl")
    return Results(plan=settled, found=[(u, records[u.key]) for u in settled.units if u.key in records])


def _try(scenario: Scenario, index: int, unit: Unit) -> None:
    """One query under this policy, for every complaint to come before the first run."""
    from headway.lab.unit import play

    where = f"policies[{index}]"
    deltas = [sweep for sweep in scenario.file.sweeps if sweep.of == "delta_per_ms"]
    units = [unit] + [
        replace(unit, sweep=sweep.of, value=sweep.values[-1])
        for sweep in deltas
        if takes_delta(scenario.policies[index])
    ]
    with scenario.blaming(where, routing=f"{where}.options", estimator=f"{where}.estimator"):
        for one in units:
            asked = _inputs(scenario, scenario.policies[index], one)
            simple = replace(asked.workload, trace=None)
            play(replace(asked, num_queries=1, arrivals=ArrivalsConfig(), workload=simple, trace=None), "")


def _units(scenario: Scenario, models: Sequence[str]) -> Iterator[tuple[Unit, Inputs]]:
    """Every unit with its inputs: the comparison over rates and its references, then each sweep."""
    from headway.lab.reference_runs import reference_policies

    file = scenario.file
    bound = [None] if file.fluid_bound else []
    references = reference_policies(file.references, models)
    for seed in file.seeds:
        for rate_per_s in file.rates_per_s:
            for one in (*scenario.policies, *bound):
                label = FLUID_BOUND if one is None else one.name
                unit = Unit(label=label, rate_per_s=rate_per_s, seed=seed)
                yield unit, _inputs(scenario, one, unit)
            for reference, row in references:
                unit = Unit(label=row.name, rate_per_s=rate_per_s, seed=seed, reference=reference)
                yield unit, _inputs(scenario, row, unit)
        for sweep in file.sweeps:
            for value in sweep.values:
                for one in scenario.policies:
                    if sweep.of == "delta_per_ms" and not takes_delta(one):
                        continue
                    rate_per_s = sweep.rate_per_s or scenario.focus_rate_per_s
                    unit = Unit(label=one.name, rate_per_s=rate_per_s, seed=seed, sweep=sweep.of, value=value)
                    yield unit, _inputs(scenario, one, unit)


def _inputs(scenario: Scenario, one: PolicyConfig | None, unit: Unit) -> Inputs:
    """The inputs of a unit under a policy (None: the fluid bound): the scenario's, the policy's, then the sweep's."""
    from headway.lab.unit import Inputs

    file = scenario.file
    workload, arrivals, sight = file.workload, file.arrivals, file.sight
    options = dict(one.options) if one else {}
    if one is not None:
        workload = replace(workload, predictor=_predictor(workload.predictor, one))
        sight = one.sight or sight
    value = unit.value or 0.0
    match unit.sweep:
        case "lambda_per_musd":
            workload = replace(workload, lambda_per_musd=value)
        case "delta_per_ms":
            options["delta_per_ms"] = value
        case "snapshot_interval_ms":
            sight = SightConfig(snapshot_interval_ms=value, ageing=sight.ageing, ledger=sight.ledger)
        case "burst_ratio":
            arrivals = replace(arrivals, process="mmpp2", ratio=value, file=None, phases=None)
    asked = Inputs(
        policy=one.policy if one else None,
        options=options,
        estimator=one.estimator if one else None,
        clock=one.clock if one else "fitted",
        rate_per_s=unit.rate_per_s,
        seed=unit.seed,
        num_queries=file.num_queries,
        pool=file.pool,
        workload=workload,
        arrivals=arrivals,
        sight=sight,
        on_infeasible=(one.on_infeasible if one else None) or file.on_infeasible,
        trace=None if scenario.trace is None else str(scenario.trace),
        arrivals_trace=None if scenario.arrivals_trace is None else str(scenario.arrivals_trace),
        rows=None if scenario.rows is None else str(scenario.rows),
        artifact=None if scenario.artifact is None else str(scenario.artifact),
        correcting=file.correcting,
        keep_pairs=unit.seed == file.seeds[0] and unit.reference is None,
        keep_failures=unit.seed == file.seeds[0]
        and unit.rate_per_s == scenario.focus_rate_per_s
        and one is not None
        and unit.reference is None,
    )
    if unit.sweep is None:
        return asked
    plain = _inputs(scenario, one, replace(unit, sweep=None, value=None))
    # A sweep shows no failures; where it passes through the scenario's own settings, one run serves both.
    return plain if plain == replace(asked, keep_failures=plain.keep_failures) else replace(asked, keep_failures=False)


def _predictor(common: PredictorConfig, one: PolicyConfig) -> PredictorConfig:
    match one.sees:
        case "task_label":
            return replace(common, quality_r2=0.0, length_log_r2=0.0)
        case "true_lengths":
            return replace(common, length_log_r2=1.0)
        case "truth":
            return replace(common, quality_r2=1.0, length_log_r2=1.0)
    return one.predictor or common


def _play_all(missing: dict[str, Inputs], jobs: int) -> Iterator[Record]:
    """The records of all, as they are done; in this process where one at a time is asked."""
    from headway.lab.unit import play

    if jobs <= 1:
        for key, one in missing.items():
            yield play(one, key)
        return
    from joblib import Parallel, delayed

    with Parallel(n_jobs=jobs, backend="loky", return_as="generator_unordered") as parallel:
        yield from parallel(delayed(play)(one, key) for key, one in missing.items())


def _ray_cores() -> int:
    need("ray", "ray")
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)  # RAY_ADDRESS names a cluster; without it a local one is started
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _play_on_ray(missing: dict[str, Inputs], jobs: int) -> Iterator[Record]:
    """The records of all, wave by wave: Ray's backend of joblib hands results back by the list only."""
    from headway.lab.unit import play

    _ray_cores()
    from joblib import Parallel, delayed
    from ray.util.joblib import register_ray

    register_ray()
    units = list(missing.items())
    wave = 4 * max(jobs, 1)
    with Parallel(n_jobs=max(jobs, 1), backend="ray") as parallel:
        for first in range(0, len(units), wave):
            yield from parallel(delayed(play)(one, key) for key, one in units[first : first + wave])


def _read_records(path: Path) -> dict[str, Record]:
    """Records by key. A last line that was broken off is cut from the file, so that the next one starts afresh."""
    from headway.lab.unit import Record

    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        _write(path, whole)
    records: dict[str, Record] = {}
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DatasetError(f"is no result: {error}", path=str(path), line=number) from None
        records[record.key] = record
    return records


def _write(path: Path, data: bytes) -> None:
    """Replaces a file in one step."""
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(data)
    partial.replace(path)
