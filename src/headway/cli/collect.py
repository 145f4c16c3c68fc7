"""``headway collect``: run prompts through every model of a pool and keep answers, tokens, costs and times.

Rows go to a file, the account to the standard output, progress to the standard error where that is a terminal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headway.cli.progress import progress
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.train.collect import CollectSummary


def collect(
    prompts: Path,
    /,
    *more: Path,
    config: Path,
    out: Path,
    models: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None,
    limit: int | None = None,
    max_tokens: int = 1024,
    concurrency: int = 4,
    rps: float | None = None,
    budget_usd: float | None = None,
    attempts: int = 4,
    timeout_s: float = 300.0,
    stream: bool = True,
    again: Annotated[bool, Parameter(negative=())] = False,
    body: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Ask every model of a pool every prompt, and append each answer to a file once it is whole.

    What the file holds already is not asked again: after a kill, Ctrl-C or an exhausted budget, run the same command
    again. Exit code 0 when every prompt has an answer of every model, else 1.

    Parameters
    ----------
    prompts
        Prompts, one JSON object per line (.jsonl, .jsonl.gz): prompt or messages; optional prompt_id, task,
        reference, max_tokens.
    more
        More such files.
    config
        The pool's YAML file, as for serve: addresses, keys and prices are taken from it.
    out
        The file of rows to append to.
    models
        The models to ask; by default every model of the pool.
    limit
        Take only so many prompts, the first ones.
    max_tokens
        Longest answer, for prompts that do not say.
    concurrency
        Requests at a time, per endpoint.
    rps
        Requests per second, per endpoint.
    budget_usd
        What all rows of the file together may cost. A request is sent only if the most it can cost still fits.
    attempts
        How often a request is tried when an endpoint fails. Being told to wait (429) does not count.
    timeout_s
        Longest wait for one whole answer.
    stream
        Take answers as streams, so that the time to the first token is known.
    again
        Ask also what an endpoint refused for good before.
    body
        JSON object whose fields go into every request, such as '{"temperature": 0}'.
    json
        Print the account as JSON.
    """
    import asyncio

    from headway.config import load_config
    from headway.train.caller import Persistence
    from headway.train.collect import CollectOptions
    from headway.train.collect import collect as run
    from headway.train.endpoints import pool_endpoints
    from headway.train.prompts import read_prompts

    options = CollectOptions(
        max_tokens=max_tokens,
        concurrency=concurrency,
        per_s=rps,
        budget_usd=budget_usd,
        persistence=Persistence(attempts=attempts, timeout_s=timeout_s),
        stream=stream,
        again=again,
        extra=_body_fields(body),
    )
    if limit is not None and limit < 1:
        raise ConfigError(f"must be at least 1, not {limit}", key="--limit")
    endpoints = pool_endpoints(load_config(config), models)
    read = read_prompts([prompts, *more])
    if read.ignored_fields:
        print(f"headway: passed over in the prompts: {', '.join(read.ignored_fields)}", file=sys.stderr)
    with progress("collect") as bar:
        told = (lambda *_: None) if bar is None else (lambda done, total, usd: bar(done, total, f"${usd:.4f}"))
        summary = asyncio.run(run(read.prompts[:limit], endpoints, out, options, told=told))
    if json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        _show(summary)
    return 0 if summary.complete else 1


def _body_fields(body: str | None) -> dict[str, object]:
    import msgspec

    if body is None:
        return {}
    try:
        fields = msgspec.json.decode(body, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"must be a JSON object: {error}", key="--body") from None
    taken = sorted({"model", "messages", "stream", "stream_options", "max_tokens", "n"} & set(fields))
    if taken:
        raise ConfigError(f"{', '.join(taken)} cannot be set here", key="--body")
    return fields


def _show(summary: CollectSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    for name in ("prompts", "kept", "stored", "refused", "failed", "not asked", "USD"):
        table.add_column(name, justify="right")
    for model, one in summary.models.items():
        counts = (one.num_prompts, one.num_kept, one.num_stored, one.num_refused, one.num_failed, one.num_not_asked)
        table.add_row(model, *map(str, counts), f"{one.cost_usd:.4f}")
    console.print(table)
    for model, one in summary.models.items():
        for reason, count in sorted(one.failures.items()):
            console.print(f"{model}: {count} x {reason}")
        for endpoint, error in one.given_up.items():
            console.print(f"{model}: gave up on {endpoint}: {error}", soft_wrap=True)
        if one.num_without_usage:
            console.print(f"{model}: {one.num_without_usage} answers without usage; their cost is by a count of bytes")
    total = f"{summary.out}: {summary.cost_usd:.4f} USD now, {summary.total_cost_usd:.4f} USD in all"
    console.print(total, soft_wrap=True)
    if summary.stopped_by == "budget":
        console.print(f"stopped: the next request may exceed the budget of {summary.budget_usd:g} USD")
    if not summary.complete:
        console.print("not complete: the same command goes on from here")
