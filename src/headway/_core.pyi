"""Stub of the native module (see ``native/bindings.cpp``)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.fleet.view import LedgerEntry
from headway.types import EngineLimits, EngineRequest, EngineState, Replay, Snapshot, StepTime

class TokenBatch:
    """One scheduled token batch, as after scheduling; ``first_tokens`` and ``finished`` as after the update.

    An asynchronous engine's update is that of the batch before: what this one gives shows with the next step.
    """

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Request id → tokens, in scheduling order."""
    @property
    def cached_tokens(self) -> dict[str, int]:
        """Request id → tokens found in the prefix cache, of those admitted by this batch that found any."""
    @property
    def preempted(self) -> list[str]: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def first_tokens(self) -> list[str]:
        """Requests whose very first output this batch gave (never after a recompute)."""
    @property
    def finished(self) -> list[str]: ...
    @property
    def time_s(self) -> float:
        """Duration without noise; 0 when there was nothing to do."""

class Workload:
    """What the residents of an engine, running and waiting, still have before them.

    What a batch already scheduled will give an asynchronous engine's requests counts as given.
    """

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_prefills(self) -> int:
        """Residents whose prompt (or recompute after a preemption) is not complete."""
    @property
    def prefill_tokens(self) -> int:
        """Tokens that these still have to prefill."""
    @property
    def prefill_pairs(self) -> float:
        """Σ p² + 2·p·c over these: p tokens still to prefill, c computed before them."""
    @property
    def num_decodes(self) -> int:
        """Residents that only decode."""
    @property
    def context_tokens(self) -> int:
        """Computed tokens of all running requests."""
    @property
    def decode_tokens(self) -> int:
        """Output tokens expected yet, of all residents."""

class ReplayedEngine:
    """The scheduler of one engine, replayed natively."""

    def __init__(self, limits: EngineLimits, step_time: StepTime) -> None: ...
    @staticmethod
    def from_state(state: EngineState, step_time: StepTime) -> ReplayedEngine: ...
    @staticmethod
    def with_block_pool(limits: EngineLimits, step_time: StepTime) -> ReplayedEngine:
        """An empty engine that tells its KV blocks apart and looks prefixes up as vLLM does; every other engine counts
        blocks, and is told counts of cached tokens. Each step costs its whole batch: it is made for mirroring an engine
        from its start, not for estimates. ``load`` makes it one that counts."""
    def load(self, state: EngineState) -> None:
        """Replace the whole state, keeping step time and identity (limits come from the state)."""
    def load_snapshot(
        self,
        snapshot: Snapshot,
        ledger_ids: dict[str, str | None],
        ledger: Mapping[str, LedgerEntry],
        released: Mapping[str, float],
        rule: LengthRule,
        default_output_tokens: float,
    ) -> None:
        """Replace the whole state by what a snapshot shows, its batch in flight brought to its end (an asynchronous
        engine: left there, about to start). ``ledger_ids`` is what :func:`shown_ids` gives for it. A request shown has
        its ledger entry's ``predicted_output_tokens``, or the default, by ``rule``; those ``released`` leave with their
        blocks. After an EngineInputError the engine is not to be used."""
    def submit(self, request: EngineRequest, block_hashes: Sequence[int] = ()) -> None:
        """Queue a request. ``block_hashes`` are for an engine with a block pool: 64-bit hashes of the request's first
        full blocks, each covering all before it; they may go on into its answer. Blocks beyond them are its own."""
    def look_up(self, block_hashes: Sequence[int], prompt_tokens: int) -> tuple[int, int]:
        """How many tokens of such a prompt the block pool holds now, and how many of their blocks residents hold: the
        ``cached_tokens`` and ``shared_blocks`` of a newcomer."""
    def cancel(self, request_id: str) -> bool:
        """Remove a request wherever it is and free its blocks; False when it is not here."""
    def step(self) -> TokenBatch: ...
    def advance(self, seconds: float) -> int:
        """Let time pass; returns the number of steps started (scheduled, where that happens a batch ahead). A batch
        still in flight at the end is completed and its remaining time stands in ``residual_s``. An engine whose
        requests preempt each other in a cycle without an output stands still."""
    def start_batch(self) -> None:
        """Start the batch that an asynchronous engine has scheduled: the next one is scheduled without whoever comes
        later, and ``residual_s`` becomes the time of the one started. Nothing happens where none is about to start."""
    def clone(self) -> ReplayedEngine: ...
    def state(self) -> EngineState: ...
    @property
    def running(self) -> list[EngineRequest]: ...
    @property
    def waiting(self) -> list[EngineRequest]: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def residual_s(self) -> float: ...
    @property
    def remaining_prefill_tokens(self) -> int:
        """Σ over all requests, running and waiting, of the tokens still to prefill."""
    def workload(self) -> Workload:
        """Sums over the residents as they stand; O(residents)."""
    def __contains__(self, request_id: str) -> bool: ...
    def replay(self, request: EngineRequest, block_hashes: Sequence[int] = ()) -> Replay:
        """Replay this newcomer without submitting it."""
    def first_token(
        self,
        prompt_tokens: int,
        priority: int = 0,
        arrival_s: float | None = None,
        cached_tokens: int = 0,
        shared_blocks: int = 0,
    ) -> Replay:
        """Replay a newcomer of this many prompt tokens, ``cached_tokens`` of which the engine's prefix cache holds, of
        these ``shared_blocks`` with residents (see :class:`headway.types.EngineRequest`). Cached until the state
        changes (FCFS)."""
    def ttft_s(self, prompt_tokens: int) -> float:
        """``first_token(prompt_tokens).ttft_s`` without a result object; infinite where the prompt can never run."""

class EngineGroup:
    """Many engines, asked in one call. Engines are kept alive; refill them in place with ``load``."""

    def __init__(self, engines: Sequence[ReplayedEngine]) -> None: ...
    def first_tokens(
        self,
        prompt_tokens: NDArray[np.int64],
        ttft_s: NDArray[np.float64],
        wait_s: NDArray[np.float64],
        priority: int = 0,
        cached_tokens: NDArray[np.int64] | None = None,
        shared_blocks: NDArray[np.int64] | None = None,
    ) -> None:
        """Fill ``ttft_s`` and ``wait_s`` (one entry per engine; +inf where it cannot run). ``cached_tokens`` and
        ``shared_blocks``, one entry per engine too, are what its prefix cache holds of the newcomer, and how many of
        these blocks residents hold; engines without a prefix cache ignore theirs."""

class LengthRule:
    """How long a resident's answer is expected to become, given its prediction and what is there already.

    ``survival``: remaining = max(predicted − done, max(64, done/4)), so that a request that outlives its prediction is
    expected to go on. ``plain``: the prediction as it is. ``conditional_median``: once there is output, the median of
    the answers seen (``lengths``, one row per bin of prompt tokens with upper bounds ``edges``, the last bin open)
    that were longer than that.
    """

    def __init__(self, kind: str, *, edges: Sequence[int] = (), lengths: Sequence[Sequence[float]] = ()) -> None: ...
    def target_tokens(self, predicted_tokens: float, prompt_tokens: int, output_tokens: int, max_tokens: int) -> int:
        """The whole answer expected, above ``output_tokens`` and within ``max_tokens`` (0: no limit)."""

class TruthEngine:
    """A simulated engine under its true, noisy clock (see ``native/truth.hpp``). For the lab only."""

    def __init__(
        self,
        limits: EngineLimits,
        step_time: StepTime,
        *,
        noise: float,
        stall_probability: float,
        stall_mean_s: float,
        gap_low_s: float,
        gap_high_s: float,
        seed: int,
    ) -> None: ...
    def submit(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        target_output_tokens: int,
        predicted_output_tokens: float,
        max_tokens: int,
        priority: int = 0,
        now: float,
    ) -> None:
        """Queue a request that arrives at ``now``; call ``run_until(now)`` first. ``max_tokens`` 0: no limit."""
    def run_until(self, now: float) -> list[tuple[float, str, bool]]:
        """Start every batch that begins before ``now``; returns (time_s, request id, whether it ended) of the first
        tokens and ends in them, the batch in flight included: its events lie at or after ``now``."""
    def mirror(self, view: ReplayedEngine, rule: LengthRule) -> float:
        """Fill ``view`` with what a router may know of this engine, lengths by ``rule``. Returns the time at which it
        stands there: the start of the batch in flight, completed, its duration by ``view``'s clock as residual."""
    def clone(self) -> TruthEngine: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def num_steps(self) -> int:
        """Steps started so far."""

def shown_ids(
    snapshot: Snapshot, known: Mapping[str, str | None], match: Callable[[str], str | None]
) -> dict[str, str | None]:
    """Engine id → ledger id of the requests that a snapshot shows: as ``known``, else as ``match`` says."""

def batch_time_s(step_time: StepTime, chunks: Sequence[tuple[int, int, bool]]) -> float:
    """Duration of a batch of ``(num_scheduled_tokens, context_before, is_decode)`` chunks."""

class SeqlockWriter:
    """Writes one shared-memory slot. See ``native/seqlock.hpp``."""

    def __init__(self, buffer: memoryview) -> None: ...
    def write(self, payload: bytes) -> None: ...

class SeqlockReader:
    """Reads one shared-memory slot. See ``native/seqlock.hpp``."""

    def __init__(self, buffer: memoryview) -> None: ...
    def sequence(self) -> int: ...
    def read(self, max_attempts: int = 1000) -> bytes | None:
        """The newest payload, None before the first write; raises SnapshotTornError when every attempt was torn."""
