"""How the lab's figures look, and how they become files: the same bytes for the same results.

A drawing carries the words that stand in for it where it cannot be seen. matplotlib (extra ``lab``) is used through its
objects alone, without a display and without global state. This file refuses to know what is drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from headway.lab.intervals import Interval

#: Colour of text and axes; inside a page it gives way to the page's own.
INK = "#24292f"
#: Colours that people with any colour vision tell apart, on light and on dark.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#8a8a8a")
_MARKERS, _DASHES = "osD^vPX", ("-", "--", "-.", ":")

_STYLE: dict[Any, Any] = {  # matplotlib lists every key that there is in its type
    "svg.hashsalt": "headway",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "grid.color": "#8b949e",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 1.2,
}


class Look(Struct, frozen=True):
    """Line of one series: no two of the first 28 are alike, in colour and in black and white."""

    colour: str
    marker: str
    dash: str


class Drawing(Struct, frozen=True, kw_only=True):
    """A figure with its file name, title, the sentence below it, and the words for those who do not see it."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


def look(index: int) -> Look:
    """The line of series number ``index``."""
    dash = _DASHES[(index // len(COLOURS)) % len(_DASHES)]
    return Look(COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)], dash)


@contextmanager
def style() -> Iterator[None]:
    """The house style, for drawing and for saving."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def panels(num: int, *, columns: int = 1, width: float = 7.6, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """A figure of ``num`` panels in rows of ``columns``; width is the figure's, height a row's, in inches."""
    from matplotlib.figure import Figure

    columns = min(columns, num)
    rows = -(-num // columns)
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [axis for row in grid for axis in row]
    for unused in axes[num:]:
        unused.set_visible(False)
    return figure, axes[:num]


def curve(axes: Axes, x: Sequence[float], values: Sequence[Interval], label: str, index: int) -> None:
    """One series with its intervals as error bars; the first series stands out."""
    one = look(index)
    y = [value.value for value in values]
    below = [0.0 if value.low is None else value.value - value.low for value in values]
    above = [0.0 if value.high is None else value.high - value.value for value in values]
    axes.errorbar(
        list(x),
        y,
        yerr=[below, above],
        label=label,
        color=one.colour,
        marker=one.marker,
        linestyle=one.dash,
        linewidth=2.4 if index == 0 else 1.2,
        markersize=5.5 if index == 0 else 4.0,
        capsize=2.5,
        elinewidth=1.0,
        zorder=3 if index == 0 else 2,
    )


def legend(figure: Figure, axes: Axes, ends: Mapping[str, float]) -> None:
    """The key to the lines, beside the panel, in the order in which they end: ``ends`` is each one's last height."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: -ends.get(labels[index], 0.0))
    figure.legend([handles[i] for i in order], [labels[i] for i in order], loc="outside right upper")


def logarithmic(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis: 0.03, 0.1, 0.3, 1; whole decades only where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    def text(value: float, _: object) -> str:
        low, high = axis.get_view_interval()
        crowded = low > 0.0 and high / low > 300.0
        return "" if crowded and not math.log10(value).is_integer() else f"{value:g}"

    axis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(text))
    axis.set_minor_formatter(NullFormatter())


def svg_bytes(drawing: Drawing) -> bytes:
    """The drawing as an SVG file on white."""
    return _saved(drawing.figure, "svg", "white")


def png_bytes(drawing: Drawing) -> bytes:
    """The drawing as a PNG file on white."""
    return _saved(drawing.figure, "png", "white")


def inline_svg(drawing: Drawing) -> str:
    """The drawing for a page: no background, text in the page's colour, ids of its own, and words for it."""
    text = _saved(drawing.figure, "svg", "none").decode()
    text = text[text.index("<svg") :]
    text = text.replace(INK, "currentColor")
    text = re.sub(r'\bid="', f'id="{drawing.name}-', text)
    text = text.replace("url(#", f"url(#{drawing.name}-").replace('href="#', f'href="#{drawing.name}-')
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text.replace("<svg", f'<svg role="img" aria-label="{_attribute(drawing.alt)}"', 1)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _saved(figure: Figure, form: str, background: str) -> bytes:
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format=form, dpi=144, facecolor=background, metadata=metadata)
    return buffer.getvalue()
