"""The model card as a Markdown page and as JSON, for a directory of cards or the terminal.

Figures stand with their intervals and the command that made them; what a predictor says nothing of stays empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.errors import DatasetError
from headway.train.card import Card
from headway.train.comparison import LENGTH_MEASURES, QUALITY_MEASURES
from headway.train.measures import Figure
from headway.train.routing import RoutingValue

#: Heading and decimals of each measure.
_COLUMNS: dict[str, tuple[str, int]] = {
    "r2": ("R²", 4),
    "r2_shared": ("R², how hard for all", 4),
    "r2_apart": ("R², how hard for whom", 4),
    "auc": ("AUC", 3),
    "calibration_error": ("calibration error", 3),
    "length_log_r2": ("log R²", 3),
    "length_mae_tokens": ("MAE, tokens", 1),
    "length_rank_correlation": ("rank correlation", 3),
    "p90_coverage": ("p90 covers", 3),
    "p90_pinball_tokens": ("p90 pinball, tokens", 2),
}
_PREDICTORS = {
    "constant": "constant (the model's mean)",
    "task_label": "task label, as the data set has it",
    "task_recognised": "task label, as told from the prompt",
    "knn": "nearest neighbours",
    "tfidf_ridge": "TF-IDF + ridge",
    "learned": "**learned**",
}
_MAX_NAMED = 12
_WAYS = {
    "best_single_model": "best single model that is no dearer",
    "random_two_model_hull": "two models at random (hull)",
    "task_label": "task label, as the data set has it",
    "task_recognised": "task label, as told from the prompt",
    "knn": "nearest neighbours",
    "tfidf_ridge": "TF-IDF + ridge",
    "learned": "**learned**",
    "oracle": "oracle (knows each answer's quality and cost)",
}


def write_card(card: Card, directory: Path, name: str) -> tuple[Path, Path]:
    """``name``.md and ``name``.json in ``directory``, which is made where it is missing.

    Raises:
        DatasetError: the files cannot be written.
    """
    page, data = directory / f"{name}.md", directory / f"{name}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        page.write_text(as_markdown(card), encoding="utf-8")
        data.write_bytes(msgspec.json.format(msgspec.json.encode(rounded(card)), indent=1) + b"\n")
    except OSError as error:
        raise DatasetError(f"cannot be written: {error.strerror or error}", path=str(directory)) from error
    return page, data


def rounded(card: Card) -> object:
    """The card as plain values, floats to six digits: enough to compare, little enough to read."""

    def shorten(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {key: shorten(one) for key, one in value.items()}
        return [shorten(one) for one in value] if isinstance(value, list) else value

    return shorten(msgspec.to_builtins(card))


def as_markdown(card: Card) -> str:
    """The page."""
    parts = [f"# {card.title}", _about(card), *_quality(card), *_lengths(card), *_routing(card), *_strata(card)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(card: Card) -> str:
    models = f"{len(card.models)} models"
    if len(card.models) <= _MAX_NAMED:
        models += f" ({', '.join(card.models)})"
    alike = (
        f"{card.num_equal_prompts} prompts equal another, {card.num_near_prompts} nearly do; alike ones share a fold"
    )
    by_rule = f", of {card.num_unlabelled_prompts} prompts by rules" if card.num_unlabelled_prompts else ""
    lines = [
        f"- {card.num_rows:,} answers to {card.num_prompts:,} prompts by {models}.",
        f"- {alike}. {card.num_folds} folds, seed {card.seed}; intervals (95 %) from {card.num_resamples} resamples.",
        f"- {card.num_labels} task labels{by_rule}; told from the prompt, {card.label_accuracy:.1%} of them are right.",
        *(f"- {note}" for note in card.notes),
        f"- What serves: quality by `{card.serves_quality}`, length by `{card.serves_length}`. {card.why}",
    ]
    if card.num_rows_without_answer:
        lines.insert(1, f"- {card.num_rows_without_answer:,} rows without an answer were left out.")
    return f"```console\n$ {card.command}\n```\n\n" + "\n".join(lines) + "\n\nAll figures are within model."


def _quality(card: Card) -> Sequence[str]:
    if "r2" not in card.figures["learned"]:
        return ()
    within = card.quality_r2_within_task
    note = (
        "*How hard for all* is a prompt's mean over the models, *for whom* what is left beyond it, which alone tells a "
        "router whom to choose."
    )
    if within is not None:
        note += f" Beyond each model's mean on each label, the learned predictor explains {within:.3f} of the variance."
    return ("## Quality", _figures(card, list(QUALITY_MEASURES)), _above(card, list(QUALITY_MEASURES)), note)


def _lengths(card: Card) -> Sequence[str]:
    if "length_mae_tokens" not in card.figures["learned"]:
        return ()
    within = card.length_log_r2_within_task
    note = "Errors and correlations are of the median, coverage and pinball loss of the 90 % quantile."
    if card.p90_pinball_saved is not None:
        saved = card.p90_pinball_saved
        note += (
            f" The pinball loss is {saved.value:.1%} ({saved.low:.1%} to {saved.high:.1%}) below that of one constant "
            "quantile per model."
        )
    if within is not None:
        note += f" Beyond each model's mean on each label, it explains {within:.3f} of the variance of the logarithm."
    return ("## Output length", _figures(card, list(LENGTH_MEASURES)), _above(card, list(LENGTH_MEASURES)), note)


def _figures(card: Card, measures: Sequence[str]) -> str:
    rows = [
        [_PREDICTORS[name], *(_shown(figures.get(measure), measure) for measure in measures)]
        for name, figures in card.figures.items()
    ]
    return as_table(["predictor", *(_COLUMNS[measure][0] for measure in measures)], rows)


def _above(card: Card, measures: Sequence[str]) -> str:
    rows = [
        [_PREDICTORS[name], *(_shown(figures.get(measure), measure, sign="+") for measure in measures)]
        for name, figures in card.above.items()
    ]
    heads = [_COLUMNS[measure][0] for measure in measures]
    return "Learned less the other, paired:\n\n" + as_table(["other", *heads], rows)


def _shown(figure: Figure | None, measure: str, sign: str = "") -> str:
    return "" if figure is None else shown(figure, _COLUMNS[measure][1], sign)


def shown(figure: Figure, decimals: int, sign: str = "") -> str:
    """The value with its interval; with ``sign`` "+" a plus stands before what is above 0."""
    spec = f"{sign}.{decimals}f"
    return f"{figure.value:{spec}} ({figure.low:{spec}} to {figure.high:{spec}})"


def _routing(card: Card) -> Sequence[str]:
    value = card.routing
    if value is None:
        return ()
    intro = (
        f"Quality really reached on {value.num_prompts:,} prompts by choosing among {', '.join(value.models)} for the "
        f"largest quality less weighted cost, mean over {len(value.costs_usd)} mean costs from "
        f"{value.costs_usd[0] * 1e6:.3g} to {value.costs_usd[-1] * 1e6:.3g} micro-USD per query."
    )
    return ("## Routing value", intro, _ways(value))


def _ways(value: RoutingValue) -> str:
    rows = []
    for name, title in _WAYS.items():
        if name in value.values:
            one, above = value.values[name], value.learned_above.get(name)
            rows.append([title, shown(one, 4), "" if above is None else shown(above, 4, "+")])
    return as_table(["way to choose", "quality at matched cost", "learned above it"], rows)


def _strata(card: Card) -> Sequence[str]:
    if not card.strata:
        return ()
    names = ("constant", "task_label", "task_recognised", "knn", "tfidf_ridge", "learned")
    errors: list[list[str]] = []
    gains: list[list[str]] = []
    for one in card.strata:
        third = f"{one.by}: {one.name}"
        squares = [f"{one.squared_error[name]:.4f}" if name in one.squared_error else "" for name in names]
        errors.append([third, f"{one.num_prompts:,}", f"{one.mean_quality:.3f}", *squares])
        gains.append([third, *(shown(gain, 4, "+") for gain in one.routing_above.values())])
    heads = ["third", "prompts", "mean quality", *(name.replace("_", " ") for name in names)]
    head = (
        "## By length and difficulty\n\nMean squared error of quality by thirds of the prompts. Difficulty is a "
        "prompt's mean quality over the models."
    )
    if not card.strata[0].routing_above:
        return (head, as_table(heads, errors))
    ways = [_WAYS[name] for name in card.strata[0].routing_above]
    intro = "Routing value of **learned** on each third, less that of:"
    return (head, as_table(heads, errors), intro, as_table(["third", *ways], gains))


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns without any entry are left out."""
    kept = [column for column in range(len(heads)) if column == 0 or any(row[column] for row in rows)]
    lines = [[heads[column] for column in kept], ["---"] * len(kept), *([row[c] for c in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
