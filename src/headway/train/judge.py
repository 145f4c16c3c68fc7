"""Gives every collected answer a quality: a judge model reads all answers to a prompt in one call and scores them.

Each call goes into a journal beside the output before anything is made of it, with its scores, its cost and, where it
failed, the reason. The output is always written from the journal, whole: every row of the input is in it, scored or
not. A run that was killed or stopped by its budget goes on where it was. It refuses to mix judges, seeds or
instructions in one journal, and to mend a verdict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

from headway.errors import ConfigError, DatasetError, HeadwayError
from headway.train.caller import Answered, Caller, Persistence, first_error
from headway.train.chat_client import client_session
from headway.train.dataset import EvaluationRow
from headway.train.endpoints import Ask, Endpoint
from headway.train.journal import Journal
from headway.train.judge_calls import Case, JournalHead, JudgeCall, cases_of, open_calls, write_judged
from headway.train.judge_prompt import (
    VerdictError,
    judge_messages,
    letters,
    read_verdict,
    shown_order,
    verdict_schema,
)
from headway.train.limits import Budget, Pacer

#: Tokens that a verdict on one candidate may take, and room for what a judge says around it.
_TOKENS_PER_CANDIDATE = 16
_MAX_REPLY_CHARS = 500

Progress = Callable[[int, int, float], None]


class JudgeOptions(Struct, frozen=True, kw_only=True):
    """How to judge. ``verdicts`` is how often a prompt is put to the judge before an unreadable reply is final;
    ``room_tokens`` is what the judge may write beside its scores (a reasoning model needs more).

    Raises:
        ConfigError: a count below 1.
    """

    seed: int = 0
    concurrency: int = 4
    per_s: float | None = None
    budget_usd: float | None = None
    verdicts: int = 3
    room_tokens: int = 256
    temperature: float | None = 0.0
    persistence: Persistence = Persistence()

    def __post_init__(self) -> None:
        for name in ("concurrency", "verdicts", "room_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", key=f"--{name.replace('_', '-')}")


class JudgeSummary(Struct, kw_only=True):
    """What a run did. Of ``num_prompts``, each was judged before, judged now, failed or not asked.

    ``num_rows`` are those of the output; ``num_unanswered`` of them have no whole answer, so nothing to judge.
    """

    out: str
    judge: str
    num_prompts: int
    num_kept: int = 0
    num_judged: int = 0
    num_failed: int = 0
    num_not_asked: int = 0
    num_without_reference: int = 0
    num_rows: int = 0
    num_rows_judged: int = 0
    num_unanswered: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    cost_usd: float = 0.0
    total_cost_usd: float = 0.0
    budget_usd: float | None = None
    stopped_by: Literal["budget", "endpoint"] | None = None
    given_up: str = ""

    @property
    def complete(self) -> bool:
        """Whether every answered prompt has its scores."""
        return self.num_kept + self.num_judged == self.num_prompts


async def judge(
    rows: Sequence[EvaluationRow],
    endpoints: Sequence[Endpoint],
    out: Path,
    options: JudgeOptions,
    *,
    told: Progress = lambda done, total, cost_usd: None,
) -> JudgeSummary:
    """Score the answers of ``rows`` and write them all to ``out``; the journal is ``out`` with ``.calls`` behind it.

    ``told`` gets prompts done, prompts in all, USD spent. ``endpoints`` serve one judge.

    Raises:
        ConfigError: ``out`` or its journal cannot be written, or the journal is of another judge, seed or instructions.
        DatasetError: the journal is malformed, or nothing in ``rows`` can be judged.
        HeadwayError: another run writes to the journal, or the disk is full.
    """
    cases = cases_of(rows)
    if not cases:
        raise DatasetError("holds no whole answer that could be judged")
    head = JournalHead(judge=endpoints[0].model, seed=options.seed)
    summary = JudgeSummary(out=str(out), judge=head.judge, num_prompts=len(cases), budget_usd=options.budget_usd)
    summary.num_without_reference = sum(case.reference is None for case in cases)
    journal_path = out.with_name(out.name + ".calls")
    async with Journal(journal_path) as journal:
        known = await open_calls(journal, head)
        budget = Budget(options.budget_usd, sum(call.cost_usd for call in known))
        before_usd = budget.spent_usd
        bench = _Bench(
            cases=cases, known=known, journal=journal, budget=budget, options=options, summary=summary, told=told
        )
        try:
            await bench.run(endpoints)
        finally:  # also when cancelled: what was judged is kept
            written = write_judged(out, rows, bench.scores, head.judge)
            summary.num_rows, summary.num_rows_judged, summary.num_unanswered = written
    summary.cost_usd, summary.total_cost_usd = budget.spent_usd - before_usd, budget.spent_usd
    summary.num_not_asked = summary.num_prompts - summary.num_kept - summary.num_judged - summary.num_failed
    if budget.exhausted:
        summary.stopped_by = "budget"
    return summary


class _Bench:
    """The prompts of a run on their way to the judge."""

    def __init__(
        self,
        *,
        cases: Sequence[Case],
        known: Sequence[JudgeCall],
        journal: Journal,
        budget: Budget,
        options: JudgeOptions,
        summary: JudgeSummary,
        told: Progress,
    ) -> None:
        self._journal, self._budget, self._options = journal, budget, options
        self._summary, self._told = summary, told
        self.scores: dict[tuple[str, str], float] = {}
        newest = {(call.prompt_id, call.case): call for call in known if call.scores is None}
        newest |= {(call.prompt_id, call.case): call for call in known if call.scores is not None}
        todo = []
        for case in cases:
            call = newest.get((case.prompt_id, case.fingerprint))
            if call is not None and call.scores is not None:
                summary.num_kept += 1
                self._keep(call)
            elif call is not None and not call.retriable:
                self._count_failure(call)
            else:
                todo.append(case)
        self._todo = iter(todo)
        self._closed = False

    async def run(self, endpoints: Sequence[Endpoint]) -> None:
        """Judge what is left."""
        options = self._options
        self._tell()
        try:
            async with client_session() as session, asyncio.TaskGroup() as tasks:
                for endpoint in endpoints:
                    caller = Caller(
                        session,
                        endpoint,
                        pacer=Pacer(options.per_s),
                        budget=self._budget,
                        persistence=options.persistence,
                        seed=options.seed,
                    )
                    for _ in range(options.concurrency):
                        tasks.create_task(self._work(caller))
        except* HeadwayError as group:
            raise first_error(group) from None

    async def _work(self, caller: Caller) -> None:
        while not self._closed and (case := next(self._todo, None)) is not None:
            call, unusable = await self._judge(caller, case)
            if call is not None:
                await self._journal.append(msgspec.json.encode(call) + b"\n")
                if call.scores is not None:
                    self._summary.num_judged += 1
                    self._keep(call)
                else:
                    self._count_failure(call)
                self._tell()
            if call is None or unusable:
                self._closed = True
                if unusable and call is not None:
                    self._summary.stopped_by, self._summary.given_up = "endpoint", call.error

    async def _judge(self, caller: Caller, case: Case) -> tuple[JudgeCall | None, bool]:
        """One prompt's verdict or failure (None: the budget does not allow it), and whether the judge is unusable."""
        options = self._options
        order = shown_order(list(case.answers), seed=options.seed, prompt_id=case.prompt_id)
        names = letters(len(order))
        shown = {name: case.answers[model] for name, model in zip(names, order, strict=True)}
        extra = {} if options.temperature is None else {"temperature": options.temperature}
        spent_usd, complaint, num_asked = 0.0, None, 0
        while True:
            ask = Ask(
                messages=judge_messages(case.request, case.reference, shown, complaint),
                max_tokens=options.room_tokens + _TOKENS_PER_CANDIDATE * len(order),
                schema=verdict_schema(names),
                extra=extra,
            )
            answered = await caller.call(ask)
            num_asked += 1
            if answered is None and num_asked == 1:
                return None, False
            if answered is not None:
                spent_usd += answered.cost_usd + answered.wasted_usd
            call = JudgeCall(
                prompt_id=case.prompt_id, case=case.fingerprint, order=order, num_asked=num_asked, cost_usd=spent_usd
            )
            if answered is None:
                words = f"the budget ended before another reply: {complaint}"
                return msgspec.structs.replace(call, reason="budget", error=words), False
            if answered.reply.status != "ok":
                return _failed(call, answered), answered.reply.unusable
            try:
                scores = read_verdict(answered.reply.text, names)
            except VerdictError as error:
                complaint = str(error)
                if num_asked >= options.verdicts:
                    return _unreadable(call, answered, complaint), False
                continue
            return _judged(call, answered, dict(zip(order, scores.values(), strict=True))), False

    def _keep(self, call: JudgeCall) -> None:
        for model, score in (call.scores or {}).items():
            self.scores[call.prompt_id, model] = score

    def _count_failure(self, call: JudgeCall) -> None:
        self._summary.num_failed += 1
        self._summary.failures[call.reason] = self._summary.failures.get(call.reason, 0) + 1

    def _tell(self) -> None:
        one = self._summary
        self._told(one.num_kept + one.num_judged + one.num_failed, one.num_prompts, self._budget.spent_usd)


def _failed(call: JudgeCall, answered: Answered) -> JudgeCall:
    reply = answered.reply
    return msgspec.structs.replace(call, reason=reply.reason, error=reply.error, retriable=reply.status != "rejected")


def _unreadable(call: JudgeCall, answered: Answered, complaint: str) -> JudgeCall:
    text = answered.reply.text[:_MAX_REPLY_CHARS]
    return msgspec.structs.replace(call, reason="unreadable", error=complaint, reply=text)


def _judged(call: JudgeCall, answered: Answered, scores: dict[str, float]) -> JudgeCall:
    reply = answered.reply
    return msgspec.structs.replace(
        call, scores=scores, prompt_tokens=reply.prompt_tokens, output_tokens=reply.output_tokens
    )
