"""Remaining prefill: the instance that would soonest be through with everything still to prefill, the newcomer last.

Mooncake's scheduler sums fitted prefill times over the queue (source: the latency-aware router's comparison). Here the
fit is the instance's own step time, so that it is as good as its form allows. It sees no decode load, no memory and no
batches: residents are priced as if prefilled one after the other. It ignores quality, cost and targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.estimate.work import OwnWork, own_work
from headway.fleet import FleetView
from headway.policy.base import Rotation, break_tie, choosable, largest, ttft_s_of
from headway.policy.residents import Residents
from headway.types import Candidate, Query

#: Sums this close, in seconds, are equal.
_TIE_S = 1e-9


class RemainingPrefillPolicy:
    """Smallest ``Σ c0 + a·p + b·(p² + 2·p·c)``, in seconds, over the residents' and the query's own prefill.

    p are the tokens still to prefill, c those computed before them; c0 is the step's constant, a and b its seconds per
    token and per squared token. An instance without a step time counts with ``remaining tokens / θ`` of its
    calibration, and without that with the router's own estimated TTFT. Equals go to fewer requests, then take turns.
    """

    name = "remaining_prefill"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rotation = Rotation(rng)
        self._residents = Residents()
        self._works: dict[str, OwnWork] = {}
        self._tokens_per_s: dict[str, float] = {}

    def bind(self, fleet: FleetView) -> None:
        """Know the step times of this fleet's instances."""
        self._residents.bind(fleet)
        for view in fleet.views:
            instance = view.instance
            if instance.step_time is not None and instance.limits is not None:
                self._works[instance.id] = own_work(instance.step_time, instance.limits)
            elif instance.calibration is not None:
                self._tokens_per_s[instance.id] = instance.calibration.prefill_tokens_per_s

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """The instance with the least left to prefill."""
        indices = choosable(candidates)
        if not indices:
            return None
        tied = largest(indices, [-self.prefill_s(candidates[index]) for index in indices], _TIE_S)
        return break_tie(tied, candidates, self._rotation, by_ttft=False)

    def prefill_s(self, candidate: Candidate) -> float:
        """Seconds until the instance has prefilled its residents and the query, by the fit."""
        own_tokens = candidate.prompt_tokens
        work = self._works.get(candidate.instance_id)
        tokens_per_s = self._tokens_per_s.get(candidate.instance_id)
        if own_tokens is None or (work is None and tokens_per_s is None):
            return ttft_s_of(candidate)
        load = self._residents.load(candidate)
        tokens = load.prefill_tokens + own_tokens
        if work is None:
            return tokens / tokens_per_s if tokens_per_s is not None else ttft_s_of(candidate)
        pairs = load.prefill_pairs + float(own_tokens) ** 2
        constant_s = work.step_s * (load.num_prefills + 1)
        return constant_s + work.prefill_token_s * tokens + work.prefill_square_s * pairs
