"""Central queues: a query waits here until an engine has a free slot for it; first come or shortest answer first.

The baselines that show what a central queue alone is worth: they look at no price, no utility and no target. A slot is
one of ``max_num_seqs``; an instance whose limits are unknown (hosted) has as many as ``hosted_slots``. The order is
strict: a query whose instances are all full holds back those behind it that could go to the same instances. It refuses
to weigh key-value memory: an engine that runs short of it queues or preempts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from headway.fleet import FleetView, InstanceView
from headway.policy.base import HeldQuery, Release, choosable
from headway.policy.options import Options, number
from headway.policy.residents import num_requests_on

#: Requests at a time on an instance whose engine is unknown.
DEFAULT_HOSTED_SLOTS = 64


class CentralQueuePolicy:
    """Releases queries in order, each to the choosable instance with the most free slots.

    ``shortest_first`` orders queries of one priority by the least output tokens predicted on any of their instances,
    ``fcfs`` keeps the queue's own order.

    Raises:
        ConfigError: ``hosted_slots`` is no number of at least 1.
    """

    needs_estimates = False

    def __init__(self, order: Literal["fcfs", "shortest_first"], options: Options) -> None:
        self.name = f"central_{order}"
        self._shortest_first = order == "shortest_first"
        self._hosted_slots = int(number(options, "hosted_slots", DEFAULT_HOSTED_SLOTS, minimum=1.0))

    def release(self, queue: Sequence[HeldQuery], fleet: FleetView, now: float) -> list[Release]:
        """As many as there are free slots. O(queue · instances) while slots are free."""
        free = {view.instance.id: self._num_slots(view) - num_requests_on(view) for view in fleet.views}
        if all(slots <= 0 for slots in free.values()):
            return []
        released: list[Release] = []
        for held in sorted(queue, key=_length) if self._shortest_first else queue:
            ids = [held.candidates[index].instance_id for index in choosable(held.candidates)]
            if not ids:
                continue  # none of its instances can take anything now, so it holds nobody back
            instance_id = max(ids, key=free.__getitem__)
            if free[instance_id] > 0:
                free[instance_id] -= 1
                released.append(Release(held.query.id, instance_id, "a slot was free"))
            else:
                free.update(dict.fromkeys(ids, 0))
            if all(slots <= 0 for slots in free.values()):
                break
        return released

    def next_release_s(self, now: float) -> float | None:
        """Slots become free by events alone."""
        return None

    def why_held(self, held: HeldQuery, now: float) -> str:
        """What it waits for."""
        return "no slot is free" if choosable(held.candidates) else "no instance can take it now"

    def _num_slots(self, view: InstanceView) -> int:
        limits = view.instance.limits
        return self._hosted_slots if limits is None else limits.max_num_seqs


def _length(held: HeldQuery) -> tuple[int, float]:
    lengths = [one.output_tokens for one in held.candidates if one.output_tokens is not None]
    return held.query.priority, min(lengths, default=math.inf)
