"""How good an artifact is on answers it was not trained on, kind by kind as it would serve them.

Prompts that the artifact has seen, by the hashes it carries, are found, counted and left out: figures on those say
nothing. Models that it does not know are named and left out too.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct, structs

from headway.errors import DatasetError
from headway.predict.artifact import Artifact, Kind
from headway.predict.forecast import Forecaster
from headway.predict.seen import prompt_hash, seen_prompts
from headway.train.card import NUM_RESAMPLES
from headway.train.comparison import compare
from headway.train.duplicates import find_duplicates
from headway.train.measures import Figure, Resamples
from headway.train.rivals import Predicted
from headway.train.table import EvaluationTable

_KINDS: tuple[Kind, ...] = ("constant", "task_label", "knn", "learned")


class HeldOut(Struct, frozen=True, kw_only=True):
    """``figures`` maps kind and measure to a figure, ``above`` kind and measure to how much larger it is for what the
    artifact serves (``served``)."""

    num_rows: int
    num_prompts: int
    num_seen_prompts: int
    unknown_models: list[str]
    serves_quality: Kind
    serves_length: Kind
    figures: dict[str, dict[str, Figure]]
    above: dict[str, dict[str, Figure]]


def hold_out(artifact: Artifact, table: EvaluationTable, *, seed: int = 0) -> HeldOut:
    """The figures of ``artifact`` on the unseen part of ``table``. Some 0.5 ms per prompt and kind.

    Raises:
        DatasetError: every prompt was seen in training, or no model is known.
    """
    names = [model.name for model in artifact.models]
    columns = np.array([at for at, name in enumerate(table.model_names) if name in names], np.intp)
    seen = seen_prompts(artifact)
    unseen = np.array([at for at, text in enumerate(table.texts) if prompt_hash(text) not in seen], np.intp)
    if not len(columns):
        raise DatasetError(f"hold no answer of a model that the artifact knows ({', '.join(names)})")
    if not len(unseen):
        raise DatasetError("hold no prompt that the artifact was not trained on")
    part = table.take(unseen, columns)
    chosen = [names.index(name) for name in part.model_names]
    predictions = {
        kind: _say(structs.replace(artifact, serves_quality=kind, serves_length=kind), part, chosen)
        for kind in _KINDS
        if kind != "learned" or (artifact.quality is not None and artifact.length is not None)
    }
    said: dict[str, Predicted] = {**{str(kind): one for kind, one in predictions.items()}}
    said["served"] = _say(artifact, part, chosen)
    resamples = Resamples(find_duplicates(part.texts).group, NUM_RESAMPLES, seed)
    figures, above = compare(part.quality, part.output_tokens, said, resamples, ours="served")
    return HeldOut(
        num_rows=table.num_rows,
        num_prompts=len(unseen),
        num_seen_prompts=table.num_prompts - len(unseen),
        unknown_models=[name for name in table.model_names if name not in names],
        serves_quality=artifact.serves_quality,
        serves_length=artifact.serves_length,
        figures=figures,
        above=above,
    )


def _say(artifact: Artifact, part: EvaluationTable, chosen: list[int]) -> Predicted:
    """What the artifact serves for every prompt, asked one by one as a gateway does."""
    mean, median = (Forecaster(artifact, chosen, median=which) for which in (False, True))
    found = Predicted.unknown((part.num_prompts, len(chosen)))
    for at in range(part.num_prompts):
        reading = mean.reading_of(part.features.one(at))
        usual, middle = mean.forecast_of(reading), median.forecast_of(reading)
        found.quality[at], found.mean_tokens[at] = usual.quality, usual.output_tokens
        found.p50_tokens[at], found.p90_tokens[at] = middle.output_tokens, usual.p90_tokens
    return found
