"""Rows of feedback as ``headway train`` reads them: an answer's measures, and its prompt or what stands for it.

They are made in another thread, from the request's own bytes. The gateway does not import the trainer, so the fields
are written out here; a test holds them to the trainer's reader. It refuses to write a prompt where it was not asked to.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

from headway.predict.feature_row import FeatureRow
from headway.predict.features import prompt_features
from headway.predict.prompt import prompt_of_messages, prompt_of_text
from headway.predict.tasks import task_type
from headway.predict.tokens import prompt_text
from headway.types import Outcome

#: What ``judge`` says in a row whose quality a user gave.
JUDGE = "feedback"


class Waiting(Struct, frozen=True, kw_only=True):
    """An answer that can still be spoken of."""

    decision_id: str
    request_id: str
    client: str
    body: bytes
    takes_messages: bool
    model: str
    predicted_quality: float | None
    max_tokens: int | None
    outcome: Outcome
    since_s: float


class _Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row as ``headway.train`` reads it; the gateway does not import the trainer."""

    prompt_id: str
    model: str
    prompt: str | None = None
    messages: object = None
    features: FeatureRow | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None
    quality: float | None = None
    judge: str | None = None
    task: str | None = None
    max_tokens: int | None = None
    ttft_s: float | None = None
    latency_s: float | None = None
    comment: str | None = None


def row_of(waiting: Waiting, quality: float | None, comment: str | None, *, with_prompt: bool) -> bytes:
    """The row as a line. Without the prompt, features take its place and the comment is left out. Some 100 µs."""
    outcome = waiting.outcome
    row = _Row(
        prompt_id=waiting.decision_id,
        model=waiting.model,
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=outcome.output_tokens,
        cost_usd=outcome.cost_usd,
        quality=quality,
        judge=None if quality is None else JUDGE,
        max_tokens=waiting.max_tokens,
        ttft_s=outcome.ttft_s,
        latency_s=outcome.total_s,
    )
    fields = msgspec.json.decode(waiting.body)
    messages = fields.get("messages") if waiting.takes_messages else None
    if not with_prompt:
        row = _without_prompt(row, fields, messages)
    elif messages is not None:
        row = msgspec.structs.replace(row, messages=messages, comment=comment)
    else:
        row = msgspec.structs.replace(row, prompt=prompt_text(fields), comment=comment)
    return msgspec.json.encode(row) + b"\n"


def _without_prompt(row: _Row, fields: dict[str, object], messages: object) -> _Row:
    """The row with what a predictor reads of the prompt, in place of the prompt."""
    if isinstance(messages, list):
        prompt = prompt_of_messages(messages, max_tokens=row.max_tokens)
        text = prompt_text({"messages": messages})
    else:
        text = prompt_text(fields)
        prompt = prompt_of_text(text, max_tokens=row.max_tokens)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    features = FeatureRow.of(prompt_features(prompt), digest)
    return msgspec.structs.replace(row, features=features, task=task_type(prompt.text))
