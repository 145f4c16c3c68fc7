"""From evaluation rows to an artifact and its model card: cross-validate, decide what serves, train on everything.

What the artifact says of its test prompts is recorded through the serving code at the end, so that a machine on which
the same file says anything else refuses it. Equal rows and settings give equal artifacts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
import numpy as np

import headway
from headway.predict.artifact import (
    Array,
    Artifact,
    Components,
    LabelTable,
    LengthTrees,
    LinearModel,
    Neighbours,
    Overall,
    QualityTrees,
    RemainingLengths,
    SelfTest,
    TrainedModel,
    TrainingData,
)
from headway.predict.forecast import Forecaster
from headway.predict.prompt import prompt_of_text
from headway.predict.seen import prompt_hash
from headway.train.calibration import Calibration, calibrate
from headway.train.card import Card, make_card
from headway.train.crossvalidate import cross_validate
from headway.train.fit import Fit, fit
from headway.train.material import Material, material_of
from headway.train.rivals import length_table, lengths_of
from headway.train.settings import Settings
from headway.train.table import EvaluationTable, Floats

#: Upper bounds of the bins of prompt tokens in which answers are kept for requests that outlive their prediction.
_EDGES_TOKENS = (128, 512, 2048, 8192, 32768)
_MAX_LENGTHS, _MAX_NEIGHBOURS = 256, 20_000
_TEST_PROMPTS = (
    "",
    "Which of the two rivers is longer, and by how much? Answer in one sentence.",
    "Write a Python function that returns the n-th prime.\n```python\ndef prime(n: int) -> int:\n```",
    "Résumé the following report in 200 words, then give three tips.\n\n日本語のテキスト。 A) yes B) no",
)


def cross_validated_card(
    table: EvaluationTable,
    settings: Settings,
    *,
    title: str,
    command: str,
    notes: Sequence[str] = (),
    on_fold: Callable[[int, int], None] = lambda number, num_folds: None,
) -> tuple[Card, Material, Calibration]:
    """The card of ``table``, and what a final predictor needs of its making: the material, and a calibration fitted on
    the outputs of all folds.

    Raises:
        DatasetError: too few unlike prompts for the folds, or too few answers to grow trees on.
    """
    with _one_thread():
        material, alike = material_of(table)
        found = cross_validate(material, table.texts, settings, on_fold=on_fold)
        card = make_card(table, material, alike, found, settings=settings, title=title, command=command, notes=notes)
        return card, material, calibrate(found.raw, material.quality, material.log_tokens, found.fold)


def build_artifact(
    table: EvaluationTable,
    card: Card,
    material: Material,
    calibration: Calibration,
    *,
    settings: Settings,
    generation: int = 1,
) -> Artifact:
    """The artifact of all rows, serving what ``card`` found best."""
    with _one_thread():
        fitted = fit(material, settings)
    artifact = Artifact(
        made_by=f"headway {headway.__version__}",
        generation=generation,
        models=_models(table),
        data=_training_data(table, card),
        figures=card.summary,
        serves_quality=card.serves_quality,
        serves_length=card.serves_length,
        why=card.why,
        linear=_linear(fitted),
        components=Components(_single(fitted.component_mean), _single(fitted.component_axes)),
        quality=_quality(fitted, calibration),
        length=_length(fitted, calibration),
        labels=_labels(material, fitted, settings),
        neighbours=_neighbours(material, fitted, settings),
        overall=_overall(material),
        remaining=remaining_lengths(table),
        settings={name: value for name, value in msgspec.structs.asdict(settings).items() if value is not None},
    )
    return with_self_tests(artifact)


def _one_thread() -> AbstractContextManager[object]:
    """Linear algebra on one thread: sums in the same order, so equal artifacts, on machines of however many cores."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

    limits: AbstractContextManager[object] = threadpool_limits(limits=1)
    return limits


def with_self_tests(artifact: Artifact) -> Artifact:
    """The artifact with what it says of the test prompts here."""
    forecaster = Forecaster(artifact, range(len(artifact.models)))
    tests = []
    for text in _TEST_PROMPTS:
        said = forecaster.forecast(prompt_of_text(text))
        tests.append(SelfTest(text, *map(_double, (said.quality, said.output_tokens, said.p90_tokens))))
    return msgspec.structs.replace(artifact, self_tests=tuple(tests))


def remaining_lengths(table: EvaluationTable) -> RemainingLengths:
    """Answers by bin of prompt tokens, all models counting alike; each bin as at most 256 of its quantiles."""
    bins = np.searchsorted(_EDGES_TOKENS, table.prompt_tokens, side="left")
    lengths: list[tuple[float, ...]] = []
    for index in range(len(_EDGES_TOKENS) + 1):
        answers = table.output_tokens[bins == index]
        known = np.sort(answers[~np.isnan(answers)])
        if len(known) > _MAX_LENGTHS:
            known = np.quantile(known, np.linspace(0.0, 1.0, _MAX_LENGTHS))
        lengths.append(tuple(known.tolist()))
    return RemainingLengths(_EDGES_TOKENS, tuple(lengths))


def _single(values: Floats) -> Array:
    return Array.of(values, "float32")


def _double(values: Floats) -> Array:
    return Array.of(values, "float64")


def _models(table: EvaluationTable) -> tuple[TrainedModel, ...]:
    def mean(values: Floats) -> float | None:
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else None

    return tuple(
        TrainedModel(
            name=facts.name,
            num_rows=int((~(np.isnan(table.quality[:, at]) & np.isnan(table.output_tokens[:, at]))).sum()),
            log_parameters=None if facts.parameters is None else float(np.log(facts.parameters)),
            context_tokens=facts.context_tokens,
            input_per_1m_usd=facts.input_per_1m_usd,
            output_per_1m_usd=facts.output_per_1m_usd,
            mean_quality=mean(table.quality[:, at]),
            mean_output_tokens=mean(table.output_tokens[:, at]),
        )
        for at, facts in enumerate(table.models)
    )


def _training_data(table: EvaluationTable, card: Card) -> TrainingData:
    hashes = np.unique(np.array([prompt_hash(text) for text in table.texts], np.int64))
    return TrainingData(
        sources=table.sources,
        sha256=table.sha256,
        num_rows=table.num_rows,
        num_prompts=table.num_prompts,
        num_duplicate_prompts=card.num_equal_prompts + card.num_near_prompts,
        prompt_hashes=Array.of(hashes, "int64"),
    )


def _linear(fitted: Fit) -> LinearModel:
    linear = fitted.linear
    return LinearModel(
        idf=_single(linear.idf),
        dense_mean=_single(linear.dense_mean),
        dense_scale=_single(linear.dense_scale),
        dense_limit=linear.dense_limit,
        weights=_single(linear.weights),
        intercept=_double(linear.intercept),
        temperature=linear.temperature,
    )


def _quality(fitted: Fit, calibration: Calibration) -> QualityTrees | None:
    head = calibration.quality
    if head is None or "huber" not in fitted.trees:
        return None
    return QualityTrees(
        trees=fitted.trees["huber"], level=_double(head.level), slope=head.slope, knots=_double(head.knots)
    )


def _length(fitted: Fit, calibration: Calibration) -> LengthTrees | None:
    parts = (calibration.mean_scale, calibration.p50_shift, calibration.p90_shift)
    if "mean" not in fitted.trees or any(part is None for part in parts):
        return None
    return LengthTrees(
        fitted.trees["mean"],
        fitted.trees["p50"],
        fitted.trees["p90"],
        *(_double(part) for part in parts if part is not None),
    )


def _labels(material: Material, fitted: Fit, settings: Settings) -> LabelTable:
    means, lengths = fitted.linear.label_means, length_table(material, settings.label_strength)
    return LabelTable(
        labels=material.label_names,
        quality=_double(means.quality),
        log_tokens=_double(means.log_tokens),
        output_tokens=_double(lengths.mean),
        p50_tokens=_double(lengths.p50),
        p90_tokens=_double(lengths.p90),
    )


def _neighbours(material: Material, fitted: Fit, settings: Settings) -> Neighbours:
    kept = np.arange(material.num_prompts)
    if len(kept) > _MAX_NEIGHBOURS:
        kept = np.sort(np.random.default_rng(settings.seed).choice(kept, _MAX_NEIGHBOURS, replace=False))
    return Neighbours(
        k=settings.neighbours,
        points=_single(fitted.components(material.features)[kept]),
        quality=_single(material.quality[kept]),
        output_tokens=_single(material.tokens[kept]),
    )


def _overall(material: Material) -> Overall:
    lengths = lengths_of(material.tokens)
    columns = [column[~np.isnan(column)] for column in material.quality.T]
    return Overall(
        quality=_double(np.array([column.mean() if len(column) else np.nan for column in columns])),
        output_tokens=_double(lengths.mean[0]),
        p50_tokens=_double(lengths.p50[0]),
        p90_tokens=_double(lengths.p90[0]),
    )
