"""``headway train``: from evaluation rows to a predictor that a gateway, the demo and the lab can use.

The artifact is written whole or not at all, so a gateway that follows the file never meets a half of one. The model
card goes to the standard output and, on request, into a directory.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.cli.progress import progress
from headway.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from headway.predict.artifact import Artifact
    from headway.train.settings import Settings
    from headway.train.table import EvaluationTable
    from headway.types import ModelCard


def train(
    data: Path,
    /,
    *more: Path,
    out: Path | None = None,
    update: Path | None = None,
    config: Path | None = None,
    card: Path | None = None,
    title: str | None = None,
    folds: int | None = None,
    seed: int | None = None,
    trees: int | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train a predictor of quality and output length, cross-validated, and write it to one file.

    Parameters
    ----------
    data
        Evaluation rows (.jsonl, .jsonl.gz), as collect, judge and the gateway's feedback write them.
    more
        More such files.
    out
        Where to write the artifact.
    update
        An artifact to train anew with its own settings, in place, on rows that have grown since. Instead of --out.
    config
        A pool's YAML file; sizes, contexts and prices of its models are taken from there.
    card
        A directory for the model card, as Markdown and JSON.
    title
        What the card calls the data; by default the names of its files.
    folds
        Folds of the cross-validation; by default 10 for less than 2,000 prompts, else 5.
    seed
        Seed of folds, bootstrap and trees.
    trees
        Most trees per head.
    json
        Print the model card as JSON.
    """
    from headway.config.artifact_file import read_artifact

    if (out is None) == (update is None):
        raise ConfigError("give either --out, a new artifact, or --update, one to train anew", key="--out")
    target = out or update or Path()
    paths = (data, *more)
    earlier = None if update is None else read_artifact(update)
    settings = _settings(earlier, {"num_folds": folds, "seed": seed, "max_trees": trees})
    table = read_table(paths, config)
    if earlier is not None and earlier.data.sha256 == table.sha256:
        print(f"headway: {target} was trained on these very rows; nothing to do", file=sys.stderr)
        return 0
    from headway.predict.artifact import encode_artifact
    from headway.train.build import build_artifact, cross_validated_card
    from headway.train.card_page import as_markdown, rounded, write_card

    command = shlex.join(["headway", "train", *map(str, paths), "--out", str(target), *_options(settings, config)])
    with progress("train") as bar:
        told = (lambda *_: None) if bar is None else (lambda done, total: bar(done, total + 1, "folds"))
        made, material, calibration = cross_validated_card(
            table, settings, title=title or ", ".join(path.name for path in paths), command=command, on_fold=told
        )
        generation = 1 if earlier is None else earlier.generation + 1
        artifact = build_artifact(table, made, material, calibration, settings=settings, generation=generation)
    write_whole(target, encode_artifact(artifact))
    if card is not None:
        write_card(made, card, target.stem)
    if json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(rounded(made)).decode() + "\n")
        return 0
    print(as_markdown(made))
    since = "" if earlier is None else f" ({table.num_rows - earlier.data.num_rows:+,} since the one before)"
    print(f"Wrote {target}: generation {generation}, {table.num_rows:,} rows{since}.")
    return 0


def _options(settings: Settings, config: Path | None) -> list[str]:
    """What must be said to train with these settings again."""
    usual = type(settings)()
    told = {"folds": settings.num_folds, "seed": settings.seed, "trees": settings.max_trees}
    plain = {"folds": usual.num_folds, "seed": usual.seed, "trees": usual.max_trees}
    options = [part for name, value in told.items() if value != plain[name] for part in (f"--{name}", str(value))]
    return options if config is None else ["--config", str(config), *options]


def read_table(paths: Sequence[Path], config: Path | None) -> EvaluationTable:
    """The rows of all files as one table.

    Raises:
        DatasetError: a file is wrong, or they contradict each other.
        ConfigError: the pool's file is wrong.
    """
    from headway.train.dataset import read_rows
    from headway.train.table import build_table

    cards: Mapping[str, ModelCard] = {}
    if config is not None:
        from headway.assembly import model_card
        from headway.config import load_config

        cards = {model.name: model_card(model) for model in load_config(config).models}
    rows = (row for path in paths for row in read_rows(path))
    return build_table(rows, cards=cards, sources=[path.name for path in paths])


def write_whole(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` in one step: whoever reads the file finds the old or the new one.

    Raises:
        DatasetError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise DatasetError(f"cannot be written: {error.strerror or error}", path=str(path)) from error


def _settings(earlier: Artifact | None, given: Mapping[str, int | None]) -> Settings:
    """The earlier artifact's settings or the defaults, with what was given.

    Raises:
        ConfigError: a value out of range; names the option.
    """
    import msgspec

    from headway.train.settings import Settings

    options = {"num_folds": "--folds", "seed": "--seed", "max_trees": "--trees"}
    known = {} if earlier is None else earlier.settings
    asked = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert({**known, **asked}, Settings)
    except msgspec.ValidationError as error:
        name = next((option for field, option in options.items() if field in str(error)), "--update")
        raise ConfigError(str(error), key=name) from error
