"""Rows of collected answers: made of replies, and taken stock of when a file is opened again.

A pair of prompt and model has at most one row of status ``ok``; failed attempts before it keep rows of their own, so
that the file's costs add up to what was charged. It refuses rows of other prompts under the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.errors import DatasetError
from headway.train.caller import Answered
from headway.train.dataset import EvaluationRow, read_rows
from headway.train.endpoints import Ask
from headway.train.prompts import PromptRow


class Known:
    """What a file of rows holds already: the newest status of each pair, and what all rows cost.

    Raises:
        DatasetError: a row is malformed, or its id stands for another prompt in ``prompts``.
    """

    def __init__(self, path: Path, prompts: Sequence[PromptRow]) -> None:
        asked = {prompt.prompt_id: prompt for prompt in prompts}
        self.status: dict[tuple[str, str], str] = {}
        self.cost_usd = 0.0
        for row in read_rows(path):
            prompt = asked.get(row.prompt_id)
            if prompt is not None and (row.prompt, row.messages) != (prompt.prompt, prompt.messages):
                raise DatasetError(f"the id {row.prompt_id!r} stands for another prompt there", path=str(path))
            key = (row.prompt_id, row.model)
            if self.status.get(key) != "ok":
                self.status[key] = row.status
            self.cost_usd += row.cost_usd or 0.0


def collected_row(model: str, prompt: PromptRow, ask: Ask, answered: Answered) -> EvaluationRow:
    """The row of one reply, or of a failure and what its attempts may have cost."""
    reply = answered.reply
    ok = reply.status == "ok"
    cost_usd = answered.cost_usd if ok else answered.cost_usd + answered.wasted_usd
    return EvaluationRow(
        prompt_id=prompt.prompt_id,
        model=model,
        prompt=prompt.prompt,
        messages=prompt.messages,
        response=reply.text if ok or reply.text else None,
        prompt_tokens=reply.prompt_tokens,
        output_tokens=reply.output_tokens,
        cost_usd=cost_usd if ok or cost_usd > 0.0 else None,
        task=prompt.task,
        reference=prompt.reference,
        max_tokens=ask.max_tokens,
        ttft_s=reply.ttft_s,
        latency_s=reply.latency_s,
        status=reply.status,
        error=None if ok else f"{reply.reason}: {reply.error}",
    )


def wasted_row(row: EvaluationRow, cost_usd: float) -> EvaluationRow:
    """The row of attempts that were charged and brought nothing, before the one that brought ``row``."""
    return msgspec.structs.replace(
        row,
        response=None,
        prompt_tokens=None,
        output_tokens=None,
        cost_usd=cost_usd,
        ttft_s=None,
        latency_s=None,
        status="error",
        error="wasted: attempts that were charged and brought no whole answer",
    )
