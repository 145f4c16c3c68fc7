"""From what happened to every query to the figures of one run.

OnTimeUtility is the mean over *all* queries of the realised utility where the first token came in time, and 0 where it
came late or never; realised means the true quality and the true length on the model that answered. It refuses to let a
score be won by refusing work: refused and failed queries count in every N.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.lab.pool import Pool
from headway.lab.workload import Workload
from headway.types import ModelCard

Column = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Relative errors are of times to first token of at least this: of a shorter one a few ms are a large share.
MAPE_FLOOR_S = 0.050

#: ``chosen`` of a query that was refused.
REFUSED = -1


class Status(IntEnum):
    """How a query ended."""

    OK = 0
    REFUSED = 1
    FAILED = 2


class Outcomes(Struct, eq=False, kw_only=True):
    """What happened to every query, in columns in order of the workload; the simulator fills them.

    ``chosen`` is the position of the instance in the pool, :data:`REFUSED` where nobody took the query. ``feasible``
    is the decision's verdict on the chosen instance. Times count from arrival: infinite where it never came to that,
    ``predicted_ttft_s`` NaN where nothing was predicted. ``output_tokens`` is what was generated.
    """

    chosen: NDArray[np.int32]
    feasible: Mask
    status: NDArray[np.int8]
    ttft_s: Column
    total_s: Column
    predicted_ttft_s: Column
    output_tokens: NDArray[np.int32]

    @classmethod
    def empty(cls, num_queries: int) -> Outcomes:
        """Columns for a run that has not begun: every query refused, no time known."""
        return cls(
            chosen=np.full(num_queries, REFUSED, np.int32),
            feasible=np.zeros(num_queries, np.bool_),
            status=np.full(num_queries, Status.REFUSED, np.int8),
            ttft_s=np.full(num_queries, np.inf),
            total_s=np.full(num_queries, np.inf),
            predicted_ttft_s=np.full(num_queries, np.nan),
            output_tokens=np.zeros(num_queries, np.int32),
        )


class TaskScore(Struct, frozen=True, kw_only=True):
    """The figures of one task's queries. ``share`` is its part of all queries, ``shares`` the part of its queries that
    went to each model, ``missed_shares`` the part that went there and came late or failed; late TTFTs are of answers
    that missed their target. None where there is nothing to tell."""

    share: float
    attainment: float
    on_time_utility: float
    mean_quality: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    late_ttft_p50_s: float | None
    late_ttft_p99_s: float | None
    shares: dict[str, float]
    missed_shares: dict[str, float]


class Score(Struct, frozen=True, kw_only=True):
    """The figures of one run. N counts every query; quality, cost, lengths and times are means over the answered ones.

    ``on_time_utility`` is ``on_time_utility_floored`` (each query's utility floored at 0) plus ``on_time_negative``
    (what answers in time that were worth less than they cost took away). ``mean_utility`` counts late answers too.
    ``ttft_mape`` is over answers of at least :data:`MAPE_FLOOR_S` whose TTFT was predicted; ``feasible`` is the share
    that was expected in time. Figures over nothing are None.
    """

    num_queries: int
    on_time_utility: float
    on_time_utility_floored: float
    on_time_negative: float
    attainment: float
    refused: float
    failed: float
    feasible: float
    mean_utility: float
    mean_quality: float | None
    mean_cost_usd: float | None
    mean_output_tokens: float | None
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    total_mean_s: float | None
    ttft_mape: float | None
    ttft_mape_by_model: dict[str, float]
    shares: dict[str, float]
    tasks: dict[str, TaskScore]


class Realised(Struct, frozen=True, eq=False, kw_only=True):
    """What each query came to. ``column`` is the model that had it (0 where none did: see ``answered``), ``utility`` is
    0 where nothing was answered."""

    answered: Mask
    on_time: Mask
    column: NDArray[np.intp]
    quality: Column
    cost_usd: Column
    utility: Column


def realise(workload: Workload, pool: Pool, outcomes: Outcomes) -> Realised:
    """True quality, cost and utility of every query on the model that had it.

    Raises:
        ValueError: the outcomes are not those of this workload and pool.
    """
    num, chosen = workload.num_queries, outcomes.chosen
    if any(len(getattr(outcomes, name)) != num for name in Outcomes.__struct_fields__):
        raise ValueError(f"outcomes must hold one entry for each of the {num} queries")
    if chosen.max() >= len(pool.instances) or chosen.min() < REFUSED:
        raise ValueError(f"outcomes.chosen must be -1 or the position of one of {len(pool.instances)} instances")
    taken = chosen != REFUSED
    answered = taken & (outcomes.status == Status.OK)
    instances = [one.instance for one in pool.instances]
    columns = np.array([workload.models.index(instance.model) for instance in instances])
    cards = [pool.cards[instance.model] for instance in instances]
    column = np.where(taken, columns[chosen], 0)
    in_usd, out_usd = (np.array(prices)[chosen] * 1e-6 for prices in _prices(cards))
    cost_usd = np.where(taken, workload.prompt_tokens * in_usd + outcomes.output_tokens * out_usd, 0.0)
    quality = np.where(answered, workload.true_quality[np.arange(num), column], 0.0)
    return Realised(
        answered=answered,
        on_time=answered & (outcomes.ttft_s <= workload.ttft_target_s),
        column=column,
        quality=quality,
        cost_usd=cost_usd,
        utility=np.where(answered, quality - workload.lambda_per_musd * 1e6 * cost_usd, 0.0),
    )


def score(workload: Workload, pool: Pool, outcomes: Outcomes) -> Score:
    """The figures of one run; O(N).

    Raises:
        ValueError: the outcomes are not those of this workload and pool.
    """
    real = realise(workload, pool, outcomes)
    answered, gain = real.answered, np.where(real.on_time, real.utility, 0.0)
    ttft_s = outcomes.ttft_s[answered]
    negative = float(np.minimum(gain, 0.0).mean())
    compared, error = _relative_errors(outcomes, answered)
    models = [
        (column, model) for column, model in enumerate(workload.models) if (compared & (real.column == column)).any()
    ]
    return Score(
        num_queries=workload.num_queries,
        on_time_utility=float(gain.mean()),
        on_time_utility_floored=float(np.maximum(gain, 0.0).mean()),
        on_time_negative=negative,
        attainment=float(real.on_time.mean()),
        refused=float((outcomes.chosen == REFUSED).mean()),
        failed=float(((outcomes.chosen != REFUSED) & ~answered).mean()),
        feasible=float(outcomes.feasible.mean()),
        mean_utility=float(real.utility.mean()),
        mean_quality=_mean(real.quality[answered]),
        mean_cost_usd=_mean(real.cost_usd[answered]),
        mean_output_tokens=_mean(outcomes.output_tokens[answered]),
        ttft_mean_s=_mean(ttft_s),
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p99_s=_quantile(ttft_s, 0.99),
        total_mean_s=_mean(outcomes.total_s[answered]),
        ttft_mape=_mean(error[compared]),
        ttft_mape_by_model={model: float(error[compared & (real.column == column)].mean()) for column, model in models},
        shares={name: float((outcomes.chosen == index).mean()) for index, name in enumerate(pool.ids)},
        tasks={
            name: _task_score(workload, outcomes, real, gain, workload.task == index)
            for index, name in enumerate(workload.task_names)
            if (workload.task == index).any()
        },
    )


def _task_score(workload: Workload, outcomes: Outcomes, real: Realised, gain: Column, of_task: Mask) -> TaskScore:
    answered = of_task & real.answered
    taken = of_task & (outcomes.chosen != REFUSED)
    missed = taken & ~real.on_time
    ttft_s, late_s = outcomes.ttft_s[answered], outcomes.ttft_s[answered & ~real.on_time]
    num = int(of_task.sum())
    by_model = [(model, real.column == column) for column, model in enumerate(workload.models)]
    return TaskScore(
        share=float(of_task.mean()),
        attainment=float(real.on_time[of_task].mean()),
        on_time_utility=float(gain[of_task].mean()),
        mean_quality=_mean(real.quality[answered]),
        ttft_p50_s=_quantile(ttft_s, 0.5),
        ttft_p99_s=_quantile(ttft_s, 0.99),
        late_ttft_p50_s=_quantile(late_s, 0.5),
        late_ttft_p99_s=_quantile(late_s, 0.99),
        shares={model: float((taken & there).sum()) / num for model, there in by_model},
        missed_shares={model: float((missed & there).sum()) / num for model, there in by_model},
    )


def _prices(cards: Sequence[ModelCard]) -> tuple[list[float], list[float]]:
    return [card.input_per_1m_usd for card in cards], [card.output_per_1m_usd for card in cards]


def _relative_errors(outcomes: Outcomes, answered: Mask) -> tuple[Mask, Column]:
    """Where prediction and observation can be compared, and |predicted − observed| ÷ observed there."""
    predicted_s, ttft_s = outcomes.predicted_ttft_s, outcomes.ttft_s
    compared = answered & np.isfinite(predicted_s) & np.isfinite(ttft_s) & (ttft_s >= MAPE_FLOOR_S)
    error = np.zeros(len(ttft_s))
    error[compared] = np.abs(predicted_s[compared] - ttft_s[compared]) / ttft_s[compared]
    return compared, error


def _mean(values: NDArray[np.number]) -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(values: Column, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
