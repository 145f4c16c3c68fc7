"""Runs the demo: the same workload under each policy in turn, on fresh engines and a fresh gateway each time.

It refuses to compare what is not comparable: one policy's failure to start or a process that dies ends the whole run,
and nothing that was started survives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from headway.demo.load_client import play
from headway.demo.pool import INSTANCES, PRICES
from headway.demo.predictor import TrainedPredictor
from headway.demo.processes import RunningPool, running_pool
from headway.demo.score import PolicyScore, Served, score
from headway.demo.workload import Workload, WorkloadSummary
from headway.errors import ConfigError, HeadwayError
from headway.policy.registry import POLICIES

#: How long queries in flight may take after the last arrival before they count as failed.
PATIENCE_S = 120.0


class DemoReport(Struct, frozen=True):
    """What was played, and the figures of each policy in the order they were asked for.

    ``predictor`` is the name of a trained artifact's file; ``cold_models`` are those it does not know.
    """

    workload: WorkloadSummary
    policies: list[PolicyScore]
    predictor: str = "prior"
    cold_models: tuple[str, ...] = ()


class Progress(Protocol):
    """Hears how the run goes."""

    def starting(self, policy: str, number: int, num_policies: int, num_queries: int) -> None:
        """The processes of a policy are about to start."""

    def sent(self) -> None:
        """One more query is on its way."""

    def served(self, served: Served) -> None:
        """One more query has its outcome."""


def check_policies(names: Sequence[str]) -> None:
    """Whether every name is a policy of the gateway, and there once.

    Raises:
        ConfigError: one is not; ``key`` names the option.
    """
    if not names:
        raise ConfigError("needs at least one policy", key="--policies")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"'{name}' is no policy; there are {', '.join(sorted(POLICIES))}", key="--policies")
    if len(set(names)) != len(names):
        raise ConfigError("names a policy twice", key="--policies")


async def run_demo(
    workload: Workload, policies: Sequence[str], progress: Progress, predictor: TrainedPredictor | None = None
) -> DemoReport:
    """Play ``workload`` under each of ``policies``. A signal to end stops everything that was started first.

    Raises:
        ConfigError: an unknown policy.
        HeadwayError: a process did not start, or died during the run.
    """
    check_policies(policies)
    path = None if predictor is None else predictor.path
    scores = []
    with _ending_signals_cancel():
        for number, policy in enumerate(policies):
            progress.starting(policy, number, len(policies), len(workload.queries))
            async with running_pool(policy, workload.summary.seed, path) as pool:
                served = await _play_while_alive(workload, pool, progress)
            scores.append(score(policy, workload.queries, served, prices=PRICES, instances=INSTANCES))
    if predictor is None:
        return DemoReport(workload.summary, scores)
    return DemoReport(workload.summary, scores, predictor.path.name, predictor.cold_models)


async def _play_while_alive(workload: Workload, pool: RunningPool, progress: Progress) -> list[Served]:
    playing = asyncio.create_task(
        play(workload.queries, pool.url, patience_s=PATIENCE_S, on_sent=progress.sent, on_served=progress.served)
    )
    dying = asyncio.create_task(pool.wait_for_death())
    try:
        await asyncio.wait((playing, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            await dying
        return await playing
    finally:
        for task in (playing, dying):
            task.cancel()
        await asyncio.gather(playing, dying, return_exceptions=True)


@contextlib.contextmanager
def _ending_signals_cancel() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run in order, as Ctrl-C does by itself."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, cancel, number)
    try:
        yield
    except asyncio.CancelledError:
        if received:
            raise HeadwayError(f"ended by {received[0].name}") from None
        raise
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
