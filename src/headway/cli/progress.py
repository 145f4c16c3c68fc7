"""A bar on a terminal, nothing in a pipe: how verbs that take long show where they are, on the standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """Something to tell how many are done, of how many, and a remark; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=None, remark="")
        yield lambda done, total, remark: bars.update(task, completed=done, total=total, remark=remark)
