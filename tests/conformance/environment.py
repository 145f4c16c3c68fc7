"""Makes the environment of the real scheduler, once per content of ``requirements/conformance.txt``.

It lies in a cache directory outside the clone (``HEADWAY_CACHE``, else ``XDG_CACHE_HOME``, else ``~/.cache``), because
torch and vLLM take 1.8 GB and do not change with the code. A marker file is written last, so an installation that was
cut short is done again, and a lock keeps two runs from installing at once. It never touches the caller's environment.
Other requirements make other environments in the same way (``tests/real_vllm_environment.py``).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import headway

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "conformance.txt"
WHAT = "the real scheduler (1.8 GB)"


def cache_directory() -> Path:
    """Where Headway keeps what is expensive to make."""
    root = os.environ.get("HEADWAY_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "headway"


def environment_directory(requirements: Path = REQUIREMENTS) -> Path:
    """The directory of the environment that these requirements and this Python make."""
    key = requirements.read_bytes() + sys.version.encode()
    return cache_directory() / f"{requirements.stem}-{hashlib.sha256(key).hexdigest()[:16]}"


def installed_python(requirements: Path = REQUIREMENTS) -> Path | None:
    """The environment's Python if it is installed already."""
    directory = environment_directory(requirements)
    return directory / "bin" / "python" if (directory / ".complete").exists() else None


def ensure_environment(requirements: Path = REQUIREMENTS, what: str = WHAT) -> Path:
    """The environment's Python, installed first where needed.

    Raises:
        SystemExit: an installation step failed; pip has said why.
    """
    directory = environment_directory(requirements)
    python, marker = directory / "bin" / "python", directory / ".complete"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            print(f"installing {what} into {directory}, once", file=sys.stderr, flush=True)
            shutil.rmtree(directory, ignore_errors=True)
            install(directory, python, requirements)
            marker.touch()
    return python


def install(directory: Path, python: Path, requirements: Path) -> None:
    """A new virtual environment with torch, then everything else pinned and without dependencies."""
    torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        [*pip, "--constraint", str(requirements), torch],
        [*pip, "--no-deps", "--requirement", str(requirements)],
    ):
        done = subprocess.run(command, check=False, env=clean_environment(directory), stdout=sys.stderr)
        if done.returncode != 0:
            raise SystemExit(f"{requirements.stem}: {' '.join(command)} failed with status {done.returncode}")


def clean_environment(directory: Path) -> dict[str, str]:
    """Environment variables for a process inside: no packages of the caller's, no network, all caches inside."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return variables | {
        "PYTHONNOUSERSITE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "huggingface"),
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }


def headway_path(directory: Path) -> Path:
    """A directory for ``PYTHONPATH`` with this very package, its compiled core included, made inside ``directory``.

    The core lies beside the sources or in the installation, by how it was built; another Python needs both as one.
    """
    from headway import _core

    package = directory / "headway-path" / "headway"
    shutil.rmtree(package.parent, ignore_errors=True)
    package.mkdir(parents=True)
    core = Path(str(_core.__file__))
    for source in [*Path(headway.__file__).parent.iterdir(), core]:
        link = package / source.name
        if source.name != "__pycache__" and not link.exists():
            link.symlink_to(source)
    return package.parent
