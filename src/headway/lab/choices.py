"""What a router chose in a run, arranged for questions of why: strata, blocks, ranks, information and intervals.

Load and task explain most of what any router does; a question about a query is asked among queries that came with the
same task under about the same load. Every figure here is a function of sums over blocks of consecutive queries, so that
a resample costs a matrix product. It refuses runs too small to have such blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.lab.intervals import Interval
from headway.lab.metrics import REFUSED, Outcomes, realise
from headway.lab.pool import Pool
from headway.lab.workload import Workload

Column = NDArray[np.float64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]

NUM_BLOCKS = 50
NUM_RESAMPLES = 2_000
#: Load is compared in this many classes of equally many queries, predicted gains too.
NUM_CLASSES = 5


class Choices(Struct, frozen=True, eq=False, kw_only=True):
    """The queries that were taken, in order. ``chosen`` counts models from the weakest; matrices have columns so too.
    ``predicted_answer`` is the predicted utility before the prompt is paid for.

    ``stratum`` joins task and load class; queries of one stratum differ in nothing but what a query itself brings.
    """

    task: Index
    stratum: Index
    block: Index
    chosen: Index
    on_time: Mask
    quality: Column
    length: Column
    utility: Column
    predicted_utility: Column
    predicted_answer: Column

    @property
    def num_models(self) -> int:
        """M."""
        return int(self.utility.shape[1])

    @property
    def num_strata(self) -> int:
        """Strata, empty ones included."""
        return int(self.stratum.max()) + 1


def information(counts: Column, num_samplings: float) -> Column:
    """Mutual information of the last two axes, nats, less the bias of a table of as many counts; at least 0.

    A resample of a sample has been sampled twice, and is biased twice as much.
    """
    total = np.maximum(counts.sum(axis=(-2, -1)), 1.0)
    rows, columns = counts.sum(axis=-1, keepdims=True), counts.sum(axis=-2, keepdims=True)
    ratio = np.divide(counts * total[:, None, None], rows * columns, out=np.ones_like(counts), where=counts > 0)
    plain = (counts * np.log(ratio)).sum(axis=(-2, -1)) / total
    freedom = ((rows > 0).sum(axis=(-2, -1)) - 1) * ((columns > 0).sum(axis=(-2, -1)) - 1)
    corrected: Column = np.maximum(plain - num_samplings * freedom / (2.0 * total), 0.0)
    return corrected


def read_choices(workload: Workload, pool: Pool, outcomes: Outcomes) -> Choices:
    """What was chosen, in columns of models from weak to strong (by mean true quality over the workload).

    Raises:
        ValueError: a pool of one model, fewer than two queries taken per block, or outcomes of another run.
    """
    if len(pool.models) < 2:
        raise ValueError("a pool of one model leaves no choice to judge")
    real = realise(workload, pool, outcomes)
    taken = np.nonzero(outcomes.chosen != REFUSED)[0]
    if len(taken) < 2 * NUM_BLOCKS:
        raise ValueError(f"needs at least {2 * NUM_BLOCKS} queries that were taken, not {len(taken)}")
    served = np.array([workload.models.index(model) for model in pool.models])
    by_strength = served[np.argsort(workload.true_quality[:, served].mean(axis=0), kind="stable")]
    rank = np.full(len(workload.models), -1)
    rank[by_strength] = np.arange(len(by_strength))
    rows = np.ix_(taken, by_strength)
    task = workload.task[taken].astype(np.intp)
    true_answer = _answer_utility(workload, pool, workload.true_quality, workload.true_output_tokens)
    prompt = workload.lambda_per_musd * workload.prompt_tokens[:, None] * _prices(workload, pool, "input_per_1m_usd")
    answer = _answer_utility(workload, pool, workload.predicted_quality, workload.predicted_output_tokens)
    load = centred_ranks(_num_under_way(workload, outcomes)[taken], task)
    return Choices(
        task=task,
        stratum=task * NUM_CLASSES + classes(load),
        block=blocks(len(taken)),
        chosen=rank[real.column[taken]],
        on_time=real.on_time[taken],
        quality=workload.true_quality[rows],
        length=workload.true_output_tokens[rows].astype(np.float64),
        utility=(true_answer - prompt)[rows],
        predicted_utility=(answer - prompt)[rows],
        predicted_answer=answer[rows],
    )


def _answer_utility(
    workload: Workload, pool: Pool, quality: Column, output_tokens: Column | NDArray[np.int32]
) -> Column:
    """Utility of every answer of the workload, the prompt not paid for; of no interest where the pool has no card."""
    utility: Column = quality - workload.lambda_per_musd * output_tokens * _prices(workload, pool, "output_per_1m_usd")
    return utility


def _prices(workload: Workload, pool: Pool, field: str) -> Column:
    cards = [pool.cards.get(model) for model in workload.models]
    return np.array([0.0 if card is None else float(getattr(card, field)) for card in cards])


def _num_under_way(workload: Workload, outcomes: Outcomes) -> Column:
    """Queries in the pool when each one came: taken before it, not yet ended."""
    taken = outcomes.chosen != REFUSED
    ends_s = np.sort((workload.arrival_s + outcomes.total_s)[taken])
    before = np.cumsum(taken) - taken
    under_way: Column = (before - np.searchsorted(ends_s, workload.arrival_s, side="right")).astype(np.float64)
    return under_way


def blocks(num: int) -> Index:
    """Consecutive blocks of equally many queries."""
    return (np.arange(num) * NUM_BLOCKS) // num


def centred_ranks(values: Column, group: Index) -> Column:
    """Mid-ranks within groups, from −½ to ½; equal values share a rank."""
    ranks = np.empty(len(values))
    for one in np.unique(group):
        rows = np.nonzero(group == one)[0]
        _, inverse, counts = np.unique(values[rows], return_inverse=True, return_counts=True)
        middle = np.cumsum(counts) - (counts - 1) / 2.0
        ranks[rows] = (middle[inverse] - 0.5) / len(rows) - 0.5
    return ranks


def classes(ranks: Column) -> Index:
    return np.minimum(((ranks + 0.5) * NUM_CLASSES).astype(np.intp), NUM_CLASSES - 1)


def sums(choices: Choices, cell: Index, weights: Column | None, size: int, *, per_query: int = 1) -> Column:
    """Sums by block and cell, of shape (blocks, size)."""
    place = np.repeat(choices.block, per_query) * size + cell
    sums: Column = np.bincount(place, weights, minlength=NUM_BLOCKS * size).reshape(NUM_BLOCKS, size).astype(np.float64)
    return sums


def resampled(sums: Column, statistic: Callable[[Column, float], Column], rng: np.random.Generator) -> Interval:
    """The statistic of all blocks, and its percentile interval over resamples of blocks."""
    picked = rng.multinomial(NUM_BLOCKS, np.full(NUM_BLOCKS, 1.0 / NUM_BLOCKS), NUM_RESAMPLES).astype(np.float64)
    value = float(statistic(sums.sum(axis=0, keepdims=True), 1.0)[0])
    low, high = np.quantile(statistic(picked @ sums, 2.0), [0.025, 0.975]).tolist()
    return Interval(value, low, high)


def ratio(part: Column, whole: Column) -> Column:
    whole = np.broadcast_to(whole, part.shape)
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)
