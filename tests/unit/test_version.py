"""The version verb."""

from __future__ import annotations

import json
import sys

import pytest

import headway
from headway.cli.version import version


def test_it_prints_one_json_object_for_bug_reports(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions of Headway, Python and platform, and the file of the native core."""
    assert version(json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["headway"] == headway.__version__
    assert answer["core"].startswith("_core.")
    assert answer["problem"] is None


def test_a_core_that_cannot_be_loaded_is_an_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text says why and what to do, and the exit code is 1."""
    monkeypatch.delattr(headway, "_core", raising=False)
    monkeypatch.setitem(sys.modules, "headway._core", None)
    assert version() == 1
    output = capsys.readouterr()
    assert "core     cannot be loaded" in output.out
    assert "make build" in output.err
