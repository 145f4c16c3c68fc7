"""The acceptance rows A1 and A1b: how well fitted step times predict batches that no fit saw.

``python -m headway.calibrate.acceptance [DATA]`` prints them. A1 calibrates on a simulated engine's step log and tests
on its later part, against the noisy log and against the same clock without noise. A1b fits half of a table of composed
H100 batch times and tests on the other half. Each number is a mean over seeds with its 95 % interval. It refuses to
choose: a form that misses its threshold stays a failing row.
"""

from __future__ import annotations

import csv
import gzip
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from headway.calibrate.fit import FORMS, fit_and_test, fit_step_times
from headway.calibrate.simulated_run import StepList, calibration_load, run_load
from headway.calibrate.step_table import StepTable, feature_matrix, predict_s
from headway.engines.step_log import Chunk, StepFeatures, batch_features
from headway.errors import DatasetError, HeadwayError
from headway.profiles import TruthProfile, load_profile, load_truth, truth_names

#: The largest mean absolute percentage error of a batch time that passes, as a share.
MAX_MAPE: Final = 0.05
SEEDS: Final = (1, 2, 3, 4, 5)

#: Where the composed batch times lie in the data directory.
COMPOSED_TIMES: Final = Path("timing/h100_composed_iteration_times.csv.gz")


class AcceptanceRow(Struct, frozen=True, kw_only=True, rename={"passed": "pass"}):
    """One number of the acceptance table. ``threshold`` and ``passed`` are None where a number is only reported."""

    id: str
    claim: str
    setting: str
    value: float
    ci95: tuple[float, float] | None
    threshold: float | None
    passed: bool | None


def simulated_step_error(
    names: Sequence[str] | None = None, *, seeds: Sequence[int] = SEEDS, num_queries: int = 600
) -> list[AcceptanceRow]:
    """A1: a judged row per truth profile and form on held-out steps, and two reported ones: on those of these steps
    that hold a prefill chunk (few, and what a TTFT is made of), and against the clock without noise."""
    rows = []
    for name in names or truth_names():
        truth = load_truth(name)
        errors = [_simulated_errors(truth, seed, num_queries) for seed in seeds]
        setting = (
            f"{name}, calibration load of {num_queries} queries, noise {truth.step_noise:.0%}, last 30 % of the steps, "
            f"{len(seeds)} seeds"
        )
        for form in FORMS:
            claim = f"step-time MAPE of the {form} form on held-out batches"
            for suffix, addition, threshold in (
                ("", "", MAX_MAPE),
                ("-prefill", " that hold a prefill chunk", None),
                ("-noiseless", ", against the clock without noise", None),
            ):
                values = [error[form + suffix] for error in errors]
                rows.append(_row(f"A1-{name}-{form}{suffix}", claim + addition, setting, values, threshold))
    return rows


def _simulated_errors(truth: TruthProfile, seed: int, num_queries: int) -> dict[str, float]:
    """Held-out MAPE by form, and by form with a suffix, of one run."""
    service_rate_per_s = load_profile(truth.name).calibration.service_rate_per_s
    sink = StepList()
    run_load(truth, calibration_load(num_queries, service_rate_per_s, seed), seed=seed, step_sink=sink)
    steps = sink.table()
    errors: dict[str, float] = {}
    for fit in fit_step_times(steps):
        form = fit.step_time.form
        later = steps.select(slice(len(steps) - fit.held_out.num_steps, None))
        predicted_s = predict_s(fit.step_time, later)
        still_s = predict_s(truth.step_time, later) + sum(truth.host_gap_s) / 2
        relative = np.abs(predicted_s / later.time_s - 1.0)
        errors[form] = fit.mape
        errors[f"{form}-prefill"] = float(relative[later.column("prefill_tokens") > 0].mean())
        errors[f"{form}-noiseless"] = float(np.abs(predicted_s / still_s - 1.0).mean())
    return errors


def composed_step_error(data: Path, *, seeds: Sequence[int] = SEEDS) -> list[AcceptanceRow]:
    """A1b: per model of the composed H100 batch times a row per form, and the best form against the threshold.

    ``data`` is the data directory.

    Raises:
        DatasetError: the table is absent or malformed.
    """
    rows = []
    for model, steps in composed_times(data / COMPOSED_TIMES).items():
        errors: dict[str, list[float]] = {form: [] for form in FORMS}
        for seed in seeds:
            order = np.random.default_rng(seed).permutation(len(steps))
            train, test = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
            for form in FORMS:
                errors[form].append(fit_and_test(form, steps.select(train), steps.select(test)).mape)
        setting = f"{model}, {len(steps)} composed H100 batches, fitted on a random half, {len(seeds)} splits"
        best = min(FORMS, key=lambda form: float(np.mean(errors[form])))
        for form in FORMS:
            claim = f"step-time MAPE of the {form} form on the other half"
            rows.append(_row(f"A1b-{model}-{form}", claim, setting, errors[form], None))
        rows.append(
            _row(f"A1b-{model}-best", f"step-time MAPE of the best form ({best})", setting, errors[best], MAX_MAPE)
        )
    return rows


class _ComposedRow(Struct, frozen=True):
    model: str
    n_prefills: int
    prefill_len: int
    n_decodes: int
    decode_ctx: int
    kernel_ms: float


def composed_times(path: Path) -> dict[str, StepTable]:
    """Model → composed batches of a table with columns n_prefills, prefill_len, n_decodes, decode_ctx, kernel_ms.

    Raises:
        DatasetError: the table cannot be read, or a row is malformed.
    """
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
            raw_rows = list(csv.DictReader(file))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise DatasetError(f"cannot be read: {error}", path=str(path)) from error
    batches: dict[str, list[StepFeatures]] = {}
    times_s: dict[str, list[float]] = {}
    for number, raw in enumerate(raw_rows, 2):
        try:
            row = msgspec.convert(raw, _ComposedRow, strict=False)
        except msgspec.ValidationError as error:
            raise DatasetError(str(error), path=str(path), line=number) from error
        if not (np.isfinite(row.kernel_ms) and row.kernel_ms > 0):
            raise DatasetError(
                f"kernel_ms: must be finite and above 0, not {row.kernel_ms}", path=str(path), line=number
            )
        decodes: list[Chunk] = [(1, row.decode_ctx, True)] * row.n_decodes
        prefills: list[Chunk] = [(row.prefill_len, 0, False)] * row.n_prefills
        batches.setdefault(row.model, []).append(batch_features([*decodes, *prefills]))
        times_s.setdefault(row.model, []).append(row.kernel_ms * 1e-3)
    return {
        model: StepTable(np.arange(float(len(rows))), np.array(times_s[model]), feature_matrix(rows))
        for model, rows in batches.items()
    }


def _row(row_id: str, claim: str, setting: str, values: Sequence[float], threshold: float | None) -> AcceptanceRow:
    from scipy.special import stdtrit

    mean = float(np.mean(values))
    interval = None
    if len(values) > 1:
        half = float(stdtrit(len(values) - 1, 0.975)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
        interval = (mean - half, mean + half)
    return AcceptanceRow(
        id=row_id,
        claim=claim,
        setting=setting,
        value=mean,
        ci95=interval,
        threshold=threshold,
        passed=None if threshold is None else mean <= threshold,
    )


def main(arguments: list[str]) -> int:
    """Print the rows as JSON, one per line: A1, and A1b where a data directory is given; returns the exit code."""
    try:
        rows = simulated_step_error() + [row for data in arguments[:1] for row in composed_step_error(Path(data))]
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        return 2
    for row in rows:
        print(msgspec.json.encode(row).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
