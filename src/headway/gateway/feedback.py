"""What users say of answers, joined with what the answers cost, as rows from which predictors are retrained.

An answer can be spoken of for a while after it was given, by its request's or its decision's id. Rows have the fields
of ``headway train``'s data sets. Prompts are written only where the configuration says so; else features stand in their
place, and the text lives in memory no longer than the answer can be spoken of. It refuses to log what users write, and
to hold the request path up: files are written by another thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from prometheus_client import CollectorRegistry, Counter, Histogram

from headway.config import Config
from headway.config.keys import beside
from headway.errors import ConfigError, HeadwayError, RequestError
from headway.gateway.decisions import DecisionRecord
from headway.gateway.feedback_rows import Waiting, row_of
from headway.gateway.request import ClientRequest
from headway.gateway.rotated_file import RotatedFile
from headway.types import Outcome

#: Answers that can be spoken of at once, and how many bytes of requests may wait with them.
MAX_WAITING = 8192
MAX_WAITING_BYTES = 64 << 20
#: Answers on their way to the file; beyond, the disk is too slow and they are lost.
MAX_LEAVING = 8192
#: A request longer than this is not kept: pictures and sound say nothing to a predictor.
MAX_BODY_BYTES = 1 << 20
#: The longest feedback, bytes.
MAX_FEEDBACK_BYTES = 64 << 10
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_ERRORS = (-0.8, -0.6, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)

_Id = Annotated[str, Meta(min_length=1, max_length=128)]


class Feedback(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user says of one answer: a quality in [0, 1] or a thumb. ``id`` is a request's or a decision's."""

    id: _Id | None = None
    request_id: _Id | None = None
    decision_id: _Id | None = None
    quality: Annotated[float, Meta(ge=0, le=1)] | None = None
    thumbs: Literal["up", "down"] | None = None
    comment: Annotated[str, Meta(max_length=4096)] | None = None


def read_feedback(body: bytes) -> tuple[str, float, str | None]:
    """Id, quality in [0, 1] and comment of a feedback's body.

    Raises:
        RequestError: not of the shape of :class:`Feedback`, no id or two, no verdict or two.
    """
    try:
        given = msgspec.json.decode(body, type=Feedback)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the feedback is wrong: {error}") from None
    ids = [name for name in (given.id, given.request_id, given.decision_id) if name is not None]
    if len(ids) != 1:
        raise RequestError("give one of 'id', 'request_id' and 'decision_id'", param="id")
    if (given.quality is None) == (given.thumbs is None):
        raise RequestError("give one of 'quality' and 'thumbs'", param="quality")
    quality = given.quality if given.quality is not None else float(given.thumbs == "up")
    return ids[0], quality, given.comment


class FeedbackBook:
    """The answers that can be spoken of, and the file of rows.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, config: Config, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._config, self._clock = config.feedback, clock
        self._file = _open(config)
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()
        self._decisions: dict[tuple[str, str], str] = {}  # client and request id -> the newest decision on it
        self._given: OrderedDict[str, tuple[str, str]] = OrderedDict()  # decision -> client and request id
        self._leaving: list[Waiting] = []
        self._num_bytes = 0
        self._rows = Counter("headway_feedback_rows", "Rows for retraining", ("kind",), registry=registry)
        self._quality = Histogram(
            "headway_feedback_quality", "Quality that users gave", ("model",), buckets=_SHARES, registry=registry
        )
        self._error = Histogram(
            "headway_quality_prediction_error", "Quality that users gave less the predicted one", ("model",),
            buckets=_ERRORS, registry=registry,
        )  # fmt: skip

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._file is not None

    def note(
        self, record: DecisionRecord, request: ClientRequest, outcome: Outcome, *, client: str = "", counted: bool
    ) -> None:
        """From now on this answer to ``client`` can be spoken of. Costs microseconds; nothing where feedback is off.

        ``counted`` tells that the engine itself reported the tokens; counts of events are no lengths to learn from.
        """
        candidate = record.decision.candidate
        speakable = request.endpoint.operation != "embeddings" and bool(request.prompt_text.strip())
        if self._file is None or candidate is None or outcome.status != "ok" or not speakable:
            return
        if len(request.body) > MAX_BODY_BYTES:
            self._rows.labels("too_large").inc()
            return
        if not counted:
            outcome = msgspec.structs.replace(outcome, prompt_tokens=None, output_tokens=None)
        self._waiting[record.id] = Waiting(
            decision_id=record.id,
            request_id=record.request_id,
            client=client,
            body=request.body,
            takes_messages="messages" in request.endpoint.prompt_fields,
            model=candidate.model,
            predicted_quality=candidate.quality,
            max_tokens=request.max_tokens,
            outcome=outcome,
            since_s=self._clock(),
        )
        self._decisions[client, record.request_id] = record.id
        self._num_bytes += len(request.body)
        while len(self._waiting) > MAX_WAITING or self._num_bytes > MAX_WAITING_BYTES:
            self._leave(next(iter(self._waiting)))

    async def give(self, name: str, quality: float, comment: str | None, *, client: str | None = None) -> Waiting:
        """Store what a user says of the answer ``name`` (a request's or a decision's id); the answer.

        Answers to others are unknown to a ``client``; None may speak of all.

        Raises:
            RequestError: 404, no such answer or too long ago; 409, it was spoken of before.
            HeadwayError: the row could not be written.
        """
        if self._file is None:
            raise RequestError("feedback is off here (feedback.file)", status=404, code="feedback_off")
        decision_id = self._decision_of(name, client)
        if decision_id in self._given and client in (None, self._given[decision_id][0]):
            raise RequestError("this answer has its feedback already", status=409, param="id", code="feedback_given")
        known = self._waiting.get(decision_id)
        waiting = None if known is None or client not in (None, known.client) else self._forget(decision_id)
        if waiting is None:
            raise RequestError(
                f"no answer of that id in the last {self._config.wait_s:g} s", status=404, param="id",
                code="feedback_unknown_id",
            )  # fmt: skip
        self._given[decision_id] = waiting.client, waiting.request_id
        if len(self._given) > MAX_WAITING:
            self._unname(*self._given.popitem(last=False))
        if not await asyncio.to_thread(self._write, [(waiting, quality, comment)]):
            raise HeadwayError("the feedback could not be written")
        self._rows.labels("feedback").inc()
        self._quality.labels(waiting.model).observe(quality)
        if waiting.predicted_quality is not None:
            self._error.labels(waiting.model).observe(quality - waiting.predicted_quality)
        return waiting

    async def sweep(self) -> None:
        """Write the rows of answers whose time to be spoken of is over."""
        over_s = self._clock() - self._config.wait_s
        while self._waiting and next(iter(self._waiting.values())).since_s <= over_s:
            self._leave(next(iter(self._waiting)))
        leaving, self._leaving = self._leaving, []
        if leaving:
            written = await asyncio.to_thread(self._write, [(one, None, None) for one in leaving])
            self._rows.labels("outcome" if written else "lost").inc(len(leaving))

    async def close(self) -> None:
        """Write what is left, and close the file."""
        while self._waiting:
            self._leave(next(iter(self._waiting)))
        await self.sweep()
        if self._file is not None:
            self._file.close()

    def _decision_of(self, name: str, client: str | None) -> str:
        """The decision that ``name`` stands for: itself, or the newest on a request of that id."""
        if name in self._waiting or name in self._given:
            return name
        if client is not None:
            return self._decisions.get((client, name), name)
        return next((one for (_, request), one in reversed(self._decisions.items()) if request == name), name)

    def _forget(self, decision_id: str) -> Waiting | None:
        waiting = self._waiting.pop(decision_id, None)
        if waiting is not None:
            self._num_bytes -= len(waiting.body)
        return waiting

    def _unname(self, decision_id: str, request: tuple[str, str]) -> None:
        """Forget the request's id, unless it stands for a newer decision by now."""
        if self._decisions.get(request) == decision_id:
            del self._decisions[request]

    def _leave(self, decision_id: str) -> None:
        waiting = self._forget(decision_id)
        if waiting is None:
            return
        self._unname(decision_id, (waiting.client, waiting.request_id))
        if not self._config.outcomes or waiting.outcome.output_tokens is None:
            return
        if len(self._leaving) >= MAX_LEAVING:
            self._rows.labels("lost").inc()
            return
        self._leaving.append(waiting)

    def _write(self, said: Sequence[tuple[Waiting, float | None, str | None]]) -> bool:
        """Runs in another thread: features are computed and the file is written here."""
        assert self._file is not None
        return self._file.append(b"".join(row_of(*one, with_prompt=self._config.prompts) for one in said))


def _open(config: Config) -> RotatedFile | None:
    feedback = config.feedback
    if feedback.file is None:
        return None
    path = beside(config, feedback.file)
    try:
        return RotatedFile(path, max_bytes=int(feedback.max_mb * 1e6), num_files=feedback.num_files)
    except ConfigError as error:
        raise config.error("feedback.file", str(error)) from error
