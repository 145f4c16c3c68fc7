"""What a policy is, and the tie rule that all of them share.

A policy sees candidates whose verdicts the router has already given and returns the index of one, or None. It reads no
clock; what it remembers between queries is its own. One that weighs more than a candidate shows has ``bind(fleet)``,
called once by its router (see ``residents.py``), one that learns has ``observe(outcome, now)``. The tie rule keeps two
replicas of one model from filling up one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

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
