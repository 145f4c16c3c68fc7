"""The house keeps its own rules: public names, who may touch the native module, what an import loads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import headway

SOURCE = Path(headway.__file__).parent

# Rooms that may cross into the native module; everything else goes through them.
NATIVE_USERS = (
    "__init__.py",
    "types.py",
    "fleet/",
    "estimate/",
    "snapshot/shared_memory.py",
    "engines/",
    "lab/",
    "cli/bench.py",
    "cli/version.py",
    "lab/",
    "calibrate",
)


def loaded_by(statement: str) -> set[str]:
    """Names of the modules a fresh interpreter holds after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.mark.parametrize("name", headway.__all__)
def test_every_public_name_resolves(name: str) -> None:
    """Each name of __all__ can be taken from the package."""
    assert getattr(headway, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that is not public fails as on any module."""
    with pytest.raises(AttributeError, match="nonsense"):
        headway.nonsense  # noqa: B018 - the access is what is tested


def test_only_named_rooms_import_the_native_module() -> None:
    """The native module is reached through a handful of files, so that its interface can change."""
    uses = re.compile(r"^\s*(from headway\._core import|from headway import _core|import headway\._core)", re.MULTILINE)
    users = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if uses.search(path.read_text())]
    assert [user for user in users if not user.startswith(NATIVE_USERS)] == []
    assert "fleet/fleet_view.py" in users


def test_core_draws_no_global_random_numbers() -> None:
    """Random policies take a Generator; the core never touches numpy's global state."""
    rooms = ["router.py", "fleet/", "types.py", "errors.py", "policy", "estimate", "predict"]
    files = [path for room in rooms for path in [SOURCE / room, *(SOURCE / room).rglob("*.py")] if path.is_file()]
    calls = re.compile(r"(np|numpy)\.random\.(?!Generator\b)\w+")
    assert [str(path) for path in files if calls.search(path.read_text())] == []


def test_importing_the_package_loads_neither_core_nor_numpy() -> None:
    """``import headway`` is cheap: public names are resolved when used."""
    loaded = loaded_by("import headway")
    assert not loaded & {"numpy", "headway._core", "headway.router", "aiohttp", "uvicorn"}


def test_serving_loads_no_trainer_and_no_demo() -> None:
    """The gateway needs none of the heavy extras, and neither demo nor lab."""
    loaded = loaded_by("import headway.gateway.app")
    assert not loaded & {"lightgbm", "sklearn", "scipy", "torch", "vllm", "polars", "matplotlib", "headway.demo"}
