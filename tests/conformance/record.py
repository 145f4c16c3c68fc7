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
from conformance.features import FEATURES, exercised
from conformance.real_scheduler import real_records
from random_states import random_workload
from recorded_runs import RECORDINGS, Recording

NUM_RECORDINGS, MAX_STEPS = 60, 160
FIRST_SEED = 1_000_000  # none of those that ``run.py`` uses


def main() -> int:
    workloads = [random_workload(FIRST_SEED + index, max_steps=MAX_STEPS) for index in range(NUM_RECORDINGS)]
    records = list(real_records(ensure_environment(), iter(workloads)))
    features: Counter[str] = Counter()
    lines = b""
    for workload, record in zip(workloads, records, strict=True):
        features.update(exercised(workload, record))
        lines += msgspec.json.encode(Recording(workload, record)) + b"\n"
    missing = [feature for feature in FEATURES if features[feature] == 0]
    if missing:
        print(f"not exercised, nothing written: {', '.join(missing)}", file=sys.stderr)
        return 1
    packed = gzip.compress(lines, 9, mtime=0)
    RECORDINGS.parent.mkdir(exist_ok=True)
    RECORDINGS.write_bytes(packed)
    num_steps = sum(len(record.rows) for record in records)
    print(f"{RECORDINGS}: {len(records)} runs, {num_steps} steps, {len(packed)} bytes")
    for feature in FEATURES:
        print(f"  {features[feature]:4d} {feature}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
