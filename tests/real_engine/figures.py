"""The figures of the report, out of the parts' results: errors of every pass, the noise floor, and what they show.

The error of a prediction is |predicted ÷ observed − 1|, at the client (first byte sent to first content) and at the
engine (arrival at its server to the end of the batch that gave the token). The noise floor is the same figure with the
first run of a workload as the prediction of the second: nobody who predicts does better on this machine but by luck.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from real_engine.errors import usable
from real_engine.passes import STATES, Pass, Row, State, read_pass
from real_engine.workload import SHAPES

#: What is reported, and the passes it comes from; both passes with snapshots are pooled.
REPORTED: Final[dict[str, tuple[State, ...]]] = {
    "snapshots": ("snapshots", "again"), "shadow": ("shadow",), "prefill_throughput": ("snapshots", "again"),
    "history": ("history",),
}  # fmt: skip
_THETA_GRID: Final = np.geomspace(0.1, 10.0, 401)

Column = NDArray[np.float64]


def ttft_figures(directory: Path) -> dict[str, Any]:
    """Everything that the passes say: pooled over the workloads, and each by itself."""
    done = {(shape, state): read_pass(directory, shape, state) for shape in SHAPES for state in STATES}
    by_workload: dict[str, Any] = {}
    for shape in SHAPES:
        states = {state: done[shape, state] for state in STATES}
        if any(one is not None for one in states.values()):
            by_workload[shape] = _workload(states)
    pooled = {
        name: _pooled(name, [done[shape, state] for shape in SHAPES for state in states])
        for name, states in REPORTED.items()
    }
    floors = [_floor(done[shape, "snapshots"], done[shape, "again"]) for shape in SHAPES]
    known = np.concatenate([one for one in floors if one is not None]) if any(f is not None for f in floors) else None
    return {
        "mape": {name: None if one is None else one["client"]["mape"] for name, one in pooled.items()},
        "noise_floor": None if known is None else float(known.mean()),
        "noise_floor_median": None if known is None else float(np.median(known)),
        "pooled": pooled,
        "by_workload": by_workload,
    }


def _workload(states: dict[State, Pass | None]) -> dict[str, Any]:
    some = next(one for one in states.values() if one is not None)
    floor = _floor(states["snapshots"], states["again"])
    return {
        "num_requests": some.num,
        "rate_per_s": some.rate_per_s,
        "load_average": {state: one.load_average for state, one in states.items() if one is not None},
        "noise_floor": None if floor is None else float(floor.mean()),
        "noise_floor_median": None if floor is None else float(np.median(floor)),
        "states": {name: _pooled(name, [states[state] for state in members]) for name, members in REPORTED.items()},
    }


def _floor(first: Pass | None, second: Pass | None) -> Column | None:
    """|first ÷ second − 1| of the times at the client, request by request."""
    if first is None or second is None:
        return None
    before = {row.client.number: row.client.ttft_s for row in usable(first)}
    pairs = [(before[row.client.number], row.client.ttft_s) for row in usable(second) if row.client.number in before]
    both = np.array([(one, two) for one, two in pairs if one is not None and two is not None])
    return np.abs(both[:, 0] / both[:, 1] - 1.0)


def _pooled(name: str, passes: list[Pass | None]) -> dict[str, Any] | None:
    """The errors over all rows of these passes; None where none was run."""
    there = [one for one in passes if one is not None]
    rows = [row for one in there for row in usable(one) if _predicted_s(name, row) is not None]
    if not rows:
        return None
    predicted = np.array([_predicted_s(name, row) for row in rows], float)
    client = np.array([row.client.ttft_s for row in rows], float)
    engine = np.array([row.engine.ttft_s for row in rows if row.engine is not None], float)
    found: dict[str, Any] = {
        "num": len(rows),
        "num_failed": sum(row.client.error is not None for one in there for row in one.rows),
        "mean_observed_ms": float(client.mean() * 1e3),
        "client": _errors(predicted, client),
        "engine": _errors(predicted, engine),
    }
    if name == "prefill_throughput":
        # Its one constant chosen in hindsight, for these very rows.
        found["client_best_scale"] = min((_errors(predicted * s, client) for s in _THETA_GRID), key=lambda e: e["mape"])
        return found
    found["sources"] = dict(Counter(row.source or "none" for row in rows))
    raw = np.array([np.nan if row.raw_s is None else row.raw_s for row in rows], float)
    if np.isfinite(raw).all():
        found["client_uncorrected"], found["engine_uncorrected"] = _errors(raw, client), _errors(raw, engine)
    return found


def _predicted_s(name: str, row: Row) -> float | None:
    return row.throughput_s if name == "prefill_throughput" else row.client.predicted_s


def _errors(predicted: Column, observed: Column) -> dict[str, float]:
    ratio = predicted / observed - 1.0
    return {
        "mape": float(np.abs(ratio).mean()),
        "median_ape": float(np.median(np.abs(ratio))),
        "p90_ape": float(np.quantile(np.abs(ratio), 0.9)),
        "bias": float(ratio.mean()),
        "mean_absolute_ms": float(np.abs(predicted - observed).mean() * 1e3),
        # Errors weighted by time: what a target in milliseconds sees.
        "wape": float(np.abs(predicted - observed).sum() / observed.sum()),
    }
