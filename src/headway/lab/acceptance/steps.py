"""A1, A1b: step-time errors, measured by the calibration's own rows; here only as units of the table.

A1b needs the table of composed H100 batch times, which is not part of the package. ``HEADWAY_DATA`` names the directory
that holds it (``timing/h100_composed_iteration_times.csv.gz``); else a directory ``data`` here, or in a folder beside
this one, is taken. Without any the row stands there, not measured.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from headway.calibrate.acceptance import (
    COMPOSED_TIMES,
    MAX_MAPE,
    AcceptanceRow,
    composed_step_error,
    simulated_step_error,
)
from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.table import Group, Results, row
from headway.profiles import truth_names


class SimulatedSteps(Struct, frozen=True, kw_only=True):
    """A1 of one truth profile."""

    name: str
    seeds: tuple[int, ...]
    num_queries: int

    @property
    def cost(self) -> float:
        """One calibration per seed."""
        return self.num_queries * len(self.seeds) * 60.0

    def run(self) -> list[AcceptanceRow]:
        """Its rows."""
        return simulated_step_error([self.name], seeds=self.seeds, num_queries=self.num_queries)


class ComposedSteps(Struct, frozen=True, kw_only=True):
    """A1b, from the table in a data directory."""

    data: str
    seeds: tuple[int, ...]

    @property
    def cost(self) -> float:
        """Fits of some thousand rows."""
        return 1e6

    def run(self) -> list[AcceptanceRow]:
        """Its rows."""
        return composed_step_error(Path(self.data), seeds=self.seeds)


def _simulated(settings: Settings) -> list[SimulatedSteps]:
    return [
        SimulatedSteps(name=name, seeds=settings.seeds, num_queries=settings.num_step_queries) for name in truth_names()
    ]


def _simulated_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    return [_named(settings, found) for unit in _simulated(settings) for found in results.of(unit)]


def _named(settings: Settings, found: AcceptanceRow) -> AcceptanceRow:
    """The row, saying so where the run is a reduced one."""
    return replace(found, setting=f"QUICK, reduced: {found.setting}") if settings.name == "quick" else found


def data_directory(needed: Path = COMPOSED_TIMES) -> Path | None:
    """The data directory that holds a file, if there is one: by ``HEADWAY_DATA``, else in or beside the present one."""
    given = os.environ.get("HEADWAY_DATA")
    here = Path.cwd()
    places = [Path(given)] if given else [here / "data", *sorted(here.parent.glob("*/data"))]
    return next((place for place in places if (place / needed).exists()), None)


def _composed(settings: Settings) -> list[ComposedSteps]:
    data = data_directory()
    return [] if data is None else [ComposedSteps(data=str(data), seeds=settings.seeds)]


def _composed_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    units = _composed(settings)
    if units:
        return [_named(settings, found) for unit in units for found in results.of(unit)]
    claim = "step-time MAPE on composed H100 batches: not measured"
    setting = f"no data directory holds {COMPOSED_TIMES}: set HEADWAY_DATA"
    return [row("A1b", claim, setting, float("nan"), at_most=MAX_MAPE)]


GROUPS = (Group("A1", _simulated, _simulated_rows), Group("A1b", _composed, _composed_rows))
