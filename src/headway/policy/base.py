"""What a policy is, of either kind, and the tie rule that the choosing ones share.

A policy sees candidates whose verdicts the router has already given. A choosing one returns the index of one, or None,
at once; a holding one lets queries wait in a central queue and says which may go. It reads no clock; what it remembers
between queries is its own. One that weighs more than a candidate shows has ``bind(fleet)``, called by its router (see
``residents.py``), one that learns has ``observe(outcome, now)``. The tie rule keeps two replicas of one model from
filling up one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from msgspec import Struct

from headway.fleet import FleetView
from headway.types import Candidate, Query

#: Verdicts a policy may choose; every other verdict rules an instance out.
CHOOSABLE = frozenset({"feasible", "late", "saturated"})
#: Utilities this close are equal.
UTILITY_TIE = 1e-12
#: Estimated times to first token this close (seconds) are equal.
TTFT_TIE_S = 1e-9


class Policy(Protocol):
    """Chooses one candidate for a query."""

    @property
    def name(self) -> str:
        """The name in the registry and in every decision."""
        ...

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """Index of the chosen candidate; None exactly when no candidate is choosable."""
        ...


class HeldQuery(Struct, frozen=True):
    """A query in the central queue, as it stands at the moment of a release.

    ``candidates`` were judged by the router just now, in fleet order: a policy may choose those that are
    :data:`CHOOSABLE`, and none of them may be. A target counts from ``held_since_s`` (monotonic), so verdicts know how
    long the query has waited. ``query.id`` is unique in the queue, and the outcome will carry it.
    """

    query: Query
    candidates: tuple[Candidate, ...]
    held_since_s: float


class Release(NamedTuple):
    """A query that goes to an instance now, and why in a few words."""

    query_id: str
    instance_id: str
    reason: str


@runtime_checkable
class HoldingPolicy(Protocol):
    """Says which queries of a central queue are released, and where to.

    Further members are optional. ``needs_estimates = False``: candidates come with NaN for times, so that none is
    ``late`` and a long queue costs little; what is released is estimated afterwards. ``target_restarts = True``: held
    queries are judged as if they had arrived now. ``why_held(held, now) -> str`` says why one is not released yet, and
    ``never_fits(held) -> str | None`` why one that has just come (without times) could never be released, which refuses
    it; neither changes anything. ``bind`` and ``observe`` are those of any policy: the outcome of a released query
    comes to ``observe`` also where it was cancelled before anything was sent.
    """

    @property
    def name(self) -> str:
        """The name in the registry and in every decision."""
        ...

    def release(self, queue: Sequence[HeldQuery], fleet: FleetView, now: float) -> list[Release]:
        """The queries to send now. Called again, with these booked, until it returns none.

        ``queue`` is in the order in which it should be served where the policy has no better reason: lower priority
        values first, then by arrival, with turns among clients. A query of it that is not returned stays held.
        """
        ...

    def next_release_s(self, now: float) -> float | None:
        """The monotonic time at which to be called even if nothing happens until then; None: only on events.

        Events are an arrival, an outcome, a snapshot, a change of health.
        """
        ...


class Rotation:
    """Takes turns among equals, beginning at a place drawn from the given generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._turn = int(rng.integers(1 << 30))

    def take(self, tied: Sequence[int]) -> int:
        """One of ``tied``; the turn moves on only where there was a tie."""
        if len(tied) == 1:
            return tied[0]
        self._turn += 1
        return tied[self._turn % len(tied)]


def choosable(candidates: Sequence[Candidate]) -> list[int]:
    """Indices a policy may choose."""
    return [index for index, candidate in enumerate(candidates) if candidate.verdict in CHOOSABLE]


def utility_of(candidate: Candidate) -> float:
    """The utility, or minus infinity where none is known."""
    return -math.inf if candidate.utility is None else candidate.utility


def ttft_s_of(candidate: Candidate) -> float:
    """The estimated time to first token in seconds, or infinity where none is known."""
    return math.inf if candidate.estimate is None else candidate.estimate.ttft_s


def largest(indices: Sequence[int], values: Sequence[float], tie: float = UTILITY_TIE) -> list[int]:
    """Those of ``indices`` whose value is within ``tie`` of the largest; ``values`` runs parallel to ``indices``."""
    if len(values) == 1:
        return list(indices)
    floor = max(values) - tie
    return [index for index, value in zip(indices, values, strict=True) if value >= floor]


def smallest_ttft(indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
    """Those of ``indices`` within a nanosecond of the smallest estimated time to first token."""
    return largest(indices, [-ttft_s_of(candidates[index]) for index in indices], TTFT_TIE_S)


def fewest_outstanding(indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
    """Those of ``indices`` with the fewest requests in the ledger."""
    fewest = min(candidates[index].num_outstanding for index in indices)
    return [index for index in indices if candidates[index].num_outstanding == fewest]


def break_tie(tied: Sequence[int], candidates: Sequence[Candidate], rotation: Rotation, *, by_ttft: bool = True) -> int:
    """One of the ``tied``: smaller estimated TTFT (unless ``by_ttft`` is off), fewer in the ledger, then in turn."""
    if len(tied) > 1 and by_ttft:
        tied = smallest_ttft(tied, candidates)
    if len(tied) > 1:
        tied = fewest_outstanding(tied, candidates)
    return rotation.take(tied)
