"""From what happened to each query to the figures of one policy.

OnTimeUtility is the mean over *all* queries of the realised utility where the first token came in time, and 0 where it
came late or never. It refuses to let a score be won by refusing work: failed queries count in every mean over N.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from headway.demo.pool import Price
from headway.demo.workload import DemoQuery
from headway.lab.truth import TASKS
from headway.lab.workload import LAMBDA_PER_MUSD

#: Shorter TTFTs say little about an estimator: a few ms of any process's lateness are a large share of them.
MAPE_FLOOR_S = 0.050


class Served(Struct, frozen=True, kw_only=True):
    """What the client saw of one query. ``error`` is None exactly when the whole answer came."""

    number: int
    lateness_s: float = 0.0
    instance: str | None = None
    model: str | None = None
    slo: str | None = None
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None
    engine_ttft_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class PolicyScore(Struct, frozen=True, kw_only=True):
    """The figures of one policy. Means are over all queries but for quality and cost, which are over the answered ones.

    ``ttft_mape`` and ``ttft_error_p50_s`` (absolute) compare prediction and client clock, ``…_engine`` prediction and
    the engine's own clock; the MAPEs are over TTFTs of at least 50 ms. ``ttft_ratio_p90`` is the 90 % quantile of
    observed ÷ predicted per instance, ``ttft_overhead_p50_s`` what gateway and client added to the engine's TTFT.
    Of ``on_time_utility``, ``on_time_negative`` came from answers worth less than they cost.
    ``client_lateness_p99_s`` tells how late this client sent: the load's own error.
    """

    policy: str
    num_queries: int
    failed: int
    attainment: float
    on_time_utility: float
    mean_quality: float | None
    mean_cost_usd: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ttft_mape: float | None
    ttft_error_p50_s: float | None
    shares: dict[str, float]
    on_time_negative: float
    num_on_time_negative: int
    attainment_by_task: dict[str, float]
    ttft_mape_engine: float | None
    ttft_error_p50_engine_s: float | None
    ttft_ratio_p90: dict[str, float]
    ttft_overhead_p50_s: float | None
    mean_output_tokens: float | None
    client_lateness_p99_s: float
    errors: dict[str, int]


class _Pair(Struct, frozen=True):
    """A query, what became of it, and what that is worth."""

    query: DemoQuery
    served: Served
    on_time: bool
    gain: float


def score(
    policy: str,
    queries: Sequence[DemoQuery],
    served: Sequence[Served],
    *,
    prices: dict[str, Price],
    instances: Sequence[str],
) -> PolicyScore:
    """The figures of ``policy``. ``served`` holds one entry per query, in any order.

    Raises:
        ValueError: a query is missing from ``served``, or is there twice.
    """
    by_number = {entry.number: entry for entry in served}
    if len(served) != len(by_number) or set(by_number) != {query.number for query in queries}:
        raise ValueError("served must hold exactly one entry per query")
    pairs = [_pair(query, by_number[query.number], prices) for query in queries]
    answered = [pair for pair in pairs if pair.served.error is None]
    entries = [pair.served for pair in answered]
    ttfts = [entry.ttft_s for entry in entries if entry.ttft_s is not None]
    client = [(entry.predicted_ttft_s, entry.ttft_s) for entry in entries]
    engine = [(entry.predicted_ttft_s, entry.engine_ttft_s) for entry in entries]
    negative = [pair.gain for pair in pairs if pair.gain < 0]
    return PolicyScore(
        policy=policy,
        num_queries=len(pairs),
        failed=len(pairs) - len(answered),
        attainment=sum(pair.on_time for pair in pairs) / len(pairs),
        on_time_utility=sum(pair.gain for pair in pairs) / len(pairs),
        mean_quality=_mean([pair.query.answers[pair.served.model].quality for pair in answered if pair.served.model]),
        mean_cost_usd=_mean([_cost_usd(entry, prices) for entry in entries]),
        ttft_p50_s=_quantile(ttfts, 0.5),
        ttft_p99_s=_quantile(ttfts, 0.99),
        ttft_mape=_mape(client),
        ttft_error_p50_s=_error_p50_s(client),
        shares={name: sum(entry.instance == name for entry in served) / len(pairs) for name in instances},
        on_time_negative=sum(negative) / len(pairs),
        num_on_time_negative=len(negative),
        attainment_by_task=_attainment_by_task(pairs),
        ttft_mape_engine=_mape(engine),
        ttft_error_p50_engine_s=_error_p50_s(engine),
        ttft_ratio_p90=_ratio_p90(entries, instances),
        ttft_overhead_p50_s=_quantile(
            [seen - own for entry in entries if (seen := entry.ttft_s) is not None and (own := entry.engine_ttft_s)],
            0.5,
        ),
        mean_output_tokens=_mean([entry.output_tokens for entry in entries]),
        client_lateness_p99_s=_quantile([entry.lateness_s for entry in served], 0.99) or 0.0,
        errors=dict(Counter(entry.error for entry in served if entry.error is not None).most_common()),
    )


def _pair(query: DemoQuery, served: Served, prices: dict[str, Price]) -> _Pair:
    """The gain is quality − λ · cost in micro-USD where the whole answer came and its first token in time, else 0."""
    on_time = served.error is None and served.ttft_s is not None and served.ttft_s <= query.ttft_target_s
    if not on_time or served.model is None:
        return _Pair(query, served, False, 0.0)
    quality = query.answers[served.model].quality
    return _Pair(query, served, True, quality - LAMBDA_PER_MUSD * 1e6 * _cost_usd(served, prices))


def _cost_usd(served: Served, prices: dict[str, Price]) -> float:
    price = prices.get(served.model or "")
    return price.cost_usd(served.prompt_tokens, served.output_tokens) if price else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None


_Compared = Sequence[tuple[float | None, float | None]]  # (predicted, observed) seconds


def _mape(compared: _Compared) -> float | None:
    """Mean of |predicted − observed| ÷ observed, where something was predicted and ``MAPE_FLOOR_S`` is reached."""
    return _mean(
        [abs(told - seen) / seen for told, seen in compared if told is not None and seen and seen >= MAPE_FLOOR_S]
    )


def _error_p50_s(compared: _Compared) -> float | None:
    return _quantile([abs(told - seen) for told, seen in compared if told is not None and seen is not None], 0.5)


def _ratio_p90(entries: Sequence[Served], instances: Sequence[str]) -> dict[str, float]:
    ratios: dict[str, list[float]] = {name: [] for name in instances}
    for entry in entries:
        if entry.instance in ratios and entry.ttft_s is not None and entry.predicted_ttft_s:
            ratios[entry.instance].append(entry.ttft_s / entry.predicted_ttft_s)
    return {name: float(np.quantile(values, 0.9)) for name, values in ratios.items() if values}


def _attainment_by_task(pairs: Sequence[_Pair]) -> dict[str, float]:
    by_task = {task: [pair.on_time for pair in pairs if pair.query.task == task] for task in TASKS}
    return {task: sum(met) / len(met) for task, met in by_task.items() if met}
