"""Prices learned from the queries themselves: the online dual of "give each query where it is worth most".

Over the last queries the fluid problem is max Σ x·U with Σ x·a ≤ capacity for each kind of instance and resource, Σ x ≤
1 for each query. Its dual prices minimise ``d·p + mean over queries of max_k (U_k − a_k·p)₊``, d being what there is of
each resource per arriving query. Some projected subgradient steps every few queries, from the prices at hand, follow
that minimum as the traffic changes (source of the method: online linear programming for routing, arXiv 2607.03948, over
periods of time there). It sees no queue: that is the replay's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.estimate.work import OwnWork, own_work
from headway.fleet import FleetView
from headway.policy.base import CHOOSABLE
from headway.types import Candidate, EngineLimits, Query, StepTime

#: Queries that prices are learned from.
WINDOW = 256
#: Prices move once per so many queries, by so many steps.
EVERY, NUM_STEPS = 16, 5
#: How far a price moves in a step, in utility per second, for a resource twice or not at all used.
STEP = 0.02
#: Share of its time, and of its memory, that an instance is planned to be used.
PLANNED_SHARE = 1.0
#: Below so many queries nothing is charged.
MIN_QUERIES = 64
#: Work, and memory over time.
_NUM_RESOURCES = 2


class _Kind:
    """Instances that are alike: one model on engines of one step time and limits. ``work`` None: nothing is scarce."""

    def __init__(self, step_time: StepTime | None, limits: EngineLimits | None) -> None:
        self.members: list[int] = []
        self.work: OwnWork | None = None
        if step_time is not None and limits is not None:
            self.work = own_work(step_time, limits)

    def demands(self, prompt_tokens: float, output_tokens: float) -> tuple[float, float]:
        """Seconds of work, and seconds of the whole memory while the engine is full."""
        work = self.work
        if work is None:
            return 0.0, 0.0
        step_s = work.step_s + work.decode_context_s * work.kv_tokens
        held = (prompt_tokens + 0.5 * output_tokens) / work.kv_tokens
        return work.seconds(prompt_tokens, output_tokens), held * output_tokens * step_s


class LearnedPrice:
    """Prices of work-seconds and of memory-seconds, per kind of instance, in utility per second; 0 until it has seen
    some queries.

    A query counts where it could be in time on an idle engine: whether one is busy now says nothing of what its time is
    worth. CPU per query: a few microseconds, and an update of a tenth of a millisecond every 16th.
    """

    def __init__(self, *, window: int = WINDOW, planned_share: float = PLANNED_SHARE, step: float = STEP) -> None:
        self._window, self._planned_share, self._step = window, planned_share, step
        self._kinds: list[_Kind] = []
        self._kind_of: dict[str, int] = {}

    def bind(self, fleet: FleetView) -> None:
        """Know the engines of this fleet, and forget what was learned."""
        self._fleet = fleet
        known: dict[object, int] = {}
        self._kinds, self._kind_of = [], {}
        for position, view in enumerate(fleet.views):
            one = view.instance
            name = (one.model, one.step_time, one.limits) if one.step_time is not None else one.id
            if name not in known:
                known[name] = len(self._kinds)
                self._kinds.append(_Kind(one.step_time, one.limits))
            self._kinds[known[name]].members.append(position)
            self._kind_of[one.id] = known[name]
        num = len(self._kinds)
        self._utilities = np.full((num, self._window), -np.inf)
        self._demands = np.zeros((_NUM_RESOURCES, num, self._window))
        self._at_s = np.zeros(self._window)
        self._prices = np.zeros((_NUM_RESOURCES, num))
        self._listed: list[list[float]] = self._prices.tolist()
        self._num_seen = 0

    def prices(self, instance_id: str) -> tuple[float, float]:
        """Utility per second of an instance's work, and per second of its whole memory."""
        number = self._kind_of[instance_id]
        return self._listed[0][number], self._listed[1][number]

    def charges(
        self, query: Query, candidates: Sequence[Candidate], works_s: Sequence[float | None], now: float
    ) -> list[float]:
        """Prices times demands, by the prices before this query; it is learned from right away."""
        if not self._kinds:
            return [0.0] * len(candidates)
        utilities = [-np.inf] * len(self._kinds)
        demands: list[tuple[float, float]] = [(0.0, 0.0)] * len(self._kinds)
        charged = []
        by_work, by_memory = self._listed
        for candidate, work_s in zip(candidates, works_s, strict=True):
            number = self._kind_of[candidate.instance_id]
            kind, prompt_tokens, output_tokens = self._kinds[number], candidate.prompt_tokens, candidate.output_tokens
            if prompt_tokens is None or output_tokens is None or candidate.utility is None:
                charged.append(0.0)
                continue
            if demands[number] == (0.0, 0.0):
                demands[number] = kind.demands(float(prompt_tokens), output_tokens)
            if candidate.verdict in CHOOSABLE and _in_time_alone(kind, query, prompt_tokens):
                utilities[number] = candidate.utility
            work, memory = demands[number]
            charged.append(0.0 if work_s is None else by_work[number] * work + by_memory[number] * memory)
        self._learn(utilities, demands, now)
        return charged

    def sent(self, candidate: Candidate, work_s: float | None, now: float) -> None:
        """Nothing to note: what the prices make of a query is planned, not observed."""

    def _learn(self, utilities: Sequence[float], demands: Sequence[tuple[float, float]], now: float) -> None:
        place = self._num_seen % self._window
        self._utilities[:, place], self._demands[:, :, place] = utilities, list(zip(*demands, strict=True))
        self._at_s[place] = now
        self._num_seen += 1
        if self._num_seen >= MIN_QUERIES and self._num_seen % EVERY == 0:
            self._update(now)

    def _update(self, now: float) -> None:
        """Projected subgradient steps over the window."""
        num = min(self._num_seen, self._window)
        eldest_s = float(self._at_s[0 if self._num_seen <= self._window else self._num_seen % self._window])
        seconds_per_query = max(now - eldest_s, 1e-9) / (num - 1)
        views = self._fleet.views
        present = [sum(views[one].healthy and not views[one].draining for one in kind.members) for kind in self._kinds]
        # Of a kind that is gone there is next to nothing: its price rises out of reach, as nobody may go there anyway.
        there = self._planned_share * seconds_per_query * np.maximum(present, 1e-3)
        utilities, demands = self._utilities[:, :num], self._demands[:, :, :num]
        self._prices = subgradient_steps(self._prices, utilities, demands, there, self._step)
        self._listed = self._prices.tolist()


def subgradient_steps(
    prices: NDArray[np.float64],
    utilities: NDArray[np.float64],
    demands: NDArray[np.float64],
    there: NDArray[np.float64],
    step: float,
    *,
    num_steps: int = NUM_STEPS,
) -> NDArray[np.float64]:
    """The prices after ``num_steps`` steps down the dual, each kept at 0 or above.

    Shapes: prices (R, K), utilities (K, N) with −inf where a query may not go, demands (R, K, N), there (K,) or (R, K)
    per query. The slope is taken relative to ``there``, so that ``step`` means the same on every kind.
    """
    scale = 1.0 / (there * utilities.shape[1])
    for _ in range(num_steps):
        margins = utilities - np.einsum("rkn,rk->kn", demands, prices)
        best = margins.max(axis=0)
        taken = ((margins == best) & (best > 0.0)).astype(np.float64)
        used = np.einsum("rkn,kn->rk", demands, taken)
        prices = np.maximum(0.0, prices - step * (1.0 - used * scale))
    return prices


def _in_time_alone(kind: _Kind, query: Query, prompt_tokens: int) -> bool:
    if kind.work is None or query.ttft_target_s is None:
        return True
    return kind.work.alone_s(float(prompt_tokens)) <= query.ttft_target_s
