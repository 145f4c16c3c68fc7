"""A choosing policy that waits instead of sending what would be late: ``on_infeasible: queue``.

What no instance is expected to answer in time is held until one is, as if the client had been told to come again and
came at the best moment: the whole target counts from the release. So the engines' own queues stay as short as the
targets ask, and nothing that is sent delays others in vain. It refuses to choose: that is the wrapped policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.fleet import FleetView
from headway.policy.base import CHOOSABLE, HeldQuery, Policy, Release
from headway.types import Candidate, Outcome, Query

#: How soon held queries are judged again when nothing happens, seconds.
RECHECK_S = 0.05
#: So many queries are judged per call: the first of the queue always, of the others some in turn. Each costs an
#: estimate, and a queue of a thousand must not hold a gateway up for a tenth of a second.
NUM_FIRST, NUM_IN_TURN = 16, 32


class HoldInfeasible:
    """Releases a query to the instance that ``policy`` chooses once some instance is in time for it.

    One query per call, the first in the queue's order that can go: the next is judged with this one booked. In a long
    queue one of the later ones may be passed over until its turn comes to be looked at.
    """

    target_restarts = True

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self._policy = policy
        self._turn = 0
        bind: Callable[[FleetView], None] | None = getattr(policy, "bind", None)
        observe: Callable[[Outcome, float], None] | None = getattr(policy, "observe", None)
        if bind is not None:
            self.bind = bind
        if observe is not None:
            self.observe = observe

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The wrapped policy's choice, late or not."""
        return self._policy.choose(query, candidates, now)

    def release(self, queue: Sequence[HeldQuery], fleet: FleetView, now: float) -> list[Release]:
        """The first query, of those looked at now, that some instance is in time for."""
        for index in self._looked_at(len(queue)):
            held = queue[index]
            if any(candidate.verdict == "feasible" for candidate in held.candidates):
                chosen = self._policy.choose(held.query, held.candidates, now)
                if chosen is not None:
                    return [Release(held.query.id, held.candidates[chosen].instance_id, "an instance is in time")]
        return []

    def _looked_at(self, length: int) -> list[int]:
        rest = length - NUM_FIRST
        if rest <= NUM_IN_TURN:
            return list(range(length))
        begin, self._turn = self._turn % rest, self._turn + NUM_IN_TURN
        return [*range(NUM_FIRST), *sorted(NUM_FIRST + (begin + step) % rest for step in range(NUM_IN_TURN))]

    def next_release_s(self, now: float) -> float | None:
        """Engines work on between events, and each step may bring one in time: look again soon."""
        return now + RECHECK_S

    def why_held(self, held: HeldQuery, now: float) -> str:
        """What the best instance lacks."""
        times_s = [
            candidate.estimate.ttft_s
            for candidate in held.candidates
            if candidate.verdict in CHOOSABLE and candidate.estimate is not None
        ]
        if not times_s:
            return "no instance can take it now"
        return f"no instance is in time: the best offers {min(times_s) * 1e3:.0f} ms"
