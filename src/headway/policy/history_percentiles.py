"""History percentiles: the model whose recent slow cases were the least slow.

vLLM Semantic Router's latency-aware selection compares observed tails, P95 of TTFT and P90 of TPOT (source: the
latency-aware router's comparison). It looks back only: a queue that has just formed is seen when its victims are done.
It knows neither the query's length nor its quality, and ignores targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.policy.base import Rotation, choosable, fewest_outstanding, largest
from headway.policy.observed import RecentSamples, tpot_s
from headway.policy.options import Options, number
from headway.types import Candidate, Outcome, Query

#: Normalised ratios this close are equal.
_TIE = 1e-9


class _History:
    """What one model was seen to do: times in seconds."""

    def __init__(self, window: int) -> None:
        self.num_sent = 0
        self.ttft_s = RecentSamples(window)
        self.tpot_s = RecentSamples(window)


class HistoryPercentilesPolicy:
    """Smallest mean of ``P95 TTFT / best P95 TTFT`` and ``P90 TPOT / best P90 TPOT`` over the candidates' models.

    Percentiles are over the last 1,000 outcomes of the model's instances (below three of them an exponentially weighted
    average of weight .3). Each model is first sent 32 queries, the one with the fewest so far before the others. A
    model without an outcome counts as good as the best. Of a model's instances the one with the fewest requests is
    taken, then in turn. Options: ``window`` (1,000 outcomes), ``warmup`` (32 queries).
    """

    name = "history_percentiles"

    def __init__(self, rng: np.random.Generator, options: Options) -> None:
        self._rotation = Rotation(rng)
        self._window = int(number(options, "window", 1000.0, minimum=3.0))
        self._num_warmup = number(options, "warmup", 32.0)
        self._models: dict[str, str] = {}
        self._histories: dict[str, _History] = {}

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """An instance of the model with the shortest tails, or of one still to be warmed up."""
        indices = choosable(candidates)
        if not indices:
            return None
        for index in indices:
            self._models[candidates[index].instance_id] = candidates[index].model
        models = list(dict.fromkeys(candidates[index].model for index in indices))
        sent = [self._of(model).num_sent for model in models]
        positions = range(len(models))
        if min(sent) < self._num_warmup:
            best = largest(positions, [-count for count in sent], 0.0)
        else:
            best = largest(positions, [-ratio for ratio in self._ratios(models)], _TIE)
        tied = [index for index in indices if candidates[index].model in {models[position] for position in best}]
        chosen = self._rotation.take(fewest_outstanding(tied, candidates))
        self._of(candidates[chosen].model).num_sent += 1
        return chosen

    def observe(self, outcome: Outcome, now: float) -> None:
        """Remember TTFT and TPOT of an answer under its instance's model."""
        model = self._models.get(outcome.instance_id)
        if model is None or outcome.status != "ok":
            return
        history = self._of(model)
        if outcome.ttft_s is not None:
            history.ttft_s.add(outcome.ttft_s)
        seen_s = tpot_s(outcome)
        if seen_s is not None:
            history.tpot_s.add(seen_s)

    def _of(self, model: str) -> _History:
        history = self._histories.get(model)
        if history is None:
            history = self._histories[model] = _History(self._window)
        return history

    def _ratios(self, models: Sequence[str]) -> list[float]:
        histories = [self._of(model) for model in models]
        ttfts = _to_best([history.ttft_s.percentile(0.95) for history in histories])
        tpots = _to_best([history.tpot_s.percentile(0.90) for history in histories])
        return [(ttft + tpot) / 2 for ttft, tpot in zip(ttfts, tpots, strict=True)]


def _to_best(values: Sequence[float | None]) -> list[float]:
    """Each value over the smallest; 1 where a value is unknown or the smallest is 0."""
    known = [value for value in values if value is not None]
    best = min(known, default=0.0)
    return [1.0 if value is None or best <= 0.0 else value / best for value in values]
