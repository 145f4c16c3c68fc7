"""``headway bench predict``: the CPU time of a query's predictions, of which a decision waits for every microsecond."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headway.errors import ConfigError, HeadwayError

#: Models of a pool, its name in the figures, and the CPU microseconds it may take.
_POOLS = ((3, "three_models_us", 250.0), (9, "nine_models_us", 400.0))


def predict(
    *, artifact: Path | None = None, rounds: int = 150, json: Annotated[bool, Parameter(negative=())] = False
) -> int:
    """Time features, quality, lengths and cost of 800-character prompts, each asked once, for three and nine models.

    Parameters
    ----------
    artifact
        A trained artifact, of which the first three and nine models are asked. Without: one is trained on the spot, of
        the size that published evaluation sets give; that takes half a minute and the extra `train`.
    rounds
        Rounds of 20 prompts; the median over rounds is printed.
    json
        Print one JSON object instead of a table.
    """
    from headway.bench.predictor import num_trees, training_artifact
    from headway.cli.progress import progress
    from headway.cli.train import read_artifact
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
    memory: list[float] = []
    for num_models, name, _ in _POOLS:
        figures[name] = None
        if num_models <= trained:
            cost = _measured(content, num_models, rounds)
            figures[name], memory = round(cost["us"], 1), [*memory, cost["peak_rss_mb"]]
            figures["features_us"] = round(cost["features_us"], 1)
    if not memory:
        raise HeadwayError(f"{artifact} knows {trained} models, and needs three at least")
    figures["peak_rss_mb"] = round(max(memory), 1)
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
