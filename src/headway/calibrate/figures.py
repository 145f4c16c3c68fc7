"""The calibration figures of an engine, from its step log: θ, T_dec and μ, and how each came about.

They serve the estimators that replay nothing. A step log holds no TTFT and no concurrency limit, so those two fields
keep their defaults and the profile says so. It refuses to invent: without prefill, decodes or answer lengths in the log
there is no figure.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from headway.calibrate.step_table import StepTable
from headway.errors import ConfigError, DatasetError
from headway.types import Calibration

#: The window over which output throughput counts as the peak: longer than a burst, shorter than a load level.
PEAK_WINDOW_S: Final = 30.0


class Figures(Struct, frozen=True, kw_only=True):
    """Calibration figures and where μ came from. ``peak_busy_share`` is the share of the peak window spent in steps;
    well below 1 the engine was never saturated, and its real service rate is higher."""

    calibration: Calibration
    peak_output_tokens_per_s: float
    peak_busy_share: float
    mean_output_tokens: float
    mean_output_source: str
    outputs_source: str


def calibration_figures(steps: StepTable, mean_output_tokens: float | None = None) -> Figures:
    """θ, T_dec and μ of a log.

    θ is Σ prefill tokens ÷ Σ time over the steps that hold a prefill chunk, T_dec the mean time of decode-only steps,
    μ the peak output throughput over :data:`PEAK_WINDOW_S` ÷ the mean output tokens of a query. The latter is
    ``mean_output_tokens`` where given, else outputs ÷ ended requests of the log.

    Raises:
        DatasetError: no step with a prefill chunk, none with decodes only, or no output token.
        ConfigError: the mean output length is neither given nor in the log.
    """
    prefill = steps.column("prefill_tokens")
    with_prefill, decode_only = prefill > 0, steps.of_kind("decode")
    if not with_prefill.any():
        raise DatasetError("holds no step with a prefill chunk, so nothing says how fast the engine prefills")
    if not decode_only.any():
        raise DatasetError("holds no step of decodes alone, so nothing says how fast the engine decodes")
    length, length_source = _mean_output_tokens(steps, mean_output_tokens)
    throughput, busy_share = _peak_throughput(steps)
    if throughput <= 0:
        raise DatasetError("holds no output token, so nothing says how many queries the engine serves")
    calibration = Calibration(
        prefill_tokens_per_s=float(prefill.sum() / steps.time_s[with_prefill].sum()),
        decode_step_s=float(steps.time_s[decode_only].mean()),
        service_rate_per_s=throughput / length,
    )
    return Figures(
        calibration=calibration,
        peak_output_tokens_per_s=throughput,
        peak_busy_share=busy_share,
        mean_output_tokens=length,
        mean_output_source=length_source,
        outputs_source="decodes, first tokens left out" if steps.outputs is None else "tokens given",
    )


def _mean_output_tokens(steps: StepTable, given: float | None) -> tuple[float, str]:
    if given is not None:
        return given, "as given"
    if steps.outputs is None or steps.finished is None or not steps.finished.any():
        raise ConfigError(
            "is needed: the log does not say how many tokens its answers had (num_outputs, num_finished)",
            key="--mean-output-tokens",
        )
    return float(steps.outputs.sum() / steps.finished.sum()), "tokens given over requests ended in the log"


def _peak_throughput(steps: StepTable) -> tuple[float, float]:
    """Output tokens per second in the best window that starts with a step, and the share of it spent in steps."""
    outputs = steps.column("decodes") if steps.outputs is None else steps.outputs
    end_s = steps.start_s + steps.time_s
    window_s = min(PEAK_WINDOW_S, float(end_s.max() - steps.start_s[0]))
    num_before = np.concatenate([[0.0], np.cumsum(outputs)])
    busy_before = np.concatenate([[0.0], np.cumsum(steps.time_s)])
    # Steps that end within the window; a step counts whole or not at all.
    past = np.searchsorted(np.maximum.accumulate(end_s), steps.start_s + window_s * (1 + 1e-12), side="right")
    first = np.arange(len(steps))
    gained = num_before[past] - num_before[first]
    best = int(np.argmax(gained))
    busy_s = busy_before[past[best]] - busy_before[best]
    return float(gained[best] / window_s), float(min(busy_s / window_s, 1.0))
