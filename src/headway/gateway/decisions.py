"""The last decisions, each with everything that was weighed, so that "why there?" has an answer afterwards.

Bounded: the oldest go first. It holds figures only; neither prompts nor answers are kept.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice

import msgspec
from msgspec import Struct

from headway.gateway.shadow import ShadowDecision
from headway.types import Decision, Outcome

#: How many decisions are kept. With 64 instances one weighs about 20 kB.
MAX_DECISIONS = 1024


class DecisionRecord(Struct, kw_only=True):
    """A decision and what came of it. ``attempt`` counts upstream calls of the same request from 1.

    ``shadow`` is what a second router would have done, where one decided too.
    """

    id: str
    request_id: str
    attempt: int
    decision: Decision
    outcome: Outcome | None = None
    shadow: ShadowDecision | None = None


class DecisionStore:
    """Decisions by id, the newest ``MAX_DECISIONS`` of them."""

    def __init__(self, capacity: int = MAX_DECISIONS) -> None:
        self.capacity = capacity
        self.num_added = 0
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    def add(self, request_id: str, attempt: int, decision: Decision) -> DecisionRecord:
        """Keep a decision under a new id."""
        record = DecisionRecord(id=secrets.token_hex(8), request_id=request_id, attempt=attempt, decision=decision)
        self._records[record.id] = record
        self.num_added += 1
        if len(self._records) > self.capacity:
            self._records.popitem(last=False)
        return record

    def get(self, decision_id: str) -> DecisionRecord | None:
        """The record of a decision, None when it is unknown or too old."""
        return self._records.get(decision_id)

    def since(self, num_seen: int) -> list[DecisionRecord]:
        """The records added after the first ``num_seen`` ever, as far as they are kept; oldest first."""
        num_new = min(self.num_added - num_seen, len(self._records))
        newest = list(islice(reversed(self._records.values()), max(num_new, 0)))
        return newest[::-1]

    def __len__(self) -> int:
        return len(self._records)


def decision_as_json(record: DecisionRecord) -> dict[str, object]:
    """A record as plain JSON values; what has no finite value (a saturated instance's TTFT) is null."""
    plain = msgspec.to_builtins(record.decision)
    plain["id"] = record.id
    plain["request_id"] = record.request_id
    plain["attempt"] = record.attempt
    chosen = record.decision.candidate
    plain["chosen"] = None if chosen is None else chosen.instance_id
    plain["outcome"] = None if record.outcome is None else msgspec.to_builtins(record.outcome)
    if record.shadow is not None:
        plain["shadow"] = msgspec.to_builtins(record.shadow)
    del plain["query_id"]
    return _finite(plain)


def decision_header(record: DecisionRecord) -> bytes:
    """The record as compact JSON in ASCII, fit for a header."""
    return json.dumps(decision_as_json(record), separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _finite(value: Mapping[str, object]) -> dict[str, object]:
    return {key: _finite_value(item) for key, item in value.items()}


def _finite_value(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return _finite(value)
    if isinstance(value, (list, tuple)):
        return [_finite_value(item) for item in value]
    return value
