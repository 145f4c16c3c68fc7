"""Whether a router has the four known failures of learned routers, measured on a simulated run.

Difficulty blindness, length reversal and semantic matching are read from one run's columns, roster suboptimality from
further runs on smaller pools. The names are common, the measures are our own and stand with each figure; ``limits``
says what each cannot show. Intervals resample blocks of consecutive queries of the one run, because neighbours share a
queue; they say nothing of other seeds. It refuses to judge where there is no choice to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from headway.estimate.registry import make_estimator
from headway.lab.arrivals import poisson
from headway.lab.choices import (
    NUM_BLOCKS,
    NUM_CLASSES,
    NUM_RESAMPLES,
    Choices,
    Column,
    Index,
    Mask,
    blocks,
    centred_ranks,
    classes,
    information,
    ratio,
    read_choices,
    resampled,
    sums,
)
from headway.lab.intervals import Interval, bootstrap_interval
from headway.lab.metrics import Outcomes, realise
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.predictions import PERFECT, TASK_LABEL, PredictorQuality
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.lab.workload import Workload, WorkloadSpec, four_task_workload
from headway.policy.registry import make_policy

#: A rank correlation that is not surely above this counts as none: it explains less than .25 % of the variance.
BLIND_BELOW = 0.05
#: A task share that is not surely below this leaves nothing worth the name to the single query.
MATCHING_ABOVE = 0.95
#: Information (nats per choice) below which a choice depends on nothing known of the query.
LEAST_INFORMATION = 1e-3


class Failure(Struct, frozen=True, kw_only=True):
    """One failure as measured. ``reference`` is the measure of the choice named in ``reference_of``, to read it by;
    None where there is none. ``judged`` says when a router has the failure, ``limits`` what the measure cannot show.
    """

    name: str
    meaning: str
    measure: str
    interval: Interval
    has_it: bool
    judged: str
    limits: str
    reference: float | None = None
    reference_of: str = ""

    @property
    def value(self) -> float:
        """The measure on this run."""
        return self.interval.value


def failures(workload: Workload, pool: Pool, outcomes: Outcomes, *, seed: int = 0) -> tuple[Failure, ...]:
    """Difficulty blindness, length reversal and semantic matching of a run; ``seed`` draws the resamples. O(N log N).

    Raises:
        ValueError: fewer than two models, fewer than two queries taken per block, or outcomes of another run.
    """
    choices = read_choices(workload, pool, outcomes)
    rng = np.random.default_rng(seed)
    return (_difficulty_blindness(choices, rng), _length_reversal(choices, rng), _semantic_matching(choices, rng))


def roster_suboptimality(workload: Workload, pool: Pool, play: Callable[[Pool], Outcomes], *, seed: int = 0) -> Failure:
    """Whether the same policy does better on a smaller pool; ``play`` runs the workload on a pool under a new policy.

    Every pool that lacks one instance is played; where the best of them is ahead of the whole, those that lack one
    more, and so on. Costs at least one run per instance, and runs on a pool too small for the rate are slow.

    Raises:
        ValueError: a pool of one instance, or fewer queries than blocks.
    """
    if len(pool.instances) < 2 or workload.num_queries < 2 * NUM_BLOCKS:
        raise ValueError(f"needs two instances or more, and at least {2 * NUM_BLOCKS} queries")
    full = _gains(workload, pool, play(pool))
    roster, ahead = _best_without_one(workload, pool, play, full)
    while ahead.mean() > 0.0 and len(roster.instances) > 1:
        smaller, further = _best_without_one(workload, roster, play, full)
        if further.mean() <= ahead.mean():
            break
        roster, ahead = smaller, further
    block = blocks(len(ahead))
    means = np.bincount(block, ahead) / np.bincount(block)
    interval = bootstrap_interval(means.tolist(), np.random.default_rng(seed), num_resamples=NUM_RESAMPLES)
    dropped = ", ".join(name for name in pool.ids if name not in roster.ids)
    return Failure(
        name="roster suboptimality",
        meaning="An instance that is kept lowers what the router makes of the pool.",
        measure=f"OnTimeUtility of the best smaller pool found (without {dropped}) less that of the whole pool",
        interval=interval,
        has_it=interval.low is not None and interval.low > 0.0,
        judged="has it where the interval lies above 0",
        limits="the best of several smaller pools is flattered by its choice; only pools that were played are judged",
    )


def _best_without_one(
    workload: Workload, pool: Pool, play: Callable[[Pool], Outcomes], full: Column
) -> tuple[Pool, Column]:
    """Of the pools that lack one instance the one that is most ahead of ``full``, and by how much on each query."""
    smaller = [
        replace(pool, instances=tuple(other for other in pool.instances if other is not one)) for one in pool.instances
    ]
    ahead = [_gains(workload, one, play(one)) - full for one in smaller]
    best = int(np.argmax([one.mean() for one in ahead]))
    return smaller[best], ahead[best]


def _difficulty_blindness(choices: Choices, rng: np.random.Generator) -> Failure:
    difficulty = 1.0 - choices.quality.mean(axis=1)
    interval = _rank_correlation(choices, difficulty, choices.chosen, rng)
    return Failure(
        name="difficulty blindness",
        meaning="Within a task, harder queries go to stronger models no more than easy ones do.",
        measure="rank correlation of the chosen model's strength with true difficulty, within task and load class",
        interval=interval,
        has_it=interval.low is None or interval.low <= BLIND_BELOW,
        judged=f"has it unless the interval lies above {BLIND_BELOW:g}",
        limits=(
            "difficulty is 1 − the models' mean true quality: a query that is hopeless for all is hard too, and a "
            "stronger model no better for it; where the reference is near 0, right choices do not follow difficulty"
        ),
        reference=_rank_correlation(choices, difficulty, choices.utility.argmax(axis=1), rng).value,
        reference_of="the largest true utility, whatever the load",
    )


def _length_reversal(choices: Choices, rng: np.random.Generator) -> Failure:
    interval = _length_gain(choices, choices.chosen, choices.on_time, rng)
    best = choices.utility.argmax(axis=1)
    return Failure(
        name="length reversal",
        meaning="Long answers are sent otherwise than short ones of their task, and are worse off for it.",
        measure=(
            "on-time utility of the longer half of each task, less what it would have been had they been spread over "
            "models as the shorter half was, within task and load class"
        ),
        interval=interval,
        has_it=interval.high is not None and interval.high < 0.0,
        judged="has it where the interval lies below 0",
        limits=(
            "halves are split at the median true length; a router blind to length shows about 0, which is no reversal; "
            "skill at quality can hide it; the other spread is taken to be in time as often as that model was"
        ),
        reference=_length_gain(choices, best, np.ones(len(best), np.bool_), rng).value,
        reference_of="the largest true utility, whatever the load",
    )


def _semantic_matching(choices: Choices, rng: np.random.Generator) -> Failure:
    interval = _task_share(choices, choices.chosen, rng)
    return Failure(
        name="semantic matching",
        meaning="What is chosen for a query follows from its task label alone.",
        measure="information of the task about the choice ÷ (that + what the query's predicted answers tell beyond it)",
        interval=interval,
        has_it=interval.high is None or interval.high >= MATCHING_ABOVE,
        judged=f"has it unless the interval lies below {MATCHING_ABOVE:g}; 0 where the choice depends on neither",
        limits=(
            "what is predicted is the gain of one model's answer over another's, in fifths within a task, for the pair "
            "that tells most: a floor of what the query tells, and no proof that it tells the truth; the prompt's "
            "length counts as neither, because it also decides who can be in time"
        ),
        reference=_task_share(choices, choices.predicted_utility.argmax(axis=1), rng).value,
        reference_of="the largest predicted utility, whatever the load",
    )


def _rank_correlation(choices: Choices, x: Column, y: Index, rng: np.random.Generator) -> Interval:
    """Spearman's, pooled within strata; 0 where nothing varies."""
    a, b = (centred_ranks(values, choices.stratum) for values in (x, y.astype(np.float64)))
    sums: Column = np.stack([np.bincount(choices.block, product) for product in (a * b, a * a, b * b)], axis=1)

    def correlation(totals: Column, _: float) -> Column:
        scale = np.sqrt(totals[:, 1] * totals[:, 2])
        return np.divide(totals[:, 0], scale, out=np.zeros(len(totals)), where=scale > 0)

    return resampled(sums, correlation, rng)


def _length_gain(choices: Choices, chosen: Index, on_time: Mask, rng: np.random.Generator) -> Interval:
    """What the long half makes of its queries, less what they would have made by the short half's shares of models."""
    strata, models = choices.num_strata, choices.num_models
    is_long = centred_ranks(np.log(choices.length).mean(axis=1), choices.task) > 0
    size = strata * models
    cell = choices.stratum * models + chosen
    every = np.arange(size).reshape(strata, models)[choices.stratum].ravel()  # each query on each model
    own = np.where(on_time & is_long, choices.utility[np.arange(len(chosen)), chosen], 0.0)
    parts = [
        sums(choices, cell, (~is_long).astype(np.float64), size),
        sums(choices, cell, is_long.astype(np.float64), size),
        sums(choices, cell, on_time.astype(np.float64), size),
        sums(choices, cell, own, size),
        sums(choices, every, (choices.utility * is_long[:, None]).ravel(), size, per_query=models),
    ]

    def gain(totals: Column, _: float) -> Column:
        short, long, in_time, own, worth = np.moveaxis(totals.reshape(len(totals), 5, strata, models), 1, 0)
        num_short, num_long = short.sum(axis=2, keepdims=True), long.sum(axis=2)
        as_short = ratio(short, num_short) * ratio(in_time, short + long) * worth
        compared = num_short[..., 0] > 0
        ahead = ((own - as_short).sum(axis=2) * compared).sum(axis=1)
        return ratio(ahead, (num_long * compared).sum(axis=1))

    return resampled(np.concatenate(parts, axis=1), gain, rng)


def _task_share(choices: Choices, chosen: Index, rng: np.random.Generator) -> Interval:
    """I(choice; task) ÷ (I(choice; task) + I(choice; class of the most telling predicted gain | task))."""
    models, tasks = choices.num_models, int(choices.task.max()) + 1
    pairs = list(combinations(range(models), 2))
    size = tasks * NUM_CLASSES * models
    parts = []
    for weak, strong in pairs:
        gain = choices.predicted_answer[:, strong] - choices.predicted_answer[:, weak]
        cell = (choices.task * NUM_CLASSES + classes(centred_ranks(gain, choices.task))) * models + chosen
        parts.append(sums(choices, cell, None, size))

    def share(totals: Column, num_samplings: float) -> Column:
        counts = totals.reshape(len(totals), len(pairs), tasks, NUM_CLASSES, models)
        by_task = counts[:, 0].sum(axis=2)
        of_task = information(by_task, num_samplings)
        within = np.stack([_information_within(counts[:, pair], num_samplings) for pair in range(len(pairs))])
        of_both = of_task + within.max(axis=0)
        return np.where(of_both >= LEAST_INFORMATION, of_task / np.maximum(of_both, LEAST_INFORMATION), 0.0)

    return resampled(np.concatenate(parts, axis=1), share, rng)


def _information_within(counts: Column, num_samplings: float) -> Column:
    """Mutual information of the last two axes given the one before, nats; bias as in :func:`information`."""
    weight = counts.sum(axis=(2, 3))
    inside = np.stack([information(counts[:, task], num_samplings) for task in range(counts.shape[1])], axis=1)
    mean: Column = (inside * weight).sum(axis=1) / weight.sum(axis=1)
    return mean


def _gains(workload: Workload, pool: Pool, outcomes: Outcomes) -> Column:
    real = realise(workload, pool, outcomes)
    return np.where(real.on_time, real.utility, 0.0)


#: Who is asked by the command: a policy, and what it is told of queries.
_ASKED: tuple[tuple[str, str, PredictorQuality], ...] = (
    ("bear", "bear", PredictorQuality()),
    ("bear, task label only", "bear", TASK_LABEL),
    ("bear, truth known", "bear", PERFECT),
    ("latency_agnostic", "latency_agnostic", PredictorQuality()),
    ("shortest_queue", "shortest_queue", PredictorQuality()),
)
_SEED, _RATE_PER_S, _NUM_QUERIES, _NUM_ROSTER_QUERIES = 2101, 8.0, 16_000, 4_000


def _asked(num_queries: int, num_roster_queries: int) -> list[tuple[str, Failure]]:
    found: list[tuple[str, Failure]] = []
    pool = qwen3_pool()
    for label, policy, predictor in _ASKED:
        spec = WorkloadSpec(seed=_SEED, predictor=predictor)
        run, short = (
            four_task_workload(poisson(num, _RATE_PER_S, stream(_SEED, "arrivals")), spec)
            for num in (num_queries, num_roster_queries)
        )
        of_run = failures(run, pool, _play(policy, run, pool))
        of_rosters = roster_suboptimality(short, pool, partial(_play, policy, short))
        found += [(label, failure) for failure in (*of_run, of_rosters)]
    return found


def _play(policy: str, workload: Workload, pool: Pool) -> Outcomes:
    looks = policy != "latency_agnostic"  # which would decide the same with an estimator, only slower
    options = {"fallback": "least_work"} if policy == "bear" else {}
    return simulate(
        workload,
        pool,
        policy=make_policy(policy, rng=stream(_SEED, "policy"), options=options),
        estimator=make_estimator("replay") if looks else None,
        seed=_SEED,
    )


def main(num_queries: int = _NUM_QUERIES, num_roster_queries: int = _NUM_ROSTER_QUERIES) -> None:
    """Prints the four failures of a few policies at 8 queries per second as a Markdown table; under a minute."""
    print("| policy | failure | value | 95 % interval | reference | has it |\n|---|---|---|---|---|---|")
    for label, one in _asked(num_queries, num_roster_queries):
        low, high = one.interval.low, one.interval.high
        between = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
        reference = "" if one.reference is None else f"{one.reference:.3f}"
        print(f"| {label} | {one.name} | {one.value:.3f} | {between} | {reference} | {'yes' if one.has_it else 'no'} |")


if __name__ == "__main__":
    main()
