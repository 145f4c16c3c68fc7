"""How fast the lab simulates, in a process of its own: ``python -m headway.lab.speed POLICY INSTANCES QUERIES``.

It prints one JSON object: queries per CPU second of the simulation (its Router, engines and outcomes; the workload is
built before), and the largest resident memory of the process from start to end, scoring included. The rate grows with
the pool, 8/3 queries per second for each instance, so that every size carries the published load. Wall time and the
machine's other work count for nothing.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from headway.estimate.registry import make_estimator
from headway.lab.arrivals import poisson
from headway.lab.metrics import score
from headway.lab.pool import Pool, qwen3_pool
from headway.lab.simulate import simulate
from headway.lab.truth import stream
from headway.lab.workload import WorkloadSpec, four_task_workload
from headway.policy.registry import POLICIES, make_policy

RATE_PER_INSTANCE_PER_S = 8.0 / 3.0
SEED = 0


def pool_of(num_instances: int) -> Pool:
    """Qwen3 0.6B, 8B and 32B in equal numbers; what is left over goes to the smaller ones."""
    each, rest = divmod(num_instances, 3)
    return qwen3_pool([each + (size < rest) for size in range(3)])


def measure(policy: str, num_instances: int, num_queries: int) -> dict[str, float]:
    """Queries per CPU second, CPU seconds, peak resident MB and the score reached (so that no work can be skipped)."""
    pool = pool_of(num_instances)
    arrival_s = poisson(num_queries, RATE_PER_INSTANCE_PER_S * num_instances, stream(SEED, "arrivals"))
    workload = four_task_workload(arrival_s, WorkloadSpec(seed=SEED, models=pool.models))
    chosen = make_policy(policy, rng=stream(SEED, "policy"))
    estimator = make_estimator(POLICIES[policy].estimator)
    started_s = time.process_time()
    outcomes = simulate(workload, pool, policy=chosen, estimator=estimator, seed=SEED)
    cpu_s = time.process_time() - started_s
    reached = score(workload, pool, outcomes)
    return {
        "queries_per_cpu_s": num_queries / cpu_s,
        "cpu_s": cpu_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
        "on_time_utility": reached.on_time_utility,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
