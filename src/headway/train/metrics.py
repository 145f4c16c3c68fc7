"""Scores answers by a rule, without a judge: equal to the reference, near to it (ROUGE-L), or matching a pattern.

Before comparing, text is normalised: Unicode NFKC, lower case, the words *a*, *an*, *the* dropped, every character
that is neither letter, digit nor sign of a number taken for a space, spaces joined. It refuses to score an answer
without a reference.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from headway.errors import ConfigError, DatasetError
from headway.train.dataset import EvaluationRow
from headway.train.judge_calls import write_judged

Metric = Literal["exact", "rouge", "regex"]
METRICS: tuple[Metric, ...] = ("exact", "rouge", "regex")

#: Answer and reference → quality in [0, 1].
Rule = Callable[[str, str], float]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
#: A point or comma inside a number and a minus before one stay: 3.5 is not 35, and -2 is not 2.
_MARKS = re.compile(r"(?<!\d)[.,](?!\d)|(?<=\d)[.,](?!\d)|(?<!\d)[.,](?=\d)|-(?!\d)|(?<=\w)-|[^\w\s.,-]|_")
_SPACES = re.compile(r"\s+")


def normalised(text: str) -> str:
    """``text`` as it is compared."""
    text = unicodedata.normalize("NFKC", text).lower()
    return _SPACES.sub(" ", _ARTICLES.sub(" ", _MARKS.sub(" ", text))).strip()


def exact_match(answer: str, reference: str) -> float:
    """1 if both are equal once normalised, else 0."""
    return float(normalised(answer) == normalised(reference))


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of normalised words (ROUGE-L, beta 1); 0 when either has no word."""
    ours, theirs = normalised(answer).split(), normalised(reference).split()
    if not ours or not theirs:
        return 0.0
    return 2.0 * longest_common_subsequence(ours, theirs) / (len(ours) + len(theirs))


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Its length, by bits of one integer (Hyyrö 2004): O(len(first) · len(second) / 64)."""
    places: dict[str, int] = {}
    for index, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full
    for word in second:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(first) - row.bit_count()


def regex_match(pattern: str | None) -> Rule:
    """The rule of ``--metric regex``.

    With ``pattern``, the answer's last match of it (its first group, where it has one) must equal the reference once
    both are normalised. Without it, the reference itself is a pattern that must occur in the answer.

    Raises:
        ConfigError: ``pattern`` is no regular expression.
    """
    if pattern is None:
        return _matches_reference
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"is no regular expression: {error}", key="--pattern") from None

    def rule(answer: str, reference: str) -> float:
        found = None
        for found in compiled.finditer(answer):  # noqa: B007 - the last one counts
            pass
        if found is None:
            return 0.0
        return exact_match((found.group(1) if compiled.groups else found.group()) or "", reference)

    return rule


def metric_rule(metric: Metric, pattern: str | None = None) -> Rule:
    """The rule behind a metric's name.

    Raises:
        ConfigError: ``pattern`` is no regular expression, or given to a metric that takes none.
    """
    if pattern is not None and metric != "regex":
        raise ConfigError("goes with --metric regex only", key="--pattern")
    return {"exact": exact_match, "rouge": rouge_l, "regex": regex_match(pattern)}[metric]


def _matches_reference(answer: str, reference: str) -> float:
    try:
        return float(re.search(reference, answer, re.MULTILINE) is not None)
    except re.error as error:
        raise DatasetError(f"the reference {reference!r} is no regular expression: {error}") from None


class MetricSummary(Struct, frozen=True, kw_only=True):
    """What a rule made of a file. ``num_unanswered`` rows hold no whole answer; ``mean_quality`` is of the scored."""

    out: str
    metric: str
    num_rows: int
    num_rows_judged: int
    num_unanswered: int
    num_without_reference: int
    mean_quality: float


def apply_metric(rows: Sequence[EvaluationRow], out: Path, metric: Metric, pattern: str | None = None) -> MetricSummary:
    """Score every answer that has a reference and write all rows to ``out``.

    Raises:
        ConfigError: as :func:`metric_rule`.
        DatasetError: no answer has a reference, a reference is no pattern, or ``out`` cannot be written.
    """
    rule = metric_rule(metric, pattern)
    scores = {
        (row.prompt_id, row.model): rule(row.response, row.reference)
        for row in rows
        if row.status == "ok" and row.response is not None and row.reference is not None
    }
    if not scores:
        raise DatasetError(f"no answer has a reference, and --metric {metric} compares with one")
    written = write_judged(out, rows, scores, metric)
    return MetricSummary(
        out=str(out),
        metric=metric,
        num_rows=written.num_rows,
        num_rows_judged=written.num_judged,
        num_unanswered=written.num_unanswered,
        num_without_reference=written.num_rows - written.num_judged - written.num_unanswered,
        mean_quality=sum(scores.values()) / len(scores),
    )
