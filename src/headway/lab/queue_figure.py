"""Prices as a diagnosis, drawn: what requests are charged for slots and for memory on each device, over a run.

``python -m headway.lab.queue_figure TRACE --out DIR`` writes ``bid_prices.png`` and ``bid_prices.svg``; the same bytes
every time. TRACE is a table of ``prompt_tokens`` and ``output_tokens``. Each panel is one load on four devices: slots
that become scarce when the rate rises, memory that is cut until it is the scarcer, and a load that leaves both idle.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from headway.lab.drawing import INK, Drawing, look, panels, style
from headway.lab.lps_figure import write
from headway.lab.queue_device import DeviceSpec
from headway.lab.queue_dispatch import PERIOD_S, BidPriceQueue
from headway.lab.queue_load import CONTEXT_TOKENS, Lengths, queue_load, trace_lengths
from headway.lab.queue_prices import PriceSeries, PriceWatch
from headway.lab.queue_sim import play
from headway.lab.runs import need
from headway.lab.truth import stream
from headway.policy.bid_control import BidSettings
from headway.policy.bid_objective import Objective

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_DEVICES, _NUM_SLOTS = 4, 29
_EVERY = 50.0  # periods


class Panel(Struct, frozen=True, kw_only=True):
    """A load: its title, rates per period before and after half of the run, and the memory of each device."""

    title: str
    rate: float
    rate_after: float
    kv_tokens: int


PANELS = (
    Panel(title="118,784 KV tokens, rate .4 to .6 at half time", rate=0.4, rate_after=0.6, kv_tokens=118_784),
    Panel(title="27,000 KV tokens, rate .4", rate=0.4, rate_after=0.4, kv_tokens=27_000),
    Panel(title="118,784 KV tokens, rate .1", rate=0.1, rate_after=0.1, kv_tokens=118_784),
)


def price_series(panel: Panel, lengths: Lengths, *, num_periods: int, seed: int = 0) -> PriceSeries:
    """The charges over a run of about so many periods, under the latency weights and columns spread ahead."""
    expected = num_periods * (panel.rate + panel.rate_after) / 2.0
    load = queue_load(
        lengths,
        num_requests=max(2, round(expected)),
        rate=panel.rate,
        rate_after=panel.rate_after,
        shift_at=num_periods / 2.0,
        seed=seed,
    )
    watch = PriceWatch(every=_EVERY)
    settings = BidSettings(history="ahead", horizon=max(BidSettings().horizon, int(load.output_tokens.max())))
    queue = BidPriceQueue(Objective(), settings, stream(seed, "queue policy"), watch=watch)
    play(load, [DeviceSpec(max_num_seqs=_NUM_SLOTS, kv_tokens=panel.kv_tokens)] * _NUM_DEVICES, queue)
    found = watch.series()
    within = found.time <= load.arrivals[-1]
    return PriceSeries(found.time[within], found.slots[within], found.tokens[within], found.num_queued[within])


def draw(found: Mapping[Panel, PriceSeries]) -> Drawing:
    """A panel per load: a line per device for slots and for memory, and how many wait, in grey."""
    figure, grid = panels(len(found), width=9.0, height=2.7)
    words = []
    for axes, (panel, series) in zip(grid, found.items(), strict=True):
        _panel(axes, series)
        axes.set_title(panel.title)
        slots, tokens = series.means(after=float(series.time[-1]) / 5.0)
        words.append(f"{panel.title}: mean charge {slots:.3f} for slots, {tokens:.3f} for memory")
    grid[-1].set_xlabel("minutes (periods of 30 ms)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    return Drawing(
        name="bid_prices",
        title="Which resource is scarce when",
        caption="What a mean request would be charged on each of four devices, in units of the largest reward.",
        alt="Charges for slots and memory over time; " + "; ".join(words) + ".",
        figure=figure,
    )


def _panel(axes: Axes, series: PriceSeries) -> None:
    minutes = series.time * PERIOD_S / 60.0
    waiting = axes.twinx()
    waiting.fill_between(minutes, series.num_queued, color="#8b949e", alpha=0.25, linewidth=0)
    waiting.set_ylabel("waiting (grey)")
    waiting.set_ylim(0.0, max(5.0, 1.15 * float(series.num_queued.max())))
    waiting.grid(visible=False)
    axes.set_zorder(waiting.get_zorder() + 1)
    for index, (name, charges) in enumerate((("slots", series.slots), ("memory", series.tokens))):
        for device in range(charges.shape[1]):
            label = f"{name}, a line per device" if device == 0 else None
            axes.plot(minutes, charges[:, device], color=look(index).colour, linewidth=1.0, alpha=0.8, label=label)
    axes.set_ylabel("mean charge (reward)")
    axes.set_ylim(0.0, max(0.05, 1.1 * float(max(series.slots.max(), series.tokens.max()))))
    axes.axhline(0.0, color=INK, linewidth=0.8)


def picture(trace: Path, *, num_periods: int = 20_000) -> Drawing:
    """Plays and draws; some seconds at the default.

    Raises:
        ConfigError: matplotlib is not installed.
        DatasetError: the trace is absent or malformed.
    """
    need("matplotlib")
    lengths = trace_lengths(trace, context_tokens=CONTEXT_TOKENS)
    found = {panel: price_series(panel, lengths, num_periods=num_periods) for panel in PANELS}
    with style():
        return draw(found)


def main() -> None:
    """Writes the figure, and prints where it is and what it shows."""
    parser = argparse.ArgumentParser(description="Draw the prices of slots and of memory over time.")
    parser.add_argument("trace", type=Path, help="table of prompt_tokens and output_tokens (.csv, .csv.gz)")
    parser.add_argument("--out", type=Path, default=Path("runs/bid_prices"), help="directory of bid_prices.png, .svg")
    given = parser.parse_args()
    drawing = picture(given.trace)
    print(*write(drawing, given.out), drawing.alt, sep="\n")


if __name__ == "__main__":
    main()
