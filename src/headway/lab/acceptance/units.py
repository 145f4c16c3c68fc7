"""One simulation of the acceptance table: which policy plays what, and how the figures come out of it.

Every row that needs the same run gets the same unit, so it is played once. A policy that looks at no engine is played
without mirrors, one that needs no estimate without replays; either way it decides as it would with them. A policy that
ignores targets is scored under both target slopes from one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from headway.estimate.registry import make_estimator
from headway.fleet import LengthRule
from headway.lab.acceptance.settings import DEFAULT_FALLBACK, SLOPES, Settings
from headway.lab.arrivals import mmpp2, poisson
from headway.lab.metrics import Score, score
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.predictions import TASK_LABEL, PredictorQuality
from headway.lab.probe import probe, refit, throughputs
from headway.lab.references import (
    RandomMixPolicy,
    TwoModelPolicy,
    knowing,
    true_clock,
    with_throughput,
    with_true_costs,
)
from headway.lab.simulate import Sight, simulate
from headway.lab.truth import draw_ttft_targets, stream
from headway.lab.workload import (
    CHAT_HEAVY,
    EQUAL_SHARES,
    LAMBDA_PER_MUSD,
    Workload,
    WorkloadSpec,
    four_task_workload,
)
from headway.policy.base import HoldingPolicy, Policy
from headway.policy.options import Option
from headway.policy.registry import make_policy

#: What a policy may know: predictions, or the task label alone; with predictions the true clock, or costs, or lengths;
#: true lengths and clock; those and true qualities.
Knowledge = Literal["predicted", "label", "clock", "costs", "lengths", "lengths+clock", "all"]

#: Queries per second by which the unfinished-over-speed baseline was published, by model.
PUBLISHED_SPEEDS = {"qwen3-0.6b": 4.281, "qwen3-8b": 1.803, "qwen3-32b": 1.217}


class Player(NamedTuple):
    """A policy of the table: its registered name and options; ``estimator`` None where it looks at no engine."""

    policy: str
    estimator: str | None
    reads_targets: bool = False
    options: Mapping[str, Option] = MappingProxyType({})


PLAYERS: dict[str, Player] = {
    "bear": Player("bear", "replay", reads_targets=True),
    "priced_bear": Player("priced_bear", "replay", reads_targets=True),
    "bear_throughput": Player("bear_throughput", "prefill_throughput", reads_targets=True),
    "bear_lagrangian": Player("bear_lagrangian", "replay"),
    "round_robin": Player("round_robin", None),
    "shortest_queue": Player("shortest_queue", None),
    "latency_agnostic": Player("latency_agnostic", None),
    "unfinished_over_speed": Player("unfinished_over_speed", None, options={"speeds": PUBLISHED_SPEEDS}),
    "remaining_prefill": Player("remaining_prefill", "queueing"),
    "routebalance": Player("routebalance", "queueing"),
    "score": Player("score", "queueing"),
    "score_literal": Player("score", "queueing", options={"form": "literal"}),
    "history_percentiles": Player("history_percentiles", None),
    "random_mix": Player("random_mix", None),
    "two_model": Player("two_model", None),
}
#: The baselines a claim is judged by, and those of them that look at latency.
LATENCY_AWARE = ("unfinished_over_speed", "remaining_prefill", "routebalance", "score", "history_percentiles")
SIMPLE = ("round_robin", "shortest_queue", "latency_agnostic")
BASELINES = (*SIMPLE, *LATENCY_AWARE)


class Play(Struct, frozen=True, kw_only=True):
    """One policy on one workload. ``options`` go beyond the player's own; ``burst_ratio`` above 1 is MMPP-2 of that r.

    ``pair`` is (first or weak, second or strong) of the two-model references. On ``refit_seed`` the prefill
    throughput is fitted anew, for 8 queries per second.
    """

    policy: str
    rate_per_s: float
    seed: int
    num_queries: int
    slope: float = SLOPES[0]
    knowledge: Knowledge = "predicted"
    options: tuple[tuple[str, float | str], ...] = ()
    pair: tuple[str, str] | None = None
    burst_ratio: float = 1.0
    lambda_per_musd: float = LAMBDA_PER_MUSD
    mix: Literal["equal", "chat_heavy"] = "equal"
    sight: Sight = Sight()
    num_routers: int = 1
    length_rule: Literal["survival", "plain"] = "survival"
    refit_seed: int | None = None

    @property
    def cost(self) -> float:
        """About how long it takes beside others: the slowest are started first."""
        return self.num_queries * (1.0 + max(0.0, self.rate_per_s - 5.0)) * (2.0 if self.policy in LATENCY_AWARE else 1)

    def run(self) -> dict[float, Score]:
        """The figures by target slope: of this unit's, or of both where the policy ignores targets."""
        player = PLAYERS[self.policy]
        work, pool = workload_of(self), pool_of(self.knowledge)
        if self.refit_seed is not None:
            pool = with_throughput(pool, refitted(self.refit_seed, self.num_queries))
        outcomes = simulate(
            work,
            pool,
            policy=self._policy(player),
            estimator=None if player.estimator is None else make_estimator(player.estimator),
            seed=self.seed,
            sight=replace(self.sight, exact_lengths=self.knowledge in ("lengths", "lengths+clock", "all")),
            num_routers=self.num_routers,
            length_rule=LengthRule(self.length_rule),
        )
        slopes = (self.slope,) if player.reads_targets else SLOPES
        return {slope: score(with_slope(work, self.seed, slope), pool, outcomes) for slope in slopes}

    def _policy(self, player: Player) -> Policy | HoldingPolicy:
        rng = stream(self.seed, "policy")
        if self.pair is not None:
            first, second = self.pair
            number = {key: float(value) for key, value in self.options}
            if player.policy == "random_mix":
                return RandomMixPolicy(rng, first=first, second=second, share=number["share"])
            return TwoModelPolicy(rng, weak=first, strong=second, threshold=number["threshold"])
        return make_policy(player.policy, rng=rng, options={**player.options, **dict(self.options)})


#: The unit of one policy at a rate, with a seed.
Maker = Callable[[float, int], Play]


def play(settings: Settings, policy: str, **more: object) -> Maker:
    """Units of a policy; ``more`` are further fields of :class:`Play`."""
    return partial(_play, policy, settings.num_queries, more)


def bear(settings: Settings, fallback: str = DEFAULT_FALLBACK, **more: object) -> Maker:
    """Units of BEAR with a fallback."""
    return play(settings, "bear", options=(("fallback", fallback),), **more)


def _play(policy: str, num_queries: int, more: Mapping[str, object], rate_per_s: float, seed: int) -> Play:
    unit = Play(policy=policy, rate_per_s=rate_per_s, seed=seed, num_queries=num_queries)
    return replace(unit, **more)


def grid(makers: Iterable[Maker], rates_per_s: Sequence[float], seeds: Sequence[int]) -> list[Play]:
    """The units of each maker at each rate with each seed, as they are run."""
    return [shared(make(rate, seed)) for make in makers for rate in rates_per_s for seed in seeds]


def shared(unit: Play) -> Play:
    """The unit under which a play is run: one for both slopes where the policy ignores targets."""
    return unit if PLAYERS[unit.policy].reads_targets else replace(unit, slope=SLOPES[0])


def workload_of(unit: Play) -> Workload:
    """The queries of a unit, as much of their truth being known as it says."""
    queries = Play(  # all that a workload depends on, for the cache
        policy="",
        rate_per_s=unit.rate_per_s,
        seed=unit.seed,
        num_queries=unit.num_queries,
        slope=unit.slope,
        knowledge=unit.knowledge,
        burst_ratio=unit.burst_ratio,
        lambda_per_musd=unit.lambda_per_musd,
        mix=unit.mix,
    )
    return _workload(queries)


@lru_cache(maxsize=2)
def _workload(unit: Play) -> Workload:
    rng, num = stream(unit.seed, "arrivals"), unit.num_queries
    if unit.burst_ratio == 1.0:
        arrival_s = poisson(num, unit.rate_per_s, rng)
    else:
        arrival_s = mmpp2(num, unit.rate_per_s, unit.burst_ratio, rng)
    spec = WorkloadSpec(
        seed=unit.seed,
        predictor=TASK_LABEL if unit.knowledge == "label" else PredictorQuality(),
        target_slope_ms_per_token=unit.slope,
        lambda_per_musd=unit.lambda_per_musd,
    )
    work = four_task_workload(arrival_s, spec, shares=CHAT_HEAVY if unit.mix == "chat_heavy" else EQUAL_SHARES)
    if unit.knowledge in ("predicted", "label", "clock"):
        return work
    if unit.knowledge == "costs":
        return with_true_costs(work, pool_of())
    return knowing(work, lengths=True, qualities=unit.knowledge == "all")


def with_slope(work: Workload, seed: int, slope: float) -> Workload:
    """The same queries with the targets of another slope."""
    return replace(work, ttft_target_s=draw_ttft_targets(seed, work.prompt_tokens, slope))


@lru_cache(maxsize=2)
def refitted(seed: int, num_queries: int) -> dict[str, float]:
    """θ in tokens per second by instance: the best for the throughput estimate with T_dec, on a run of its own."""
    unit = Play(policy="bear", rate_per_s=8.0, seed=seed, num_queries=num_queries)
    pool = pool_of()
    policy = make_policy("bear", rng=stream(seed, "policy"), options={"fallback": DEFAULT_FALLBACK})
    probed = probe(workload_of(unit), pool, policy=policy, seed=seed)
    return throughputs(refit(probed, pool, with_decode_step=True))


@lru_cache(maxsize=2)
def pool_of(knowledge: Knowledge = "predicted") -> Pool:
    """The three-model pool, its clock known or fitted."""
    pool = qwen3_pool()
    return true_clock(pool) if knowledge in ("clock", "lengths+clock", "all") else pool
