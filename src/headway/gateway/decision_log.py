"""The decision log: one line of JSON per routed request, in files that are bounded, to be read again later.

A line holds what the router knew and did, and what came of it: enough to route the same traffic once more by another
policy or over another pool. Lines are gathered and written by another thread once a second, so that the request path
never waits for a disk. It refuses to hold prompts, answers or credentials.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter

from headway.config import Config
from headway.config.keys import beside
from headway.decision_row import LoggedDecision, LoggedInstance, LoggedModel
from headway.errors import ConfigError
from headway.gateway.decisions import DecisionRecord
from headway.gateway.request import ClientRequest
from headway.gateway.rotated_file import RotatedFile
from headway.gateway.telemetry import Served
from headway.types import Candidate, Outcome

#: How often lines are written, seconds.
FLUSH_INTERVAL_S = 1.0
#: Lines that wait to be written; more are lost, and counted.
MAX_WAITING_BYTES = 16 << 20


class DecisionLog:
    """Writes lines where the configuration names a file, and does nothing where it names none.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, config: Config, registry: CollectorRegistry, *, seed: int = 0) -> None:
        self._config, self._path = config.decisions, config.path
        self._file: RotatedFile | None = None
        self._rng = random.Random(seed)
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._lost = Counter("headway_decision_log_lost", "Lines of the decision log that were lost", registry=registry)
        if self._config.file is not None:
            try:
                self._file = RotatedFile(
                    beside(config, self._config.file),
                    max_bytes=int(self._config.max_mb * 1e6),
                    num_files=self._config.num_files,
                )
            except ConfigError as error:
                message = str(error).removeprefix(f"{error.path}: ")
                raise config.error("decisions.file", f"{Path(error.path)} {message}") from None

    def note(
        self,
        record: DecisionRecord | None,
        request: ClientRequest | None,
        served: Served,
        outcome: Outcome | None,
        *,
        client: str,
        attempts: int,
    ) -> None:
        """Take in a request that is over. One that came to no decision has no line."""
        if self._file is None or record is None or request is None or self._rng.random() >= self._config.sample:
            return
        line = msgspec.json.encode(self._row(record, request, served, outcome, client, attempts)) + b"\n"
        if self._num_bytes + len(line) > MAX_WAITING_BYTES:
            self._lost.inc()
            return
        self._lines.append(line)
        self._num_bytes += len(line)

    def _row(  # noqa: PLR0917 - the parts of one line
        self,
        record: DecisionRecord,
        request: ClientRequest,
        served: Served,
        outcome: Outcome | None,
        client: str,
        attempts: int,
    ) -> LoggedDecision:
        decision, targets, chosen = record.decision, request.targets, record.decision.candidate
        shown = decision.candidates if self._config.candidates else () if chosen is None else (chosen,)
        return LoggedDecision(
            wall_s=time.time() - served.duration_s,
            request_id=record.request_id,
            decision_id=record.id,
            client=client or None,
            operation=served.operation,
            requested_model=served.requested_model,
            stream=request.stream,
            max_tokens=request.max_tokens,
            priority=request.priority,
            ttft_target_s=decision.ttft_target_s,
            quality_min=targets.quality_min,
            max_cost_usd=targets.max_cost_usd,
            policy=decision.policy,
            config=self._path,
            config_hash=decision.config_hash,
            reason=decision.reason,
            slo=decision.slo,
            held_s=decision.held_s,
            retry_after_s=decision.retry_after_s,
            decision_s=decision.decision_s,
            models={one.model: _model(one) for one in decision.candidates},
            instances=[_instance(one) for one in shown],
            chosen=None if chosen is None else chosen.instance_id,
            attempts=attempts,
            status=served.status,
            ttft_s=served.ttft_s,
            duration_s=served.duration_s,
            outcome=outcome,
        )

    async def flush(self) -> None:
        """Write what waits, by another thread; what cannot be written is lost, counted and said once."""
        if self._file is None or not self._lines:
            return
        lines, self._lines, self._num_bytes = self._lines, [], 0
        self._lost.inc(await asyncio.to_thread(_write, self._file, lines))

    async def close(self) -> None:
        """Write what waits and close the file."""
        await self.flush()
        if self._file is not None:
            self._file.close()


def _write(file: RotatedFile, lines: list[bytes]) -> int:
    """Append line by line, so that no file grows beyond its bounds by many at once; how many were lost."""
    return sum(not file.append(line) for line in lines)


def _model(one: Candidate) -> LoggedModel:
    return LoggedModel(one.prompt_tokens, one.quality, one.output_tokens, one.cost_usd, one.prediction)


def _instance(one: Candidate) -> LoggedInstance:
    estimate = one.estimate
    return LoggedInstance(
        one.instance_id,
        one.model,
        one.verdict,
        one.utility,
        one.num_outstanding,
        None if estimate is None else estimate.ttft_s,
        None if estimate is None else estimate.ttft_p90_s,
        None if estimate is None else estimate.wait_s,
        None if estimate is None else estimate.source,
        None if estimate is None else estimate.snapshot_age_s,
    )
