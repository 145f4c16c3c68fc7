"""Runs prompts through every model of a pool and keeps what came back, one row per prompt and model.

A row counts only once it is on the disk; what is stored is never asked again. So a run that was killed, stopped by its
budget or by Ctrl-C goes on where it was, and at most the answers in flight at that moment are asked twice. Models
advance side by side, so that a run cut short holds whole prompts. It refuses to judge answers, and to hide a failure:
each is a row too, with its reason and what it may have cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import aiohttp
from msgspec import Struct, field

from headway.errors import ConfigError, HeadwayError
from headway.train.caller import Answered, Caller, Persistence, first_error
from headway.train.chat_client import client_session
from headway.train.collected import Known, collected_row, wasted_row
from headway.train.dataset import encode_row
from headway.train.endpoints import Ask, Endpoint
from headway.train.journal import Journal
from headway.train.limits import Budget, Pacer
from headway.train.prompts import PromptRow

#: How many prompts a model may be ahead of the slowest one.
_LEAD = 64
#: Failures in a row after which an endpoint is taken for unusable.
_STRIKES = 3

Progress = Callable[[int, int, float], None]


class CollectOptions(Struct, frozen=True, kw_only=True):
    """How to collect. ``concurrency`` and ``per_s`` hold per endpoint; ``extra`` goes into every body as it is.

    ``again`` asks also what an endpoint refused for good before.

    Raises:
        ConfigError: a count below 1.
    """

    max_tokens: int = 1024
    concurrency: int = 4
    per_s: float | None = None
    budget_usd: float | None = None
    persistence: Persistence = Persistence()
    stream: bool = True
    again: bool = False
    extra: Mapping[str, object] = {}
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("--max-tokens", self.max_tokens), ("--concurrency", self.concurrency)):
            if value < 1:
                raise ConfigError(f"must be at least 1, not {value}", key=name)


class ModelSummary(Struct, kw_only=True):
    """One model's account: of ``num_prompts``, each is kept, stored, refused, failed or not asked."""

    num_prompts: int
    num_kept: int = 0
    num_stored: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_not_asked: int = 0
    num_without_usage: int = 0
    cost_usd: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)


class CollectSummary(Struct, kw_only=True):
    """What a run did. ``cost_usd`` is this run's, ``total_cost_usd`` that of all rows of the file."""

    out: str
    num_prompts: int
    models: dict[str, ModelSummary]
    cost_usd: float
    total_cost_usd: float
    budget_usd: float | None
    stopped_by: Literal["budget"] | None
    num_cut_bytes: int

    @property
    def complete(self) -> bool:
        """Whether every prompt has an answer of every model."""
        return all(one.num_kept + one.num_stored == one.num_prompts for one in self.models.values())


async def collect(
    prompts: Sequence[PromptRow],
    endpoints: Mapping[str, Sequence[Endpoint]],
    out: Path,
    options: CollectOptions,
    *,
    told: Progress = lambda done, total, cost_usd: None,
) -> CollectSummary:
    """Ask every model every prompt it has no row for. ``told`` gets pairs done, pairs in all, USD spent.

    Raises:
        ConfigError: ``out`` cannot be written.
        DatasetError: ``out`` holds something else, or another prompt under one of these ids.
        HeadwayError: another run writes to ``out``, or the disk is full.
    """
    async with Journal(out) as journal, client_session() as session:
        collector = _Collector(
            prompts=prompts, endpoints=endpoints, journal=journal, options=options, session=session, told=told
        )
        return await collector.run()


class _Line:
    """One model's way through the prompts: places in the list of those still to be asked."""

    def __init__(self, model: str, todo: list[int], summary: ModelSummary, num_endpoints: int) -> None:
        self.model, self.todo, self.summary = model, todo, summary
        self.position = 0
        self.num_live_endpoints = num_endpoints

    @property
    def open(self) -> bool:
        """Whether this model still moves on."""
        return self.num_live_endpoints > 0 and self.position < len(self.todo)


class _Collector:
    def __init__(
        self,
        *,
        prompts: Sequence[PromptRow],
        endpoints: Mapping[str, Sequence[Endpoint]],
        journal: Journal,
        options: CollectOptions,
        session: aiohttp.ClientSession,
        told: Progress,
    ) -> None:
        self._prompts, self._endpoints, self._journal = prompts, endpoints, journal
        self._options, self._session, self._told = options, session, told
        known = Known(journal.path, prompts)
        self._kept_usd = known.cost_usd
        self._budget = Budget(options.budget_usd, known.cost_usd)
        self._lines = [self._line(model, known) for model in endpoints]
        self._moved = asyncio.Condition()

    def _line(self, model: str, known: Known) -> _Line:
        summary = ModelSummary(num_prompts=len(self._prompts))
        todo = []
        for place, prompt in enumerate(self._prompts):
            status = known.status.get((prompt.prompt_id, model))
            if status == "ok":
                summary.num_kept += 1
            elif status == "rejected" and not self._options.again:
                summary.num_refused += 1
            else:
                todo.append(place)
        return _Line(model, todo, summary, len(self._endpoints[model]))

    async def run(self) -> CollectSummary:
        options = self._options
        self._tell()
        try:
            async with asyncio.TaskGroup() as tasks:
                for line in self._lines:
                    for endpoint in self._endpoints[line.model]:
                        caller = Caller(
                            self._session,
                            endpoint,
                            pacer=Pacer(options.per_s),
                            budget=self._budget,
                            persistence=options.persistence,
                            seed=options.seed,
                        )
                        desk = _Desk(caller)
                        for _ in range(options.concurrency):
                            tasks.create_task(self._work(line, desk))
        except* HeadwayError as group:
            raise first_error(group) from None
        for line in self._lines:
            one = line.summary
            one.num_not_asked = one.num_prompts - one.num_kept - one.num_stored - one.num_refused - one.num_failed
        return CollectSummary(
            out=str(self._journal.path),
            num_prompts=len(self._prompts),
            models={line.model: line.summary for line in self._lines},
            cost_usd=self._budget.spent_usd - self._kept_usd,
            total_cost_usd=self._budget.spent_usd,
            budget_usd=options.budget_usd,
            stopped_by="budget" if self._budget.exhausted else None,
            num_cut_bytes=self._journal.num_cut_bytes,
        )

    # ---- one worker ----------------------------------------------------------------------------------------------

    async def _work(self, line: _Line, desk: _Desk) -> None:
        while not desk.closed and (place := await self._next(line)) is not None:
            prompt = self._prompts[place]
            ask = Ask(
                messages=prompt.chat,
                max_tokens=prompt.max_tokens or self._options.max_tokens,
                stream=self._options.stream,
                extra=self._options.extra,
            )
            answered = await desk.caller.call(ask)
            if answered is None:
                return
            await self._store(line, prompt, ask, answered)
            reply = answered.reply
            if desk.strike(answered):
                line.summary.given_up[desk.caller.endpoint.id] = reply.error
                line.num_live_endpoints -= 1
                async with self._moved:
                    self._moved.notify_all()

    async def _next(self, line: _Line) -> int | None:
        """The next prompt for a model, once the others have come near enough; None when it has no more."""
        async with self._moved:
            while line.open and not self._budget.exhausted:
                place = line.todo[line.position]
                slowest = min(other.todo[other.position] for other in self._lines if other.open)
                if place <= slowest + _LEAD:
                    line.position += 1
                    self._moved.notify_all()
                    return place
                await self._moved.wait()
            self._moved.notify_all()
        return None

    async def _store(self, line: _Line, prompt: PromptRow, ask: Ask, answered: Answered) -> None:
        reply, summary = answered.reply, line.summary
        ok = reply.status == "ok"
        row = collected_row(line.model, prompt, ask, answered)
        lines = encode_row(row)
        if ok and answered.wasted_usd > 0.0:  # an attempt before it was charged too
            lines = encode_row(wasted_row(row, answered.wasted_usd)) + lines
        await self._journal.append(lines)
        summary.cost_usd += answered.cost_usd + answered.wasted_usd
        if ok:
            summary.num_stored += 1
            summary.num_without_usage += reply.prompt_tokens is None or reply.output_tokens is None
        elif row.status == "rejected":
            summary.num_refused += 1
        else:
            summary.num_failed += 1
        if not ok:
            summary.failures[reply.reason] = summary.failures.get(reply.reason, 0) + 1
        self._tell()

    def _tell(self) -> None:
        done = sum(
            one.num_kept + one.num_stored + one.num_refused + one.num_failed
            for one in (line.summary for line in self._lines)
        )
        self._told(done, len(self._prompts) * len(self._lines), self._budget.spent_usd)


class _Desk:
    """An endpoint's share of a run: its caller, and whether it was given up."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.closed = False
        self._num_strikes = 0

    def strike(self, answered: Answered) -> bool:
        """Whether this reply is the one after which the endpoint is given up."""
        reply = answered.reply
        if reply.status in {"ok", "rejected"}:
            self._num_strikes = 0
        else:
            self._num_strikes += 1
        over = reply.unusable or (self._num_strikes >= _STRIKES and (reply.reason == "unreachable" or reply.busy))
        if not over or self.closed:
            return False
        self.closed = True
        return True
