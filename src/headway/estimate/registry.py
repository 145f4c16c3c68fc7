"""The names by which policies' rows and the lab ask for an estimator of time to first token, and who speaks for whom.

An estimator that knows too little of an instance hands it on, always in this order, and ``Estimate.source`` says where
it ended: ``replay`` (snapshots), ``shadow`` or ``shadow_widened`` (this router's own dispatches), ``history`` (recent
times to first token), ``queueing`` (calibration or gauges), ``default``. Each is made anew with its own fallbacks,
because what an estimator learns is its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from headway.errors import ConfigError
from headway.estimate.base import Estimator
from headway.estimate.history import HistoryEstimator
from headway.estimate.prefill_throughput import PrefillThroughputEstimator
from headway.estimate.queueing import QueueingEstimator
from headway.estimate.replay import ReplayEstimator


class EstimatorRow(NamedTuple):
    """How to make an estimator, and what it does in one line."""

    factory: Callable[[], Estimator]
    description: str


def _history() -> HistoryEstimator:
    return HistoryEstimator(QueueingEstimator())


ESTIMATORS: dict[str, EstimatorRow] = {
    "replay": EstimatorRow(
        lambda: ReplayEstimator(_history()), "replay of the engine's own token batches, from its state"
    ),
    "prefill_throughput": EstimatorRow(
        lambda: PrefillThroughputEstimator(fallback=_history()),
        "remaining prefill of all residents over a constant throughput, plus a decode step",
    ),
    "prefill_throughput_bare": EstimatorRow(
        lambda: PrefillThroughputEstimator(include_decode_step=False, fallback=_history()),
        "the same without the decode step",
    ),
    "history": EstimatorRow(_history, "median of the instance's recent times to first token, no state"),
    "queueing": EstimatorRow(QueueingEstimator, "average case of limited processor sharing, no state"),
}


def make_estimator(name: str) -> Estimator:
    """A new estimator by its registered name.

    Raises:
        ConfigError: an unknown name, with the nearest known one.
    """
    row = ESTIMATORS.get(name)
    if row is None:
        near = difflib.get_close_matches(name, ESTIMATORS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(ESTIMATORS))}"
        raise ConfigError(f"unknown estimator {name!r}; {hint}", key="estimator")
    return row.factory()
