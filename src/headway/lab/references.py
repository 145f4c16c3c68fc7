"""What a router must be measured against that no registry holds: what cannot be known, and what costs nothing.

An oracle is BEAR on true lengths, qualities and clock; ``oracle_latency`` knows lengths and clock only. Below stand the
cheap ones: the task label alone, random mixtures of two models, one threshold between two. Nobody should be praised
who does not beat these. They refuse to be configured in a gateway: some need the truth, and the rest are no use.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.lab.pool import LabInstance, Pool
from headway.lab.workload import Workload
from headway.policy.base import Rotation, choosable, fewest_outstanding, utility_of
from headway.types import Calibration, Candidate, Query, StepTime

Column = NDArray[np.float64]


def knowing(workload: Workload, *, lengths: bool = False, qualities: bool = False) -> Workload:
    """The same queries, with the true lengths or qualities in the place of the predicted ones."""
    length = workload.true_output_tokens.astype(np.float64) if lengths else workload.predicted_output_tokens
    quality = workload.true_quality.copy() if qualities else workload.predicted_quality
    return replace(workload, predicted_output_tokens=length, predicted_quality=quality)


def with_true_costs(workload: Workload, pool: Pool) -> Workload:
    """The same queries, whose predicted utilities are those of the true costs, while predicted lengths stay.

    Utility is linear in quality, so the difference is put there, as far as quality stays within [0, 1].
    """
    prices = np.array([pool.cards[model].output_per_1m_usd for model in workload.models])
    excess_musd = prices * (workload.true_output_tokens - workload.predicted_output_tokens)
    quality = workload.predicted_quality - workload.lambda_per_musd * excess_musd
    return replace(workload, predicted_quality=np.clip(quality, 0.0, 1.0))


def true_clock(pool: Pool) -> Pool:
    """The same pool, whose estimators know the clock itself: its form and mean host gap. Noise stays noise."""
    return replace(pool, instances=tuple(_with_true_clock(one) for one in pool.instances))


def _with_true_clock(one: LabInstance) -> LabInstance:
    truth = one.truth
    terms = truth.step_time.named()
    terms["b0"] += sum(truth.host_gap_s) / 2 + truth.stall_probability * truth.stall_mean_s
    known = StepTime(truth.step_time.form, tuple(terms.values()))
    return replace(one, instance=replace(one.instance, step_time=known))


def with_throughput(pool: Pool, tokens_per_s: Mapping[str, float]) -> Pool:
    """The same pool with another calibrated prefill throughput θ, in tokens per second, by instance id."""
    return replace(pool, instances=tuple(_with_throughput(one, tokens_per_s) for one in pool.instances))


def _with_throughput(one: LabInstance, tokens_per_s: Mapping[str, float]) -> LabInstance:
    known: Calibration | None = one.instance.calibration
    if known is None or one.instance.id not in tokens_per_s:
        return one
    fitted = replace(known, prefill_tokens_per_s=tokens_per_s[one.instance.id])
    return replace(one, instance=replace(one.instance, calibration=fitted))


class RandomMixPolicy:
    """Model ``second`` with probability ``share``, else ``first``; of a model's instances the one with fewest requests.

    Raises:
        ConfigError: a share outside [0, 1].
    """

    name = "random_mix"

    def __init__(self, rng: np.random.Generator, *, first: str, second: str, share: float) -> None:
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"must lie between 0 and 1, not {share!r}", key="random_mix.share")
        self._rng, self._rotation = rng, Rotation(rng)
        self._models, self._share = (first, second), share

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """An instance of the model that was drawn; of the other one where that cannot be chosen."""
        model = self._models[self._rng.random() < self._share]
        return _of_model(model, candidates, self._rotation)


class TwoModelPolicy:
    """The ``strong`` model where its predicted utility exceeds the ``weak`` one's by ``threshold``, else the weak one.

    That is a two-model router of the common kind: one predicted gain, one threshold, no look at any queue.
    """

    name = "two_model"

    def __init__(self, rng: np.random.Generator, *, weak: str, strong: str, threshold: float) -> None:
        self._rotation = Rotation(rng)
        self._weak, self._strong, self._threshold = weak, strong, threshold

    def choose(self, query: Query, candidates: Sequence[Candidate], now: float) -> int | None:
        """An instance of the model on the predicted gain's side of the threshold."""
        utilities = {candidate.model: utility_of(candidate) for candidate in candidates}
        gain = utilities[self._strong] - utilities[self._weak]
        return _of_model(self._strong if gain >= self._threshold else self._weak, candidates, self._rotation)


def _of_model(model: str, candidates: Sequence[Candidate], rotation: Rotation) -> int | None:
    indices = choosable(candidates)
    if not indices:
        return None
    served = [index for index in indices if candidates[index].model == model]
    return rotation.take(fewest_outstanding(served or indices, candidates))


def model_pairs(models: Sequence[str]) -> list[tuple[str, str]]:
    """Every two models, in the given order: by size, the weaker first."""
    return list(itertools.combinations(models, 2))


def gain_thresholds(workload: Workload, pool: Pool, weak: str, strong: str, shares: Sequence[float]) -> list[float]:
    """Thresholds at which these shares of the workload's queries would go to the strong model."""
    gains = predicted_utility(workload, pool, strong) - predicted_utility(workload, pool, weak)
    return [float(np.quantile(gains, 1.0 - share)) for share in shares]


def predicted_utility(workload: Workload, pool: Pool, model: str) -> Column:
    """Predicted utility of each query on one model."""
    column, card = workload.models.index(model), pool.cards[model]
    cost_musd = (
        workload.prompt_tokens * card.input_per_1m_usd
        + workload.predicted_output_tokens[:, column] * card.output_per_1m_usd
    )
    utility: Column = workload.predicted_quality[:, column] - workload.lambda_per_musd * cost_musd
    return utility


def hull_at(points: Sequence[tuple[float, float]], cost: float) -> float:
    """The largest value that a mixture of ``points`` (cost, value) reaches at no more than ``cost``.

    The upper concave hull, which rises up to the best point and stays there. Below the cheapest point its value counts.

    Raises:
        ValueError: no point.
    """
    if not points:
        raise ValueError("a hull needs at least one point")
    cheapest = min(points)[0]
    limit = max(cost, cheapest)
    best = max(value for at, value in points if at <= limit)
    for (cost_a, value_a), (cost_b, value_b) in itertools.product(points, repeat=2):
        if cost_a <= limit < cost_b:
            weight = (limit - cost_a) / (cost_b - cost_a)
            best = max(best, value_a + weight * (value_b - value_a))
    return best
