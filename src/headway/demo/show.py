"""The demo's face on a terminal: progress while it runs, then one table, one sentence, and the command to repeat it.

Progress goes to stderr and only to a terminal; a pipe stays quiet. It refuses to praise: the sentence names whichever
policy led.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from headway.demo.pool import INSTANCES
from headway.demo.predictor import TrainedPredictor
from headway.demo.run import DemoReport
from headway.demo.score import PolicyScore, Served
from headway.demo.workload import WorkloadSummary

_WIDTH = 80
_LEGEND = """\
On-time utility: quality − cost (5e-4 per micro-USD), averaged over all queries,
0 where the first token came late or never. Error: predicted against measured
TTFT. Last column: where queries went, by size of the model."""


class TerminalProgress:
    """One line per policy: queries sent, answered, and how many had their first token in time so far."""

    def __init__(self, console: Console) -> None:
        self._rich = RichProgress(
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._line: TaskID | None = None
        self._num_sent = self._num_served = self._num_failed = self._num_queries = 0

    def __enter__(self) -> TerminalProgress:
        self._rich.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._rich.stop()

    def starting(self, policy: str, number: int, num_policies: int, num_queries: int) -> None:
        """Begin the line of ``policy``."""
        self._num_sent = self._num_served = self._num_failed = 0
        self._num_queries = num_queries
        label = f"{number + 1}/{num_policies} {policy}"
        self._line = self._rich.add_task(label, total=num_queries, note="starting 3 engines and the gateway")

    def sent(self) -> None:
        """Count a query as sent."""
        self._num_sent += 1
        self._show()

    def served(self, served: Served) -> None:
        """Count a query as done."""
        self._num_served += 1
        self._num_failed += served.error is not None
        self._show()

    def _show(self) -> None:
        if self._line is None:
            return
        note = f"{self._num_sent} of {self._num_queries} sent, {self._num_served} answered"
        if self._num_failed:
            note = f"{note}, {self._num_failed} failed"
        self._rich.update(self._line, completed=self._num_served, note=note)


class Silence:
    """No progress at all."""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def starting(self, policy: str, number: int, num_policies: int, num_queries: int) -> None:
        """Say nothing."""

    def sent(self) -> None:
        """Say nothing."""

    def served(self, served: Served) -> None:
        """Say nothing."""


def progress_on(stream: TextIO) -> TerminalProgress | Silence:
    """Progress for ``stream`` where it is a terminal, else silence."""
    return TerminalProgress(Console(file=stream)) if stream.isatty() else Silence()


def introduce(summary: WorkloadSummary, policies: Sequence[str], predictor: TrainedPredictor | None = None) -> str:
    """What is about to happen, in a few lines."""
    kinds = "one kind" if len(summary.tasks) == 1 else f"{len(summary.tasks)} kinds"
    turns = "one policy" if len(policies) == 1 else f"{len(policies)} policies in turn"
    return (
        f"Three simulated engines (Qwen3 0.6B, 8B and 32B on H100s) behind one gateway.\n"
        f"{summary.num_queries} queries of {kinds}, {summary.qps:g} per second, each with a target for its first\n"
        f"token, under {turns}. Everything runs on this machine."
        + ("" if predictor is None else f"\n{predictor.description}")
    )


def show_report(report: DemoReport, command: str, stream: TextIO) -> None:
    """Print the table, what it means, one sentence on it, and ``command``, which repeats the run. 80 columns wide."""
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False)
    console.print()
    console.print(_table(report.policies))
    console.print(f"\n{_LEGEND}\n")
    for entry in report.policies:
        if entry.failed:
            errors = ", ".join(f"{count} × {error}" for error, count in entry.errors.items())
            console.print(f"{entry.policy}: {entry.failed} of {entry.num_queries} failed ({errors}).", style="red")
    console.print(conclusion(report.policies), style="bold")
    console.print(f"\nRepeat with: {command}", soft_wrap=True)


def conclusion(scores: Sequence[PolicyScore]) -> str:
    """One sentence: which policy led in on-time utility, and by how much."""
    ranked = sorted(scores, key=lambda entry: -entry.on_time_utility)
    best = ranked[0]
    text = f"{best.policy} reached on-time utility {best.on_time_utility:.3f}, {best.attainment:.0%} of queries in time"
    if len(ranked) == 1:
        return text + "."
    second = ranked[1]
    if second.on_time_utility <= 0:
        return f"{text}; the next was {second.policy} with {second.on_time_utility:.3f}."
    lead = best.on_time_utility / second.on_time_utility - 1
    return f"{text}: {lead:.0%} more than {second.policy}, the next ({second.on_time_utility:.3f})."


def _table(scores: Sequence[PolicyScore]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("policy", no_wrap=True)
    for heading in (
        "on-time\nutility",
        "in\ntime %",
        "mean\nquality",
        "USD\nper 1k",
        "TTFT\np50 ms",
        "TTFT\np99 ms",
        "error\np50 ms",
        f"{'/'.join(name.removeprefix('h100-').removesuffix('b') for name in INSTANCES)}B\n%",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    best = max(entry.on_time_utility for entry in scores)
    for entry in scores:
        table.add_row(
            entry.policy,
            f"{entry.on_time_utility:.3f}",
            f"{100 * entry.attainment:.1f}",
            _number(entry.mean_quality, 1, ".3f"),
            _number(entry.mean_cost_usd, 1e3, ".3f"),
            _number(entry.ttft_p50_s, 1e3, ".0f"),
            _number(entry.ttft_p99_s, 1e3, ".0f"),
            _number(entry.ttft_error_p50_s, 1e3, ".1f"),
            "/".join(f"{100 * entry.shares[name]:.0f}" for name in INSTANCES),
            style="bold" if entry.on_time_utility == best else None,
        )
    return table


def _number(value: float | None, factor: float, form: str) -> str:
    return "–" if value is None else format(value * factor, form)
