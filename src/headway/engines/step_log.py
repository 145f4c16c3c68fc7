"""The step log: what each token batch of an engine held and how long it took, one JSON line per batch.

An engine writes it while it serves; ``headway calibrate`` reads it back and fits step times. It holds counts and times
only, no request ids and nothing of a prompt, unless it is asked for the requests too: then a run can be repeated batch
by batch (:class:`LoggedBatch`). The format is here, below both sides, so that an engine needs none of the fitting. It
refuses to time anything: whoever runs the batches says how long they took. See ``docs/calibration.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final, Literal, Protocol

import msgspec
from msgspec import Struct

from headway.errors import ConfigError
from headway.types import EngineLimits

#: One scheduled chunk: tokens scheduled, context before the batch, whether it is a decode.
Chunk = tuple[int, int, bool]

_BUFFER_BYTES: Final = 1 << 16


class LoggedLimits(EngineLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine limits as they stand in a file: a misspelt key is an error."""


class StepLogHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line; ``step_log`` is the format's version. ``engine_version`` is written as in profiles
    (``vllm-0.32.0``), ``hardware`` and ``model`` are free text."""

    step_log: Literal[1]
    engine_version: str
    hardware: str
    model: str
    limits: LoggedLimits


class StepFeatures(Struct, frozen=True, kw_only=True):
    """The sums over one batch that every step-time form is made of, named as in ``native/step_time.hpp``.

    Contexts are taken before the batch. ``prefill_pairs`` is Σ p·c + p(p+1)/2 and ``chunk_squares`` Σ p² over prefill
    chunks of p tokens on c computed ones; ``context`` and ``context_squares`` run over all scheduled requests.
    """

    requests: int
    tokens: int
    prefill_tokens: int
    decodes: int
    decode_context: int
    context: int
    prefill_pairs: int
    chunk_squares: float
    context_squares: float


class LoggedStep(StepFeatures, frozen=True, kw_only=True):
    """One line: the features, the step's start in seconds since the log began, how long it took, and what came out.

    ``num_outputs`` counts the tokens it gave, ``num_finished`` the requests that ended with it.
    """

    start_s: float
    time_s: float
    num_outputs: int
    num_finished: int


class LoggedArrival(Struct, frozen=True, array_like=True):
    """A request as an engine took it in. ``arrival_s`` counts from the log's beginning, as ``start_s`` of the steps.

    ``prompt_blocks`` are 64-bit hashes of the prompt's full blocks, each of which covers all blocks before it; empty
    where nothing is cached by prefix.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    priority: int
    arrival_s: float
    prompt_blocks: list[int] = []


class LoggedEnd(Struct, frozen=True, array_like=True):
    """How far a request came: its output tokens, and the hashes of the full blocks behind its prompt's."""

    request_id: str
    output_tokens: int
    output_blocks: list[int] = []


class LoggedBatch(LoggedStep, frozen=True, kw_only=True):
    """A line that says whose tokens a batch held, so that the batches of a real engine can be asked of a mirror.

    One line is one call of ``schedule()``. ``arrivals`` are the requests it was the first to see, in their order;
    ``cancelled`` those taken out from outside since the call before. ``scheduled`` is (request id, tokens) in batch
    order; ``cached`` is (request id, tokens) of those admitted by it that were found in the prefix cache;
    ``preempted`` is in order; ``free_blocks`` is as after scheduling. ``ended`` came to their end with this batch;
    ``cancelled_ends`` says how far those cancelled had come.
    Calls that scheduled and preempted nothing while no batch was in flight have no line; what arrived or was cancelled
    before them is in the next.
    """

    arrivals: list[LoggedArrival]
    cancelled: list[str]
    scheduled: list[tuple[str, int]]
    cached: list[tuple[str, int]]
    preempted: list[str]
    free_blocks: int
    ended: list[LoggedEnd]
    cancelled_ends: list[LoggedEnd] = []


class ScheduledRequest(Protocol):
    """What the log wants to know of a request, right after a batch holding it was scheduled."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...
    @property
    def scheduled_tokens(self) -> int: ...


class StepSink(Protocol):
    """Where an engine's steps go: a :class:`StepLogWriter`, or a list in memory behind this one method."""

    def write(self, step: LoggedStep) -> None: ...


def batch_features(chunks: Iterable[Chunk]) -> StepFeatures:
    """The features of a batch of chunks; the Python twin of ``Features::add_chunk``."""
    requests = prefill_tokens = decodes = decode_context = context_sum = prefill_pairs = squares = context_squares = 0
    for tokens, context, is_decode in chunks:
        requests += 1
        context_sum += context
        context_squares += context * context
        if is_decode:
            decodes += 1
            decode_context += context
        else:
            prefill_tokens += tokens
            prefill_pairs += tokens * context + tokens * (tokens + 1) // 2
            squares += tokens * tokens
    return StepFeatures(
        requests=requests,
        tokens=prefill_tokens + decodes,
        prefill_tokens=prefill_tokens,
        decodes=decodes,
        decode_context=decode_context,
        context=context_sum,
        prefill_pairs=prefill_pairs,
        chunk_squares=float(squares),
        context_squares=float(context_squares),
    )


def logged_step(batch: Iterable[ScheduledRequest], *, start_s: float, time_s: float, num_finished: int) -> LoggedStep:
    """The line of a batch just scheduled: ``computed_tokens`` already counts it, outputs are not yet appended."""
    chunks: list[Chunk] = []
    num_outputs = 0
    for request in batch:
        tokens, computed = request.scheduled_tokens, request.computed_tokens
        known = request.prompt_tokens + request.output_tokens
        context = computed - tokens
        chunks.append((tokens, context, tokens == 1 and request.output_tokens > 0 and context == known - 1))
        num_outputs += computed >= known
    features = msgspec.structs.asdict(batch_features(chunks))
    return LoggedStep(**features, start_s=start_s, time_s=time_s, num_outputs=num_outputs, num_finished=num_finished)


class StepLogWriter:
    """Writes a step log, replacing what was at ``path``. Lines are buffered; :meth:`close` writes the last ones.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, header: StepLogHeader) -> None:
        try:
            self._file: IO[bytes] = path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", path=str(path), key="--step-log") from error
        self._encoder = msgspec.json.Encoder()
        self._file.write(self._encoder.encode(header) + b"\n")

    def write(self, step: LoggedStep) -> None:
        """Append one line."""
        self._file.write(self._encoder.encode(step) + b"\n")

    def flush(self) -> None:
        """Write out what is buffered."""
        self._file.flush()

    def close(self) -> None:
        """Write out what is buffered. Nothing happens the second time."""
        self._file.close()
