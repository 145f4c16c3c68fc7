"""``headway calibrate``: from an engine's step log to a profile that the router can estimate with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.calibrate.fit import HeldOut
    from headway.calibrate.result import Calibrated


def calibrate(
    steps: Path,
    /,
    *,
    output: Path | None = None,
    name: str | None = None,
    form: Literal["auto", "linear", "knee", "six_term"] = "auto",
    max_error: float = 0.10,
    mean_output_tokens: float | None = None,
    json: bool = False,
) -> int:
    """Fit step times to a step log, test them on its later part, and write a profile.

    The first 70 % of the steps train, the last 30 % test. Exit code 0 when a profile was written, 1 when the held-out
    error is beyond the gate (nothing is written then), 2 when the log is malformed or too short.

    Parameters
    ----------
    steps
        The step log (JSON lines, gzipped or not), as ``headway engine --step-log`` writes it.
    output
        Where the profile goes; by default the log's name with .yaml, in the present directory.
    name
        The profile's name; by default that of its file.
    form
        The step-time form; auto takes the one with the smallest held-out error.
    max_error
        The gate: the largest held-out mean absolute percentage error that makes a profile, as a share.
    mean_output_tokens
        Mean output tokens of a query, for the service rate; by default from the log.
    json
        Print the result as JSON.
    """
    import sys

    for option, value in (("--max-error", max_error), ("--mean-output-tokens", mean_output_tokens)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"must be finite and above 0, not {value}", key=option)
    target = output or Path(f"{steps.name.removesuffix('.gz').removesuffix('.jsonl')}.yaml")
    if target.absolute() == steps.absolute():
        raise ConfigError("is the step log itself", path=str(target), key="--output")
    profile_name = name or target.name.removesuffix(".yaml")
    if not profile_name.isprintable():
        raise ConfigError(f"must be printable text, not {profile_name!r}", key="--name")
    import msgspec

    from headway.calibrate.fit import FORMS
    from headway.calibrate.profile_file import render_profile, write_profile
    from headway.calibrate.result import as_json, calibrate_log, notes

    result = calibrate_log(
        steps,
        name=profile_name,
        forms=FORMS if form == "auto" else (form,),
        max_error=max_error,
        mean_output_tokens=mean_output_tokens,
    )
    if result.profile is not None:
        title = f"What an estimator may know of {result.profile.model}, from a step log."
        write_profile(target, render_profile(result.profile, title=title, notes=notes(result.figures)))
    if json:
        written = target if result.accepted else None
        sys.stdout.write(msgspec.json.encode(as_json(result, written)).decode() + "\n")
    else:
        _show(result, target)
    return 0 if result.accepted else 1


def _show(result: Calibrated, target: Path) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    log, chosen = result.log, result.chosen
    console = Console()
    table = Table(
        title=f"Held-out error, last {chosen.held_out.num_steps} of {len(log.steps)} steps", title_justify="left"
    )
    for column in ("form", "all", "bias", "p95", *chosen.by_kind):
        table.add_column(column, justify="left" if column == "form" else "right")
    for fit in result.fits:
        table.add_row(
            f"{fit.step_time.form} *" if fit is chosen else fit.step_time.form,
            _percent(fit.held_out),
            f"{fit.held_out.bias:+.2%}",
            f"{fit.held_out.p95:.2%}",
            *(_percent(held) for held in fit.by_kind.values()),
        )
    console.print(table)
    calibration = result.figures.calibration
    console.print(
        f"prefill {calibration.prefill_tokens_per_s:,.0f} tokens/s, "
        f"decode step {calibration.decode_step_s * 1e3:.2f} ms, "
        f"service rate {calibration.service_rate_per_s:.2f} queries/s",
        highlight=False,
    )
    for warning in result.warnings:
        print(f"headway: warning: {warning}", file=sys.stderr)
    if result.accepted:
        console.print(f"* written to {target}", highlight=False, soft_wrap=True)
    else:
        print(
            f"headway: no profile written: the {chosen.step_time.form} form misses by {chosen.mape:.2%} on held-out "
            f"steps, --max-error allows {result.max_error:.2%}",
            file=sys.stderr,
        )


def _percent(held: HeldOut) -> str:
    return "-" if held.mape is None else f"{held.mape:.2%}"
