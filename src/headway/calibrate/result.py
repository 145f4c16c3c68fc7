"""One calibration from log to profile: reads, fits, tests, judges, and says all of it as values.

The gate is the held-out MAPE over all steps. A kind of step that misses it alone, or an engine that was never
saturated, is a warning: the profile may still be the best there is. It refuses to build a profile from a fit that
misses the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from headway.calibrate.figures import PEAK_WINDOW_S, Figures, calibration_figures
from headway.calibrate.fit import FORMS, Fit, best_fit, fit_step_times
from headway.calibrate.profile_file import rounded
from headway.calibrate.read_log import StepLog, read_step_log
from headway.calibrate.step_table import StepTable
from headway.errors import DatasetError
from headway.profiles import Profile
from headway.types import Calibration, EngineLimits, StepTime, StepTimeForm

#: The largest held-out MAPE that a profile may have unless told otherwise.
MAX_ERROR: Final = 0.10

_MIN_BUSY_SHARE: Final = 0.95
_MIN_KIND_STEPS: Final = 20


class Calibrated(Struct, frozen=True, kw_only=True, eq=False):
    """What a log gave. ``chosen`` is one of ``fits``; ``profile`` is None when its held-out MAPE misses the gate."""

    log: StepLog
    fits: list[Fit]
    chosen: Fit
    figures: Figures
    max_error: float
    profile: Profile | None
    warnings: list[str]

    @property
    def accepted(self) -> bool:
        """Whether the chosen fit passed the gate."""
        return self.profile is not None


def calibrate_log(
    path: Path,
    *,
    name: str,
    forms: Sequence[StepTimeForm] = FORMS,
    max_error: float = MAX_ERROR,
    mean_output_tokens: float | None = None,
) -> Calibrated:
    """Fit ``forms`` to the step log at ``path`` and make a profile called ``name`` of the best.

    Raises:
        DatasetError: the log is malformed, too short, or lacks a kind of step that a figure needs.
        ConfigError: scipy is not installed, or the mean output length is neither given nor in the log.
    """
    log = read_step_log(path)
    try:
        figures = calibration_figures(log.steps, mean_output_tokens)
        fits = fit_step_times(log.steps, forms)
    except DatasetError as error:
        raise DatasetError(str(error), path=str(path)) from error
    chosen = best_fit(fits)
    accepted = chosen.mape <= max_error
    return Calibrated(
        log=log,
        fits=fits,
        chosen=chosen,
        figures=figures,
        max_error=max_error,
        profile=_profile(log, chosen, figures, name) if accepted else None,
        warnings=_warnings(log, chosen, figures, max_error),
    )


def notes(figures: Figures) -> dict[str, str]:
    """What the profile's file says of each calibration figure."""
    return {
        "prefill_tokens_per_s": "Prefill tokens over time, summed over the steps that hold a prefill chunk.",
        "decode_step_s": "Mean time of the steps that hold decodes only.",
        "service_rate_per_s": (
            f"Peak output throughput, {figures.peak_output_tokens_per_s:.6g} tokens/s ({figures.outputs_source}) over "
            f"the best {PEAK_WINDOW_S:.0f} s of which the engine was busy {figures.peak_busy_share:.0%}, over the mean "
            f"output of {figures.mean_output_tokens:.6g} tokens ({figures.mean_output_source})."
        ),
        "concurrency": "Not in a step log: the published k of the limited-processor-sharing estimate.",
        "ttft_ratio_p90": "Not in a step log: the default.",
    }


def as_json(result: Calibrated, written: Path | None) -> dict[str, object]:
    """Everything a calibration found, for ``--json``. Errors are shares, times seconds."""
    log = result.log
    num_train = len(log.steps) - result.chosen.held_out.num_steps
    return {
        "log": {
            "path": log.path,
            "sha256": log.sha256,
            "engine_version": log.header.engine_version,
            "hardware": log.header.hardware,
            "model": log.header.model,
            "num_steps": len(log.steps),
            "num_empty": log.num_empty,
            "num_train": num_train,
            "num_held_out": result.chosen.held_out.num_steps,
        },
        "fits": [
            {
                "form": fit.step_time.form,
                "coefficients": fit.step_time.named(),
                "train_mape": fit.train_mape,
                "held_out": msgspec.to_builtins(fit.held_out),
                "by_kind": msgspec.to_builtins(fit.by_kind),
            }
            for fit in result.fits
        ],
        "chosen": result.chosen.step_time.form,
        "max_error": result.max_error,
        "accepted": result.accepted,
        **msgspec.to_builtins(result.figures),
        "profile": None if written is None else str(written),
        "warnings": result.warnings,
    }


def _profile(log: StepLog, fit: Fit, figures: Figures, name: str) -> Profile:
    header, step_time = log.header, fit.step_time
    calibration = figures.calibration
    return Profile(
        name=name,
        model=header.model,
        hardware=header.hardware,
        engine_version=header.engine_version,
        source=_source(log, fit),
        limits=EngineLimits(**msgspec.structs.asdict(header.limits)),
        step_time=StepTime(step_time.form, tuple(rounded(value) for value in step_time.coefficients)),
        calibration=Calibration(
            prefill_tokens_per_s=rounded(calibration.prefill_tokens_per_s),
            decode_step_s=rounded(calibration.decode_step_s),
            service_rate_per_s=rounded(calibration.service_rate_per_s),
            concurrency=calibration.concurrency,
            ttft_ratio_p90=calibration.ttft_ratio_p90,
        ),
    )


def _source(log: StepLog, fit: Fit) -> str:
    kinds = ", ".join(
        f"{kind} {held.mape:.2%} of {held.num_steps}" for kind, held in fit.by_kind.items() if held.mape is not None
    )
    return (
        f"Relative least-squares fit of the {fit.step_time.form} form to the first "
        f"{len(log.steps) - fit.held_out.num_steps} of {len(log.steps)} steps in {Path(log.path).name!r} (sha256 "
        f"{log.sha256}). Mean absolute error on the later {fit.held_out.num_steps} steps {fit.mape:.2%} ({kinds}). "
        f"The log reaches {_extent(log.steps)}; beyond that the fit extrapolates."
    )


def _extent(steps: StepTable) -> str:
    requests = steps.column("requests")
    context = steps.column("context") / requests
    return (
        f"{steps.column('tokens').max():.0f} tokens, {requests.max():.0f} requests and a mean context of "
        f"{context.max():.0f} tokens per step"
    )


def _warnings(log: StepLog, fit: Fit, figures: Figures, max_error: float) -> list[str]:
    found = [
        f"{kind} steps alone: MAPE {held.mape:.1%} over {held.num_steps} held-out steps"
        for kind, held in fit.by_kind.items()
        if held.mape is not None and held.num_steps >= _MIN_KIND_STEPS and held.mape > max_error
    ]
    found += [
        f"no held-out {kind} step: nothing tests the fit there"
        for kind, held in fit.by_kind.items()
        if not held.num_steps
    ]
    if figures.peak_busy_share < _MIN_BUSY_SHARE:
        found.append(
            f"the engine was busy only {figures.peak_busy_share:.0%} of its best {PEAK_WINDOW_S:.0f} s: "
            "service_rate_per_s is a lower bound"
        )
    if log.num_empty:
        found.append(f"{log.num_empty} steps without a request were left out")
    return found
