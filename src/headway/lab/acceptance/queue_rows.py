"""How runs through the central queue become rows: a run per seed, paired comparisons, what a row says of its run.

A run is given without its seed (seed 0 stands for all of them); what differs between two runs is what they are compared
for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.queue_units import (
    NUM_REQUESTS,
    DispatcherName,
    QueueResult,
    QueueRun,
    scaled,
    trace_directory,
)
from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.table import Results, row
from headway.lab.intervals import Interval, paired_gain
from headway.lab.queue_load import AZURE_CONVERSATIONS
from headway.lab.queue_score import QueueScore

Figure = Callable[[QueueScore], float]


def queue(settings: Settings, rate: float, *, num_requests: int = NUM_REQUESTS) -> QueueRun:
    """Bid prices with the latency weights at a rate per period, on any seed."""
    return QueueRun(
        data=trace_directory() or "",
        dispatcher="bid_price",
        rate=rate,
        seed=0,
        num_requests=scaled(settings, num_requests),
    )


def under(run: QueueRun, dispatcher: DispatcherName) -> QueueRun:
    """The same load under another dispatcher."""
    return replace(run, dispatcher=dispatcher)


def units(settings: Settings, runs: Sequence[QueueRun]) -> list[QueueRun]:
    """The runs on every seed; none where the trace is not here."""
    if trace_directory() is None:
        return []
    return [replace(run, seed=seed) for run in dict.fromkeys(runs) for seed in settings.seeds]


def told(settings: Settings, what: str, num_requests: int = NUM_REQUESTS) -> str:
    """The setting, and the size of the run."""
    quick = "QUICK, reduced: " if settings.name == "quick" else ""
    return f"{quick}{what}; {len(settings.seeds)} seeds x {scaled(settings, num_requests)} requests"


def absent(settings: Settings, claim_id: str, claim: str) -> list[AcceptanceRow]:
    """The row that stands for a claim whose data is not here."""
    quick = "QUICK, reduced: " if settings.name == "quick" else ""
    setting = f"{quick}no data directory holds {AZURE_CONVERSATIONS}: set HEADWAY_DATA"
    return [row(claim_id, f"{claim}: not measured", setting, float("nan"), at_least=0.0)]


class Runs:
    """Looks up runs seed by seed."""

    def __init__(self, settings: Settings, results: Results) -> None:
        self._seeds, self._results = settings.seeds, results

    def all(self, run: QueueRun) -> list[QueueResult]:
        """One result per seed."""
        return [self._results.of(replace(run, seed=seed)) for seed in self._seeds]

    def figures(self, run: QueueRun, figure: Figure) -> list[float]:
        """One figure per seed."""
        return [figure(one.score) for one in self.all(run)]

    def reduction(self, ours: QueueRun, theirs: QueueRun, figure: Figure) -> Interval:
        """By which share ours is below theirs, paired over seeds; 0 where theirs is 0 throughout."""
        a, b = self.figures(ours, figure), self.figures(theirs, figure)
        if not any(b):
            return Interval(0.0, None, None)
        gain = paired_gain(a, b)
        return Interval(-gain.value, _minus(gain.high), _minus(gain.low))

    def gain(self, ours: QueueRun, theirs: QueueRun, figure: Figure) -> Interval:
        """By which share ours is above theirs, paired over seeds."""
        return paired_gain(self.figures(ours, figure), self.figures(theirs, figure))

    def loads(self, run: QueueRun) -> str:
        """ρ of slots and of memory, means over seeds."""
        found = self.all(run)
        slots, memory = (sum(of(one) for one in found) / len(found) for of in (_slot_load, _memory_load))
        return f"rho = {slots:.3f}, of memory {memory:.3f}"


def _slot_load(one: QueueResult) -> float:
    return one.slot_load


def _memory_load(one: QueueResult) -> float:
    return one.memory_load


def _minus(value: float | None) -> float | None:
    return None if value is None else -value


def latency(one: QueueScore) -> float:
    """Mean periods from arrival to the last token."""
    return one.latency


def latency_p95(one: QueueScore) -> float:
    """Their 95 % quantile."""
    return one.latency_p95


def slo_missed(one: QueueScore) -> float:
    """Share of objectives missed."""
    return one.slo_missed


def tokens(one: QueueScore) -> float:
    """Output tokens per period while requests arrive."""
    return one.tokens_per_time
