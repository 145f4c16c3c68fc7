"""The model card: how good a predictor is on prompts it has not seen, against the simple ones on the same folds.

All figures are within model, on grouped folds, with intervals of a bootstrap over groups of alike prompts; differences
are paired. The card also decides what should serve: trees only where they beat the task label that a router can
recognise. It refuses to round a miss into a hit: the reason stands in ``why``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from headway.predict.artifact import CardFigures, Kind
from headway.train.comparison import compare
from headway.train.crossvalidate import CrossValidation
from headway.train.duplicates import Duplicates
from headway.train.linear import label_means
from headway.train.material import Material
from headway.train.measures import Figure, Resamples, interval, pinball_loss, r2
from headway.train.rivals import Predicted
from headway.train.routing import RoutingPool, RoutingValue, choices, routing_pool, routing_value
from headway.train.settings import Settings
from headway.train.strata import Stratum, make_strata
from headway.train.table import EvaluationTable, Floats

NUM_RESAMPLES = 200


class Card(Struct, frozen=True, kw_only=True):
    """The card. ``figures`` maps predictor and measure to a figure, ``above`` a rival and measure to how much larger
    the measure is for the learned predictor; a measure is missing where nothing is known to measure it by.
    ``p90_pinball_saved`` is how much smaller the loss of the 90 % quantile is than a constant one's, as a share."""

    title: str
    notes: list[str]
    command: str
    num_rows: int
    num_rows_without_answer: int
    num_prompts: int
    num_equal_prompts: int
    num_near_prompts: int
    models: list[str]
    num_unlabelled_prompts: int
    num_labels: int
    label_accuracy: float
    num_folds: int
    seed: int
    num_resamples: int
    figures: dict[str, dict[str, Figure]]
    above: dict[str, dict[str, Figure]]
    routing: RoutingValue | None
    strata: list[Stratum]
    quality_r2_within_task: float | None
    length_log_r2_within_task: float | None
    p90_pinball_saved: Figure | None
    serves_quality: Kind
    serves_length: Kind
    why: str

    @property
    def summary(self) -> CardFigures:
        """What the artifact repeats of it."""
        learned = self.figures["learned"]
        gain = None if self.routing is None else self.routing.learned_above["task_recognised"]
        return CardFigures(
            quality_r2=learned["r2"].value if "r2" in learned else None,
            quality_r2_within_task=self.quality_r2_within_task,
            length_log_r2=learned["length_log_r2"].value if "length_log_r2" in learned else None,
            length_log_r2_within_task=self.length_log_r2_within_task,
            routing_gain=None if gain is None else gain.value,
            routing_gain_low=None if gain is None else gain.low,
            routing_gain_high=None if gain is None else gain.high,
        )


def make_card(
    table: EvaluationTable,
    material: Material,
    alike: Duplicates,
    found: CrossValidation,
    *,
    settings: Settings,
    title: str,
    command: str,
    notes: Sequence[str] = (),
) -> Card:
    """The card of a cross-validation. Some ten seconds of CPU per 10,000 prompts, most of it the bootstrap."""
    resamples = Resamples(material.group, NUM_RESAMPLES, settings.seed)
    predictions: dict[str, Predicted] = {
        **{str(name): one for name, one in found.rivals.items()},
        "learned": found.learned,
    }
    figures, above = compare(material.quality, material.tokens, predictions, resamples, ours="learned")
    pool = routing_pool(table)
    routing = None if pool is None else _routing(table, pool, predictions, resamples)
    serves_quality, why_quality = _prefer_quality(above["task_recognised"], routing)
    serves_length, why_length = _prefer_length(above["task_recognised"])
    return Card(
        title=title,
        notes=list(notes),
        command=command,
        num_rows=table.num_rows,
        num_rows_without_answer=table.num_without_answer,
        num_prompts=table.num_prompts,
        num_equal_prompts=alike.num_equal,
        num_near_prompts=alike.num_near,
        models=list(table.model_names),
        num_unlabelled_prompts=table.num_unlabelled,
        num_labels=len(material.label_names),
        label_accuracy=found.label_accuracy,
        num_folds=int(found.fold.max()) + 1,
        seed=settings.seed,
        num_resamples=NUM_RESAMPLES,
        figures=figures,
        above=above,
        routing=routing,
        strata=make_strata(table, material, predictions, pool, seed=settings.seed),
        quality_r2_within_task=_within_task(material, material.quality, found.learned.quality),
        length_log_r2_within_task=_within_task(material, material.log_tokens, np.log1p(found.learned.p50_tokens)),
        p90_pinball_saved=_pinball_saved(material.tokens, predictions, resamples),
        serves_quality=serves_quality,
        serves_length=serves_length,
        why=f"{why_quality} {why_length}",
    )


def _routing(
    table: EvaluationTable, pool: RoutingPool, predictions: Mapping[str, Predicted], resamples: Resamples
) -> RoutingValue:
    names = [table.model_names[column] for column in pool.columns]
    counts = resamples.counts(table.num_prompts)[:, pool.prompts]
    return routing_value(pool, names, choices(pool, predictions), counts)


def _prefer_quality(above: Mapping[str, Figure], routing: RoutingValue | None) -> tuple[Kind, str]:
    if routing is not None:
        gain = routing.learned_above["task_recognised"]
        text = f"Routing value of the learned quality over the recognised task label: {_signed(gain)}"
    elif "r2" in above:
        gain = above["r2"]
        text = (
            f"Without prices routing cannot be valued; R² of the learned quality over the task label: {_signed(gain)}"
        )
    else:
        return "constant", "No quality is known."
    if gain.low > 0.0:
        return "learned", f"{text}, so the trees serve quality."
    return "task_label", f"{text}, which is no proof that the trees are better, so the task label serves quality."


def _prefer_length(above: Mapping[str, Figure]) -> tuple[Kind, str]:
    if "length_mae_tokens" not in above:
        return "constant", "No length is known."
    gain = above["length_mae_tokens"]
    text = f"Length error of the trees less that of the task label: {_signed(gain)} tokens"
    if gain.high < 0.0:
        return "learned", f"{text}, so the trees serve lengths."
    return "task_label", f"{text}, which is no proof that the trees are better, so the task label serves lengths."


def _signed(figure: Figure) -> str:
    digits = 1 if abs(figure.value) >= 1 else 4
    return f"{figure.value:+.{digits}f} ({figure.low:+.{digits}f} to {figure.high:+.{digits}f})"


def _pinball_saved(tokens: Floats, predictions: Mapping[str, Predicted], resamples: Resamples) -> Figure | None:
    known = ~np.isnan(tokens)
    said = [predictions[name].p90_tokens for name in ("learned", "constant")]
    if not known.any() or any(np.isnan(one[known]).any() for one in said):
        return None
    ours, constant = (
        np.array([pinball_loss(tokens, one), *resamples.values(pinball_loss, tokens, one)]) for one in said
    )
    saved = 1.0 - ours / np.maximum(constant, 1e-12)
    return interval(float(saved[0]), saved[1:])


def _within_task(material: Material, actual: Floats, said: Floats) -> float | None:
    """R² beyond each model's mean on each task label."""
    if np.isnan(actual).all():
        return None
    return r2(actual, said, label_means(material, actual, 0.0)[material.label])
