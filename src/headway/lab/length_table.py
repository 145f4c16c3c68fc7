"""How long a resident goes on: the length table of the published runs, and what it is worth beside the default rule.

The table gives, once an answer has begun, the median of the calibration answers that were longer than what is there, by
bins of prompt tokens. It is made of a workload of its own seed; one table serves the fleet, pooled over models.
``python -m headway.lab.length_table`` plays it against the default and the plain rule. It belongs to the lab: a gateway
has no calibration answers, needs none by what is found here, and refuses to be told of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from headway.errors import ConfigError
from headway.estimate.registry import make_estimator
from headway.fleet import LengthRule
from headway.lab.arrivals import poisson
from headway.lab.intervals import Interval, paired_interval, t_interval
from headway.lab.metrics import Outcomes, score
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.simulate import Sight, simulate
from headway.lab.truth import stream
from headway.lab.workload import Workload, WorkloadSpec, four_task_workload
from headway.policy.registry import make_policy

#: Upper bounds of the published bins of prompt tokens; the last bin is open.
EDGES_TOKENS = (128, 512, 2048, 8192, 32768)

#: What was chosen (to pool the table over models) was chosen on the tuning seeds; no seed serves two ends.
CALIBRATION_SEED = 501
TUNING_SEEDS: tuple[int, ...] = (77, 78, 79)
EVALUATION_SEEDS: tuple[int, ...] = (2101, 2102, 2103, 2104, 2105)
RATES_PER_S = (8.0, 8.6)
#: Time between snapshots; 0 is the state at every decision.
SNAPSHOT_INTERVALS_MS = (0.0, 1000.0)
NUM_QUERIES = 16_000
NUM_CALIBRATION_QUERIES = 8_000


class RuleFigures(Struct, frozen=True, kw_only=True):
    """One rule at one rate, over seeds. ``gain`` is OnTimeUtility less the plain rule's, ``over_default`` less the
    default's, both seed by seed; ``moved`` is the share of queries that went elsewhere than under the default."""

    rule: str
    rate_per_s: float
    snapshot_interval_ms: float
    on_time_utility: Interval
    attainment: Interval
    ttft_mape: Interval
    gain: Interval
    over_default: Interval
    moved: float


def length_table(
    calibration: Workload, *, models: Sequence[str] | None = None, edges_tokens: Sequence[int] = EDGES_TOKENS
) -> LengthRule:
    """The conditional-median rule of a workload's true answers on ``models`` (by default all, each counting alike).

    Only a workload of another seed than those it is judged on may be given. An empty bin falls back to what the default
    rule expects of an answer that has outlived its prediction.

    Raises:
        ConfigError: a model that the workload does not hold.
        EngineInputError: edges that do not rise.
    """
    chosen = calibration.models if models is None else tuple(models)
    for model in chosen:
        if model not in calibration.models:
            raise ConfigError(f"no answers of {model!r}; there are {', '.join(calibration.models)}", key="models")
    columns = [calibration.models.index(model) for model in chosen]
    edges = np.asarray(edges_tokens, np.int64)
    bins = np.searchsorted(edges, calibration.prompt_tokens, side="left")
    answers = calibration.true_output_tokens[:, columns]
    lengths = [answers[bins == index].ravel().tolist() for index in range(len(edges) + 1)]
    return LengthRule("conditional_median", edges=edges.tolist(), lengths=lengths)


def standard_rules(num_calibration_queries: int = NUM_CALIBRATION_QUERIES) -> dict[str, LengthRule]:
    """The default rule, the plain one, the table, and a rule that knows no answers at all: a resident that has begun
    goes on for a quarter of what is there, at least 64 tokens, whatever was predicted."""
    return {
        "survival (default)": LengthRule("survival"),
        "plain": LengthRule("plain"),
        "length table": length_table(_queries(CALIBRATION_SEED, RATES_PER_S[0], num_calibration_queries)),
        "a quarter more": LengthRule("conditional_median", lengths=[[]]),
    }


def compare(
    rules: Mapping[str, LengthRule],
    *,
    rates_per_s: Sequence[float] = RATES_PER_S,
    snapshot_intervals_ms: Sequence[float] = SNAPSHOT_INTERVALS_MS,
    seeds: Sequence[int] = EVALUATION_SEEDS,
    num_queries: int = NUM_QUERIES,
) -> tuple[RuleFigures, ...]:
    """Every rule under BEAR with the least-work fallback on the three-model pool, at each rate and age of what is
    seen of the engines, on the same seeds.

    The first of ``rules`` is the default, and one must be called ``plain``. About a second of CPU per 16,000 queries.

    Raises:
        ConfigError: no rule is called plain.
    """
    if "plain" not in rules:
        raise ConfigError(f"must hold 'plain', not only {', '.join(rules)}", key="rules")
    pool = qwen3_pool()
    figures: list[RuleFigures] = []
    for rate_per_s in rates_per_s:
        workloads = {seed: _queries(seed, rate_per_s, num_queries) for seed in seeds}
        for interval_ms in snapshot_intervals_ms:
            figures += _compare_on(workloads, pool, rules, rate_per_s, interval_ms)
    return tuple(figures)


def _compare_on(
    workloads: Mapping[int, Workload],
    pool: Pool,
    rules: Mapping[str, LengthRule],
    rate_per_s: float,
    interval_ms: float,
) -> list[RuleFigures]:
    sight = Sight(interval_s=interval_ms / 1000)
    played = {
        name: [_play(workload, pool, rule, seed, sight) for seed, workload in workloads.items()]
        for name, rule in rules.items()
    }
    scores = {
        name: [score(workload, pool, outcomes) for workload, outcomes in zip(workloads.values(), runs, strict=True)]
        for name, runs in played.items()
    }
    worth = {name: [one.on_time_utility for one in found] for name, found in scores.items()}
    default = next(iter(rules))
    return [
        RuleFigures(
            rule=name,
            rate_per_s=rate_per_s,
            snapshot_interval_ms=interval_ms,
            on_time_utility=t_interval(worth[name]),
            attainment=t_interval([one.attainment for one in found]),
            ttft_mape=t_interval([one.ttft_mape or 0.0 for one in found]),
            gain=paired_interval(worth[name], worth["plain"]),
            over_default=paired_interval(worth[name], worth[default]),
            moved=float(np.mean([_moved(a, b) for a, b in zip(played[name], played[default], strict=True)])),
        )
        for name, found in scores.items()
    ]


def _play(workload: Workload, pool: Pool, rule: LengthRule, seed: int, sight: Sight) -> Outcomes:
    policy = make_policy("bear", rng=stream(seed, "policy"), options={"fallback": "least_work"})
    estimator = make_estimator("replay")
    return simulate(workload, pool, policy=policy, estimator=estimator, seed=seed, sight=sight, length_rule=rule)


def _moved(ours: Outcomes, theirs: Outcomes) -> float:
    return float((ours.chosen != theirs.chosen).mean())


def _queries(seed: int, rate_per_s: float, num: int) -> Workload:
    return four_task_workload(poisson(num, rate_per_s, stream(seed, "arrivals")), WorkloadSpec(seed=seed))


def as_markdown(figures: Sequence[RuleFigures]) -> str:
    """The figures as the table that the documentation holds."""
    lines = [
        "| qps | snapshots | rule | OnTimeUtility | less plain | less default | attainment % | TTFT MAPE % | moved % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in figures:
        cells = (
            f"{one.rate_per_s:g}",
            f"{one.snapshot_interval_ms:g} ms" if one.snapshot_interval_ms else "always",
            one.rule,
            _shown(one.on_time_utility, 4),
            _shown(one.gain, 4, sign="+"),
            _shown(one.over_default, 4, sign="+"),
            _shown(one.attainment, 1, scale=100.0),
            _shown(one.ttft_mape, 1, scale=100.0),
            f"{100 * one.moved:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(interval: Interval, digits: int, *, scale: float = 1.0, sign: str = "") -> str:
    value = f"{scale * interval.value:{sign}.{digits}f}"
    if interval.low is None or interval.high is None:
        return value
    return f"{value} ± {scale * (interval.high - interval.low) / 2:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Plays the comparison and prints it as a Markdown table; about three minutes on one core."""
    parser = argparse.ArgumentParser(prog="python -m headway.lab.length_table", description=main.__doc__)
    parser.add_argument("--num-queries", type=int, default=NUM_QUERIES, help="queries per run (%(default)s)")
    parser.add_argument(
        "--tuning-seeds", action="store_true", help="the tuning seeds, and a table without the smallest model"
    )
    asked = parser.parse_args(arguments)
    rules, seeds = standard_rules(), EVALUATION_SEEDS
    if asked.tuning_seeds:
        calibration = _queries(CALIBRATION_SEED, RATES_PER_S[0], NUM_CALIBRATION_QUERIES)
        rules["table without 0.6b"] = length_table(calibration, models=calibration.models[1:])
        seeds = TUNING_SEEDS
    print(as_markdown(compare(rules, seeds=seeds, num_queries=asked.num_queries)))


if __name__ == "__main__":
    main()
