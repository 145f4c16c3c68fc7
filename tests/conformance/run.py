"""``make conformance``: the native core against the real vLLM scheduler, and against the Python reference.

Part one runs seeded random workloads through the real scheduler, in an environment of its own, and compares every step:
batch order, token counts, free blocks, preempted and finished requests, both queues in order. It does so for four
kinds of engine: plain, asynchronous, with a prefix cache, and both. It fails as well when the workloads of a kind never
reached one of its rules. Part two compares native replays with the reference on random states. The first mismatch is
printed with its seed, step and both sides; exit status 1. ``--help`` names the shorter modes.
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

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance.environment import ensure_environment
from conformance.features import exercised, features_of
from conformance.real_scheduler import real_records
from random_states import KINDS, Workload, random_workload
from recorded_runs import Engine, Mismatch, Record, first_mismatch, native_engine, reference_engine
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
    kind = next(
        kind for kind, flags in KINDS.items() if workload.limits == msgspec.structs.replace(workload.limits, **flags)
    )
    print(f"  again: python tests/conformance/run.py --kind '{kind}' --seed {workload.seed} --workloads 1 --states 0")


def compare_workload(workload: Workload, record: Record) -> bool:
    """Whether both the native core and the Python reference repeat the record."""
    engines: dict[str, Engine] = {
        "the native core": native_engine(workload.limits),
        "the Python reference": reference_engine(workload.limits),
    }
    for side, engine in engines.items():
        mismatch = first_mismatch(engine, workload, record)
        if mismatch is not None:
            report(side, workload, mismatch)
            return False
    return True


def compare_with_real_scheduler(
    python: Path, kind: str, first_seed: int, num_workloads: int, *, all_features: bool
) -> bool:
    """Part one, for one kind of engine. ``all_features`` demands that every rule was exercised."""
    workloads = [random_workload(seed, **KINDS[kind]) for seed in range(first_seed, first_seed + num_workloads)]
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
        progress(f"{kind}: workload {compared}/{num_workloads}, {num_steps} steps")
    progress("")
    print(
        f"real scheduler (vLLM {version}), {kind}: {compared} workloads, {num_steps} steps, {num_preemptions} "
        f"preemptions, no mismatch, {time.monotonic() - started_s:.0f} s",
        flush=True,
    )
    wanted = features_of(workloads[0].limits)
    for feature in wanted:
        print(f"  {features[feature]:6d} workloads exercise: {feature}")
    missing = [feature for feature in wanted if features[feature] == 0]
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
    parser.add_argument(
        "--workloads", type=int, default=1000, help="for the real scheduler, of each kind (default 1000)"
    )
    parser.add_argument("--kind", choices=KINDS, help="only this kind of engine")
    parser.add_argument("--states", type=int, default=100_000, help="states for the reference (default 100000)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    options = parser.parse_args()
    good = True
    if options.workloads:
        python = ensure_environment()
        every = options.workloads >= 500  # a handful of workloads cannot reach everything
        good = all(
            compare_with_real_scheduler(python, kind, options.seed, options.workloads, all_features=every)
            for kind in ([options.kind] if options.kind else KINDS)
        )
    if good and options.states:
        good = compare_with_reference(options.seed, options.states)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
