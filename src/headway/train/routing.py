"""What predictions are worth to a router: the quality really reached when it trades quality against cost by them.

A router that weighs predicted quality against predicted cost spends more or less as its weight changes; the quality and
cost it really reaches are points, and their upper hull is its curve (between two points it may mix at random). Curves
are compared at equal mean cost. Cost is what would have been charged: known tokens times prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.train.measures import Figure, interval
from headway.train.rivals import Predicted
from headway.train.table import EvaluationTable, Floats

#: Weights of cost, relative to the dearest model's mean cost, and at how many costs curves are compared.
_WEIGHTS = np.concatenate(([0.0], np.logspace(-3, 2.5, 45)))
_NUM_COSTS = 15


class RoutingPool(Struct, frozen=True, eq=False, kw_only=True):
    """The models that are routed over: their columns, true quality (P, S) and cost in USD (P, S), input cost (P, S) and
    output price in USD per token (S,). Prompts on which a model lacks quality are left out: ``prompts`` are kept."""

    columns: NDArray[np.intp]
    prompts: NDArray[np.intp]
    quality: Floats
    cost_usd: Floats
    input_usd: Floats
    output_usd_per_token: Floats

    def predicted_cost(self, mean_tokens: Floats) -> Floats:
        """Cost in USD by predicted lengths (P, M of the table); where nothing is said, of the prompt alone."""
        tokens = np.nan_to_num(mean_tokens[np.ix_(self.prompts, self.columns)])
        cost: Floats = self.input_usd + tokens * self.output_usd_per_token
        return cost

    def take(self, prompts: NDArray[np.intp]) -> RoutingPool:
        """Only those of its prompts that are among ``prompts``."""
        kept = np.isin(self.prompts, prompts)
        return RoutingPool(
            columns=self.columns,
            prompts=self.prompts[kept],
            quality=self.quality[kept],
            cost_usd=self.cost_usd[kept],
            input_usd=self.input_usd[kept],
            output_usd_per_token=self.output_usd_per_token,
        )

    def predicted_quality(self, quality: Floats) -> Floats:
        """The pool's part of (P, M)."""
        return quality[np.ix_(self.prompts, self.columns)]


class Curve(Struct, frozen=True, eq=False):
    """Quality and cost of every prompt under every weight, (weights, P)."""

    quality: Floats
    cost_usd: Floats


class RoutingValue(Struct, frozen=True, kw_only=True):
    """Mean quality over matched costs of each way to choose, and how much the learned predictor's is above each.

    ``costs_usd`` are mean costs per query; ``curves`` give each way's quality there.
    """

    models: list[str]
    num_prompts: int
    costs_usd: list[float]
    curves: dict[str, list[float]]
    values: dict[str, Figure]
    learned_above: dict[str, Figure]


def routing_pool(table: EvaluationTable) -> RoutingPool | None:
    """The models of ``table`` that have prices, and the prompts on which all of them have a quality.

    None where there are fewer than two such models, no such prompt, or where all prices are the same.
    """
    priced = [
        column
        for column, model in enumerate(table.models)
        if model.input_per_1m_usd is not None and model.output_per_1m_usd is not None
    ]
    columns = np.array(priced, np.intp)
    if len(columns) < 2:
        return None
    prompts = np.flatnonzero(~np.isnan(table.quality[:, columns]).any(axis=1))
    prices = np.array([(table.models[c].input_per_1m_usd, table.models[c].output_per_1m_usd) for c in priced], float)
    if not len(prompts) or np.ptp(prices) == 0.0:
        return None
    input_usd = table.prompt_tokens[prompts, None] * prices[:, 0] / 1e6
    output_price = prices[:, 1] / 1e6
    by_tokens = input_usd + np.nan_to_num(table.output_tokens[np.ix_(prompts, columns)]) * output_price
    charged = table.cost_usd[np.ix_(prompts, columns)]
    return RoutingPool(
        columns=columns,
        prompts=prompts,
        quality=table.quality[np.ix_(prompts, columns)],
        cost_usd=np.where(np.isnan(charged), by_tokens, charged),
        input_usd=input_usd,
        output_usd_per_token=output_price,
    )


def curve(pool: RoutingPool, quality: Floats, cost_usd: Floats) -> Curve:
    """What choosing the largest ``quality − weight · cost_usd`` really gives, for every weight."""
    rows = np.arange(len(pool.prompts))
    scale = float(pool.cost_usd.mean(axis=0).max())
    chosen = [np.argmax(quality - weight / scale * cost_usd, axis=1) for weight in _WEIGHTS]
    return Curve(
        np.array([pool.quality[rows, one] for one in chosen]), np.array([pool.cost_usd[rows, one] for one in chosen])
    )


def choices(pool: RoutingPool, predictions: Mapping[str, Predicted]) -> dict[str, tuple[Floats, Floats]]:
    """Predicted quality and cost of the pool's models by each predictor, (P, S) each.

    A constant one is left out: it only ever picks single models, and the hull says what those give.
    """
    return {
        name: (pool.predicted_quality(one.quality), pool.predicted_cost(one.mean_tokens))
        for name, one in predictions.items()
        if name != "constant"
    }


def routing_value(
    pool: RoutingPool,
    names: Sequence[str],
    predictions: Mapping[str, tuple[Floats, Floats]],
    counts: Floats,
) -> RoutingValue:
    """Curves of each prediction (quality, cost; both (P, S) of the pool), the two-model hull, the best single model and
    the oracle. ``names`` are the pool's models; the key ``learned`` must be there. ``counts`` (n, P) say how often each
    of the pool's prompts is in each resample."""
    curves = {name: curve(pool, *both) for name, both in predictions.items()}
    curves["oracle"] = curve(pool, pool.quality, pool.cost_usd)
    single = Curve(pool.quality.T, pool.cost_usd.T)
    whole = np.ones((1, len(pool.prompts)))
    costs = _costs(pool)

    def values_of(one: Curve, weights: Floats, *, mixed: bool = True) -> Floats:
        shares = weights / weights.sum(axis=1, keepdims=True)
        points = zip(shares @ one.cost_usd.T, shares @ one.quality.T, strict=True)
        at = hull_at if mixed else best_at
        return np.array([at(cost, quality, costs) for cost, quality in points])

    ways = {name: values_of(one, whole)[0] for name, one in curves.items()}
    ways["random_two_model_hull"] = values_of(single, whole)[0]
    ways["best_single_model"] = values_of(single, whole, mixed=False)[0]
    again = {name: values_of(one, counts).mean(axis=1) for name, one in curves.items()}
    again["random_two_model_hull"] = values_of(single, counts).mean(axis=1)
    again["best_single_model"] = values_of(single, counts, mixed=False).mean(axis=1)
    return RoutingValue(
        models=list(names),
        num_prompts=len(pool.prompts),
        costs_usd=costs.tolist(),
        curves={name: at.tolist() for name, at in ways.items()},
        values={name: interval(float(at.mean()), again[name]) for name, at in ways.items()},
        learned_above={
            name: interval(float(ways["learned"].mean() - at.mean()), again["learned"] - again[name])
            for name, at in ways.items()
            if name != "learned"
        },
    )


def _costs(pool: RoutingPool) -> Floats:
    means = pool.cost_usd.mean(axis=0)
    costs: Floats = np.geomspace(means.min(), means.max(), _NUM_COSTS)
    return costs


def hull_at(cost: Floats, quality: Floats, at: Floats) -> Floats:
    """The upper concave hull of points, at other costs; below the cheapest point its quality, above the best its."""
    order = np.lexsort((-quality, cost))
    hull: list[tuple[float, float]] = []
    for x, y in zip(cost[order].tolist(), quality[order].tolist(), strict=True):
        if hull and y <= hull[-1][1]:
            continue  # dearer and no better
        while len(hull) > 1 and _below(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    xs, ys = zip(*hull, strict=True)
    return np.asarray(np.interp(at, xs, ys), np.float64)


def _below(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    return (middle[1] - first[1]) * (last[0] - first[0]) <= (last[1] - first[1]) * (middle[0] - first[0])


def best_at(cost: Floats, quality: Floats, at: Floats) -> Floats:
    """The best quality among points that cost no more; below the cheapest, its."""
    return np.array([quality[cost <= max(x * (1 + 1e-9), float(cost.min()))].max() for x in at.tolist()])
