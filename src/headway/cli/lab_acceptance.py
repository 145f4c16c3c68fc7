"""``headway lab acceptance``: measure what the router claims on simulated fleets, one row per number.

Rows that miss their threshold are printed like the others, and the exit code is 0 all the same: the table is the
result. Only a table that cannot be made is an error.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from headway.calibrate.acceptance import AcceptanceRow


def acceptance(
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    markdown: Annotated[bool, Parameter(negative=())] = False,
    only: str = "",
    quick: Annotated[bool, Parameter(negative=())] = False,
    jobs: int | None = None,
) -> int:
    """Measure the acceptance table: policies, estimators, staleness, bounds.

    Parameters
    ----------
    json
        Print one JSON array of rows instead of a table.
    markdown
        Print the rows as a Markdown table, as in docs/acceptance.md.
    only
        Claims or rows to measure, separated by commas: A4,A7-all. All of them by default.
    quick
        Fewer queries, seeds and rates, for a look within two minutes; each row says so.
    jobs
        Processes, one per core by default.
    """
    import msgspec

    from headway.errors import ConfigError
    from headway.lab.acceptance import FULL, QUICK, acceptance_rows

    if json and markdown:
        raise ConfigError("give one of --json and --markdown", key="markdown")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"must be at least 1, not {jobs}", key="jobs")
    names = [name.strip() for name in only.split(",") if name.strip()]
    rows = acceptance_rows(QUICK if quick else FULL, only=names, num_jobs=jobs, progress=_progress())
    if json:
        print(msgspec.json.encode(rows).decode())
    elif markdown:
        print(as_markdown(rows))
    else:
        _print_table(rows)
    return 0


def as_markdown(rows: list[AcceptanceRow]) -> str:
    """The rows as a Markdown table, four significant digits, intervals of 95 %."""
    lines = ["| id | claim | setting | value | 95 % | threshold | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        interval = "–" if row.ci95 is None else f"{row.ci95[0]:.4g} – {row.ci95[1]:.4g}"
        threshold = "–" if row.threshold is None else f"{row.threshold:g}"
        verdict = "" if row.passed is None else "pass" if row.passed else "miss"
        cells = (row.id, row.claim, row.setting, f"{row.value:.4g}", interval, threshold, verdict)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


class _Bar:
    """A line on a terminal that says how far the run is."""

    def __call__(self, done: int, of_all: int) -> None:
        end = "\n" if done == of_all else ""
        print(f"\r{done} of {of_all} runs done", end=end, file=sys.stderr, flush=True)


def _progress() -> _Bar | None:
    return _Bar() if sys.stderr.isatty() else None


def _print_table(rows: list[AcceptanceRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Acceptance", title_justify="left")
    for column in ("id", "value", "95 % interval", "threshold", "pass", "claim", "setting"):
        table.add_column(column, overflow="fold", justify="right" if column in ("value", "threshold") else "left")
    for row in rows:
        interval = "" if row.ci95 is None else f"{row.ci95[0]:.4g} to {row.ci95[1]:.4g}"
        verdict = "" if row.passed is None else "yes" if row.passed else "NO"
        threshold = "" if row.threshold is None else f"{row.threshold:g}"
        table.add_row(row.id, f"{row.value:.4g}", interval, threshold, verdict, row.claim, row.setting)
    console = Console()
    console.print(table)
    judged = [row for row in rows if row.passed is not None]
    console.print(f"{sum(row.passed is True for row in judged)} of {len(judged)} judged rows pass.")
