"""The limited-processor-sharing formula against what an event simulation observes, over the load, as a picture.

``python -m headway.lab.lps_figure --out DIR`` writes ``lps.png`` and ``lps.svg``; the same bytes every time. On the
left service is exponential, where the formula is exact; on the right it varies more, and the variability factor is a
rule of thumb. It refuses to show an engine: there the formula's assumptions do not hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from headway.estimate.queueing import lps_wait_s
from headway.lab.drawing import Drawing, logarithmic, look, panels, png_bytes, style, svg_bytes
from headway.lab.intervals import Interval
from headway.lab.lps import Service, simulated_wait
from headway.lab.runs import need
from headway.lab.truth import stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Requests served at a time, and the loads at which queues are simulated.
LOADS: dict[int, tuple[float, ...]] = {
    1: (0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    5: (0.5, 0.6, 0.7, 0.8, 0.9, 0.95),
    25: (0.8, 0.85, 0.9, 0.93, 0.95),
}
#: One request in ten is, on average, nine times as long as the others.
VARIABLE = Service(long_share=0.1, long_mean=5.0)
_NUM_STEPS, _NUM_QUEUES, _NUM_PLACES = 20_000, 500, 120


class Point(Struct, frozen=True, kw_only=True):
    """Mean waits in mean service times: the formula's, and the simulated one with its 95 % interval."""

    concurrency: int
    rho: float
    formula: float
    observed: Interval


def points(
    service: Service, *, seed: int = 0, num_steps: int = _NUM_STEPS, num_queues: int = _NUM_QUEUES
) -> list[Point]:
    """Formula and simulation at each of :data:`LOADS`; the variability factor is (1 + cs²)/2 of ``service``."""
    found: list[Point] = []
    for concurrency, rhos in LOADS.items():
        for rho in rhos:
            rng = stream(seed, "lps figure", str(concurrency), str(rho), str(service.long_share))
            formula = lps_wait_s(rho, 1.0, concurrency, service.second_moment / 2.0)
            observed = simulated_wait(
                rho, concurrency, rng, num_steps=num_steps, service=service, num_queues=num_queues
            )
            found.append(Point(concurrency=concurrency, rho=rho, formula=formula, observed=observed))
    return found


def draw(exponential: Sequence[Point], variable: Sequence[Point]) -> Drawing:
    """Mean wait over the load, a panel per kind of service: lines are the formula, marks the simulation."""
    figure, grid = panels(2, columns=2, width=11.0, height=4.6)
    titles = ("exponential service (cs² = 1)", f"variable service (cs² = {VARIABLE.second_moment - 1.0:.3g})")
    for axes, found, service, title in zip(grid, (exponential, variable), (Service(), VARIABLE), titles, strict=True):
        _panel(axes, found, service.second_moment / 2.0)
        axes.set_title(title)
        axes.set_xlabel("load ρ (arrival rate ÷ service rate)")
    ends = [axes.get_ylim() for axes in grid]
    for axes in grid:  # one scale for both, on which everything of either has its place
        axes.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    grid[0].set_ylabel("mean wait (mean service times, logarithmic)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    return Drawing(
        name="lps",
        title="Waiting under limited processor sharing: formula and simulation",
        caption="k requests share the server. Bars are 95 % intervals over simulated queues.",
        alt="Mean wait over the load, formula as lines and event simulation as marks: "
        + "; ".join(
            f"{kind} service: formula over simulation less 1 is {min(errors):+.1%} to {max(errors):+.1%}"
            for kind, found in (("exponential", exponential), ("variable", variable))
            if (errors := [one.formula / one.observed.value - 1.0 for one in found if one.observed.value > 0])
        )
        + ".",
        figure=figure,
    )


def _panel(axes: Axes, found: Sequence[Point], factor: float) -> None:
    for index, concurrency in enumerate(LOADS):
        mine = [one for one in found if one.concurrency == concurrency and one.observed.value > 0.0]
        if not mine:
            continue
        low, high = mine[0].rho, mine[-1].rho
        rhos = [low + (high - low) * place / _NUM_PLACES for place in range(_NUM_PLACES + 1)]
        waits = [lps_wait_s(rho, 1.0, concurrency, factor) for rho in rhos]
        colour, marker = look(index).colour, look(index).marker
        axes.plot(rhos, waits, color=colour, linewidth=1.6, label=f"k = {concurrency}, formula")
        y = [one.observed.value for one in mine]
        # A lower end at or below 0 has no place on a logarithmic axis.
        below = [min(_half(one.observed), 0.99 * one.observed.value) for one in mine]
        axes.errorbar(
            [one.rho for one in mine],
            y,
            yerr=[below, [_half(one.observed) for one in mine]],
            color=colour,
            marker=marker,
            markerfacecolor="white",
            linestyle="none",
            capsize=3,
            label=f"k = {concurrency}, simulated",
        )
    axes.set_yscale("log")
    logarithmic(axes.yaxis)


def _half(interval: Interval) -> float:
    return 0.0 if interval.high is None else interval.high - interval.value


def picture(*, num_steps: int = _NUM_STEPS, num_queues: int = _NUM_QUEUES) -> Drawing:
    """Simulates and draws; two minutes at the defaults.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    need("matplotlib")
    plain, varied = (points(one, num_steps=num_steps, num_queues=num_queues) for one in (Service(), VARIABLE))
    with style():
        return draw(plain, varied)


def write(drawing: Drawing, out: Path) -> list[Path]:
    """The drawing as PNG and SVG in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{drawing.name}.png", out / f"{drawing.name}.svg"]
    for path, data in zip(paths, (png_bytes(drawing), svg_bytes(drawing)), strict=True):
        path.write_bytes(data)
    return paths


def main() -> None:
    """Writes the figure, and prints where it is and how far off the formula was."""
    parser = argparse.ArgumentParser(description="Draw the LPS formula against an event simulation.")
    parser.add_argument("--out", type=Path, default=Path("runs/lps"), help="directory of lps.png and lps.svg")
    out: Path = parser.parse_args().out
    drawing = picture()
    print(*write(drawing, out), drawing.alt, sep="\n")


if __name__ == "__main__":
    main()
