"""What no router could beat: the fluid bound of a pool at a rate, a linear program over a workload's queries.

Each query may be split over the instances; none may be given more work than it can do, and none counts where its
prefill alone would be late. Waiting, batching and chance cost nothing here, so a policy that knows the same predictions
stays below on average. It needs scipy (extra ``lab``) and refuses to be an estimate of what a policy reaches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError, HeadwayError
from headway.estimate.work import own_work
from headway.lab.pool import LabInstance, Pool
from headway.lab.workload import Workload

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Column = NDArray[np.float64]
Knowledge = Literal["predicted", "true"]


class FluidBound(Struct, frozen=True, kw_only=True):
    """``utility`` is the mean per query, an upper bound of OnTimeUtility. ``loads`` is the share of its time that each
    instance works, ``prices`` the utility per second of work that one more of it would bring, ``shares`` the share of
    queries it takes, ``unserved`` the share that is worth no instance's time."""

    utility: float
    loads: dict[str, float]
    prices: dict[str, float]
    shares: dict[str, float]
    unserved: float


def fluid_bound(workload: Workload, pool: Pool, rate_per_s: float, *, knowledge: Knowledge = "predicted") -> FluidBound:
    """``max (1/N) Σ x·U`` with ``(rate/N) Σ x·w ≤ 1`` on each instance, ``Σ x ≤ 1`` for each query, x ≥ 0.

    U and the work w are those of the predicted quality and length, or of the true ones; the clock is the truth's
    without noise. Equal instances are solved as one of their number. A few seconds for 16,000 queries on three kinds.

    Raises:
        ConfigError: a rate that is not positive.
        HeadwayError: the solver found no optimum.
    """
    if not 0.0 < rate_per_s < float("inf"):
        raise ConfigError(f"must be positive and finite, not {rate_per_s!r}", key="rate_per_s")
    kinds = _kinds(pool)
    worths, works = _worth_and_work(workload, pool, [kind[0] for kind in kinds], knowledge)
    scale = rate_per_s / workload.num_queries
    capacities = np.array([len(kind) for kind in kinds], np.float64)
    x, prices = _solve(worths / workload.num_queries, works * scale, capacities)
    loads = (x * works).sum(axis=0) * scale / capacities
    shares = x.sum(axis=0) / workload.num_queries / capacities
    place = {one.instance.id: index for index, kind in enumerate(kinds) for one in kind}
    return FluidBound(
        utility=float((x * worths).sum()) / workload.num_queries,
        loads={name: float(loads[place[name]]) for name in pool.ids},
        prices={name: float(prices[place[name]]) * rate_per_s for name in pool.ids},
        shares={name: float(shares[place[name]]) for name in pool.ids},
        unserved=max(0.0, 1.0 - float(x.sum()) / workload.num_queries),
    )


def mean_work_s(workload: Workload, one: LabInstance, *, knowledge: Knowledge = "true") -> float:
    """Mean work in seconds of the workload's queries on one instance: it is stable alone up to 1 ÷ this per second."""
    return float(_work(workload, one, knowledge).mean())


def _kinds(pool: Pool) -> list[list[LabInstance]]:
    """Instances of one model under one truth, which a fluid cannot tell apart."""
    kinds: dict[tuple[str, str], list[LabInstance]] = {}
    for one in pool.instances:
        kinds.setdefault((one.instance.model, one.truth.name), []).append(one)
    return list(kinds.values())


def _lengths(workload: Workload, column: int, knowledge: Knowledge) -> Column:
    lengths = workload.true_output_tokens if knowledge == "true" else workload.predicted_output_tokens
    return lengths[:, column].astype(np.float64)


def _work(workload: Workload, one: LabInstance, knowledge: Knowledge) -> Column:
    column = workload.models.index(one.instance.model)
    work = own_work(one.truth.step_time, one.truth.limits)
    return work.seconds(workload.prompt_tokens.astype(np.float64), _lengths(workload, column, knowledge))


def _worth_and_work(
    workload: Workload, pool: Pool, ones: list[LabInstance], knowledge: Knowledge
) -> tuple[Column, Column]:
    """Utility and work of each query on each kind; a utility of 0 where the query would be late even alone."""
    prompts = workload.prompt_tokens.astype(np.float64)
    qualities = workload.true_quality if knowledge == "true" else workload.predicted_quality
    worths, works = np.empty((len(prompts), len(ones))), np.empty((len(prompts), len(ones)))
    for index, one in enumerate(ones):
        column, card = workload.models.index(one.instance.model), pool.cards[one.instance.model]
        lengths = _lengths(workload, column, knowledge)
        cost_musd = prompts * card.input_per_1m_usd + lengths * card.output_per_1m_usd
        alone_s = own_work(one.truth.step_time, one.truth.limits).alone_s(prompts)
        utility = qualities[:, column] - workload.lambda_per_musd * cost_musd
        worths[:, index] = np.where(alone_s <= workload.ttft_target_s, utility, 0.0)
        works[:, index] = _work(workload, one, knowledge)
    return worths, works


def _solve(worths: Column, loads: Column, capacities: Column) -> tuple[Column, Column]:
    """The split x and the price of each kind's capacity. Only pairs worth something are variables."""
    from scipy.optimize import linprog

    x = np.zeros(worths.shape)
    query, kind = np.nonzero(worths > 0.0)
    if len(query) == 0:
        return x, np.zeros(len(capacities))
    result = linprog(
        -worths[query, kind],
        A_ub=_constraints(query, kind, loads[query, kind], worths.shape),
        b_ub=np.concatenate((capacities, np.ones(len(worths)))),
        bounds=(0.0, None),
        method="highs",
    )
    if not result.success:
        raise HeadwayError(f"the fluid bound has no solution: {result.message}")
    x[query, kind] = result.x
    return x, -np.asarray(result.ineqlin.marginals[: len(capacities)])


def _constraints(query: NDArray[np.intp], kind: NDArray[np.intp], load: Column, shape: tuple[int, ...]) -> csr_array:
    """One row per kind (its load), then one per query (its shares)."""
    from scipy.sparse import csr_array

    num_queries, num_kinds = shape
    values = np.concatenate((load, np.ones(len(query))))
    rows = np.concatenate((kind, num_kinds + query))
    columns = np.tile(np.arange(len(query)), 2)
    return csr_array((values, (rows, columns)), shape=(num_kinds + num_queries, len(query)))
