"""Runs the acceptance table: the units of the rows asked for, once each, in parallel; then the rows.

Units are independent and small in memory, so processes of their own share nothing but the code; what is timed runs
before them, alone. Same settings, same rows: which process ran what, and when, changes nothing. It refuses an unknown
row by name.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Hashable, Sequence

from headway.calibrate.acceptance import AcceptanceRow
from headway.errors import ConfigError, HeadwayError
from headway.lab.acceptance import (
    baselines,
    bid_price,
    bid_price_weights,
    estimates,
    knowledge,
    priced,
    queueing,
    staleness,
    steps,
    utility,
)
from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.table import Group, Results, Unit


def _number(claim_id: str) -> tuple[int, str]:
    """``A1b`` as (1, "b")."""
    digits = "".join(character for character in claim_id if character.isdigit())
    return int(digits), claim_id.split(digits, 1)[1]


_ALL = (
    *(steps, estimates, utility, baselines, staleness, queueing, knowledge, priced),
    *(bid_price, bid_price_weights),
)
#: Every claim, in the order of their numbers.
GROUPS: tuple[Group, ...] = tuple(
    sorted((group for module in _ALL for group in module.GROUPS), key=lambda group: _number(group.claim_id))
)

#: Called with (units done, units in all) after each.
Progress = Callable[[int, int], None]


def acceptance_rows(
    settings: Settings,
    *,
    only: Sequence[str] = (),
    num_jobs: int | None = None,
    progress: Progress | None = None,
) -> list[AcceptanceRow]:
    """The rows of the table in order, or of the claims named in ``only`` (``A7``, or one row: ``A7-all``).

    ``num_jobs`` processes run the units, as many as there are cores by default; 1 runs them in this one.

    Raises:
        ConfigError: ``only`` names a claim or row that does not exist.
        HeadwayError: joblib is not installed and more than one process is asked for.
    """
    groups = _chosen(only)
    needed: dict[Unit[object], None] = {}
    for group in groups:
        needed.update(dict.fromkeys(group.needs(settings)))
    units = sorted(needed, key=lambda unit: -unit.cost)
    results = Results(_run(units, num_jobs or os.cpu_count() or 1, progress))
    rows = [row for group in groups for row in group.rows(settings, results)]
    kept = [row for row in rows if not only or any(_asks_for(name, row.id) for name in only)]
    missing = [name for name in only if not any(_asks_for(name, row.id) for row in rows)]
    if missing:
        raise ConfigError(_unknown(missing[0], [row.id for row in rows]), key="only")
    return kept


def _chosen(only: Sequence[str]) -> list[Group]:
    claims = [group.claim_id for group in GROUPS]
    for name in only:
        if name.split("-", 1)[0] not in claims:
            raise ConfigError(_unknown(name, claims), key="only")
    asked = {name.split("-", 1)[0] for name in only}
    return [group for group in GROUPS if not asked or group.claim_id in asked]


def _asks_for(name: str, row_id: str) -> bool:
    return row_id == name or row_id.startswith(f"{name}-")


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown row {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}")


def _run(units: Sequence[Unit[object]], num_jobs: int, progress: Progress | None) -> dict[Hashable, object]:
    """The result of each unit. Those of infinite cost come first, here and one by one: they are timed."""
    found: dict[Hashable, object] = {}

    def note(unit: Unit[object], result: object) -> None:
        found[unit] = result
        if progress is not None:
            progress(len(found), len(units))

    num_here = len(units) if num_jobs == 1 else sum(math.isinf(unit.cost) for unit in units)
    others = units[num_here:]
    if others:
        try:
            from joblib import Parallel, delayed
        except ImportError as error:
            raise HeadwayError("parallel runs need joblib: install headway[lab]") from error
    for unit in units[:num_here]:
        note(unit, unit.run())
    if others:
        parallel = Parallel(n_jobs=num_jobs, backend="loky", return_as="generator", batch_size=1)
        for unit, result in zip(others, parallel(delayed(_call)(unit) for unit in others), strict=True):
            note(unit, result)
    return found


def _call(unit: Unit[object]) -> object:
    return unit.run()
