"""A12, A13: bid prices against round robin and other queues: latency, tails, throughput and missed objectives.

Where devices are alike and memory does not bind, a release under the latency weights is that of the shortest predicted
answer first: the rows say so. Where prices do win is told by the rows of ``bid_price_cases.py``.
"""

from __future__ import annotations

from msgspec.structs import replace

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.bid_price_cases import own_rows, own_runs
from headway.lab.acceptance.queue_rows import (
    Figure,
    Runs,
    absent,
    latency,
    latency_p95,
    queue,
    slo_missed,
    tokens,
    told,
    under,
    units,
)
from headway.lab.acceptance.queue_units import TAIL, DispatcherName, QueueRun, trace_directory
from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.table import Group, Results, row
from headway.lab.intervals import t_interval
from headway.lab.queue_score import QueueScore

RATES, NEAR_SATURATION = (0.4, 0.5), 0.5
_SHIFTED_RATE = 0.6
_ERROR = 0.2
_MIN_AVERAGE, _MIN_P95, _MAX_THROUGHPUT_LOSS = 0.40, 0.35, 0.01
_OTHERS: tuple[DispatcherName, ...] = (
    "random",
    "shortest_queue",
    "power_of_two",
    "central_fcfs",
    "central_shortest_first",
)
_SHOWN: tuple[tuple[str, str, Figure], ...] = (
    ("p99", "P99 latency", lambda one: one.latency_p99),
    ("ttft", "mean TTFT", lambda one: one.ttft),
    ("ttft_p95", "P95 TTFT", lambda one: one.ttft_p95),
    ("ttft_p99", "P99 TTFT", lambda one: one.ttft_p99),
    ("slo", "missed objectives (waits of 49 periods, latencies of 512)", slo_missed),
)


def _a12_runs(settings: Settings) -> list[QueueRun]:
    known = [queue(settings, rate) for rate in RATES]
    loads = [*known, *(replace(one, length_error=_ERROR) for one in known)]
    return [
        *(under(load, name) for load in loads for name in ("round_robin", *_OTHERS)),
        *loads,
        *(_tail(settings), under(_tail(settings), "planned")),
        *own_runs(settings),
    ]


def _tail(settings: Settings) -> QueueRun:
    return replace(queue(settings, NEAR_SATURATION), weights=TAIL)


def _a12_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    if trace_directory() is None:
        return absent(settings, "A12", "mean latency under bid prices below round robin's")
    runs = Runs(settings, results)
    rows: list[AcceptanceRow] = []
    for rate in RATES:
        for error in (0.0, _ERROR):
            rows += _against_round_robin(settings, runs, replace(queue(settings, rate), length_error=error))
    return [*rows, *_tail_rows(settings, runs), *own_rows(settings, runs)]


def _against_round_robin(settings: Settings, runs: Runs, ours: QueueRun) -> list[AcceptanceRow]:
    theirs, noisy = under(ours, "round_robin"), ours.length_error > 0.0
    lengths = "predicted within 20 %" if noisy else "known"
    setting = told(settings, f"lambda = {ours.rate:g} per period, {runs.loads(ours)}, lengths {lengths}")
    name, judged = f"A12-{ours.rate:g}{'-noisy' if noisy else ''}", ours.rate == NEAR_SATURATION
    throughput = runs.gain(ours, theirs, tokens)
    possible = t_interval([1.0 - one.service / one.score.latency for one in runs.all(theirs)])
    rows = [
        row(
            f"{name}-{key}",
            f"{what} below round robin's",
            setting,
            runs.reduction(ours, theirs, figure),
            at_least=least if judged else None,
        )
        for key, what, figure, least in (
            ("average", "mean latency", latency, _MIN_AVERAGE),
            ("p95", "P95 latency", latency_p95, _MIN_P95),
        )
    ]
    rows += [
        row(
            f"{name}-throughput",
            "output tokens per period over round robin's",
            setting,
            throughput,
            at_most=_MAX_THROUGHPUT_LOSS,
            passed=abs(throughput.value) <= _MAX_THROUGHPUT_LOSS,
        ),
        row(f"{name}-qps", "requests ended per period over round robin's", setting, runs.gain(ours, theirs, _ended)),
        row(f"{name}-possible", "mean latency below round robin's if no answer ever waited", setting, possible),
    ]
    for key, what, figure in () if noisy else _SHOWN:
        rows += [row(f"{name}-{key}", f"{what} below round robin's", setting, runs.reduction(ours, theirs, figure))]
    for other in _OTHERS[-1:] if noisy else _OTHERS:
        below = runs.reduction(ours, under(ours, other), latency)
        rows += [row(f"{name}-over-{other}", f"mean latency below that of {other}", setting, below)]
    return rows


def _ended(one: QueueScore) -> float:
    return one.requests_per_time


def _tail_rows(settings: Settings, runs: Runs) -> list[AcceptanceRow]:
    ours = _tail(settings)
    setting = told(settings, f"lambda = {ours.rate:g} per period, weights (0, 0, 0, 0, 1, 1), lengths known")
    rows = [
        row(
            f"A12-{ours.rate:g}-tail-{key}-over-{other}",
            f"{what} below {other}'s",
            setting,
            runs.reduction(ours, under(queue(settings, ours.rate), other), figure),
        )
        for other in ("round_robin", "central_shortest_first")
        for key, what, figure in (("slo", _SHOWN[-1][1], slo_missed), ("p95", "P95 latency", latency_p95))
    ]
    claim = f"{_SHOWN[-1][1]} below those of the same rewards without prices"
    below = runs.reduction(ours, under(ours, "planned"), slo_missed)
    return [*rows, row(f"A12-{ours.rate:g}-tail-slo-price", claim, setting, below)]


def _shifted(settings: Settings) -> QueueRun:
    return replace(queue(settings, RATES[0]), rate_after=_SHIFTED_RATE)


def _a13_runs(settings: Settings) -> list[QueueRun]:
    ours = _shifted(settings)
    others = (under(ours, "round_robin"), under(ours, "central_shortest_first"))
    return [ours, replace(ours, reset_on_rise=False), *others]


def _a13_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    claim = "mean latency below round robin's where the rate rises at half time"
    if trace_directory() is None:
        return absent(settings, "A13", claim)
    runs, ours = Runs(settings, results), _shifted(settings)
    theirs, kept = under(ours, "round_robin"), replace(ours, reset_on_rise=False)
    setting = told(
        settings, f"lambda {ours.rate:g} to {_SHIFTED_RATE:g} at half time, {runs.loads(ours)}, lengths known"
    )
    rows: list[AcceptanceRow] = []
    for key, run, what in (("", ours, "old columns dropped at the rise"), ("-kept", kept, "old columns kept")):
        average, p95 = runs.reduction(run, theirs, latency), runs.reduction(run, theirs, latency_p95)
        rows += [
            row(f"A13{key}-average", f"{claim}, {what}", setting, average, at_least=_MIN_AVERAGE),
            row(f"A13{key}-p95", f"P95 latency, likewise, {what}", setting, p95),
        ]
    resets = t_interval([float(one.num_resets) for one in runs.all(ours)])
    more: tuple[tuple[str, str, QueueRun, Figure], ...] = (
        ("slo", "missed objectives below round robin's", theirs, slo_missed),
        ("reset", "mean latency with old columns dropped below that with them kept", kept, latency),
        ("over-shortest", "mean latency below that of shortest first", under(ours, "central_shortest_first"), latency),
    )
    rows += [row(f"A13-{key}", what, setting, runs.reduction(ours, other, figure)) for key, what, other, figure in more]
    return [*rows, row("A13-resets", "times that old columns were dropped", setting, resets)]


GROUPS = (
    Group("A12", lambda settings: units(settings, _a12_runs(settings)), _a12_rows),
    Group("A13", lambda settings: units(settings, _a13_runs(settings)), _a13_rows),
)
