"""Where to send what no instance can answer in time: the rules that were tried, on the tuning seeds.

``python -m headway.lab.fallbacks`` plays BEAR with each rule at, near and beyond saturation and prints OnTimeUtility,
attainment and the TTFT of the slowest in a hundred. Every rule answers every query. What was chosen from this is judged
on other seeds, in the acceptance table. It refuses to be an option of the gateway: two of these rules are, by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from headway.estimate.registry import make_estimator
from headway.lab.acceptance.settings import FULL, SLOPES
from headway.lab.acceptance.units import Play, pool_of, workload_of
from headway.lab.metrics import Score, score
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.policy.base import UTILITY_TIE, largest, ttft_s_of
from headway.policy.bear import BearPolicy
from headway.policy.least_work import LeastWork
from headway.types import Candidate

RATES_PER_S = (8.0, 8.6, 9.5, 12.0)


class LargestTtft(LeastWork):
    """The instance that is latest anyway: one is given up, the others recover."""

    def choose(self, indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
        """Those with the largest estimated TTFT."""
        return largest(indices, [ttft_s_of(candidates[index]) for index in indices])


class Cheapest(LeastWork):
    """The instance whose answer costs least money."""

    def choose(self, indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
        """Those with the smallest predicted cost."""
        costs_usd = [candidates[index].cost_usd or 0.0 for index in indices]
        return largest(indices, [-cost_usd for cost_usd in costs_usd], UTILITY_TIE * 1e-6)


class MostOutstanding(LeastWork):
    """The instance with the most requests under way."""

    def choose(self, indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
        """Those with the most in the ledger."""
        return largest(indices, [float(candidates[index].num_outstanding) for index in indices])


class LeastWorkIfLaterThan(LeastWork):
    """Least work only where even the soonest instance would answer later than ``seconds``; else the smallest TTFT."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def choose(self, indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
        """Those with the least work, or none."""
        soonest_s = min(ttft_s_of(candidates[index]) for index in indices)
        return super().choose(indices, candidates) if soonest_s > self._seconds else []


class LeastWorkWithin(LeastWork):
    """Least work among the instances that answer within ``seconds``, of all where none does: a bound on the wait."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def choose(self, indices: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
        """Those with the least work of the near ones."""
        near = [index for index in indices if ttft_s_of(candidates[index]) <= self._seconds]
        return super().choose(near or indices, candidates)


#: The rules by name; None is the smallest estimated TTFT.
RULES = ("least_ttft", "least_work", "largest_ttft", "cheapest", "most_outstanding", "later_than_2s", "within_10s")


def make_rule(name: str) -> LeastWork | None:
    """A new rule by its name in :data:`RULES`."""
    rules: dict[str, LeastWork | None] = {
        "least_ttft": None,
        "least_work": LeastWork(),
        "largest_ttft": LargestTtft(),
        "cheapest": Cheapest(),
        "most_outstanding": MostOutstanding(),
        "later_than_2s": LeastWorkIfLaterThan(2.0),
        "within_10s": LeastWorkWithin(10.0),
    }
    return rules[name]


def play_rule(name: str, rate_per_s: float, slope: float, seed: int, num_queries: int) -> Score:
    """BEAR with one rule on one workload."""
    unit = Play(policy="bear", rate_per_s=rate_per_s, seed=seed, num_queries=num_queries, slope=slope)
    work, pool = workload_of(unit), pool_of()
    policy = BearPolicy(stream(seed, "policy"), least_work=make_rule(name))
    outcomes = simulate(work, pool, policy=policy, estimator=make_estimator("replay"), seed=seed)
    return score(work, pool, outcomes)


def main(arguments: Sequence[str]) -> int:
    """Print a line per slope, rate and rule; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m headway.lab.fallbacks", description=__doc__)
    parser.add_argument("--queries", type=int, default=6_000, help="per run (default: %(default)s)")
    given = parser.parse_args(arguments)
    seeds = FULL.tuning_seeds
    print(f"{given.queries} queries x seeds {', '.join(map(str, seeds))}; means")
    print(f"{'slope':>7} {'qps':>5} {'rule':<17} {'utility':>8} {'floored':>8} {'in time':>8} {'p99 TTFT s':>11}")
    for slope in SLOPES:
        for rate in RATES_PER_S:
            for name in RULES:
                scores = [play_rule(name, rate, slope, seed, given.queries) for seed in seeds]
                figures = [
                    float(np.mean([figure or 0.0 for figure in column]))
                    for column in zip(
                        *(
                            (one.on_time_utility, one.on_time_utility_floored, one.attainment, one.ttft_p99_s)
                            for one in scores
                        ),
                        strict=True,
                    )
                ]
                utility, floored, attainment, p99_s = figures
                print(f"{slope:>7} {rate:>5} {name:<17} {utility:8.4f} {floored:8.4f} {attainment:8.4f} {p99_s:11.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
