"""BEAR that pays for what it takes: the best margin ``U − price − harm`` among the instances in time.

``price`` is the shadow price of the work a query would take of the instance, ``harm`` the utility of those waiting
there whom it would make late. BEAR spends the bottleneck on queries that gain little by it; this rule leaves it to
those that gain more (source: our simulations of the three-model pool; price rules in ``prices.py``). Where even the
best margin is below 0, the query is worth less than what it would take from others: it goes where it is the least own
work, as those do that no instance can answer in time. It refuses to price by a clock that is not trusted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from headway.fleet import FleetView
from headway.fleet.at_risk import AtRisk
from headway.policy.base import Rotation, break_tie, choosable, largest, utility_of
from headway.policy.bear import BearPolicy
from headway.policy.least_work import LeastWork
from headway.policy.prices import Price
from headway.policy.residents import Residents
from headway.types import Candidate, Query


class PricedBearPolicy:
    """Largest margin among the feasible; below a margin of 0, and where none is feasible, BEAR's fallback.

    With ``least_work`` off the best margin counts whatever its sign, and the smallest TTFT takes the hopeless.
    """

    name = "priced_bear"

    def __init__(self, rng: np.random.Generator, price: Price, *, least_work: bool = True) -> None:
        self._price = price
        self._rotation = Rotation(rng)
        self._work = LeastWork()
        self._least_work = self._work if least_work else None
        self._bear = BearPolicy(rng, name=self.name, least_work=self._least_work)
        self._residents = Residents()
        self._charged: tuple[Sequence[Candidate], list[float], dict[int, float]] | None = None

    def bind(self, fleet: FleetView) -> None:
        """Know the engines of this fleet."""
        for part in (self._work, self._residents, self._price):
            part.bind(fleet)
        for view in fleet.views:
            if view.at_risk is None:  # a shadow's policy looks at the same fleet
                view.at_risk = AtRisk()

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The best margin in time, else the least work, else the soonest."""
        works_s = [self._work.work_s(candidate) for candidate in candidates]
        prices = self._price.charges(query, candidates, works_s, now)
        feasible = [index for index, candidate in enumerate(candidates) if candidate.verdict == "feasible"]
        harms = [self._harm(candidates[index], now) for index in feasible]
        margins = [
            utility_of(candidates[index]) - prices[index] - harm for index, harm in zip(feasible, harms, strict=True)
        ]
        self._charged = (candidates, prices, dict(zip(feasible, harms, strict=True)))
        if not feasible:
            chosen = self._bear.choose(query, candidates, now)
        else:
            tied = self._given_up(candidates) if max(margins) < 0.0 else []
            chosen = break_tie(tied or largest(feasible, margins), candidates, self._rotation)
        if chosen is not None:
            self._price.sent(candidates[chosen], works_s[chosen], now)
        return chosen

    def charged(self, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """The candidates of the last choice with what each was charged; others come back as they are."""
        if self._charged is None or self._charged[0] is not candidates:
            return candidates
        _, prices, harms = self._charged
        rows = enumerate(zip(candidates, prices, strict=True))
        return tuple([replace(candidate, price=price, harm=harms.get(index)) for index, (candidate, price) in rows])

    def _given_up(self, candidates: Sequence[Candidate]) -> list[int]:
        """Where to send what is worth less than its place; nowhere else if no work can be told or trusted."""
        return [] if self._least_work is None else self._least_work.choose(choosable(candidates), candidates)

    def _harm(self, candidate: Candidate, now: float) -> float:
        """Utility of those waiting on the instance whom the query would make late, by the replay of both."""
        view, estimate = self._residents.view(candidate), candidate.estimate
        if view is None or view.at_risk is None or estimate is None or view.engine is None or view.stale:
            return 0.0
        return 0.0 if not view.clock_trusted else view.at_risk.harm(now + estimate.wait_s, now + estimate.ttft_s)
