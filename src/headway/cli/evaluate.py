"""``headway evaluate``: how good predictions are on prompts they were not trained on, without making an artifact.

Three ways: cross-validate on rows, ask an artifact about rows it has not seen, or make the model cards of the published
evaluation sets anew. It refuses to report a figure on a prompt that training saw.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.cli.progress import progress
from headway.cli.train import read_table
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.train.card import Card
    from headway.train.held_out import HeldOut
    from headway.train.settings import Settings
    from headway.train.table import EvaluationTable


def evaluate(
    *data: Path,
    artifact: Path | None = None,
    published: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None,
    config: Path | None = None,
    out: Path | None = None,
    title: str | None = None,
    folds: int | None = None,
    seed: int = 0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Measure a predictor on unseen prompts, against simple ones.

    Parameters
    ----------
    data
        Evaluation rows (.jsonl, .jsonl.gz) to cross-validate on, or to ask --artifact about.
    artifact
        A trained artifact: it is asked about those prompts that it has not seen.
    published
        Names of published sets (all of them: "all") under HEADWAY_DATA, instead of rows; their cards go to --out.
    config
        A pool's YAML file; sizes, contexts and prices of its models are taken from there.
    out
        A directory for the cards, as Markdown and JSON.
    title
        What the card calls the data; by default the names of its files.
    folds
        Folds of the cross-validation; by default 10 for less than 2,000 prompts, else 5.
    seed
        Seed of folds, bootstrap and trees.
    json
        Print JSON.
    """
    from headway.train.settings import Settings

    if (published is not None) == bool(data):
        raise ConfigError("give either files of evaluation rows, or --published", key="DATA")
    if folds is not None and folds < 2:
        raise ConfigError(f"must be at least 2, not {folds}", key="--folds")
    settings = Settings(num_folds=folds, seed=seed)
    if published is not None:
        if artifact is not None:
            raise ConfigError("asks about files of rows, not about published sets", key="--artifact")
        return _published(published, settings, out, json)
    table = read_table(data, config)
    if artifact is not None:
        return _held_out(artifact, table, seed, json)
    pool = "" if config is None else f" --config {shlex.quote(str(config))}"
    command = f"headway evaluate {shlex.join(map(str, data))}{pool}{_options(settings)}"
    card = _card(table, settings, title or ", ".join(path.name for path in data), command)
    if out is not None:
        from headway.train.card_page import write_card

        write_card(card, out, data[0].name.split(".")[0])
    _print({"": card}, json)
    return 0


def _card(table: EvaluationTable, settings: Settings, title: str, command: str, notes: tuple[str, ...] = ()) -> Card:
    from headway.train.build import cross_validated_card

    with progress(title) as bar:
        told = (lambda *_: None) if bar is None else (lambda done, total: bar(done, total, "folds"))
        return cross_validated_card(table, settings, title=title, command=command, notes=notes, on_fold=told)[0]


def _published(names: list[str], settings: Settings, out: Path | None, json: bool) -> int:
    """One after the other, each card written as soon as it is made."""
    from headway.config.nodes import did_you_mean
    from headway.train.card_index import index_page, read_cards, write_index
    from headway.train.card_page import write_card
    from headway.train.published import PUBLISHED, data_directory

    chosen = list(PUBLISHED) if names in ([], ["all"]) else names
    for name in chosen:
        if name not in PUBLISHED:
            raise ConfigError(f"no published set {name!r}{did_you_mean(name, list(PUBLISHED))}", key="--published")
    directory = data_directory()
    cards = {}
    for name in chosen:
        one = PUBLISHED[name]
        command = f"headway evaluate --published {name}{_options(settings)}"
        cards[name] = _card(one.table(directory), settings, one.title, command, one.notes)
        if out is not None:
            write_card(cards[name], out, name)
    _print(cards, json)
    if out is not None:
        command = f"headway evaluate --published all{_options(settings)} --out {out}"
        page = write_index(out, index_page(read_cards(out, list(PUBLISHED)), command))
        print(f"Wrote {len(cards)} cards and {page}.", file=sys.stderr)
    return 0


def _options(settings: Settings) -> str:
    """What must be said to have these settings again."""
    folds = f" --folds {settings.num_folds}" if settings.num_folds else ""
    return folds + (f" --seed {settings.seed}" if settings.seed else "")


def _print(cards: dict[str, Card], json: bool) -> None:
    from headway.train.card_page import as_markdown, rounded

    if json:
        import msgspec

        plain = {name: rounded(card) for name, card in cards.items()}
        sys.stdout.write(msgspec.json.encode(plain.get("", plain)).decode() + "\n")
        return
    for card in cards.values():
        print(as_markdown(card))


def _held_out(path: Path, table: EvaluationTable, seed: int, json: bool) -> int:
    from headway.config.artifact_file import read_artifact
    from headway.train.held_out import hold_out

    found = hold_out(read_artifact(path), table, seed=seed)
    if json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        _show_held_out(found)
    return 0


def _show_held_out(found: HeldOut) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    seen = f", {found.num_seen_prompts:,} that it was trained on are left out" if found.num_seen_prompts else ""
    console.print(f"{found.num_prompts:,} prompts that the artifact has not seen{seen}.", highlight=False)
    if found.unknown_models:
        console.print(f"Models that it does not know: {', '.join(found.unknown_models)}.", highlight=False)
    console.print(f"It serves quality by {found.serves_quality}, length by {found.serves_length}.", highlight=False)
    measures = list(dict.fromkeys(measure for figures in found.figures.values() for measure in figures))
    table = Table(title="Within model, 95 % intervals", title_justify="left")
    table.add_column("measure")
    for name in found.figures:
        table.add_column(name, justify="right")
    for measure in measures:
        cells = [figures.get(measure) for figures in found.figures.values()]
        table.add_row(measure, *("" if f is None else f"{f.value:.3f} ({f.low:.3f} to {f.high:.3f})" for f in cells))
    console.print(table)
