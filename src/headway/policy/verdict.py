"""Which instances a policy may choose for a query, and the figures by which it chooses.

The router applies these rules before any policy sees a candidate, so that no policy can send a prompt to an instance
that is ill, draining or too small for it. An instance that is ruled out stays in the list with the first reason that
applies; nothing is dropped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from headway.fleet import InstanceView
from headway.types import Candidate, Estimate, Instance, ModelCard, Prediction, Query, Verdict


class Place(NamedTuple):
    """One instance of the fleet with what never changes about it."""

    position: int
    view: InstanceView
    instance_id: str
    model: str
    max_prompt_tokens: int


class Worth(Struct, frozen=True, gc=False):
    """What one model makes of one query; the same on each of its instances. ``refused`` by quality floor or budget."""

    prompt_tokens: int
    quality: float
    cost_usd: float
    output_tokens: float
    source: str
    utility: float
    refused: Verdict | None


def max_prompt_tokens(instance: Instance, card: ModelCard) -> int:
    """The longest prompt that leaves room for one token in the context and fits the key-value blocks."""
    limits = instance.limits
    if limits is None:
        return card.context_tokens - 1
    # One block is the null block; a prompt beyond the others would never be admitted.
    return min(card.context_tokens - 1, limits.max_model_len - 1, (limits.num_blocks - 1) * limits.block_size)


def worths_of(
    query: Query, models: Sequence[str], predictions: Mapping[str, Prediction], lambda_per_usd: float
) -> dict[str, Worth]:
    """``quality − λ·cost`` of each model and what it is made of. Written for speed: no call per model.

    Raises:
        ValueError: ``predictions`` or ``query.prompt_tokens`` lack a model.
    """
    counts, quality_min, max_cost_usd = query.prompt_tokens, query.quality_min, query.max_cost_usd
    worths: dict[str, Worth] = {}
    for model in models:
        prediction, prompt_tokens = predictions.get(model), counts.get(model)
        if prediction is None:
            raise ValueError(f"predictions of query {query.id!r} lack model {model!r}")
        if prompt_tokens is None:
            raise ValueError(f"query.prompt_tokens of query {query.id!r} lacks model {model!r}")
        quality, cost_usd = prediction.quality, prediction.cost_usd
        refused: Verdict | None = None
        if quality_min is not None and quality < quality_min:
            refused = "quality"
        elif max_cost_usd is not None and cost_usd > max_cost_usd:
            refused = "budget"
        worths[model] = Worth(
            prompt_tokens,
            quality,
            cost_usd,
            prediction.output_tokens,
            prediction.source,
            quality - lambda_per_usd * cost_usd,
            refused,
        )
    return worths


def judge(
    query: Query,
    places: Sequence[Place],
    worths: Mapping[str, Worth],
    estimates: Sequence[Estimate],
    target_s: float | None,
) -> tuple[tuple[Candidate, ...], float | None]:
    """Every place as a candidate, in order, with the first verdict that applies. Written for speed: no call per place.

    Beside them the smallest estimated TTFT, seconds, of those that a policy may choose; None where it may choose none.

    Order: excluded, draining, unhealthy, resting, context, quality, budget, saturated, late, feasible. Without a target
    nothing is late. ``estimates`` are in fleet order.
    """
    excluded, limit_s, inf = query.excluded_instances, math.inf if target_s is None else target_s, math.inf
    candidates, best_ttft_s = [], None
    for position, view, instance_id, model, longest in places:
        worth = worths[model]
        prompt_tokens = worth.prompt_tokens
        estimate: Estimate | None = estimates[position]
        verdict: Verdict
        if instance_id in excluded:
            verdict = "excluded"
        elif view.draining:
            verdict = "draining"
        elif not view.healthy:
            verdict, estimate = "unhealthy", None  # its last known load says nothing about it now
        elif view.resting:
            verdict = "resting"
        elif prompt_tokens > longest:
            verdict, estimate = "context", None
        elif worth.refused is not None:
            verdict = worth.refused
        else:
            ttft_s = estimates[position].ttft_s
            if best_ttft_s is None or ttft_s < best_ttft_s:
                best_ttft_s = ttft_s
            verdict = "saturated" if ttft_s == inf else "late" if ttft_s > limit_s else "feasible"
        candidates.append(
            Candidate(
                instance_id,
                model,
                verdict,
                worth.utility,
                worth.quality,
                worth.cost_usd,
                worth.output_tokens,
                prompt_tokens,
                worth.source,
                estimate,
                view.num_outstanding,
            )
        )
    return tuple(candidates), best_ttft_s
