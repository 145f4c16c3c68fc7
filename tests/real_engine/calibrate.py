"""Part ``calibrate``: one workload on the bare engine, and ``headway calibrate`` on the log it left.

Rounds of requests asked at once, from one to twice what the engine can seat, with lengths of the trace in between short
and long ones, over and over, so that light and heavy load and every kind of batch are in both the fitted and the
held-out part of the log. Its requests are of other seeds than every later part's.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from headway.calibrate.profile_file import render_profile, write_profile
from headway.calibrate.result import as_json, calibrate_log, notes
from real_engine.client import ask, body_of, session_of
from real_engine.instance import MODEL, Instance, instance
from real_engine.workload import CONTEXT_TOKENS, Asked, lengths

SEED: Final = 101
_AT_ONCE: Final = (1, 6, 2, 12, 3, 24, 1, 8, 4, 16)
#: No gate here: the error is what the experiment is to show.
_ANY_ERROR: Final = 10.0


async def calibrate(directory: Path, *, minutes: float) -> dict[str, Any]:
    """Run it for so long and fit; the profile is ``profile.yaml`` in ``directory``, the log lies beside it."""
    log = directory / "calibrate.steps.jsonl"
    with instance("calibrated", directory / "calibrated") as engine:
        await rounds(engine, seconds=60.0 * minutes, seed=SEED)
        await engine.idle()
        engine.take_log(log)
    return fit(log, directory / "profile.yaml")


def fit(log: Path, profile: Path) -> dict[str, Any]:
    """A profile from the log, and what the calibration says of itself."""
    result = calibrate_log(log, name=profile.stem, max_error=_ANY_ERROR)
    assert result.profile is not None
    write_profile(profile, render_profile(result.profile, title="A real engine.", notes=notes(result.figures)))
    found = as_json(result, profile)
    found["log"]["path"] = log.name  # type: ignore[index]
    found["profile"] = profile.name
    return dict(msgspec.to_builtins(found))


async def rounds(engine: Instance, *, seconds: float, seed: int) -> int:
    """Rounds until the time is up; the number of requests."""
    rng = np.random.default_rng(seed)
    pool = lengths("poisson", 5000, seed)
    number = turn = 0
    until_s = time.monotonic() + seconds
    async with session_of() as session:
        while time.monotonic() < until_s:
            asked = []
            for _ in range(_AT_ONCE[turn % len(_AT_ONCE)]):
                asked.append(_asked(rng, number, pool[number % len(pool)]))
                number += 1
            turn += 1
            name = f"calibrate-{turn}"
            answers = await asyncio.gather(
                *(ask(session, engine.url, one, body_of(one, seed, MODEL), name=name) for one in asked)
            )
            wrong = [answered.error for answered in answers if answered.error is not None]
            assert not wrong, wrong[0]
    return number


def _asked(rng: np.random.Generator, number: int, row: tuple[int, int]) -> Asked:
    """A row of the trace, or one time in three a prompt of any length and a short answer."""
    prompt, output = row
    if rng.random() < 1 / 3:
        prompt, output = int(np.exp(rng.uniform(np.log(4), np.log(CONTEXT_TOKENS - 100)))), int(rng.integers(2, 60))
    return Asked(number, 0.0, prompt, output)
