"""``headway bench gateway``: CPU and memory of the gateway, beside no gateway and another router, in one run."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headway.errors import ConfigError

_ROUTER_VERSION = "0.1.17"


def gateway(
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    rounds: int = 3,
    vllm_router: Path | None = None,
) -> int:
    """Measure what the gateway costs: CPU per token and request, added TTFT, memory.

    Streams of 50 tokens, 20 ms apart, 1, 32 and 256 at a time, from a paced server on this machine: direct, through
    this gateway, and through vllm-router where it is installed. Linux only.

    Parameters
    ----------
    json
        Print one JSON object instead of a table.
    rounds
        Rounds over all targets; medians are printed. One takes about a minute.
    vllm_router
        The program to compare with (`pip install vllm-router` in an environment of its own), else the one on the PATH.
    """
    import shutil

    from headway.bench.gateway import measure

    if rounds < 1:
        raise ConfigError(f"must be at least 1, not {rounds}", key="rounds")
    if vllm_router is not None and not vllm_router.is_file():
        raise ConfigError(f"no such file: {vllm_router}", key="vllm-router")
    found = shutil.which("vllm-router")
    router = vllm_router if vllm_router is not None else None if found is None else Path(found)
    figures = measure(rounds=rounds, vllm_router=router, progress=_progress)
    if json:
        print(json_module.dumps(figures))
    else:
        _print_tables(figures)
        if router is None:
            print(f"vllm-router is not installed: it was left out (checked with {_ROUTER_VERSION}).")
    return 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _print_tables(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="CPU µs per token at so many streams; per request of 50 tokens", title_justify="left")
    for column in ("target", "1", "32", "256", "request", "added TTFT p50, p99 ms", "MB idle, peak"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for name, one in figures["targets"].items():
        tokens = [f"{one['per_token_us'][streams]:.1f}" for streams in ("1", "32", "256")]
        added = f"{one['added_ttft_p50_ms']:.2f}, {one['added_ttft_p99_ms']:.2f}"
        memory = f"{one['rss_idle_mb']:.0f}, {one['rss_peak_mb']:.0f}"
        table.add_row(name, *tokens, f"{one['per_request_us']:,.0f}", added, memory)
    console = Console()
    console.print(table)
    if figures["ratio_per_token_256"] is not None:
        console.print(f"CPU per token at 256 streams over vllm-router's: {figures['ratio_per_token_256']:.2f}")
    console.print(f"An idle stream: {figures['kb_per_idle_stream']:.1f} KB", highlight=False)
    p99_ms = figures["decision_p99_ms_16_instances"]
    console.print(f"A decision over 16 instances with new snapshots each time, p99: {p99_ms:.2f} ms", highlight=False)
