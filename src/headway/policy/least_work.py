"""Where to send a query that no instance can answer in time: to the one where it is the least own work.

Near saturation the smallest estimated TTFT spreads lateness over the whole pool, which serves nobody; sending each
hopeless query where it takes the least of an engine's seconds keeps the others in time for those that can still be
served (source: our simulations of the three-model pool). Its victims wait long. It refuses to act on a clock that is
not trusted: an inflated one makes every query look hopeless, and all of them would end up in one place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.estimate.work import OwnWork, own_work
from headway.fleet import FleetView
from headway.policy.base import largest, ttft_s_of
from headway.policy.residents import Residents
from headway.types import Candidate, Instance

#: Works this close, in seconds, are equal.
WORK_TIE_S = 1e-12


class LeastWork:
    """Finds the least work among the instances whose step time is known and whose clock is trusted.

    The work is ``prefill(P) + L·(b1 + b2·(P + L/2)) + b0·L·max((P + L/2)/KV, 1/max_num_seqs)`` in seconds, L being
    the predicted output length (``headway.estimate.work``).
    """

    def __init__(self) -> None:
        self._residents = Residents()
        self._works: dict[str, OwnWork | None] = {}

    def bind(self, fleet: FleetView) -> None:
        """Know the engines of this fleet from now on."""
        self._residents.bind(fleet)
        self._works.clear()

    def choose(self, indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
        """Those of ``indices`` with the least own work in seconds; empty where none can be told or trusted.

        An instance whose replay never comes to the query's first token is left out: it cannot run it.
        """
        found: list[int] = []
        works_s: list[float] = []
        for index in indices:
            work_s = self.work_s(candidates[index])
            if work_s is not None:
                found.append(index)
                works_s.append(work_s)
        return largest(found, [-work_s for work_s in works_s], WORK_TIE_S) if found else []

    def work_s(self, candidate: Candidate) -> float | None:
        """Seconds of the engine's time that the query takes there; None where it cannot be told or trusted."""
        view = self._residents.view(candidate)
        prompt_tokens, output_tokens = candidate.prompt_tokens, candidate.output_tokens
        if view is None or not view.clock_trusted or prompt_tokens is None or output_tokens is None:
            return None
        if view.engine is not None and not view.stale and math.isinf(ttft_s_of(candidate)):
            return None
        if candidate.instance_id not in self._works:
            self._works[candidate.instance_id] = _work_of(view.instance)
        work = self._works[candidate.instance_id]
        return None if work is None else work.seconds(float(prompt_tokens), output_tokens)


def _work_of(instance: Instance) -> OwnWork | None:
    if instance.step_time is None or instance.limits is None:
        return None
    return own_work(instance.step_time, instance.limits)
