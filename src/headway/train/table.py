"""Evaluation rows as matrices: prompts down, models across, NaN where a model was not asked or the value is unknown.

Rows that hold no answer are counted and left out, and so are answers that say nothing (neither quality nor length).
It refuses rows that contradict each other: one prompt id with two texts, or two values for one prompt and model.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from headway.errors import DatasetError
from headway.predict.features import PromptFeatures, prompt_features
from headway.predict.prompt import prompt_of_messages, prompt_of_text
from headway.predict.tasks import task_type
from headway.predict.tokens import count_tokens
from headway.train.dataset import EvaluationRow, encode_row
from headway.types import ModelCard

Floats = NDArray[np.float64]

_PARAMETERS_IN_NAME = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z0-9])")


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What is known of a model beside its rows. Prices are USD per million tokens; None where unknown."""

    name: str
    parameters: float | None = None
    context_tokens: int | None = None
    input_per_1m_usd: float | None = None
    output_per_1m_usd: float | None = None


class FeatureTable(Struct, frozen=True, eq=False):
    """The features of P prompts: ``dense`` (P, F), ``hashed`` (P, H), and each prompt's ``buckets``."""

    dense: Floats
    hashed: Floats
    buckets: tuple[NDArray[np.int64], ...]

    @classmethod
    def of(cls, found: Sequence[PromptFeatures]) -> FeatureTable:
        """The table of these prompts."""
        dense, hashed = np.array([one.dense for one in found]), np.array([one.hashed for one in found])
        return cls(dense, hashed, tuple(one.buckets for one in found))

    def take(self, prompts: NDArray[np.intp]) -> FeatureTable:
        """The features of these prompts only."""
        return FeatureTable(self.dense[prompts], self.hashed[prompts], tuple(self.buckets[i] for i in prompts))

    def one(self, index: int) -> PromptFeatures:
        """One prompt's features."""
        return PromptFeatures(self.dense[index], self.hashed[index], self.buckets[index])


class EvaluationTable(Struct, frozen=True, eq=False, kw_only=True):
    """P prompts on M models. Matrices are (P, M); ``prompt_tokens`` (P,) is the mean of what the models counted.

    ``texts`` are whole prompts, or a stand-in where only features were kept. ``labels`` are their task labels: the
    rows' own, else by the plain rules of ``predict.tasks``, as for ``num_unlabelled`` prompts. ``cut`` marks answers as
    long as their ``max_tokens``.
    """

    prompt_ids: tuple[str, ...]
    texts: tuple[str, ...]
    features: FeatureTable
    labels: tuple[str, ...]
    num_unlabelled: int
    models: tuple[ModelFacts, ...]
    quality: Floats
    output_tokens: Floats
    cost_usd: Floats
    cut: NDArray[np.bool_]
    prompt_tokens: Floats
    num_rows: int
    num_without_answer: int
    sha256: str
    sources: tuple[str, ...] = ()

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.texts)

    def take(self, prompts: NDArray[np.intp], columns: NDArray[np.intp]) -> EvaluationTable:
        """These prompts on these models only; counts of rows stay those of the whole."""
        places = prompts.tolist()
        return structs.replace(
            self,
            prompt_ids=tuple(self.prompt_ids[at] for at in places),
            texts=tuple(self.texts[at] for at in places),
            labels=tuple(self.labels[at] for at in places),
            models=tuple(self.models[at] for at in columns.tolist()),
            features=self.features.take(prompts),
            prompt_tokens=self.prompt_tokens[prompts],
            **{
                name: getattr(self, name)[np.ix_(prompts, columns)]
                for name in ("quality", "output_tokens", "cost_usd", "cut")
            },
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models in the order of the columns."""
        return tuple(model.name for model in self.models)


def build_table(
    rows: Iterable[EvaluationRow],
    *,
    cards: Mapping[str, ModelCard] | None = None,
    facts: Mapping[str, ModelFacts] | None = None,
    sources: Sequence[str] = (),
) -> EvaluationTable:
    """The table of ``rows``. What is known of the models comes from ``facts``, else from ``cards``, else a number of
    parameters from the model's name ("7b").

    Raises:
        DatasetError: no row with an answer, one prompt id with two texts, or two values for one prompt and model.
    """
    digest = hashlib.sha256()
    places: dict[str, int] = {}
    columns: dict[str, int] = {}
    first: list[EvaluationRow] = []
    kept: list[tuple[int, int, EvaluationRow]] = []
    num_rows = num_without = 0
    for row in rows:
        num_rows += 1
        digest.update(encode_row(row))
        if row.status != "ok" or (row.quality is None and row.output_tokens is None):
            num_without += 1
            continue
        place = places.setdefault(row.prompt_id, len(places))
        if place == len(first):
            first.append(row)
        elif _asked(first[place]) != _asked(row):
            raise DatasetError(f"prompt id {row.prompt_id!r} stands for two different prompts")
        kept.append((place, columns.setdefault(row.model, len(columns)), row))
    if not kept:
        raise DatasetError(f"hold no answer with a quality or a length ({num_rows} rows read)")
    texts = tuple(row.text for row in first)
    matrices, cut = _matrices(kept, len(places), len(columns))
    return EvaluationTable(
        prompt_ids=tuple(places),
        texts=texts,
        features=FeatureTable.of([_features(row) for row in first]),
        labels=tuple(row.task or _rule_label(row) for row in first),
        num_unlabelled=sum(not row.task for row in first),
        models=tuple(_facts(name, cards or {}, facts or {}) for name in columns),
        **matrices,
        cut=cut,
        prompt_tokens=_prompt_tokens(kept, texts),
        num_rows=num_rows,
        num_without_answer=num_without,
        sha256=digest.hexdigest(),
        sources=tuple(sources),
    )


def _matrices(
    kept: Sequence[tuple[int, int, EvaluationRow]], num_prompts: int, num_models: int
) -> tuple[dict[str, Floats], NDArray[np.bool_]]:
    shape = (num_prompts, num_models)
    names = ("quality", "output_tokens", "cost_usd")
    found = {name: np.full(shape, math.nan) for name in names}
    cut, seen = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for place, column, row in kept:
        if seen[place, column]:
            raise DatasetError(f"prompt {row.prompt_id!r} has two answers of {row.model!r}")
        seen[place, column] = True
        for name in names:
            value = getattr(row, name)
            if value is not None:
                found[name][place, column] = value
        if row.max_tokens is not None and row.output_tokens is not None:
            cut[place, column] = row.output_tokens >= row.max_tokens
    return found, cut


def _prompt_tokens(kept: Sequence[tuple[int, int, EvaluationRow]], texts: Sequence[str]) -> Floats:
    total, num = np.zeros(len(texts)), np.zeros(len(texts))
    for place, _, row in kept:
        if row.prompt_tokens is not None:
            total[place] += row.prompt_tokens
            num[place] += 1
    counted = np.array([float(count_tokens(text)) for text in texts])
    np.divide(total, num, out=counted, where=num > 0)
    return counted


def _asked(row: EvaluationRow) -> tuple[object, object, object]:
    return row.prompt, row.messages, row.features


def _features(row: EvaluationRow) -> PromptFeatures:
    """By the code that serves; as they were kept where only they were."""
    if row.features is not None:
        return row.features.features()
    if row.messages is not None:
        return prompt_features(prompt_of_messages(row.messages, max_tokens=row.max_tokens))
    return prompt_features(prompt_of_text(row.text, max_tokens=row.max_tokens))


def _rule_label(row: EvaluationRow) -> str:
    return "unknown" if row.features is not None else task_type(row.text)


def _facts(name: str, cards: Mapping[str, ModelCard], facts: Mapping[str, ModelFacts]) -> ModelFacts:
    if name in facts:
        return facts[name]
    if name in cards:
        card = cards[name]
        return ModelFacts(
            name=name,
            parameters=card.parameters or parameters_in_name(name),
            context_tokens=card.context_tokens,
            input_per_1m_usd=card.input_per_1m_usd,
            output_per_1m_usd=card.output_per_1m_usd,
        )
    return ModelFacts(name=name, parameters=parameters_in_name(name))


def parameters_in_name(name: str) -> float | None:
    """The number of parameters that a model's name tells ("qwen3-0.6b", "mixtral-8x7b"), None where it tells none."""
    found = _PARAMETERS_IN_NAME.search(name.lower())
    return None if found is None else float(found[1] or 1) * float(found[2]) * 1e9
