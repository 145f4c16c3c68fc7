"""``headway lab``: compare routing policies on simulated fleets: run a scenario, print tables, write a report.

Results go to the standard output, progress and complaints to the standard error; progress only where that is a
terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from headway.cli.progress import progress
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.lab.tables import Table

app = App(name="lab", help="Compare routing policies on simulated fleets.")
app.command(
    "headway.cli.lab_acceptance:acceptance",
    name="acceptance",
    help="Measure every claim of the project against its threshold.",
)


@app.command
def run(
    scenario: Path,
    /,
    *,
    out: Path | None = None,
    jobs: int | None = None,
    backend: Literal["loky", "ray"] = "loky",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Simulate every policy, rate and seed of a scenario. What is in the directory already is not run again.

    Parameters
    ----------
    scenario
        The scenario (YAML).
    out
        Where plan and results go; by default runs/ and the scenario's name, in the present directory.
    jobs
        Simulations at a time; by default one per core.
    backend
        loky: processes on this machine. ray: a Ray cluster (RAY_ADDRESS; without it a local one), extra 'ray'.
    json
        Print the results, one object per policy, rate and seed.
    """
    from headway.lab.runs import load_results
    from headway.lab.runs import run as run_scenario
    from headway.lab.scenario import load_scenario

    if jobs is not None and jobs < 1:
        raise ConfigError(f"must be at least 1, not {jobs}", key="--jobs")
    asked = load_scenario(scenario)
    target = out or Path("runs") / scenario.stem
    with progress(asked.file.name) as bar:
        told = None if bar is None else lambda done, total: bar(done, total, "")
        summary = run_scenario(asked, target, jobs=jobs, backend=backend, told=told)
    if json:
        import msgspec

        rows = [(unit, record.score, record.bound) for unit, record in load_results(target).found]
        found = [{"unit": unit, "score": score, "fluid_bound": bound} for unit, score, bound in rows]
        _print_json(msgspec.json.encode({"scenario": asked.file.name, "out": str(target), "results": found}))
    else:
        print(
            f"{summary.num_units} units in {target}: {summary.num_played} simulated, {summary.num_kept} kept.\n"
            f"headway lab compare {target}\nheadway lab report {target}"
        )
    return 0


@app.command
def compare(
    directory: Path,
    /,
    *,
    baseline: str | None = None,
    rate: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Print the policies of a run side by side, with 95 % intervals and paired differences to a baseline.

    Parameters
    ----------
    directory
        Where ``headway lab run`` put its results.
    baseline
        The policy to compare with; by default the scenario's.
    rate
        The rate of the table of parts, in queries per second; by default the scenario's focus.
    json
        Print one JSON object.
    """
    from headway.lab.runs import load_results
    from headway.lab.tables import compare as compare_results
    from headway.lab.tables import difference_table, parts_table, reference_table, utility_table

    results = load_results(directory)
    comparison = compare_results(results, baseline)
    if json:
        import msgspec

        _print_json(msgspec.json.encode(comparison))
        return 0
    focus = results.plan.focus_rate_per_s if rate is None else rate
    if focus not in results.plan.scenario.rates_per_s:
        known = ", ".join(f"{one:g}" for one in results.plan.scenario.rates_per_s)
        raise ConfigError(f"{focus:g} was not run; there are {known}", key="--rate")
    shown = (utility_table(comparison), reference_table(comparison), difference_table(comparison))
    for table in (*shown, parts_table(comparison, focus)):
        if table is not None:
            _print_table(table)
    _say_missing(comparison.num_missing)
    return 0


@app.command
def report(directory: Path, /, *, baseline: str | None = None, out: Path | None = None) -> int:
    """Write one self-contained HTML page with tables and figures, and the figures as PNG and SVG.

    Parameters
    ----------
    directory
        Where ``headway lab run`` put its results.
    baseline
        The policy to compare with; by default the scenario's.
    out
        Where report.html and figures/ go; by default the same directory.
    """
    from headway.lab.report import write_report
    from headway.lab.runs import load_results

    written = write_report(load_results(directory), out or directory, baseline=baseline)
    print(f"{written.html}\n{len(written.figures)} files in {written.figures[0].parent}")
    _say_missing(written.num_missing)
    return 0


def _say_missing(num_missing: int) -> None:
    if num_missing:
        print(f"headway: warning: {num_missing} units have no result yet; run the scenario again", file=sys.stderr)


def _print_table(table: Table) -> None:
    """A table on a terminal as wide as it is; in a pipe as wide as it needs."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=None if sys.stdout.isatty() else 400, highlight=False)
    shown = RichTable(title=table.title, title_justify="left", caption=table.note, caption_justify="left")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def _print_json(data: bytes) -> None:
    sys.stdout.write(data.decode() + "\n")
