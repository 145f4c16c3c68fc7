"""``headway judge``: give collected answers a quality, by a judge model or by a rule, and compare two judges.

Rows go to a file, the account to the standard output, progress to the standard error where that is a terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from headway.cli.progress import progress
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.train.agree import AgreementReport
    from headway.train.dataset import EvaluationRow
    from headway.train.endpoints import Endpoint
    from headway.train.judge import JudgeSummary

app = App(name="judge", help="Give collected answers a quality, and compare judges.")


@app.default
def judge(
    rows: Path,
    /,
    *,
    out: Path,
    judge: str | None = None,
    config: Path | None = None,
    judge_model: str | None = None,
    api_key: str | None = None,
    price_in: float = 0.0,
    price_out: float = 0.0,
    metric: Literal["exact", "rouge", "regex"] | None = None,
    pattern: str | None = None,
    seed: int = 0,
    concurrency: int = 4,
    rps: float | None = None,
    budget_usd: float | None = None,
    verdicts: int = 3,
    room_tokens: int = 256,
    temperature: float | None = 0.0,
    attempts: int = 4,
    timeout_s: float = 120.0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Score all answers to a prompt together, from 0 to 1, and write every row with its score.

    A judge's calls are kept in a journal beside the output (its name and .calls): after a kill, Ctrl-C or an exhausted
    budget, run the same command again. Exit code 0 when every answered prompt has its scores, else 1.

    Parameters
    ----------
    rows
        Collected rows (.jsonl, .jsonl.gz).
    out
        The file to write: all rows, with quality where there is one.
    judge
        The judge: a model of --config, or the address of an endpoint (http://HOST/v1).
    config
        The pool's YAML file in which the judge is found.
    judge_model
        What an endpoint given by address calls the judge.
    api_key
        That endpoint's key, as env:NAME.
    price_in
        That endpoint's price, USD per million prompt tokens.
    price_out
        That endpoint's price, USD per million output tokens.
    metric
        In place of a judge: exact (equal to the reference), rouge (ROUGE-L F1), regex.
    pattern
        For regex: what to take out of the answer; without it the reference is the pattern.
    seed
        Seed of the order in which the judge sees answers.
    concurrency
        Calls at a time, per endpoint.
    rps
        Calls per second, per endpoint.
    budget_usd
        What all calls of the journal together may cost.
    verdicts
        How often a prompt is put to the judge until its reply can be read.
    room_tokens
        What the judge may write beside its scores; a reasoning model needs more.
    temperature
        The judge's temperature; none to leave it to the endpoint.
    attempts
        How often a call is tried when the endpoint fails. Being told to wait (429) does not count.
    timeout_s
        Longest wait for one reply.
    json
        Print the account as JSON.
    """
    from headway.train.dataset import read_rows

    if (judge is None) == (metric is None):
        raise ConfigError("give one of --judge and --metric", key="--judge")
    if out.exists() and out.samefile(rows):
        raise ConfigError("must not be the file of rows itself", key="--out")
    if metric is not None:
        return _by_rule(list(read_rows(rows)), out, metric, pattern, as_json=json)
    import asyncio

    from headway.train.caller import Persistence
    from headway.train.judge import JudgeOptions
    from headway.train.judge import judge as run

    options = JudgeOptions(
        seed=seed,
        concurrency=concurrency,
        per_s=rps,
        budget_usd=budget_usd,
        verdicts=verdicts,
        room_tokens=room_tokens,
        temperature=temperature,
        persistence=Persistence(attempts=attempts, timeout_s=timeout_s),
    )
    endpoints = _judge_endpoints(judge or "", config, judge_model, api_key, (price_in, price_out))
    read = list(read_rows(rows))
    with progress("judge") as bar:
        told = (lambda *_: None) if bar is None else (lambda done, total, usd: bar(done, total, f"${usd:.4f}"))
        summary = asyncio.run(run(read, endpoints, out, options, told=told))
    if json:
        _print_json(summary)
    else:
        _show(summary)
    return 0 if summary.complete else 1


@app.command
def agree(
    first: Path,
    second: Path,
    /,
    *,
    resamples: int = 2000,
    seed: int = 0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Compare two judged files: order of pairs, top choice, correlation, with 95 % intervals over prompts.

    Parameters
    ----------
    first
        One judge's file.
    second
        The other's, of the same answers.
    resamples
        Bootstrap resamples behind the intervals.
    seed
        Seed of the resampling.
    json
        Print the figures as JSON.
    """
    from headway.train.agree import agreement
    from headway.train.dataset import read_rows

    if resamples < 0:
        raise ConfigError(f"must be at least 0, not {resamples}", key="--resamples")
    report = agreement(list(read_rows(first)), list(read_rows(second)), num_resamples=resamples, seed=seed)
    if json:
        _print_json(report)
    else:
        _show_agreement(report)
    return 0


def _judge_endpoints(
    judge: str, config: Path | None, model: str | None, api_key: str | None, price: tuple[float, float]
) -> list[Endpoint]:
    from headway.config import load_config
    from headway.train.endpoints import pool_endpoints, url_endpoint
    from headway.types import ModelCard

    if "://" in judge:
        if model is None:
            raise ConfigError("say what the endpoint calls the judge", key="--judge-model")
        if not min(price) >= 0.0:
            raise ConfigError("must be at least 0", key="--price-in")
        card = ModelCard(name=model, input_per_1m_usd=price[0], output_per_1m_usd=price[1])
        return [url_endpoint(judge, model=model, api_key=api_key, card=card)]
    if config is None:
        raise ConfigError(f"say in which pool {judge!r} is found, or give an address as --judge", key="--config")
    if model is not None or api_key is not None or any(price):
        raise ConfigError("a judge of --config brings its name, key and prices along", key="--judge-model")
    try:
        return pool_endpoints(load_config(config), [judge])[judge]
    except ConfigError as error:
        if error.key == "--models":
            raise ConfigError(str(error).removeprefix("--models: "), key="--judge") from None
        raise


def _by_rule(
    rows: list[EvaluationRow],
    out: Path,
    metric: Literal["exact", "rouge", "regex"],
    pattern: str | None,
    *,
    as_json: bool,
) -> int:
    from headway.train.metrics import apply_metric

    summary = apply_metric(rows, out, metric, pattern)
    if as_json:
        _print_json(summary)
    else:
        print(
            f"{out}: {summary.num_rows_judged} of {summary.num_rows} rows scored by {metric}, "
            f"mean {summary.mean_quality:.3f}; {summary.num_unanswered} without a whole answer, "
            f"{summary.num_without_reference} without a reference"
        )
    return 0


def _show(summary: JudgeSummary) -> None:
    print(
        f"{summary.out}: {summary.num_rows_judged} of {summary.num_rows} rows scored by {summary.judge}; "
        f"{summary.num_unanswered} have no whole answer\n"
        f"prompts: {summary.num_prompts}, {summary.num_kept} judged before, {summary.num_judged} now, "
        f"{summary.num_failed} failed, {summary.num_not_asked} not asked; "
        f"{summary.num_without_reference} without a reference\n"
        f"{summary.cost_usd:.4f} USD now, {summary.total_cost_usd:.4f} USD in all"
    )
    for reason, count in sorted(summary.failures.items()):
        print(f"{count} x {reason}")
    if summary.stopped_by == "budget":
        print(f"stopped: the next call may exceed the budget of {summary.budget_usd:g} USD")
    if summary.stopped_by == "endpoint":
        print(f"stopped: {summary.given_up}")
    if not summary.complete:
        print("not complete: the same command goes on from here")


def _show_agreement(report: AgreementReport) -> None:
    from rich.console import Console
    from rich.table import Table

    names = {
        "pairwise": "same order of a pair (a tie is an order)",
        "pairwise_decided": "same order where neither sees a tie",
        "top_choice": "same best answer",
        "pearson": "correlation of scores",
        "spearman": "correlation of ranks",
        "within_prompt": "correlation within prompts",
        "mean_difference": "mean of the first less the second",
    }
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(
        f"{report.num_answers} answers to {report.num_prompts} prompts scored by both, {report.num_pairs} pairs "
        f"({report.num_pairs_decided} without a tie); {report.num_only_first} answers scored only by the first, "
        f"{report.num_only_second} only by the second",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("value", "95 % from", "to"):
        table.add_column(name, justify="right")
    for key, text in names.items():
        one = getattr(report, key)
        table.add_row(text, *("-" if figure is None else f"{figure:.3f}" for figure in (one.value, one.low, one.high)))
    console.print(table)


def _print_json(value: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
