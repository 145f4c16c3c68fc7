"""What an estimator of time to first token is.

An estimator answers for all instances at once, in fleet order, from what the fleet knows at ``now``; it never talks to
an engine. An instance of which it knows too little is answered by a simpler estimator, and ``Estimate.source`` says
which one really spoke: nothing falls back in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.fleet import FleetView
from headway.types import Estimate, Instance, Outcome, Query


class Estimator(Protocol):
    """Gives the newcomer's time to first token on every instance."""

    @property
    def name(self) -> str:
        """The name in reports; ``Estimate.source`` carries it where this estimator itself spoke."""
        ...

    def estimate(self, query: Query, fleet: FleetView, prompt_tokens: Sequence[int], now: float) -> list[Estimate]:
        """One estimate per instance, in the order of ``fleet.views``; call ``fleet.age(now)`` first.

        ``prompt_tokens`` holds the query's length on each instance (models may have unlike tokenizers). Infinite times
        mean that the instance is saturated or can never run the query.
        """
        ...

    def observe(self, outcome: Outcome, instance: Instance, now: float) -> None:
        """Learn from what really happened on ``instance``. Estimators that learn nothing ignore it."""
        ...
