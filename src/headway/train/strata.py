"""The same comparison on thirds of the prompts: by length, and by how hard they are for the models.

A mean hides where predictions help. Difficulty is the prompt's mean quality over the models, which only hindsight
knows: it says where errors sit, and refuses to be a feature.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from headway.train.material import Material
from headway.train.measures import Figure, Resamples
from headway.train.rivals import Predicted
from headway.train.routing import RoutingPool, choices, routing_value
from headway.train.table import EvaluationTable

_NUM_RESAMPLES = 100
#: Ways to choose that routing by the learned predictor is compared with on each third.
COMPARED = ("task_recognised", "best_single_model", "random_two_model_hull", "oracle")
_BY_LENGTH, _BY_DIFFICULTY = ("short", "middle", "long"), ("hard", "middle", "easy")


class Stratum(Struct, frozen=True, kw_only=True):
    """A third of the prompts: by prompt length, or by mean quality over the models (``difficulty``). Squared errors
    are of quality."""

    by: str
    name: str
    num_prompts: int
    mean_quality: float
    squared_error: dict[str, float]
    routing_above: dict[str, Figure]


def make_strata(
    table: EvaluationTable,
    material: Material,
    predictions: Mapping[str, Predicted],
    pool: RoutingPool | None,
    *,
    seed: int,
) -> list[Stratum]:
    """Six strata: three by length, three by difficulty. None where no quality is known."""
    known = ~np.isnan(material.quality)
    if not known.any():
        return []
    difficulty = np.where(known, material.quality, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    thirds = [
        (by, name, np.sort(prompts))
        for by, values, names in (
            ("length", table.prompt_tokens, _BY_LENGTH),
            ("difficulty", difficulty, _BY_DIFFICULTY),
        )
        for name, prompts in zip(names, np.array_split(np.argsort(values, kind="stable"), len(names)), strict=True)
    ]
    return [
        Stratum(
            by=by,
            name=name,
            num_prompts=len(prompts),
            mean_quality=float(np.nanmean(material.quality[prompts])),
            squared_error={
                rival: float(np.nanmean(np.square(material.quality[prompts] - one.quality[prompts])))
                for rival, one in predictions.items()
            },
            routing_above={} if pool is None else _routing(pool.take(prompts), predictions, seed),
        )
        for by, name, prompts in thirds
    ]


def _routing(pool: RoutingPool, predictions: Mapping[str, Predicted], seed: int) -> dict[str, Figure]:
    num_prompts = len(pool.prompts)
    if num_prompts < 2:
        return {}
    counts = Resamples(np.arange(num_prompts, dtype=np.intp), _NUM_RESAMPLES, seed).counts(num_prompts)
    named = [str(column) for column in pool.columns]
    value = routing_value(pool, named, choices(pool, predictions), counts)
    return {name: value.learned_above[name] for name in COMPARED}
