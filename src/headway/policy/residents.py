"""What a candidate does not show: the load behind it, for the policies that weigh more than a count.

A policy that needs it is bound to the fleet by its router and asks here. Where an engine is replayed, its residents
speak, aged to the moment of the decision; where none is (hosted, silent, stale), the router's own ledger does. Unbound,
nothing but the candidate's count is known. This file refuses to estimate times: it counts requests and tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.fleet import FleetView, InstanceView
from headway.types import Candidate


class Load(NamedTuple):
    """Requests and tokens on one instance.

    ``num_requests`` are this router's that have not ended and, where the replay shows more, those of other routers too.
    ``prefill_tokens`` are still to prefill, over ``num_prefills`` requests; ``prefill_pairs`` is Σ p² + 2·p·c over
    these, c tokens being computed before the p. ``decode_tokens`` are outputs still expected, ``context_tokens`` those
    computed by running requests. ``slot_free`` tells that fewer than ``max_num_seqs`` are there.
    """

    num_requests: int
    num_running: int
    num_decodes: int
    num_prefills: int
    prefill_tokens: int
    prefill_pairs: float
    decode_tokens: float
    context_tokens: int
    slot_free: bool


class Residents:
    """Looks behind candidates, once bound to a fleet."""

    def __init__(self) -> None:
        self._fleet: FleetView | None = None

    def bind(self, fleet: FleetView) -> None:
        """Look at this fleet from now on."""
        self._fleet = fleet

    def view(self, candidate: Candidate) -> InstanceView | None:
        """The instance behind a candidate; None while unbound."""
        fleet = self._fleet
        return None if fleet is None else fleet.views[fleet.index(candidate.instance_id)]

    def num_requests(self, candidate: Candidate) -> int:
        """Requests under way on the instance: those of this router, and of others where a replay shows them."""
        view = self.view(candidate)
        return max(candidate.num_outstanding, 0 if view is None else num_requests_on(view))

    def load(self, candidate: Candidate) -> Load:
        """The load of the instance. O(its residents)."""
        view = self.view(candidate)
        if view is None:
            return Load(candidate.num_outstanding, 0, 0, 0, 0, 0.0, 0.0, 0, True)
        engine = None if view.stale else view.engine
        if engine is None:
            return _booked(view)
        work = engine.workload()
        num_residents = work.num_running + work.num_waiting
        limits = view.instance.limits
        return Load(
            max(candidate.num_outstanding, num_residents),
            work.num_running,
            work.num_decodes,
            work.num_prefills,
            work.prefill_tokens,
            work.prefill_pairs,
            float(work.decode_tokens),
            work.context_tokens,
            limits is None or num_residents < limits.max_num_seqs,
        )


def num_requests_on(view: InstanceView) -> int:
    """Requests under way on the instance: those of this router, and of others where a replay shows them."""
    engine = None if view.stale else view.engine
    if engine is None:
        return view.num_outstanding
    # The ledger knows best when ours end, the replay alone knows of others.
    return max(view.num_outstanding, engine.num_running + engine.num_waiting)


def _booked(view: InstanceView) -> Load:
    """The load by the ledger alone: nothing is prefilled before the first token, and the whole answer is to come."""
    num_decodes = num_prefills = prefill_tokens = context_tokens = 0
    prefill_pairs = decode_tokens = 0.0
    for entry in view.ledger.values():
        if entry.first_token_s is None:
            num_prefills += 1
            prefill_tokens += entry.prompt_tokens
            prefill_pairs += float(entry.prompt_tokens) ** 2
        else:
            num_decodes += 1
            context_tokens += entry.prompt_tokens
        limit = entry.max_tokens
        decode_tokens += entry.predicted_output_tokens if limit is None else min(entry.predicted_output_tokens, limit)
    limits = view.instance.limits
    return Load(
        view.num_outstanding,
        view.num_outstanding,
        num_decodes,
        num_prefills,
        prefill_tokens,
        prefill_pairs,
        decode_tokens,
        context_tokens,
        limits is None or view.num_outstanding < limits.max_num_seqs,
    )
