"""``make conformance``: the native core against the real vLLM scheduler, and against the Python reference.

Part one runs seeded random workloads through the real scheduler, in an environment of its own, and compares every step:
batch order, token counts, free blocks, preempted and finished requests, both queues in order. It fails as well when
the workloads never reached one of the rules. Part two compares native replays with the reference on random states.
The first mismatch is printed with its seed, step and both sides; exit status 1. ``--help`` names the shorter modes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance.environment import ensure_environment
from conformance.features import ANY_CLOCK, FEATURES, exercised
from conformance.real_scheduler import real_records
from headway._core import ReplayedEngine
from random_states import Workload, random_workload
from recorded_runs import Engine, Mismatch, Record, first_mismatch
from reference_scheduler import ReferenceEngine
from replay_comparison import replay_differences

STATES_PER_TASK = 500


def progress(message: str) -> None:
    """A line that overwrites itself, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


def report(side: str, workload: Workload, mismatch: Mismatch) -> None:
    print(f"MISMATCH: {side} leaves the real scheduler in workload {workload.seed} at step {mismatch.step}")
    print(f"  limits {workload.limits}")
    for field in mismatch.recorded.__struct_fields__:
        recorded, replayed = getattr(mismatch.recorded, field), getattr(mismatch.replayed, field)
        mark = " " if recorded == replayed else "*"
        print(f"{mark} {field}\n      real   {recorded}\n      replay {replayed}")
    print(f"  again: python tests/conformance/run.py --seed {workload.seed} --workloads 1 --states 0")


def compare_workload(workload: Workload, record: Record) -> bool:
    """Whether both the native core and the Python reference repeat the record."""
    engines: dict[str, Engine] = {
        "the native core": ReplayedEngine(workload.limits, ANY_CLOCK),
        "the Python reference": ReferenceEngine(workload.limits, ANY_CLOCK),
    }
    for side, engine in engines.items():
        mismatch = first_mismatch(engine, workload, record)
        if mismatch is not None:
            report(side, workload, mismatch)
            return False
    return True


def compare_with_real_scheduler(python: Path, first_seed: int, num_workloads: int, *, all_features: bool) -> bool:
    """Part one. ``all_features`` demands that every rule was exercised."""
    workloads = [random_workload(seed) for seed in range(first_seed, first_seed + num_workloads)]
    features: Counter[str] = Counter()
    num_steps = num_preemptions = 0
    version = ""
    started_s = time.monotonic()
    compared = 0
    for workload, record in zip(workloads, real_records(python, iter(workloads)), strict=True):
        if not compare_workload(workload, record):
            return False
        compared += 1
        version = record.vllm
        num_steps += len(record.rows)
        num_preemptions += sum(len(row.preempted) for row in record.rows)
        features.update(exercised(workload, record))
        progress(f"workload {compared}/{num_workloads}, {num_steps} steps")
    progress("")
    print(
        f"real scheduler (vLLM {version}): {compared} workloads, {num_steps} steps, {num_preemptions} preemptions, "
        f"no mismatch, {time.monotonic() - started_s:.0f} s"
    )
    for feature in FEATURES:
        print(f"  {features[feature]:6d} workloads exercise: {feature}")
    missing = [feature for feature in FEATURES if features[feature] == 0]
    if missing and all_features:
        print(f"NOT EXERCISED: {', '.join(missing)}")
        return False
    return True


def compare_with_reference(first_seed: int, num_states: int) -> bool:
    """Part two: native replays of a newcomer on random states."""
    started_s = time.monotonic()
    starts = range(first_seed, first_seed + num_states, STATES_PER_TASK)
    counts = [min(STATES_PER_TASK, first_seed + num_states - start) for start in starts]
    num_compared = num_never = 0
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        results: Iterator[tuple[list[str], int]] = pool.map(replay_differences, starts, counts)
        for count, (differences, never) in zip(counts, results, strict=True):
            if differences:
                pool.shutdown(cancel_futures=True)
                print(
                    f"MISMATCH: native replay and Python reference differ, {len(differences)} times in {count} states"
                )
                print("\n".join(differences[:10]))
                return False
            num_compared += count
            num_never += never
            progress(f"state {num_compared}/{num_states}")
    progress("")
    print(
        f"Python reference: {num_compared} random states, {num_never} of them without a first token, no mismatch, "
        f"{time.monotonic() - started_s:.0f} s"
    )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=2500, help="workloads for the real scheduler (default 2500)")
    parser.add_argument("--states", type=int, default=100_000, help="states for the reference (default 100000)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    options = parser.parse_args()
    good = True
    if options.workloads:
        python = ensure_environment()
        # A handful of workloads cannot reach everything.
        good = compare_with_real_scheduler(
            python, options.seed, options.workloads, all_features=options.workloads >= 1000
        )
    if good and options.states:
        good = compare_with_reference(options.seed, options.states)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
