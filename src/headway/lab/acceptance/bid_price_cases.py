"""Where bid prices win, and where not: the rows of A12 that are ours.

Longer queues, other ratios of prompt to output at the same load of the slots, memory that binds, models of unlike
worth, and what a plan is worth that follows real ends. Each is compared with the queue that has all but the prices.
"""

from __future__ import annotations

from msgspec.structs import replace

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.queue_rows import Figure, Runs, latency, latency_p95, queue, slo_missed, told, under
from headway.lab.acceptance.queue_units import (
    CUT_KV_TOKENS,
    NUM_OWN_REQUESTS,
    NUM_REQUESTS,
    VALUE,
    DispatcherName,
    QueueRun,
)
from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.table import row
from headway.lab.intervals import paired_interval, t_interval
from headway.lab.queue_score import QueueScore

_STABLE, _NEAR_SATURATION, _OVERLOAD, _MODELS = 0.4, 0.5, 0.55, 0.45
_ERROR = 0.2
_SPLITS = ((1, 4), (4, 1))
_OTHERS: tuple[DispatcherName, ...] = ("round_robin", "central_shortest_first")


def own_runs(settings: Settings) -> list[QueueRun]:
    """What these rows are made of."""
    loads = _loads(settings).values()
    kv, noisy, models = _kv(settings), _noisy(settings), _models(settings)
    return [
        *(under(load, name) for load in loads for name in (*_OTHERS, load.dispatcher)),
        *(under(kv, "planned"), replace(kv, history="ahead")),
        *(noisy, replace(noisy, reconcile=False)),
        *(under(models, "central_shortest_first"), under(models, "planned"), models, replace(models, history="ahead")),
    ]


def own_rows(settings: Settings, runs: Runs) -> list[AcceptanceRow]:
    """These rows."""
    rows: list[AcceptanceRow] = []
    for key, load in _loads(settings).items():
        num_requests = NUM_REQUESTS if key == "overload" else NUM_OWN_REQUESTS
        setting = told(settings, f"{_words(load)}, {runs.loads(load)}, lengths known", num_requests)
        for other in _OTHERS:
            below = runs.reduction(load, under(load, other), latency)
            rows += [row(f"A12-{key}-over-{other}", f"mean latency below that of {other}", setting, below)]
        if key == "overload":
            p95 = runs.reduction(load, under(load, "round_robin"), latency_p95)
            rows += [row("A12-overload-p95", "P95 latency below that of round_robin", setting, p95)]
    return [*rows, *_memory_rows(settings, runs), *_plan_rows(settings, runs), *_model_rows(settings, runs)]


def _own(settings: Settings, rate: float) -> QueueRun:
    return queue(settings, rate, num_requests=NUM_OWN_REQUESTS)


def _loads(settings: Settings) -> dict[str, QueueRun]:
    near = _own(settings, _NEAR_SATURATION)
    splits = {f"pd-{p}:{d}": replace(near, split=(p, d)) for p, d in _SPLITS}
    seconds = replace(near, in_seconds=True)
    return {
        "overload": queue(settings, _OVERLOAD),
        **splits,
        "kv": _kv(settings),
        "clock": seconds,
        "mixing": replace(seconds, mixing=True),
    }


def _words(load: QueueRun) -> str:
    if load.split is not None:
        return f"prompt to output {load.split[0]}:{load.split[1]} at the slot load of lambda = {load.rate:g}"
    clock = " by the devices' own clock" if load.in_seconds else ""
    prompts = ", which compute prompts too" if load.mixing else ""
    return f"lambda = {load.rate:g}{clock}, {load.kv_tokens:,} KV tokens per device{prompts}"


def _kv(settings: Settings) -> QueueRun:
    return replace(_own(settings, _STABLE), kv_tokens=CUT_KV_TOKENS)


def _noisy(settings: Settings) -> QueueRun:
    return replace(_own(settings, _NEAR_SATURATION), length_error=_ERROR)


def _models(settings: Settings) -> QueueRun:
    return replace(_own(settings, _MODELS), has_values=True, weights=VALUE)


def _memory_rows(settings: Settings, runs: Runs) -> list[AcceptanceRow]:
    ours = _kv(settings)
    planned, ahead, slots = (
        under(ours, "planned"),
        replace(ours, history="ahead"),
        under(ours, "central_shortest_first"),
    )
    setting = told(settings, f"{_words(ours)}, {runs.loads(ours)}, lengths known", NUM_OWN_REQUESTS)
    cases: tuple[tuple[str, str, QueueRun, QueueRun, Figure], ...] = (
        ("plan", "mean latency of the plan without prices below shortest first's", planned, slots, latency),
        ("price", "mean latency below that of the plan without prices", ours, planned, latency),
        ("price-ahead", "the same with columns spread over the horizon", ahead, planned, latency),
        ("slo", "missed objectives below those of the plan without prices", ours, planned, slo_missed),
    )
    preempted = t_interval(runs.figures(slots, lambda one: one.preempted))
    claim = "preemptions per request of central_shortest_first; the plan has none"
    return [
        *(row(f"A12-kv-{key}", what, setting, runs.reduction(one, other, of)) for key, what, one, other, of in cases),
        row("A12-kv-preempted", claim, setting, preempted),
    ]


def _plan_rows(settings: Settings, runs: Runs) -> list[AcceptanceRow]:
    noisy = _noisy(settings)
    as_predicted = replace(noisy, reconcile=False)
    setting = told(settings, f"{_words(noisy)}, lengths predicted within 20 %", NUM_OWN_REQUESTS)
    follows = "with a plan that follows real ends below that with one that does not"
    waits = runs.reduction(noisy, as_predicted, lambda one: one.wait)
    return [
        row("A12-reconcile", f"mean latency {follows}", setting, runs.reduction(noisy, as_predicted, latency)),
        row("A12-reconcile-wait", f"mean wait {follows}", setting, waits),
    ]


def _model_rows(settings: Settings, runs: Runs) -> list[AcceptanceRow]:
    paper = _models(settings)
    planned, shortest = under(paper, "planned"), under(paper, "central_shortest_first")
    what = f"two of the devices give better answers, lambda = {paper.rate:g}, all weight on value"
    setting = told(settings, what, NUM_OWN_REQUESTS)
    rows: list[AcceptanceRow] = []
    for key, ours, words in (
        ("", paper, "with the paper's columns"),
        ("-ahead", replace(paper, history="ahead"), "with columns spread over the horizon"),
    ):
        shares = [_value(one.score) / (one.fluid_value or 1.0) for one in runs.all(ours)]
        lost = paired_interval(runs.figures(ours, latency), runs.figures(planned, latency))
        value = f"mean value of the answers {words}"
        name = f"A12-models{key}"
        rows += [
            row(
                f"{name}-over-planned", f"{value} over the best free device", setting, runs.gain(ours, planned, _value)
            ),
            row(f"{name}-over-shortest", f"{value} over shortest first", setting, runs.gain(ours, shortest, _value)),
            row(f"{name}-bound", f"share of the fluid bound {words}", setting, t_interval(shares)),
            row(f"{name}-latency", f"periods of mean latency lost {words} to the best free device", setting, lost),
        ]
    return rows


def _value(one: QueueScore) -> float:
    return one.value or 0.0
