"""Figures of a run through the central queue: latency, waits, throughput, missed objectives.

Rates are over the time in which requests arrive, so that how a run drains counts for nothing; every request counts in
every mean. It refuses to leave out those that waited longest.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.lab.queue_sim import QueueOutcomes


class QueueScore(Struct, frozen=True, kw_only=True):
    """Times in units of the load's clock, from arrival; rates per unit of it; shares of all requests.

    ``ttft`` ends with the first iteration on a device, ``wait`` where that begins. ``wait_missed`` and
    ``latency_missed`` are at or beyond the objective's thresholds, ``slo_missed`` the mean of both. ``value`` is the
    mean value of the answers where the load has values.
    """

    latency: float
    latency_p95: float
    latency_p99: float
    ttft: float
    ttft_p95: float
    ttft_p99: float
    wait: float
    tokens_per_time: float
    requests_per_time: float
    wait_missed: float
    latency_missed: float
    slo_missed: float
    preempted: float
    value: float | None


def queue_score(outcomes: QueueOutcomes, *, wait_slo: float, latency_slo: float) -> QueueScore:
    """The figures of a run; thresholds in units of its clock."""
    load = outcomes.load
    latency, ttft = outcomes.ended - load.arrivals, outcomes.first_token - load.arrivals
    wait = outcomes.joined - load.arrivals
    end = float(load.arrivals[-1])
    wait_missed, latency_missed = float((wait >= wait_slo).mean()), float((latency >= latency_slo).mean())
    value = None if load.values is None else float(load.values[np.arange(len(load)), outcomes.device].mean())
    return QueueScore(
        latency=float(latency.mean()),
        latency_p95=_quantile(latency, 0.95),
        latency_p99=_quantile(latency, 0.99),
        ttft=float(ttft.mean()),
        ttft_p95=_quantile(ttft, 0.95),
        ttft_p99=_quantile(ttft, 0.99),
        wait=float(wait.mean()),
        tokens_per_time=float(_made_by(outcomes, end).sum()) / end,
        requests_per_time=float((outcomes.ended <= end).sum()) / end,
        wait_missed=wait_missed,
        latency_missed=latency_missed,
        slo_missed=(wait_missed + latency_missed) / 2.0,
        preempted=outcomes.num_preemptions / len(load),
        value=value,
    )


def _made_by(outcomes: QueueOutcomes, end: float) -> NDArray[np.float64]:
    """Output tokens of each request until ``end``, as if it made them evenly from joining to ending."""
    duration = np.maximum(outcomes.ended - outcomes.joined, 1e-12)
    share = np.clip((end - outcomes.joined) / duration, 0.0, 1.0)
    made: NDArray[np.float64] = share * outcomes.load.output_tokens
    return made


def _quantile(values: NDArray[np.float64], share: float) -> float:
    return float(np.quantile(values, share))
