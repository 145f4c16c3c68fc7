"""One HTML page of a comparison: what was asked, tables, figures; and every figure as PNG and SVG beside it.

The page needs nothing but itself: no script, no font, no picture from elsewhere. It can be read in light and dark, and
every figure has words for those who do not see it. It refuses to say what it was not given: units that are missing are
counted at its head.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import msgspec
from msgspec import Struct

import headway
from headway.lab import drawing as drawings
from headway.lab.drawing import Drawing
from headway.lab.figures import rate_figures, sweep_figures
from headway.lab.run_figures import run_figures
from headway.lab.runs import Results, need
from headway.lab.tables import (
    Comparison,
    Table,
    compare,
    difference_table,
    failures_table,
    parts_table,
    reference_table,
    utility_table,
)

_CSS = """
:root { color-scheme: light dark;
  --ink: #1f2328; --paper: #ffffff; --faint: #59636e; --line: #d1d9e0; --best: #dff3e4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9198a1; --line: #3d444d; --best: #12301c; }
}
body { margin: 2rem auto; padding: 0 1rem; max-width: 88rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { line-height: 1.2; margin-bottom: .2rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
p.note, figcaption, footer, dt { color: var(--faint); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th { vertical-align: bottom; white-space: normal; }
td.best { background: var(--best); font-weight: 600; }
figure { margin: 1rem 0 2rem; }
figure svg { width: 100%; height: auto; max-width: 62rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; font-size: .8rem; }
"""


class Written(Struct, frozen=True, kw_only=True):
    """The files of a report."""

    html: Path
    figures: list[Path]
    num_missing: int


def write_report(results: Results, out: Path, *, baseline: str | None = None) -> Written:
    """Writes ``report.html`` and ``figures/*.{png,svg}`` into ``out``; equal results give equal bytes.

    Raises:
        ConfigError: matplotlib is not installed, an unknown baseline, or results that hold nothing yet.
    """
    need("matplotlib")
    comparison = compare(results, baseline)
    with drawings.style():
        made = [
            *rate_figures(results, comparison.baseline),
            *sweep_figures(results),
            *run_figures(results),
        ]
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for one in made:
        for suffix, data in ((".svg", drawings.svg_bytes(one)), (".png", drawings.png_bytes(one))):
            paths.append(folder / f"{one.name}{suffix}")
            paths[-1].write_bytes(data)
    html = out / "report.html"
    html.write_text(page(results, comparison, made), encoding="utf-8")
    return Written(html=html, figures=paths, num_missing=results.num_missing)


def page(results: Results, comparison: Comparison, made: list[Drawing]) -> str:
    """The page as text."""
    plan = results.plan
    title = plan.scenario.title or plan.scenario.name
    tables = [
        utility_table(comparison),
        reference_table(comparison),
        difference_table(comparison),
        parts_table(comparison, plan.focus_rate_per_s),
        failures_table(results),
    ]
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_CSS}</style></head>",
        f"<body><h1>{escape(title)}</h1>",
        _missing(comparison, len(plan.units)),
        _facts(results),
        _reading(),
        *(_table(table) for table in tables if table is not None),
        "<h2>Figures</h2>",
        *(_figure(one) for one in made),
        "<h2>The scenario</h2>",
        "<p class=note>As it was read, with every default filled in.</p>",
        f"<details><summary>Show</summary><pre>{escape(_settings(results))}</pre></details>",
        f"<footer>headway {headway.__version__}, <code>headway lab report</code>. Simulated, no real GPU behind it."
        "</footer></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _missing(comparison: Comparison, num_units: int) -> str:
    if not comparison.num_missing:
        return ""
    words = f"{comparison.num_missing} of {num_units} units have no result yet; means are over what is there."
    return f"<p role=alert><strong>{words}</strong></p>"


def _facts(results: Results) -> str:
    file = results.plan.scenario
    served: dict[str, int] = {}
    for model in results.plan.instances.values():
        served[model] = served.get(model, 0) + 1
    facts = {
        "pool": ", ".join(f"{number} × {model}" for model, number in served.items()),
        "traffic": f"{file.arrivals.process}, {file.num_queries} queries on each of {len(file.seeds)} seeds",
        "targets": f"155 ms + {file.workload.target_slope_ms_per_token:g} ms per prompt token, 150 to 1,120 ms",
        "λ": f"{file.workload.lambda_per_musd:g} per micro-USD",
        "baseline": results.plan.baseline,
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{rows}</dl>"


def _reading() -> str:
    return (
        "<p>A query's <em>utility</em> is the quality of its answer less λ times what it cost. <em>OnTimeUtility</em> "
        "is the mean over all queries, counting 0 for one whose first token came after its target, that was refused or "
        "that failed.</p>"
    )


def _table(table: Table) -> str:
    """Columns of plain values mark their largest where that is best; differences have a sign and mark nothing."""
    best = _best(table)
    head = "".join(f"<th scope=col>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>"
        + f"<th scope=row>{escape(row[0])}</th>"
        + "".join(
            f"<td{' class=best' if (number, column) in best else ''}>{escape(text)}</td>"
            for column, text in enumerate(row[1:], start=1)
        )
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    return (
        f"<h2>{escape(table.title)}</h2><div class=wide><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
        + "".join(f"<p class=note>{escape(line)}</p>" for line in table.note.splitlines())
    )


def _best(table: Table) -> set[tuple[int, int]]:
    """Where the largest value of each column stands; nothing for tables that hold more than one kind of figure."""
    found: set[tuple[int, int]] = set()
    if not table.ranked:
        return found
    for column in range(1, len(table.columns)):
        values = {
            number: float(row[column].split()[0].rstrip("%"))
            for number, row in enumerate(table.rows)
            if row[column] and row[0] not in table.unranked
        }
        found |= {(number, column) for number, value in values.items() if value == max(values.values())}
    return found


def _figure(one: Drawing) -> str:
    return (
        f"<figure><h3>{escape(one.title)}</h3>{drawings.inline_svg(one)}"
        f"<figcaption>{escape(one.caption)}</figcaption></figure>"
    )


def _settings(results: Results) -> str:
    return msgspec.json.format(msgspec.json.encode(results.plan.scenario), indent=2).decode()
