"""What one routing decision costs, as a histogram: CPU time of ``Router.decide`` over a simulated run.

``python -m headway.lab.overhead --out DIR`` writes ``overhead.png`` and ``overhead.svg``. Times are of the machine it
runs on and differ from run to run: this is the one figure of the lab that no seed brings back, and so it has a command
of its own and stands on no page of results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headway.estimate.registry import make_estimator
from headway.lab.arrivals import poisson
from headway.lab.drawing import Drawing, look, panels, style
from headway.lab.lps_figure import write
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.runs import need
from headway.lab.simulate import simulate
from headway.lab.workload import WorkloadSpec, four_task_workload
from headway.policy.options import Options
from headway.policy.registry import POLICIES, make_policy
from headway.router import Router
from headway.types import Decision, Prediction, Query

#: Queries per second for each instance, as 8 per second are for three.
_RATE_PER_INSTANCE = 8 / 3
_NUM_QUERIES = 4000


def decision_times_s(
    pool: Pool, *, policy: str = "bear", num_queries: int = _NUM_QUERIES, seed: int = 0
) -> list[float]:
    """CPU seconds of every decision of a run: looking at the engines, estimates, verdicts, choice.

    Raises:
        KeyError: no policy is called so.
    """
    rate_per_s = _RATE_PER_INSTANCE * len(pool.instances)
    workload = four_task_workload(
        poisson(num_queries, rate_per_s, np.random.default_rng(seed)), WorkloadSpec(seed=seed)
    )
    times_s: list[float] = []

    class TimedRouter(Router):
        def decide(self, query: Query, now: float, predictions: Mapping[str, Prediction] | None = None) -> Decision:
            start_ns = time.thread_time_ns()
            try:
                return super().decide(query, now, predictions)
            finally:
                times_s.append((time.thread_time_ns() - start_ns) * 1e-9)

    options: Options = {"fallback": "least_work"} if "fallback" in POLICIES[policy].options else {}
    simulate(
        workload,
        pool,
        policy=make_policy(policy, rng=np.random.default_rng(seed), options=options),
        estimator=make_estimator(POLICIES[policy].estimator),
        seed=seed,
        router=TimedRouter,
    )
    return times_s


def draw(times_s: Mapping[str, list[float]], policy: str = "bear") -> Drawing:
    """A histogram per pool, of microseconds per decision, the slowest hundredth gathered in the last bar."""
    figure, grid = panels(len(times_s), columns=len(times_s), width=5.0 * len(times_s), height=3.8)
    words = []
    for index, (axes, (label, values)) in enumerate(zip(grid, times_s.items(), strict=True)):
        microseconds = np.array(values) * 1e6
        middle, most = np.quantile(microseconds, 0.5), np.quantile(microseconds, 0.99)
        axes.hist(np.minimum(microseconds, most), bins=40, color=look(index).colour)
        axes.axvline(middle, color="black", linestyle="--", linewidth=1.2)
        axes.set_title(f"{label}: median {middle:.0f} µs, 99 % below {most:.0f} µs")
        axes.set_xlabel("CPU time of a decision (µs)")
        axes.set_ylabel("decisions")
        words.append(f"{label}: median {middle:.0f} µs, 99 % below {most:.0f} µs")
    return Drawing(
        name="overhead",
        title="What one decision costs",
        caption=f"CPU time of Router.decide under {policy}, engines looked at anew each time. Dashed: the median.",
        alt="Histograms of CPU time per decision; " + "; ".join(words) + ".",
        figure=figure,
    )


def main() -> None:
    """Measures on 3 and on 24 instances, writes the figure, and prints where it is and what it shows."""
    parser = argparse.ArgumentParser(description="Draw what a routing decision costs on this machine.")
    parser.add_argument("--out", type=Path, default=Path("runs/overhead"), help="directory of overhead.png and .svg")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="bear", help="whose (default: %(default)s)")
    given = parser.parse_args()
    out: Path = given.out
    need("matplotlib")
    pools = {f"{3 * copies} instances": qwen3_pool(copies) for copies in (1, 8)}
    times_s = {label: decision_times_s(pool, policy=given.policy) for label, pool in pools.items()}
    with style():
        drawing = draw(times_s, given.policy)
    print(*write(drawing, out), drawing.alt, sep="\n")


if __name__ == "__main__":
    main()
