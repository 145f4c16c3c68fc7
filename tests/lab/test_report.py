"""Runs, tables and pages: broken off and taken up again, the same bytes whatever the order, nothing left out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headway.cli.lab import app
from headway.errors import ConfigError, DatasetError
from headway.lab.report import Written, write_report
from headway.lab.runs import Results, load_results, run
from headway.lab.scenario import Scenario, parse_scenario
from headway.lab.tables import compare, difference_table, failures_table, parts_table, utility_table
from small_scenario import SMALL


@pytest.fixture(scope="module")
def small() -> Scenario:
    return parse_scenario(SMALL.replace("sweeps:", "fluid_bound: true\nsweeps:"), path="small.yaml")


@pytest.fixture(scope="module")
def played(small: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("played")
    run(small, out, jobs=1)
    return out


@pytest.fixture(scope="module")
def results(played: Path) -> Results:
    return load_results(played)


@pytest.fixture(scope="module")
def written(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_report(results, tmp_path_factory.mktemp("written"))


def lines(out: Path) -> list[bytes]:
    return (out / "results.jsonl").read_bytes().splitlines(keepends=True)


def test_a_run_is_taken_up_where_it_was_broken_off(small: Scenario, played: Path, tmp_path: Path) -> None:
    """What is there is kept, the half line of a broken-off run is cut, and the rest is played to equal bytes."""
    whole = lines(played)
    (tmp_path / "results.jsonl").write_bytes(b"".join(whole[:5]) + whole[5][:40])
    summary = run(small, tmp_path, jobs=1)
    assert (summary.num_kept, summary.num_played) == (5, len(whole) - 5)
    assert sorted(lines(tmp_path)) == sorted(whole)
    assert run(small, tmp_path, jobs=1).num_played == 0


def test_workers_change_nothing(small: Scenario, played: Path, written: Written, tmp_path: Path) -> None:
    """Two processes find what one finds, to the byte, and every step is told."""
    told: list[tuple[int, int]] = []
    run(small, tmp_path, jobs=2, told=lambda done, total: told.append((done, total)))
    assert sorted(lines(tmp_path)) == sorted(lines(played))
    assert told == [(done, told[0][1]) for done in range(told[0][1] + 1)]
    again = write_report(load_results(tmp_path), tmp_path)
    assert again.html.read_bytes() == written.html.read_bytes()
    assert [path.read_bytes() for path in again.figures] == [path.read_bytes() for path in written.figures]


def test_a_damaged_result_is_told_by_line(small: Scenario, played: Path, tmp_path: Path) -> None:
    """A line within the results that is no result is an error, not a result that is missing."""
    whole = lines(played)
    (tmp_path / "results.jsonl").write_bytes(b"{}\n".join([whole[0], whole[1]]))
    with pytest.raises(DatasetError, match=r"results\.jsonl:2: is no result"):
        run(small, tmp_path, jobs=1)


def test_tables_hold_every_policy_and_the_figures_behind(results: Results) -> None:
    """Each policy stands at each rate with its interval, and beside its score what the score hides."""
    comparison = compare(results)
    assert [area.policy for area in comparison.areas] == results.plan.labels
    assert len(comparison.cells) == 3 * 2
    for cell in comparison.cells:
        value = cell.on_time_utility
        assert value.low is not None
        assert value.low <= value.value
        assert cell.on_time_utility_floored + cell.on_time_negative == pytest.approx(value.value)
        assert set(cell.attainment_by_task) == {"alpaca", "hotpotqa", "gov_report", "writing_prompts"}
    base = [cell.difference for cell in comparison.cells if cell.policy == "shortest_queue"]
    assert [(one.value, one.low, one.high) for one in base if one is not None] == [(0.0, 0.0, 0.0)] * 2
    assert set(comparison.fluid_bound) == {"6", "9"}
    rows = [row[0] for row in utility_table(comparison).rows]
    assert rows[: len(results.plan.labels) + 1] == [*results.plan.labels, "fluid bound"]
    assert [row[0] for row in difference_table(comparison).rows] == ["bear", "label only"]
    parts = parts_table(comparison, 9.0)
    assert {"refused", "on-time negatives", "floored at 0"} <= set(parts.columns)
    assert all(len(row) == len(parts.columns) for row in parts.rows)


def test_an_unknown_baseline_is_refused_with_the_nearest(results: Results) -> None:
    """A baseline that was not run is an error that names the one that was meant."""
    with pytest.raises(ConfigError, match="did you mean 'shortest_queue'"):
        compare(results, "shortest_que")


def test_known_failures_are_judged_by_policy(results: Results, written: Written) -> None:
    """The focus rate's first seed is judged for each policy by name, and the page names the fourth's command."""
    kept = [(unit.label, unit.rate_per_s, unit.seed) for unit, record in results.found if record.failures]
    assert set(kept) == {(label, 9.0, 0) for label in results.plan.labels}
    table = failures_table(results)
    assert table is not None
    names = ["difficulty blindness", "length reversal", "semantic matching"]
    assert [row[:2] for row in table.rows] == [[label, name] for label in results.plan.labels for name in names]
    first = results.of("bear", 9.0)[0].failures[0]
    assert table.rows[0][2:4] == ["yes" if first.has_it else "no", f"{first.value:.3f}"]
    text = written.html.read_text()
    assert all(name in text for name in names)
    assert "python -m headway.lab.failures" in text


def test_a_run_too_small_to_be_judged_shows_no_failures(tmp_path: Path) -> None:
    """With fewer queries than blocks need the rest of the page stands, without the table."""
    text = SMALL[: SMALL.index("sweeps:")].replace("num_queries: 120", "num_queries: 60")
    run(parse_scenario(text), tmp_path, jobs=1)
    assert failures_table(load_results(tmp_path)) is None
    assert "Known failures" not in write_report(load_results(tmp_path), tmp_path).html.read_text()


class Page(HTMLParser):
    """Collects what a page would load, what stands in for its pictures, and the ids in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.alts: list[str] = []
        self.ids: list[str] = []
        self.tables = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        links = [given[name] for name in ("src", "href", "xlink:href") if name in given]
        self.loads += [link for link in links if not link.startswith("#")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.alts += [given["aria-label"]] if tag == "svg" else []
        self.ids += [given["id"]] if "id" in given else []
        self.tables += tag == "table"


def test_the_page_needs_nothing_else(written: Written) -> None:
    """The page loads nothing, every figure in it has words, no id stands twice, and the files beside it match."""
    text = written.html.read_text()
    page = Page()
    page.feed(text)
    names = {path.stem for path in written.figures}
    assert {"on_time_utility", "difference", "attainment", "predictions", "mean_predictions"} <= names
    assert {"routing_shares", "ttft_quantiles", "staleness", "delta_per_ms", "lambda_per_musd", "burst_ratio"} <= names
    assert page.loads == []
    assert len(page.alts) == len(names)
    assert all(len(alt) > 40 for alt in page.alts)
    assert len(set(page.ids)) == len(page.ids)
    assert page.tables == 5
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text
    assert re.search(r"url\((?!#)|@import", text) is None
    for path in written.figures:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in start


def test_missing_results_are_told(small: Scenario, played: Path, tmp_path: Path) -> None:
    """A report over part of the units says so at its head; one over none is refused."""
    (tmp_path / "plan.json").write_bytes((played / "plan.json").read_bytes())
    with pytest.raises(ConfigError, match="holds no result yet"):
        write_report(load_results(tmp_path), tmp_path)
    (tmp_path / "results.jsonl").write_bytes(b"".join(lines(played)[:4]))
    written = write_report(load_results(tmp_path), tmp_path)
    assert written.num_missing > 0
    assert f"{written.num_missing} of {len(load_results(tmp_path).plan.units)} units" in written.html.read_text()


@pytest.mark.parametrize(
    ("module", "act"),
    [
        ("matplotlib", lambda small, played, out: write_report(load_results(played), out)),
        ("joblib", lambda small, played, out: run(small, out, jobs=2)),
    ],
)
def test_a_missing_extra_is_named(
    module: str,
    act: Callable[[Scenario, Path, Path], object],
    small: Scenario,
    played: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a package of the extra the error says which extra holds it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs {module}.*headway\[lab\]"):
        act(small, played, played / "never")


def test_the_command_line_runs_compares_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a scenario's file to its page by three commands; JSON is one document, and silent on the other stream."""

    def call(*words: str) -> str:
        assert app(words, result_action="return_value", exit_on_error=False) == 0
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    path = tmp_path / "small.yaml"
    path.write_text(SMALL[: SMALL.index("sweeps:")])
    out = str(tmp_path / "out")
    first = json.loads(call("run", str(path), "--out", out, "--jobs", "1", "--json"))
    assert len(first["results"]) == (3 + 1) * 2 * 2
    assert json.loads(call("run", str(path), "--out", out, "--jobs", "1", "--json")) == first
    comparison = json.loads(call("compare", out, "--json"))
    assert comparison["baseline"] == "shortest_queue"
    shown = call("compare", out, "--baseline", "bear")
    assert "OnTimeUtility less that of bear" in shown
    assert "report.html" in call("report", out)
