"""The environment of a whole vLLM, its models, and Headway inside it: made once, kept outside the clone.

``requirements/real-engine.txt`` makes it, in the cache directory and by the functions of
``conformance/environment.py`` (2.2 GB). Models have random weights and are made by a script that is not part of this
repository: ``HEADWAY_VLLM`` names the directory that holds ``make_model.py``. Tests ask :func:`missing` first and skip
with its words; nothing here installs or downloads unless it is called to.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal

from conformance.environment import (
    cache_directory,
    clean_environment,
    ensure_environment,
    environment_directory,
    headway_path,
    installed_python,
)

REQUIREMENTS: Final = Path(__file__).parents[1] / "requirements" / "real-engine.txt"
MODEL_SCRIPTS: Final = Path(os.environ.get("HEADWAY_VLLM") or Path(__file__).parents[2] / "shared" / "vllm")

#: Hidden size × layers.
ModelSize = Literal["256x4", "512x8", "1024x12"]
_SHAPES: Final[dict[ModelSize, dict[str, int]]] = {
    "256x4": {"hidden": 256, "layers": 4, "heads": 4, "kv-heads": 2, "head-dim": 64, "inter": 768},
    "512x8": {"hidden": 512, "layers": 8, "heads": 8, "kv-heads": 4, "head-dim": 64, "inter": 1536},
    "1024x12": {"hidden": 1024, "layers": 12, "heads": 16, "kv-heads": 8, "head-dim": 64, "inter": 3072},
}


def missing() -> str | None:
    """Why no real vLLM runs here, in words for a skipped test; None when it was asked for and all is there."""
    if not os.environ.get("HEADWAY_E2E"):
        return "real vLLM servers take long to start: `make e2e` runs this"
    if installed_python(REQUIREMENTS) is None:
        return f"no vLLM is installed for {REQUIREMENTS.name}: run `python tests/real_vllm_environment.py`"
    if not (MODEL_SCRIPTS / "make_model.py").exists():
        return f"{MODEL_SCRIPTS} holds no make_model.py: set HEADWAY_VLLM to the directory that does"
    return None


def ensure_python() -> Path:
    """The Python that has vLLM, installed first where needed (a few minutes).

    Raises:
        SystemExit: an installation step failed; pip has said why.
    """
    return ensure_environment(REQUIREMENTS, "vLLM on CPU (2.2 GB)")


def ensure_model(size: ModelSize) -> Path:
    """A model directory of this size, made first where needed (a few seconds). The same bytes for the same script.

    Raises:
        SystemExit: the script is not there or failed.
    """
    script = MODEL_SCRIPTS / "make_model.py"
    if not script.exists():
        raise SystemExit(f"{MODEL_SCRIPTS} holds no make_model.py: set HEADWAY_VLLM to the directory that does")
    options = [f"--{name}={value}" for name, value in _SHAPES[size].items()]
    key = hashlib.sha256(script.read_bytes() + " ".join(options).encode()).hexdigest()[:16]
    directory = cache_directory() / f"model-{size}-{key}"
    python = ensure_python()
    with open(directory.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            draft = directory.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)
            command = [str(python), str(script), str(draft), *options]
            done = subprocess.run(
                command, check=False, env=clean_environment(environment_directory(REQUIREMENTS)), stdout=sys.stderr
            )
            if done.returncode != 0:
                raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}")
            draft.rename(directory)
    return directory


def engine_environment(directory: Path, *, core: int | None = None) -> dict[str, str]:
    """Environment variables of a vLLM process with Headway importable; what it writes goes below ``directory``.

    ``core`` is the processor core its arithmetic is bound to; None leaves that to vLLM.
    """
    variables = clean_environment(environment_directory(REQUIREMENTS))
    variables = {name: value for name, value in variables.items() if not name.startswith("HEADWAY_")}
    variables |= {
        "PYTHONPATH": str(headway_path(directory)),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "INFO",
        "DO_NOT_TRACK": "1",
    }
    if core is not None:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    return variables


if __name__ == "__main__":
    if not (MODEL_SCRIPTS / "make_model.py").exists():
        print(f"{MODEL_SCRIPTS} holds no make_model.py (HEADWAY_VLLM): no real engine here", file=sys.stderr)
        sys.exit(0)
    print(ensure_python())
    for model_size in _SHAPES:
        print(ensure_model(model_size))
