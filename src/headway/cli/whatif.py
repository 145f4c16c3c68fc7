"""``headway whatif``: logged traffic under other rules: what it would have cost, how many targets it would have met."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.lab.whatif import WhatIf


def whatif(
    *decisions: Path,
    policy: str,
    pool: Path | None = None,
    seeds: int = 3,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Route a decision log once more, by other policies or over another pool, in simulation.

    The first row of the table is what really happened. To see what the simulation is worth, name the policy that ruled
    among the others: its row should be near the first.

    Parameters
    ----------
    decisions
        Files of the decision log (``decisions: {file: …}``), in any order; rotated ones too.
    policy
        Policies, separated by commas.
    pool
        The configuration whose pool and routing options are used; by default the one that the log names.
    seeds
        Runs of each policy with other step noise; means are printed.
    json
        Print one JSON array.
    """
    import msgspec

    from headway.config import load_config
    from headway.lab.whatif import as_it_was, check_policies, read_decisions, what_if

    if not decisions:
        raise ConfigError("name at least one file of a decision log", key="decisions")
    if seeds < 1:
        raise ConfigError(f"must be at least 1, not {seeds}", key="seeds")
    names = [name.strip() for name in policy.split(",") if name.strip()]
    check_policies(names)
    rows = read_decisions(decisions)
    path = Path(rows[-1].config) if pool is None else pool
    if pool is None and not rows[-1].config:
        raise ConfigError("the log names no configuration: give one", key="pool")
    config = load_config(path)
    found = [as_it_was(rows)]
    found += [what_if(rows, config, name, seeds=range(seeds)) for name in names]
    if json:
        print(msgspec.json.encode(found).decode())
        return 0
    _print_table(found)
    if pool is None and config.config_hash != rows[-1].config_hash:
        print(f"{path} has changed since: its hash is {config.config_hash}, the log's {rows[-1].config_hash}.")
    return 0


def _print_table(found: list[WhatIf]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{found[0].num_queries:,} logged requests", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1)
    )
    for column in ("policy", "met", "USD/1,000", "quality", "p50 s", "p99 s", "where, %"):
        left = column in ("policy", "where, %")
        width = 12 if column == "where, %" else None
        table.add_column(column, justify="left" if left else "right", no_wrap=width is None, min_width=width)
    for one in found:
        table.add_row(
            one.policy or "as it was",
            "–" if one.attainment is None else f"{one.attainment:.1%}",
            f"{one.cost_per_1000_usd:.4g}",
            "–" if one.mean_quality is None else f"{one.mean_quality:.3f}",
            *("–" if value is None else f"{value:.3g}" for value in (one.ttft_p50_s, one.ttft_p99_s)),
            ", ".join(
                f"{name} {100 * share:.0f}" for name, share in [*one.shares.items(), ("refused", one.refused)] if share
            ),
        )
    console = Console()
    console.print(table)
    console.print(
        "Met: targets for the time to first token (p50 and p99, in seconds). Simulated rows: lengths on models that "
        "did not answer and all qualities are predictions; engines run by their profiles.",
        highlight=False,
    )
