"""Evaluation data: what one model made of one prompt, one row (a JSON object) per line, gzipped or not.

``headway collect`` writes such rows, ``headway judge`` and the gateway's feedback complete them, ``headway train`` and
``headway evaluate`` read them. The reader refuses to guess: an unknown field, a value out of range, a row without a
prompt or the same answer twice is a :class:`~headway.errors.DatasetError` that names file and line.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headway.config.lines import read_lines
from headway.errors import DatasetError, RequestError
from headway.predict.feature_row import FeatureRow
from headway.predict.tokens import messages_text
from headway.types import MAX_COUNT, OutcomeStatus

_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Usd = Annotated[float, Meta(ge=0, le=1e9)]
_Quality = Annotated[float, Meta(ge=0, le=1)]


class EvaluationRow(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One answer of one model, or the attempt at it. Exactly one of ``prompt``, ``messages`` and ``features`` is given.

    ``prompt_id`` is the same for every model's answer to one prompt. ``messages`` are OpenAI chat messages as sent,
    ``features`` stand for a prompt that a gateway was not to keep; ``comment`` is what a user said of the answer.
    Tokens are as the engine counted them; ``max_tokens`` is the request's own limit, so an answer of that length may
    have been cut. ``quality`` in [0, 1] is None until judged, ``judge`` says who or what judged. ``cost_usd`` is what
    was charged. Times run from sending, in seconds. A ``status`` other than ``ok`` says that ``response`` is missing or
    broken off; such rows count for nothing but the account. ``error`` holds the reason in words.
    """

    prompt_id: _Name
    model: _Name
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    features: FeatureRow | None = None
    response: str | None = None
    prompt_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    cost_usd: _Usd | None = None
    quality: _Quality | None = None
    judge: str | None = None
    task: str | None = None
    reference: str | None = None
    max_tokens: _Positive | None = None
    ttft_s: _Seconds | None = None
    latency_s: _Seconds | None = None
    status: OutcomeStatus = "ok"
    error: str | None = None
    comment: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is not None) + (self.messages is not None) + (self.features is not None) != 1:
            raise ValueError("a row needs one of `prompt`, `messages` and `features`")
        if self.messages is not None:
            try:
                messages_text(self.messages)
            except RequestError as error:
                raise ValueError(str(error)) from error

    @property
    def text(self) -> str:
        """The prompt as the router sees it, all messages in a row; a stand-in, equal for equal prompts, if not kept."""
        if self.features is not None:
            return f"features {self.features.prompt_sha256}"
        return self.prompt if self.prompt is not None else messages_text(self.messages)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(EvaluationRow)


def encode_row(row: EvaluationRow) -> bytes:
    """The row as one line, with its line end. The line is complete: appending it is all there is to do.

    Raises:
        DatasetError: a value is out of its range.
    """
    line = _encoder.encode(row)
    try:
        _decoder.decode(line)  # ranges are only checked when decoded; what is written must be readable
    except msgspec.MsgspecError as error:
        raise DatasetError(f"row {row.prompt_id!r} of {row.model!r}: {error}") from error
    return line + b"\n"


def decode_row(line: str | bytes, *, path: str = "", number: int | None = None) -> EvaluationRow:
    """The row in ``line``; ``path`` and ``number`` only appear in complaints.

    Raises:
        DatasetError: no JSON object, an unknown field, or a value out of range.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DatasetError(str(error), path=path, line=number) from error


def read_rows(path: Path) -> Iterator[EvaluationRow]:
    """The rows of a file in order; blank lines are passed over.

    Raises:
        DatasetError: the file cannot be read, a row is wrong, or a second row of status ``ok`` holds the same prompt
            and model. File and line are in the message.
    """
    seen: dict[tuple[str, str], int] = {}
    for number, line in read_lines(path):
        if not line.strip():
            continue
        row = decode_row(line, path=str(path), number=number)
        if row.status == "ok":
            first = seen.setdefault((row.prompt_id, row.model), number)
            if first != number:
                what = f"prompt {row.prompt_id!r} already has an answer of {row.model!r} in line {first}"
                raise DatasetError(what, path=str(path), line=number)
        yield row


def write_rows(path: Path, rows: Iterable[EvaluationRow]) -> int:
    """Write ``rows`` to a new file (gzipped where its name ends in ``.gz``); returns how many.

    Raises:
        DatasetError: the file cannot be written, or as :func:`encode_row`.
    """
    num = 0
    try:
        # No time stamp inside: equal rows make equal files.
        with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, 0) if path.suffix == ".gz" else raw as file:
            for row in rows:
                file.write(encode_row(row))
                num += 1
    except OSError as error:
        raise DatasetError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
    return num
