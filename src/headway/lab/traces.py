"""Reads traces of arrivals and lengths (.csv, gzipped or not), one row a query.

Columns by name: ``prompt_tokens``, ``output_tokens`` and, where known, ``arrival_s``. Rows that no engine of a pool
could take (nothing to compute, nothing to answer, longer than the context) are dropped and counted. Stamps of a coarse
clock, which many rows share, are spread over its tick. It refuses to guess at anything malformed: a
:class:`~headway.errors.DatasetError` names file, line and column.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.config.lines import read_lines
from headway.errors import DatasetError
from headway.lab.truth import PROMPT_CAP_TOKENS, stream
from headway.types import MAX_COUNT

#: Stamps of a trace are a coarse clock's when more than this share of rows repeat the stamp before them.
_SHARED_STAMPS = 0.5


class Trace(Struct, frozen=True, eq=False, kw_only=True):
    """The usable rows of a trace in order of arrival, and what became of the others.

    ``arrival_s`` starts at 0 and is None where the file has no such column. ``tick_s`` is the clock tick over which
    shared stamps were spread, None where nothing had to be.
    """

    name: str
    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    num_dropped_empty: int
    num_dropped_long: int
    tick_s: float | None = None


def load_trace(path: Path, *, context_tokens: int = PROMPT_CAP_TOKENS, seed: int = 0) -> Trace:
    """The rows of a trace that fit ``context_tokens`` (prompt and output together). ``seed`` spreads shared stamps.

    Raises:
        DatasetError: unreadable, a column missing, a value that is no number, negative or not finite, or no row left.
    """
    times_s: list[float] = []
    lengths: list[tuple[int, int]] = []
    num_empty = num_long = 0
    rows = _Rows(path, "prompt_tokens", "output_tokens")
    timed = "arrival_s" in rows.header
    for row in rows:
        prompt_tokens, output_tokens = (row.count(name) for name in ("prompt_tokens", "output_tokens"))
        time_s = row.number("arrival_s") if timed else 0.0
        if not prompt_tokens or not output_tokens:
            num_empty += 1
        elif prompt_tokens + output_tokens > context_tokens:
            num_long += 1
        else:
            times_s.append(time_s)
            lengths.append((prompt_tokens, output_tokens))
    if not lengths:
        raise DatasetError(
            f"holds no usable row ({num_empty} without tokens, {num_long} longer than {context_tokens} tokens)",
            path=str(path),
        )
    prompts, outputs = np.array(lengths, np.int32).T
    arrival_s, tick_s = None, None
    if timed:
        order = np.argsort(times_s, kind="stable")
        arrival_s, tick_s = _spread(np.array(times_s)[order], seed)
        if tick_s is not None:
            order = order[np.argsort(arrival_s, kind="stable")]
            arrival_s = np.sort(arrival_s)
        arrival_s = arrival_s - arrival_s[0]
        prompts, outputs = prompts[order], outputs[order]
    return Trace(
        name=path.name,
        arrival_s=arrival_s,
        prompt_tokens=prompts,
        output_tokens=outputs,
        num_dropped_empty=num_empty,
        num_dropped_long=num_long,
        tick_s=tick_s,
    )


def load_arrivals(path: Path) -> list[float]:
    """The arrival times of a trace in seconds, sorted: its column ``arrival_s``, as the file has them.

    Raises:
        DatasetError: the file cannot be read, has no such column, a value is no time, or all are equal.
    """
    arrivals = sorted(row.number("arrival_s") for row in _Rows(path, "arrival_s"))
    if not arrivals or arrivals[0] == arrivals[-1]:
        raise DatasetError("needs at least two different arrival times", path=str(path))
    return arrivals


class _Row:
    """One row, its values by column name."""

    __slots__ = ("_rows", "_values")

    def __init__(self, rows: _Rows, values: list[str]) -> None:
        self._rows, self._values = rows, values

    def number(self, name: str) -> float:
        rows = self._rows
        try:
            value = float(self._values[rows.header.index(name)])
        except (ValueError, IndexError) as error:
            raise rows.error(f"{name!r} must be a number") from error
        if not math.isfinite(value) or value < 0:
            raise rows.error(f"{name!r} must be finite and at least 0, not {value:g}")
        return value

    def count(self, name: str) -> int:
        value = self.number(name)
        if value != int(value) or value > MAX_COUNT:
            raise self._rows.error(f"{name!r} must be a whole number of tokens, not {value:g}")
        return int(value)


class _Rows:
    """The rows of a csv file under its header; blank lines are passed over."""

    def __init__(self, path: Path, *required: str) -> None:
        self._path = path
        self._reader = csv.reader(line for _, line in read_lines(path))
        self.header: list[str] = next(self._reader, [])
        for name in required:
            if name not in self.header:
                raise DatasetError(f"the first line must name a column {name!r}", path=str(path), line=1)

    def error(self, message: str) -> DatasetError:
        return DatasetError(message, path=str(self._path), line=self._reader.line_num)

    def __iter__(self) -> Iterator[_Row]:
        return (_Row(self, values) for values in self._reader if values)


def _spread(times_s: NDArray[np.float64], seed: int) -> tuple[NDArray[np.float64], float | None]:
    """The times, and where most rows share a stamp, spread evenly at random over the tick behind each."""
    steps_s = np.diff(times_s)
    if len(steps_s) == 0 or (steps_s == 0).mean() <= _SHARED_STAMPS or not steps_s.any():
        return times_s, None
    tick_s = float(np.median(steps_s[steps_s > 0]))
    return times_s + tick_s * stream(seed, "tick").random(len(times_s)), tick_s
