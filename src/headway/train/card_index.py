"""The page that leads to the model cards of a directory: the figures that matter most, and which thresholds hold.

Made from the cards' JSON, so it can be made again without their data. It stands in the directory's README between two
marks and leaves what people wrote around it alone. A threshold that is missed is shown as missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from headway.errors import DatasetError
from headway.predict.artifact import Kind
from headway.train.card import Card
from headway.train.card_page import as_table, shown
from headway.train.measures import Figure
from headway.train.routing import RoutingValue

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
#: Whom the quality of the trees must beat.
_RIVALS = {"task_label": "task label", "knn": "nearest neighbours", "tfidf_ridge": "TF-IDF + ridge"}
MIN_RANK_CORRELATION = 0.5
COVERAGE = (0.88, 0.92)
MIN_PINBALL_SAVED = 0.05


class Verdict(Struct, frozen=True):
    """Whether one threshold holds on one set, and by which figure."""

    holds: bool
    figure: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else '**missed**'}: {self.figure}"


def verdicts(card: Card) -> dict[str, Verdict]:
    """Every threshold that the card has figures for, by its text.

    A difference from a rival holds only if its whole interval does; a level holds if the measured value does.
    """
    found: dict[str, Verdict] = {}
    rivals = {name: card.above[name]["r2"] for name in _RIVALS if "r2" in card.above.get(name, {})}
    if rivals:
        name, least = min(rivals.items(), key=lambda pair: pair[1].low)
        figure = f"{shown(least, 4, sign='+')} above {_RIVALS[name]}"
        found["quality R² above task label, neighbours and TF-IDF + ridge"] = Verdict(least.low > 0.0, figure)
    learned = card.figures["learned"]
    if "length_rank_correlation" in learned:
        rank = learned["length_rank_correlation"]
        text = f"length rank correlation at least {MIN_RANK_CORRELATION}"
        found[text] = Verdict(rank.value >= MIN_RANK_CORRELATION, shown(rank, 3))
    if "p90_coverage" in learned:
        covered = learned["p90_coverage"]
        text = f"p90 covers {COVERAGE[0]:.0%} to {COVERAGE[1]:.0%}"
        found[text] = Verdict(COVERAGE[0] <= covered.value <= COVERAGE[1], shown(covered, 3))
    if card.p90_pinball_saved is not None:
        saved = card.p90_pinball_saved
        text = f"p90 pinball loss {MIN_PINBALL_SAVED:.0%} below a constant quantile per model"
        figure = f"{saved.value:.1%} ({saved.low:.1%} to {saved.high:.1%}) below"
        found[text] = Verdict(saved.value >= MIN_PINBALL_SAVED, figure)
    if card.routing is not None:
        gain = card.routing.learned_above["task_recognised"]
        served = card.serves_quality == "task_label" or gain.low > 0.0
        figure = f"trees {shown(gain, 4, sign='+')}, so `{card.serves_quality}` serves"
        found["what serves routes no worse than the task label"] = Verdict(served, figure)
    return found


def read_cards(directory: Path, names: Sequence[str]) -> dict[str, Card]:
    """Those of the named cards that lie in ``directory``.

    Raises:
        DatasetError: a file is no card, or of another version; names it.
    """
    cards = {}
    for name in names:
        path = directory / f"{name}.json"
        if path.is_file():
            try:
                cards[name] = msgspec.json.decode(path.read_bytes(), type=Card)
            except (OSError, msgspec.MsgspecError) as error:
                raise DatasetError(f"is no model card: {error}", path=str(path)) from error
    return cards


def index_page(cards: Mapping[str, Card], command: str) -> str:
    """The figures of the learned predictor that matter most, and a row per threshold."""
    rows = [_summary(name, card) for name, card in cards.items()]
    heads = [
        "data", "quality R²", "of the task label", "length log R²", "routing value", "above the task label as told",
        "serves (quality, length)", "which makes of the oracle's lead",
    ]  # fmt: skip
    judged = {name: verdicts(card) for name, card in cards.items()}
    thresholds = dict.fromkeys(text for one in judged.values() for text in one)
    table = [
        [text, *(str(judged[name][text]) if text in judged[name] else "no figures" for name in cards)]
        for text in thresholds
    ]
    return (
        f"```console\n$ {command}\n```\n\n{as_table(heads, rows)}\n\n"
        f"{as_table(['threshold', *(f'[{name}]({name}.md)' for name in cards)], table)}"
    )


def _summary(name: str, card: Card) -> list[str]:
    learned, routing = card.figures["learned"], card.routing

    def cell(figure: Figure | None, decimals: int, sign: str = "") -> str:
        return "" if figure is None else shown(figure, decimals, sign=sign)

    return [
        f"[{card.title}]({name}.md)",
        cell(learned.get("r2"), 3),
        cell(card.figures["task_label"].get("r2"), 3),
        cell(learned.get("length_log_r2"), 3),
        "" if routing is None else cell(routing.values["learned"], 3),
        "" if routing is None else cell(routing.learned_above["task_recognised"], 4, "+"),
        f"{card.serves_quality}, {card.serves_length}",
        "" if routing is None else _of_the_lead(routing, card.serves_quality),
    ]


def _of_the_lead(routing: RoutingValue, serves: Kind) -> str:
    """How much of what an oracle is above two models mixed at random the predictor that serves is above them."""
    way = {"task_label": "task_recognised", "constant": "random_two_model_hull"}.get(serves, serves)
    served, hull, oracle = (routing.values[name].value for name in (way, "random_two_model_hull", "oracle"))
    return f"{(served - hull) / max(oracle - hull, 1e-12):.0%}"


def write_index(directory: Path, block: str) -> Path:
    """Put ``block`` between the marks of the directory's README, which is begun where it is missing.

    Raises:
        DatasetError: the page lacks a mark, or cannot be written.
    """
    path = directory / "README.md"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else f"# Model cards\n\n{BEGIN}\n{END}\n"
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise DatasetError(f"has no part between {BEGIN!r} and {END!r} to write to", path=str(path))
        path.write_text(f"{before}{BEGIN}\n\n{block}\n\n{END}{after}", encoding="utf-8")
    except OSError as error:
        raise DatasetError(f"cannot be written: {error.strerror or error}", path=str(path)) from error
    return path
