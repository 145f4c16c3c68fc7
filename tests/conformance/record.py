"""Writes ``tests/recordings``: runs of the real scheduler that ``make test`` replays without installing it.

``python tests/conformance/record.py`` makes the same file from the same seeds; it refuses to write recordings that
leave one of the rules unexercised.
"""

from __future__ import annotations

import gzip
import sys
from collections import Counter
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance.environment import ensure_environment
from conformance.features import exercised, features_of
from conformance.real_scheduler import real_records
from random_states import KINDS, random_workload
from recorded_runs import Recording, recordings_path

NUM_RECORDINGS, MAX_STEPS = 60, 160
FIRST_SEED = 1_000_000  # none of those that ``run.py`` uses


def main() -> int:
    good = [record_kind(kind) for kind in KINDS]
    return 0 if all(good) else 1


def record_kind(kind: str) -> bool:
    """Write the file of one kind of engine; whether its runs exercise every rule."""
    seeds = range(FIRST_SEED, FIRST_SEED + NUM_RECORDINGS)
    workloads = [random_workload(seed, max_steps=MAX_STEPS, **KINDS[kind]) for seed in seeds]
    records = list(real_records(ensure_environment(), iter(workloads)))
    features: Counter[str] = Counter()
    lines = b""
    for workload, record in zip(workloads, records, strict=True):
        features.update(exercised(workload, record))
        lines += msgspec.json.encode(Recording(workload, record)) + b"\n"
    wanted = features_of(workloads[0].limits)
    missing = [feature for feature in wanted if features[feature] == 0]
    if missing:
        print(f"{kind}: not exercised, nothing written: {', '.join(missing)}", file=sys.stderr)
        return False
    packed = gzip.compress(lines, 9, mtime=0)
    path = recordings_path(kind)
    path.write_bytes(packed)
    num_steps = sum(len(record.rows) for record in records)
    print(f"{path}: {len(records)} runs, {num_steps} steps, {len(packed)} bytes")
    for feature in wanted:
        print(f"  {features[feature]:4d} {feature}")
    return True


if __name__ == "__main__":
    sys.exit(main())
