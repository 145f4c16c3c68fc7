"""``headway bench predict``: the CPU time of a query's predictions, of which a decision waits for every microsecond."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from cyclopts import Parameter

from headway.errors import ConfigError, HeadwayError

_PASSES = 3
#: Models of a pool, its name in the figures, and the CPU microseconds it may take.
_POOLS = ((3, "three_models_us", 250.0), (9, "nine_models_us", 400.0))


def predict(
    *, artifact: Path | None = None, rounds: int = 75, json: Annotated[bool, Parameter(negative=())] = False
) -> int:
    """Time features, quality, lengths and cost of 800-character prompts, each asked once, for three and nine models.

    Parameters
    ----------
    artifact
        A trained artifact, of which the first three and nine models are asked. Without: one is trained on the spot, as
        large as those of the published evaluation sets or larger; that takes half a minute and the extra `train`.
    rounds
        Rounds of 20 prompts, in each of three processes per pool; medians are printed.
    json
        Print one JSON object instead of a table.
    """
    from headway.bench.predictor import num_trees, training_artifact
    from headway.cli.progress import progress
    from headway.config.artifact_file import read_artifact
    from headway.predict.artifact import encode_artifact

    if rounds < 1:
        raise ConfigError(f"must be at least 1, not {rounds}", key="--rounds")
    if artifact is not None:
        asked = read_artifact(artifact)
    else:
        with progress("bench"):
            asked = training_artifact()
    content, trained = encode_artifact(asked), len(asked.models)
    figures: dict[str, Any] = {"num_trees": num_trees(asked)}
    if trained < _POOLS[0][0]:
        raise HeadwayError(f"{artifact} knows {trained} models, and needs three at least")
    pools = [(num_models, name) for num_models, name, _ in _POOLS if num_models <= trained]
    figures |= {name: None for _, name, _ in _POOLS}
    # In turn, so that a neighbour's burst of work does not fall on one pool alone.
    passes = [{name: _measured(content, num_models, rounds) for num_models, name in pools} for _ in range(_PASSES)]
    for _, name in pools:
        figures[name] = round(median(one[name]["us"] for one in passes), 1)
    every = [cost for one in passes for cost in one.values()]
    figures["features_us"] = round(median(cost["features_us"] for cost in every), 1)
    figures["peak_rss_mb"] = round(max(cost["peak_rss_mb"] for cost in every), 1)
    if json:
        print(json_module.dumps(figures))
    else:
        _print(figures)
    return 0


def _measured(content: bytes, num_models: int, rounds: int) -> dict[str, float]:
    """In a process of its own, which holds nothing of the training; its CPU time only."""
    command = [sys.executable, "-m", "headway.bench.predictor", str(num_models), str(rounds)]
    done = subprocess.run(command, check=False, capture_output=True, input=content)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise HeadwayError(f"the measurement failed: {reason[-1]}")
    figures: dict[str, float] = json_module.loads(done.stdout)
    return figures


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"Predictions for a prompt of 800 characters, CPU µs ({figures['num_trees']} trees)"
    table = Table(title=title, title_justify="left")
    for name in ("pool", "measured", "target"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for num_models, name, target_us in _POOLS:
        found = figures[name]
        shown = "too few models" if found is None else f"{found:.0f}"
        table.add_row(f"{num_models} models", shown, f"{target_us:.0f}")
    console = Console()
    console.print(table)
    console.print(
        f"Of that the features: {figures['features_us']:.0f} µs. Peak memory: {figures['peak_rss_mb']:.0f} MB."
    )
