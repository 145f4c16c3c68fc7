"""Part ``choice``: two unlike real engines, and who meets more targets: the replay's choice or the usual rules.

Both engines serve one model's name with one quality, so that only time decides. They are calibrated under load at once,
as they will run, then the same recorded workload is sent under each policy in turn, three times over. The target is the
median time to first token of a pilot under round robin with another seed, so that neither all nor none can be in time.
One engine shares its core with gateway and client, so its clock is noisy; that is the same for every policy.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from headway.config import Config
from headway.profiles import load_profile
from headway.testing import pool, running_gateway
from real_engine.calibrate import fit, rounds
from real_engine.client import Answered, play
from real_engine.instance import CLIENT_CORE, ENGINE_CORE, MODEL, Instance, instance
from real_engine.workload import CONTEXT_TOKENS, Asked, capacity_per_s, workload
from real_vllm_environment import ModelSize

SEED: Final = 404
POLICIES: Final = ("bear", "round_robin", "shortest_queue")
REPEATS: Final = 3
ENGINES: Final[dict[str, tuple[ModelSize, int]]] = {
    "quick": ("512x8", CLIENT_CORE),
    "slow": ("1024x12", ENGINE_CORE),
}
_LOAD: Final = 0.75
_CALIBRATION_SHARE: Final = 0.25
_TAIL_S: Final = 10.0


async def choice(directory: Path, *, minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Calibrate both, then run what is missing of policies × repeats."""
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(instance(name, directory / name, size=size, core=core))
            for name, (size, core) in ENGINES.items()
        }
        profiles = {name: directory / f"choice-{name}.yaml" for name in engines}
        if not all(path.exists() for path in profiles.values()):
            say("calibrating both engines")
            await _calibrate(engines, directory, profiles, seconds=60.0 * minutes * _CALIBRATION_SHARE)
        rate_per_s = _rate_per_s(profiles)
        seconds = 60.0 * minutes * (1 - _CALIBRATION_SHARE) / (1 + REPEATS * len(POLICIES)) - _TAIL_S
        num = max(round(rate_per_s * seconds), 20)
        os.sched_setaffinity(0, {CLIENT_CORE})
        pilot = directory / "choice-pilot.json"
        if not pilot.exists():
            say(f"choice pilot: {num} requests at {rate_per_s:.2f}/s")
            asked = workload("bursty", num=num, rate_per_s=rate_per_s, seed=SEED + 2)
            answers = await _play(_config(engines, profiles, "round_robin"), asked, None, "pilot")
            pilot.write_text(json.dumps([one.ttft_s for one in answers if one.ttft_s is not None]))
            await asyncio.gather(*(engine.idle() for engine in engines.values()))
        target_s = statistics.median(json.loads(pilot.read_text()))
        asked = workload("bursty", num=num, rate_per_s=rate_per_s, seed=SEED)
        found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for repeat in range(REPEATS):
            for policy in POLICIES[repeat:] + POLICIES[:repeat]:
                path = directory / f"choice-{policy}-{repeat}.json"
                if not path.exists():
                    say(f"choice {policy} {repeat}: {num} requests at {rate_per_s:.2f}/s")
                    config = _config(engines, profiles, policy)
                    answers = await _play(config, asked, target_s, f"{policy}-{repeat}")
                    path.write_text(json.dumps(_scored(answers, target_s)))
                    await asyncio.gather(*(engine.idle() for engine in engines.values()))
                found[policy].append(json.loads(path.read_text())["attainment"])
    return {
        "engines": ", ".join(f"{size} on core {core}" for size, core in ENGINES.values()),
        "num_requests": num, "rate_per_s": rate_per_s, "target_s": target_s, "seed": SEED,
        "policies": {
            policy: {"attainment": values, "mean": sum(values) / len(values)} for policy, values in found.items()
        },
    }  # fmt: skip


async def _calibrate(
    engines: dict[str, Instance], directory: Path, profiles: dict[str, Path], *, seconds: float
) -> None:
    await asyncio.gather(*(rounds(engine, seconds=seconds, seed=SEED + 1) for engine in engines.values()))
    for name, engine in engines.items():
        await engine.idle()
        log = directory / f"choice-{name}.steps.jsonl"
        engine.take_log(log)
        fit(log, profiles[name])


def _rate_per_s(profiles: dict[str, Path]) -> float:
    known = [load_profile(path) for path in profiles.values()]
    return _LOAD * sum(capacity_per_s("poisson", one.limits, one.step_time) for one in known)


def _config(engines: dict[str, Instance], profiles: dict[str, Path], policy: str) -> Config:
    return pool(
        [{"name": MODEL, "context_tokens": CONTEXT_TOKENS, "prior": {"output_tokens": CONTEXT_TOKENS}}],
        [
            {
                "id": name, "model": MODEL, "api_base": engine.url, "engine": "vllm-0.32",
                "profile": str(profiles[name]), "snapshots": {"shared_memory": engine.segment},
            }
            for name, engine in engines.items()
        ],
        routing={"policy": policy},
        resilience={"deadline_s": 600.0, "first_byte_timeout_s": 300.0, "idle_timeout_s": 300.0},
    )  # fmt: skip


async def _play(config: Config, asked: Sequence[Asked], target_s: float | None, name: str) -> list[Answered]:
    async with running_gateway(config) as running:
        await asyncio.sleep(0.5)
        headers = {} if target_s is None else {"x-slo-ttft-ms": f"{1e3 * target_s:.1f}"}
        return await play(asked, f"{running.url}/v1", name=name, model=MODEL, seed=SEED, headers=headers)


def _scored(answers: Sequence[Answered], target_s: float) -> dict[str, Any]:
    in_time = [one.error is None and one.ttft_s is not None and one.ttft_s <= target_s for one in answers]
    chosen: dict[str, int] = {}
    for one in answers:
        chosen[one.instance or "none"] = chosen.get(one.instance or "none", 0) + 1
    return {
        "attainment": sum(in_time) / len(in_time),
        "num_failed": sum(one.error is not None for one in answers),
        "chosen": chosen,
        "ttft_s": [one.ttft_s for one in answers],
    }
