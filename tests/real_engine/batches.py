"""Part ``batches``: does the mirror form the batches that the real engine formed?

Prefix cache off, over the logs of all passes; on, over a run of its own whose prompts begin alike. Then, for every
newcomer of the passes, the batch that was predicted to admit it by the clock against the one that did.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from headway.calibrate.read_log import read_step_log
from headway.profiles import Profile, load_profile
from real_engine.client import play
from real_engine.instance import CLIENT_CORE, MODEL, instance
from real_engine.mirror import admissions, newcomers_of, read_run, repeated
from real_engine.passes import STATES, pass_files, read_pass
from real_engine.workload import SHAPES, capacity_per_s, sharing_workload

SEED: Final = 303
#: How long before the decision the engine's state was known, seconds.
KNOWN_S: Final = (0.0, 0.25, 1.0)
_LOAD: Final = 0.9


async def batches(directory: Path, *, minutes: float) -> dict[str, Any]:
    """Compare the logs of the passes, and a new run with the prefix cache on."""
    profile = load_profile(directory / "profile.yaml")
    log = directory / "cached.steps.jsonl"
    if not log.exists():
        os.sched_setaffinity(0, {CLIENT_CORE})
        rate_per_s = _LOAD * capacity_per_s("poisson", profile.limits, profile.step_time)
        asked = sharing_workload(num=max(int(rate_per_s * 60 * minutes), 20), rate_per_s=rate_per_s, seed=SEED)
        with instance("cached", directory / "cached", prefix_caching=True) as engine:
            answers = await play(asked, engine.url, name="cached", model=MODEL, seed=SEED)
            await engine.idle()
            engine.take_log(log)
        wrong = [answered.error for answered in answers if answered.error is not None]
        assert not wrong, wrong[0]
    return {
        "prefix_cache_off": _off(directory),
        "prefix_cache_on": _on(log),
        "admission": _admission(directory, profile),
    }


def _off(directory: Path) -> dict[str, Any]:
    """All passes, and the calibration's own run."""
    logs = [pass_files(directory, shape, state)[1] for shape in SHAPES for state in STATES]
    logs = [log for log in (directory / "calibrate.steps.jsonl", *logs) if log.exists()]
    found = {log.name.split(".")[0]: repeated(read_run(log)) for log in logs}
    return _summed(found)


def _on(log: Path) -> dict[str, Any]:
    return _summed({"cached": repeated(read_run(log), block_pool=True)})


def _summed(found: dict[str, Any]) -> dict[str, Any]:
    names = ("num_batches", "num_repeated", "num_requests", "num_cached", "num_preempted")
    sums = {name: sum(getattr(one, name) for one in found.values()) for name in names}
    return {
        **sums,
        "agreement": sums["num_repeated"] / sums["num_batches"],
        "runs": {name: msgspec.to_builtins(one) for name, one in found.items()},
    }


def _admission(directory: Path, profile: Profile) -> list[dict[str, Any]]:
    """Over all passes, by how long before the decision the state was known."""
    table = []
    for known_s in KNOWN_S:
        missed: list[tuple[int, bool]] = []
        for shape in SHAPES:
            for state in STATES:
                done, log = read_pass(directory, shape, state), pass_files(directory, shape, state)[1]
                if done is None:
                    continue
                run = read_run(log)
                decided = {row.client.request_id: row.decided_s for row in done.rows if row.decided_s is not None}
                times = {row.client.request_id: row.engine for row in done.rows if row.engine is not None}
                newcomers = sorted(newcomers_of(run, decided, times), key=lambda one: one.decided_s)
                missed += admissions(
                    run, newcomers, zero_s=done.zero_s, step_time=profile.step_time,
                    table=read_step_log(log).steps, known_s=known_s,
                )  # fmt: skip
        waited = [by for by, had_to in missed if had_to]
        row = {"known_before_s": known_s, **_shares([by for by, _ in missed]), "had_to_wait": _shares(waited)}
        table.append(row)
    return table


def _shares(missed: list[int]) -> dict[str, Any]:
    by = np.array(missed)
    if not len(by):
        return {"num": 0}
    return {
        "num": len(by),
        "exact": float(np.mean(by == 0)),
        "within_1": float(np.mean(np.abs(by) <= 1)),
        "earlier": float(np.mean(by < 0)),
        "later": float(np.mean(by > 0)),
    }
