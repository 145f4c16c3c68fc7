"""``headway bench prices``: the CPU time of a routing period of bid-price control.

Times are of this process on this machine, for orientation; the acceptance row A14 measures the same call.
"""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from headway.policy.bid_control import History

_TARGETS_MS = {4: 0.3, 64: 3.0}
_HISTORIES: tuple[History, ...] = ("period", "ahead")


def prices(*, periods: int = 400, seed: int = 1, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Time routing periods of bid prices with 200 queries waiting, on 4 and on 64 devices.

    Parameters
    ----------
    periods
        Routing periods that are timed, after a fifth as many to warm up.
    seed
        Draws lengths and minibatches.
    json
        Print one JSON object instead of a table.
    """
    import numpy as np

    from headway.errors import ConfigError
    from headway.lab.queue_cost import routing_times_ms
    from headway.policy.bid_control import BidSettings

    if periods < 1:
        raise ConfigError(f"must be at least 1, not {periods}", key="--periods")
    figures: dict[str, dict[str, float]] = {}
    for history in _HISTORIES:
        for num in _TARGETS_MS:
            settings = BidSettings(history=history)
            times_ms = routing_times_ms(num, num_periods=periods, seed=seed, settings=settings)
            low, middle, high = np.quantile(times_ms, [0.1, 0.5, 0.9]).tolist()
            figures[f"{history}_{num}"] = {"median_ms": middle, "p10_ms": low, "p90_ms": high}
    if json:
        print(json_module.dumps(figures))
    else:
        _print(figures)
    return 0


def _print(figures: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="A routing period of bid prices, CPU ms (200 waiting, horizon 2,048)", title_justify="left")
    for name in ("columns", "devices", "median", "10 to 90 %", "target"):
        table.add_column(name, justify="left" if name == "columns" else "right")
    for key, found in figures.items():
        history, num = key.split("_")
        spread = f"{found['p10_ms']:.3f} to {found['p90_ms']:.3f}"
        table.add_row(history, num, f"{found['median_ms']:.3f}", spread, f"{_TARGETS_MS[int(num)]:g}")
    Console().print(table)
