"""Three real vLLM servers of different sizes behind a real gateway, started once for all tests that use them.

The engines share two cores, so nothing here says anything about speed. The middle one runs with vLLM's priority
scheduling and few seats, so that order in its queue can be seen.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from headway.bench.processes import Measured, headway_command, serving
from headway.profiles import load_profile
from headway.snapshot.shared_memory import SharedMemoryReader, segment_path
from real_vllm import RealVllm
from real_vllm_environment import ModelSize, ensure_model

CONTEXT_TOKENS: Final = 4096
SEATS: Final = 4
SIZES: Final[dict[str, ModelSize]] = {"small": "256x4", "medium": "512x8", "large": "1024x12"}
QUALITY: Final = {"small": 0.3, "medium": 0.6, "large": 0.9}
_PRIORITY: Final = ("--scheduling-policy=priority", f"--max-num-seqs={SEATS}")
_SNAPSHOT_WITHIN_S: Final = 60.0
#: Three at once on two cores that may have other work too.
_READY_WITHIN_S: Final = 600.0


class Engine:
    """One vLLM server with its segment."""

    def __init__(self, name: str, directory: Path, core: int) -> None:
        self.name = name
        self.segment = f"headway-e2e-{os.getpid()}-{name}"
        self.server = RealVllm(
            model=ensure_model(SIZES[name]),
            directory=directory / name,
            served_name=f"qwen3-{name}",
            core=core,
            environment={"HEADWAY_SNAPSHOT_SHARED_MEMORY": self.segment, "HEADWAY_INSTANCE": name},
            arguments=_PRIORITY if name == "medium" else (),
        )

    def gauge(self, name: str) -> float:
        """The sum of one of vLLM's own gauges."""
        with urllib.request.urlopen(f"{self.server.root_url}/metrics", timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def limits(self) -> dict[str, Any]:
        """What the engine itself says of its limits, from its first snapshot."""
        reader = SharedMemoryReader(self.segment, instance_id=self.name)
        until_s = time.monotonic() + _SNAPSHOT_WITHIN_S
        try:
            while time.monotonic() < until_s:
                shown = reader.poll()
                if shown is not None:
                    return dict(msgspec.to_builtins(shown.limits))
                time.sleep(0.05)
        finally:
            reader.close()
        raise AssertionError(f"{self.name} published nothing:\n{self.server.log_tail()}")


class RealPool:
    """The engines by name, and the gateway in front of them."""

    def __init__(self, engines: dict[str, Engine], gateway: Measured) -> None:
        self.engines, self.gateway = engines, gateway

    def get(self, path: str) -> Any:
        """The JSON of one of the gateway's own paths."""
        with urllib.request.urlopen(self.gateway.url + path, timeout=10.0) as answer:
            return json.loads(answer.read())

    def instance(self, name: str) -> dict[str, Any]:
        """One row of ``/instances``."""
        return next(row for row in self.get("/instances")["instances"] if row["id"] == name)


@contextmanager
def real_pool(directory: Path) -> Iterator[RealPool]:
    """The pool, ready; everything ended on leaving."""
    with ExitStack() as stack:
        # The large one by itself: beside it on one core a small one may give no token for half a minute.
        engines = {name: Engine(name, directory, core) for name, core in zip(SIZES, (1, 1, 0), strict=True)}
        for engine in engines.values():
            stack.callback(segment_path(engine.segment).unlink, missing_ok=True)
            stack.callback(engine.server.stop)
            engine.server.start()
        for engine in engines.values():
            engine.server.wait_ready(_READY_WITHIN_S)
        path = directory / "gateway.yaml"
        path.write_text(_config(directory, engines))
        yield RealPool(engines, stack.enter_context(serving(headway_command("serve", str(path)))))


def _config(directory: Path, engines: dict[str, Engine]) -> str:
    models, instances = [], []
    for name, engine in engines.items():
        model = f"qwen3-{name}"
        models.append(
            {
                "name": model, "context_tokens": CONTEXT_TOKENS, "price": {"input_per_1m": 0.05, "output_per_1m": 0.2},
                "prior": {"quality": QUALITY[name], "output_tokens": 40},
            }
        )  # fmt: skip
        instances.append(
            {
                "id": name, "model": model, "api_base": engine.server.url, "engine": "vllm-0.32",
                "profile": str(_rough_profile(directory, engine)), "snapshots": {"shared_memory": engine.segment},
            }
        )  # fmt: skip
    return yaml.safe_dump(
        {
            "models": models,
            "instances": instances,
            "resilience": {"breaker_open_s": 1.0, "deadline_s": 120},
            "server": {"port": 0},
        }
    )


def _rough_profile(directory: Path, engine: Engine) -> Path:
    """The engine's own limits, and step times of about the right size for three engines on two busy cores."""
    shipped = load_profile("h100-qwen3-8b")
    profile = {
        "kind": "estimator",
        "name": engine.name,
        "model": f"qwen3-{engine.name}",
        "hardware": "two shared CPU cores",
        "engine_version": "vllm-0.32.0",
        "source": "a guess, for tests of function",
        "limits": engine.limits(),
        "step_time": {"form": "linear", "b0": 0.02, "b1": 2e-4, "b2": 1e-7, "b3": 1e-8},
        "calibration": msgspec.to_builtins(shipped.calibration),
    }
    path = directory / f"{engine.name}.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path
