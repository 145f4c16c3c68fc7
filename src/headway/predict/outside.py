"""The seam for scorers from outside: an embedding model, RouteLLM, LLMRouter, a judge of one's own.

Such a scorer says how good each model would be on a prompt; lengths and cost still come from the predictor it stands
in front of. It is asked once per prompt and remembered, a bounded number of prompts. A score that is no number from 0
to 1 is refused by name. A scorer that is slow makes every decision slow: it is called on the request's path.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from headway.predict.base import Predictor
from headway.predict.prompt import Prompt, prompt_of_query
from headway.types import Prediction, Query

MAX_CACHED = 4096


class QualityScorer(Protocol):
    """Scores models on a prompt."""

    name: str

    def score(self, prompt: Prompt, models: Sequence[str]) -> Sequence[float | None]:
        """Expected quality in [0, 1] of each of ``models``, None where the scorer does not know one."""
        ...


class ScoredPredictor:
    """A predictor whose quality is a scorer's wherever that knows the model; ``source`` is then the scorer's name."""

    def __init__(
        self, inner: Predictor, scorer: QualityScorer, models: Sequence[str], *, max_cached: int = MAX_CACHED
    ) -> None:
        self._inner, self._scorer, self._models = inner, scorer, tuple(models)
        self._cache: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        self._max_cached = max_cached

    def predict(self, query: Query) -> Mapping[str, Prediction]:
        """The inner predictions with the scorer's quality.

        Raises:
            ValueError: the scorer gave another number of scores than models, or a score outside [0, 1].
        """
        predictions = dict(self._inner.predict(query))
        for name, quality in self._scores(prompt_of_query(query)).items():
            if name in predictions:
                predictions[name] = msgspec.structs.replace(
                    predictions[name], quality=quality, source=self._scorer.name
                )
        return predictions

    def _scores(self, prompt: Prompt) -> dict[str, float]:
        key = hashlib.blake2b(prompt.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            return known
        given = self._scorer.score(prompt, self._models)
        if len(given) != len(self._models):
            raise ValueError(f"scorer {self._scorer.name!r} gave {len(given)} scores for {len(self._models)} models")
        scores = {name: score for name, score in zip(self._models, given, strict=True) if score is not None}
        for name, score in scores.items():
            if not 0.0 <= score <= 1.0:
                raise ValueError(f"scorer {self._scorer.name!r} gave {score!r} for {name!r}, no quality from 0 to 1")
        self._cache[key] = scores
        if len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return scores
