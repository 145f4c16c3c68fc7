"""The predictor of a trained artifact: what each model of a pool is worth on a query.

The artifact knows its models by name; one it does not know is started cold. Forecasts depend on nothing but the prompt,
so they are kept by its hash, a bounded number of them. All that can be wrong with an artifact is found when this is
built; asking it does no I/O and raises only for a query that lacks token counts.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from headway.predict.artifact import Artifact
from headway.predict.base import cost_usd
from headway.predict.cold_start import ColdStart
from headway.predict.forecast import Forecast, Forecaster, check_self_tests
from headway.predict.linear import checked
from headway.predict.prompt import Prompt, prompt_of_query
from headway.predict.tasks import task_type
from headway.types import ModelCard, ModelPrior, Prediction, Query

#: Prompts of which the forecast is kept.
MAX_CACHED = 4096
_DEFAULT = ModelPrior()


class _Said(Struct, frozen=True, gc=False):
    """What is kept of one model on one prompt, before ``max_tokens`` and prices. Nothing for a collector to look at."""

    quality: float
    output_tokens: float
    p90_tokens: float | None
    source: str


class LearnedPredictor:
    """Quality, lengths and cost of each model by an artifact.

    Raises:
        ArtifactError: the artifact cannot be served here, or says other things than where it was trained.
    """

    def __init__(
        self, artifact: Artifact, models: Mapping[str, ModelCard], *, median: bool = False, max_cached: int = MAX_CACHED
    ) -> None:
        """``median`` makes the expected length the median, not the mean."""
        check_self_tests(artifact)
        self.artifact = artifact
        self._models = dict(models)
        names = [model.name for model in artifact.models]
        unknown = [name for name in models if name not in names]
        # A model that is started cold needs the forecasts of all that were trained.
        asked = [name for name in names if unknown or name in models]
        self._places = {name: place for place, name in enumerate(asked) if name in models}
        chosen = [names.index(name) for name in asked]
        self._forecaster = Forecaster(artifact, chosen, median=median)
        trained = [artifact.models[index] for index in chosen]
        num, overall = len(names), artifact.overall
        typical = overall.p50_tokens if median else overall.output_tokens
        levels = tuple(
            checked(array, "overall", num)[chosen] for array in (overall.quality, typical, overall.p90_tokens)
        )
        self._cold = {name: ColdStart(models[name], trained, (levels[0], levels[1])) for name in unknown}
        self._by_task = any(card.tasks for card in models.values())
        quality, length = self._forecaster.quality_source, self._forecaster.length_source
        self._source = quality if quality == length else f"{quality}, length {length}"
        self._cache: OrderedDict[bytes, dict[str, _Said]] = OrderedDict()
        self._max_cached = max_cached

    @property
    def cold_models(self) -> tuple[str, ...]:
        """Models of the pool that the artifact does not know."""
        return tuple(self._cold)

    def predict(self, query: Query) -> dict[str, Prediction]:
        """One prediction per candidate model; output tokens never exceed ``query.max_tokens``.

        Raises:
            ValueError: ``query.prompt_tokens`` lacks a candidate model.
        """
        said = self._said(prompt_of_query(query))
        predictions = {}
        for name in self._models if query.candidates is None else query.candidates:
            card = self._models.get(name)
            if card is None:
                continue
            prompt_tokens = query.prompt_tokens.get(name)
            if prompt_tokens is None:
                raise ValueError(f"query.prompt_tokens of query {query.id!r} lacks model {name!r}")
            one = said[name]
            tokens, p90 = one.output_tokens, one.p90_tokens
            if query.max_tokens is not None:
                tokens = min(tokens, float(query.max_tokens))
                p90 = None if p90 is None else min(p90, float(query.max_tokens))
            cost = cost_usd(card, prompt_tokens, tokens)
            predictions[name] = Prediction(one.quality, tokens, cost, one.source, p90)
        return predictions

    def _said(self, prompt: Prompt) -> dict[str, _Said]:
        key = _key(prompt)
        said = self._cache.get(key)
        if said is not None:
            self._cache.move_to_end(key)
            return said
        forecast = self._forecaster.forecast(prompt)
        task = task_type(prompt.text) if self._by_task else None
        lists = tuple(values.tolist() for values in (forecast.quality, forecast.output_tokens, forecast.p90_tokens))
        said = {}
        for name, card in self._models.items():
            prior = (card.tasks.get(task) if task is not None else None) or card.prior
            place = self._places.get(name)
            if place is None:
                said[name] = _cold(self._cold[name], forecast, prior)
            else:
                quality, tokens, p90 = (values[place] for values in lists)
                said[name] = self._known(quality, tokens, p90, prior)
        self._cache[key] = said
        if len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return said

    def _known(self, quality: float, tokens: float, p90: float, prior: ModelPrior | None) -> _Said:
        """As the artifact says; what it was never told of a model comes from the card."""
        source = self._source
        if math.isnan(quality):
            source = "default" if prior is None else "prior"
        given = prior or _DEFAULT
        return _Said(
            given.quality if math.isnan(quality) else quality,
            given.output_tokens if math.isnan(tokens) else tokens,
            None if math.isnan(p90) else p90,
            source,
        )


def _cold(start: ColdStart, forecast: Forecast, prior: ModelPrior | None) -> _Said:
    quality = start.quality(forecast.quality, None if prior is None else prior.quality)
    tokens = start.tokens(forecast.output_tokens, None if prior is None else prior.output_tokens)
    ratio = forecast.p90_tokens / forecast.output_tokens
    known = ratio[~np.isnan(ratio)]
    return _Said(
        _DEFAULT.quality if math.isnan(quality) else quality,
        _DEFAULT.output_tokens if math.isnan(tokens) else tokens,
        tokens * float(known.mean()) if len(known) and not math.isnan(tokens) else None,
        "cold_start",
    )


def _key(prompt: Prompt) -> bytes:
    """The prompt's hash; two prompts share one with a chance of 2^-128."""
    digest = hashlib.blake2b(prompt.text.encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(b"%d %d %d %d" % (prompt.num_chars, prompt.num_turns, prompt.system_chars, prompt.max_tokens or 0))
    return digest.digest()
