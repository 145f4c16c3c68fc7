"""Reads a step log (``docs/calibration.md``) into columns, gzipped or not.

It refuses to guess: a line that is malformed, holds an unknown key, a time that no step takes, or counts that
contradict each other or the header's limits ends in a :class:`~headway.errors.DatasetError` with path and line.
Batches that held no request (an engine that only preempted) are dropped and counted.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from headway.calibrate.step_table import FEATURES, StepTable, feature_matrix
from headway.engines.step_log import (
    LoggedArrival,
    LoggedBatch,
    LoggedEnd,
    StepFeatures,
    StepLogHeader,
    batch_features,
)
from headway.errors import DatasetError

_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Sum = Annotated[int, Meta(ge=0, le=2**62)]
_Squares = Annotated[float, Meta(ge=0)]


class _Line(Struct, kw_only=True, forbid_unknown_fields=True):
    start_s: float
    time_s: float
    chunks: list[tuple[_Tokens, _Count, bool]] | UnsetType = UNSET
    requests: _Count | UnsetType = UNSET
    tokens: _Sum | UnsetType = UNSET
    prefill_tokens: _Sum | UnsetType = UNSET
    decodes: _Count | UnsetType = UNSET
    decode_context: _Sum | UnsetType = UNSET
    context: _Sum | UnsetType = UNSET
    prefill_pairs: _Sum | UnsetType = UNSET
    chunk_squares: _Squares | UnsetType = UNSET
    context_squares: _Squares | UnsetType = UNSET
    num_outputs: _Count | UnsetType = UNSET
    num_finished: _Count | UnsetType = UNSET
    arrivals: list[LoggedArrival] | UnsetType = UNSET
    cancelled: list[str] | UnsetType = UNSET
    cancelled_ends: list[LoggedEnd] | UnsetType = UNSET
    scheduled: list[tuple[str, _Tokens]] | UnsetType = UNSET
    cached: list[tuple[str, _Tokens]] | UnsetType = UNSET
    preempted: list[str] | UnsetType = UNSET
    free_blocks: _Count | UnsetType = UNSET
    ended: list[LoggedEnd] | UnsetType = UNSET


#: What may stand in a line or be left out, but only in all lines of a log alike.
_OPTIONAL: Final = ("num_outputs", "num_finished")


class StepLog(Struct, frozen=True, eq=False):
    """A step log in memory. ``sha256`` is that of the file's bytes; ``num_empty`` batches held no request."""

    path: str
    sha256: str
    header: StepLogHeader
    steps: StepTable
    num_empty: int


def read_step_log(path: Path) -> StepLog:
    """The step log at ``path``.

    Raises:
        DatasetError: the file cannot be read, or a line is wrong; names path and line.
    """
    data, digest = _read(path)
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise DatasetError("is empty; the first line must be the step log's header", path=str(path), line=1)
    header = _header(path, *lines[0])
    read = _Rows(path, header)
    for number, line in lines[1:]:
        try:
            read.add(msgspec.json.decode(line, type=_Line), number)
        except msgspec.MsgspecError as error:
            raise DatasetError(_what_is_wrong(line, error), path=str(path), line=number) from error
    return StepLog(str(path), digest, header, read.table(), read.num_empty)


def read_batches(path: Path) -> tuple[StepLogHeader, list[LoggedBatch]]:
    """The header and every batch of a log that names its requests, those without a request included.

    Raises:
        DatasetError: the file cannot be read, or a line is wrong or names no requests; names path and line.
    """
    read_step_log(path)  # all that is checked of a log is checked there
    data, _ = _read(path)
    header, *lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    batches = []
    for number, line in lines:
        try:
            batches.append(msgspec.json.decode(line, type=LoggedBatch))
        except msgspec.MsgspecError as error:
            raise DatasetError(f"names no requests: {error}", path=str(path), line=number) from error
    return _header(path, *header), batches


def _read(path: Path) -> tuple[bytes, str]:
    try:
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        return (gzip.decompress(data) if path.suffix == ".gz" else data), digest
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"cannot be read: {error}", path=str(path)) from error


def _header(path: Path, number: int, line: bytes) -> StepLogHeader:
    try:
        header = msgspec.json.decode(line, type=StepLogHeader)
    except msgspec.MsgspecError as error:
        message = f"the first line must be the step log's header: {_what_is_wrong(line, error)}"
        raise DatasetError(message, path=str(path), line=number) from error
    for name in ("engine_version", "hardware", "model"):
        if not (getattr(header, name).strip() and getattr(header, name).isprintable()):
            raise DatasetError(f"{name}: must be printable text", path=str(path), line=number)
    return header


def _what_is_wrong(line: bytes, error: Exception) -> str:
    """The decoder's complaint, but for numbers that JSON has no word for, which are named by their key."""
    try:
        parsed = json.loads(line)  # reads NaN and Infinity, where msgspec only says which byte is wrong
    except ValueError:
        return str(error)
    for key, value in parsed.items() if isinstance(parsed, dict) else ():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key}: must be finite, not {value}"
    return str(error)


class _Rows:
    """Checks lines one by one and collects them."""

    def __init__(self, path: Path, header: StepLogHeader) -> None:
        self.num_empty = 0
        self._path = str(path)
        self._limits = header.limits
        self._times: list[tuple[float, float]] = []
        self._batches: list[StepFeatures] = []
        self._optional: dict[str, list[int]] = {name: [] for name in _OPTIONAL}
        self._present: dict[str, bool] | None = None
        self._last_start_s = -math.inf

    def add(self, line: _Line, number: int) -> None:
        """Take a line in, or say what is wrong with it."""
        problem = self._time_problem(line) or self._optional_problem(line)
        if problem is None:
            batch = _features(line)
            problem = batch if isinstance(batch, str) else self._contradiction(batch) or _contradicts(line, batch)
        if problem is not None:
            raise DatasetError(problem, path=self._path, line=number)
        assert isinstance(batch, StepFeatures)
        self._last_start_s = line.start_s
        if batch.requests == 0:
            self.num_empty += 1
            return
        self._times.append((line.start_s, line.time_s))
        self._batches.append(batch)
        for name, values in self._optional.items():
            value = getattr(line, name)
            if value is not UNSET:
                values.append(value)

    def table(self) -> StepTable:
        """Everything taken in, as columns."""
        times = np.array(self._times, dtype=np.float64).reshape(-1, 2)
        present = self._present or dict.fromkeys(_OPTIONAL, False)
        outputs, finished = (
            np.array(self._optional[name], dtype=np.float64) if present[name] else None for name in _OPTIONAL
        )
        return StepTable(times[:, 0], times[:, 1], feature_matrix(self._batches), outputs, finished)

    def _time_problem(self, line: _Line) -> str | None:
        if not (math.isfinite(line.time_s) and line.time_s > 0):
            return f"time_s: must be finite and above 0, not {line.time_s!r}"
        if not math.isfinite(line.start_s):
            return f"start_s: must be finite, not {line.start_s!r}"
        if line.start_s < self._last_start_s:
            return f"start_s: must not fall, but {line.start_s!r} comes after {self._last_start_s!r}"
        return None

    def _optional_problem(self, line: _Line) -> str | None:
        present = {name: getattr(line, name) is not UNSET for name in _OPTIONAL}
        if self._present is None:
            self._present = present
        for name in _OPTIONAL:
            if present[name] != self._present[name]:
                return f"{name}: must stand in every line or in none"
        return None

    def _contradiction(self, batch: StepFeatures) -> str | None:
        limits = self._limits
        num_prefills, prefill_tokens = batch.requests - batch.decodes, batch.prefill_tokens
        most_pairs = prefill_tokens * batch.context + prefill_tokens * (prefill_tokens + 1) // 2
        if batch.tokens != prefill_tokens + batch.decodes:
            return f"tokens: must be prefill_tokens + decodes, {prefill_tokens + batch.decodes}, not {batch.tokens}"
        if batch.tokens > limits.max_num_batched_tokens:
            return f"tokens: {batch.tokens} is beyond max_num_batched_tokens, {limits.max_num_batched_tokens}"
        if batch.requests > limits.max_num_seqs:
            return f"requests: {batch.requests} is beyond max_num_seqs, {limits.max_num_seqs}"
        if not min(prefill_tokens, 1) <= num_prefills <= prefill_tokens:
            return f"requests: {batch.requests} with {batch.decodes} decodes and {prefill_tokens} prefill tokens"
        if not batch.decode_context <= batch.context <= batch.requests * limits.max_model_len:
            return f"context: {batch.context} with decode_context {batch.decode_context} and {batch.requests} requests"
        if not prefill_tokens <= batch.prefill_pairs <= most_pairs:
            return f"prefill_pairs: {batch.prefill_pairs} with {prefill_tokens} prefill tokens, context {batch.context}"
        if not prefill_tokens <= batch.chunk_squares <= prefill_tokens**2:
            return f"chunk_squares: {batch.chunk_squares:.0f} is no sum of squares of {prefill_tokens} tokens"
        if not batch.context <= batch.context_squares <= batch.context**2:
            return f"context_squares: {batch.context_squares:.0f} is no sum of squares of {batch.context} tokens"
        return None


def _contradicts(line: _Line, batch: StepFeatures) -> str | None:
    """What else the line says that cannot be true of its batch."""
    if line.scheduled is not UNSET:
        tokens = sum(scheduled for _, scheduled in line.scheduled)
        if len(line.scheduled) != batch.requests or tokens != batch.tokens:
            return f"scheduled: {len(line.scheduled)} requests with {tokens} tokens, the sums say otherwise"
    num_outputs = batch.requests if line.num_outputs is UNSET else line.num_outputs
    if num_outputs > batch.requests:
        return f"num_outputs: {num_outputs} from {batch.requests} requests"
    if line.num_finished is not UNSET and line.num_finished > num_outputs:
        return f"num_finished: {line.num_finished} with {num_outputs} outputs"
    return None


def _features(line: _Line) -> StepFeatures | str:
    """The features of a line, given as chunks or as sums; a text says what is wrong with it."""
    given = [name for name in FEATURES if getattr(line, name) is not UNSET]
    if line.chunks is not UNSET:
        if given:
            return f"{given[0]}: stands beside chunks, which say it already"
        for index, (tokens, _, is_decode) in enumerate(line.chunks):
            if is_decode and tokens != 1:
                return f"chunks[{index}]: a decode has 1 token, not {tokens}"
        return batch_features(line.chunks)
    missing = [name for name in FEATURES if name not in given]
    if missing:
        return f"{missing[0]}: is missing; a step has chunks, or all of {', '.join(FEATURES)}"
    return StepFeatures(**{name: getattr(line, name) for name in FEATURES})
