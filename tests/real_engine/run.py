"""``make real-engine``: how well Headway predicts a real vLLM, part by part, each kept as soon as it is done.

Every part writes its JSON into the results directory, outside the clone; a part that is there is not run again, so a
run that was cut goes on where it stopped. ``--only`` runs single parts anew where their results were removed. The
report (docs/real-engine.md and .json) is made of whatever parts there are. Timing needs a machine that does nothing
else: two cores, one for the engine's arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance.environment import cache_directory
from real_engine import batches, calibrate, choice, errors, mixed, passes, report
from real_engine.workload import TRACE
from real_vllm_environment import MODEL_SCRIPTS, ensure_model, ensure_python

#: The parts in order, each with the minutes it takes at ``--minutes 1``'s scale of 1.
MINUTES: Final[dict[str, float]] = {
    "calibrate": 4.0, "passes": 24.0, "batches": 2.0, "errors": 0.0, "choice": 12.0, "mixed": 10.0,
}  # fmt: skip


def run_part(part: str, directory: Path, scale: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one part and return what it found."""
    minutes = scale * MINUTES[part]
    if part == "calibrate":
        return asyncio.run(calibrate.calibrate(directory, minutes=minutes))
    if part == "passes":
        return asyncio.run(passes.passes(directory, minutes=minutes, say=say))
    if part == "batches":
        return asyncio.run(batches.batches(directory, minutes=minutes))
    if part == "errors":
        return errors.errors(directory)
    if part == "choice":
        return asyncio.run(choice.choice(directory, minutes=minutes, say=say))
    return asyncio.run(mixed.mixed(directory, minutes=minutes))


def main() -> int:
    """Run what is missing and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=cache_directory() / "real-engine-results")
    parser.add_argument("--only", action="append", choices=[*MINUTES, "report"], help="may be given several times")
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual length of each part")
    parser.add_argument("--docs", type=Path, default=Path(__file__).parents[2] / "docs", help="where the report goes")
    parser.add_argument("--note", help="a sentence on how it was measured, kept with the results and put on the page")
    asked = parser.parse_args()
    if not (MODEL_SCRIPTS / "make_model.py").exists():
        print(f"{MODEL_SCRIPTS} holds no make_model.py: set HEADWAY_VLLM to the directory that does", file=sys.stderr)
        return 2
    if not TRACE.exists():
        print(f"{TRACE} is not there: set HEADWAY_DATA to the directory that holds traces/", file=sys.stderr)
        return 2
    logging.getLogger("headway").addHandler(logging.NullHandler())  # the gateways' events are none of the report
    ensure_python()
    ensure_model("512x8")
    asked.results.mkdir(parents=True, exist_ok=True)
    if asked.note is not None:
        (asked.results / "note.txt").write_text(asked.note)
    started_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started_s:6.0f} s] {text}", file=sys.stderr, flush=True)

    for part in MINUTES if asked.only is None else [one for one in asked.only if one != "report"]:
        path = asked.results / f"{part}.json"
        if path.exists():
            say(f"{part}: there already ({path})")
            continue
        say(f"{part}: about {asked.scale * MINUTES[part]:.1f} minutes")
        found = {"scale": asked.scale, **run_part(part, asked.results, asked.scale, say)}
        path.write_text(json.dumps(found, indent=1) + "\n")
    report.write(asked.results, asked.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
