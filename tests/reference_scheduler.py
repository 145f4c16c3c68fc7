"""The scheduler's rules once more, in plain Python, one iteration at a time.

This is what the native core is compared with: no event skipping, no cache, no arithmetic in closed form. It is itself
compared with the real vLLM 0.32 scheduler, live in ``make conformance`` and from recordings in ``make test``. Rules:
``vllm/v1/core/sched/scheduler.py`` (``schedule``, ``_preempt_request``), ``async_scheduler.py`` beside it,
``vllm/v1/core/kv_cache_manager.py`` (``allocate_slots``) and ``vllm/v1/core/sched/utils.py`` (``check_stop``) at
0.32.0. Asynchronous scheduling keeps vLLM's own placeholders and stale outputs, where the core counts outputs ahead.
Prefixes are cached as counts, or block by block where there is a pool (``reference_pool.py``). It refuses to check its
input; ``headway.types`` and the native core do.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway.types import EngineLimits, EngineRequest, EngineState, StepTime
from reference_pool import ReferencePool, Table


@dataclass(slots=True, eq=False)
class Resident:
    """A request inside the engine. ``last_output`` is min(target, max_tokens); ``key`` orders the priority policy.

    ``limit`` is the largest number of outputs that ``max_tokens`` and the model's length allow. ``placeholders`` and
    ``stale`` are vLLM's ``num_output_placeholders`` and ``num_stale_output_tokens``, both 0 without async scheduling.
    """

    request_id: str
    prompt: int
    computed: int
    output: int
    last_output: int
    blocks: int
    key: tuple[int, float, int]
    limit: int
    cached: int = 0
    in_flight: int = 0
    placeholders: int = 0
    stale: int = 0
    gone: bool = False
    shared: int = 0
    table: Table | None = None

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.output

    @property
    def want(self) -> int:
        return self.prompt + self.output + self.placeholders - self.computed

    @property
    def is_over(self) -> bool:
        """Whether the batch in flight is sure to bring it to its limit, so that it needs no further step."""
        return self.placeholders > 0 and self.computed + 2 - self.placeholders >= self.prompt + self.limit


@dataclass(slots=True)
class Batch:
    """One step, with the fields of the native ``TokenBatch``.

    ``begun_s`` is the time of the batch that starts when this one is scheduled: the same, or with async scheduling the
    one before it.
    """

    num_scheduled_tokens: dict[str, int]
    preempted: list[str]
    free_blocks: int
    first_tokens: list[str]
    finished: list[str]
    time_s: float
    begun_s: float


#: A request's share of a batch, and whether the batch gives it an output.
Share = tuple[Resident, int, bool]


class ReferenceEngine:
    """An engine between steps; ``running`` and ``waiting`` are in engine order."""

    def __init__(self, limits: EngineLimits, step_time: StepTime, *, pool: type[ReferencePool] | None = None) -> None:
        self.limits, self.step_time = limits, step_time
        self.pool = None if pool is None else pool(limits.num_blocks, limits.block_size)
        self.running: list[Resident] = []
        self.waiting: list[Resident] = []
        self.free_blocks = limits.num_blocks - 1  # the null block is never free
        self.num_submitted = self.num_outputs = 0
        self.newest: list[Share] = []  # async: the batch whose outcome is not applied
        self.newest_s = 0.0

    @classmethod
    def from_state(cls, state: EngineState, step_time: StepTime) -> ReferenceEngine:
        engine = cls(state.limits, step_time)
        for request in state.running:
            engine.running.append(engine._admit(request))
        for request in state.waiting:
            engine._enqueue(engine._admit(request))
        engine.free_blocks -= sum(r.blocks - r.shared for r in engine.running + engine.waiting)
        if state.free_blocks is not None:
            engine.free_blocks = state.free_blocks
        engine.newest = [(r, r.in_flight, r.placeholders > 0) for r in engine.running if r.in_flight]
        chunks = [
            (n, r.computed - n, n == 1 and r.output > 0 and r.computed == r.num_tokens) for r, n, _ in engine.newest
        ]
        chunks += state.departed
        engine.newest_s = batch_time(step_time, chunks) if chunks else 0.0
        return engine

    @property
    def is_idle(self) -> bool:
        """Whether a step would change nothing as long as nobody comes, given that the last one did nothing."""
        return not self.newest

    def submit(self, request: EngineRequest, block_hashes: Sequence[int] = ()) -> None:
        resident = self._admit(request)
        resident.table = Table(resident.key, block_hashes)
        self._enqueue(resident)

    def cancel(self, request_id: str) -> bool:
        for queue in (self.running, self.waiting):
            for resident in queue:
                if resident.request_id == request_id:
                    queue.remove(resident)
                    self._let_go(resident)
                    return True
        return False

    def _admit(self, request: EngineRequest) -> Resident:
        arrival_s = request.arrival_s
        if arrival_s is None:
            latest_s = max((resident.key[1] for resident in self.running + self.waiting), default=-math.inf)
            arrival_s = math.nextafter(latest_s, sys.float_info.max)  # strictly after all present
        held = request.num_blocks
        if held is None:
            held = -(-request.computed_tokens // self.limits.block_size)
        limit = self.limits.max_model_len - request.prompt_tokens
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens)
        num_tokens = request.prompt_tokens + request.output_tokens
        shared = request.shared_blocks
        if held == 0:  # of the blocks it will find, those that others hold
            shared = min(shared, self._hit(request.cached_tokens, num_tokens) // self.limits.block_size)
        samples = request.scheduled_tokens > 0 and request.computed_tokens == num_tokens
        self.num_submitted += 1
        return Resident(
            request.request_id,
            request.prompt_tokens,
            request.computed_tokens,
            request.output_tokens,
            min(limit, request.target_output_tokens),
            max(held, shared),
            (request.priority, arrival_s, self.num_submitted),
            limit,
            request.cached_tokens,
            request.scheduled_tokens,
            int(samples),
            shared=shared,
        )

    def _enqueue(self, resident: Resident) -> None:
        if self.limits.policy == "fcfs":
            self.waiting.append(resident)
        else:
            insort(self.waiting, resident, key=lambda other: other.key)

    def _missing_blocks(self, resident: Resident, num_tokens: int) -> int:
        return max(-(-num_tokens // self.limits.block_size) - resident.blocks, 0)

    def _take_blocks(self, resident: Resident, num_tokens: int) -> None:
        missing = self._missing_blocks(resident, num_tokens)
        resident.blocks += missing
        self.free_blocks -= missing
        if self.pool is not None and resident.table is not None:
            self.pool.take(resident.table, missing)
            self._cache(resident, min(num_tokens, resident.num_tokens))  # not what an output on its way will fill

    def _cache(self, resident: Resident, num_tokens: int) -> None:
        if self.pool is not None and resident.table is not None:
            self.pool.cache(resident.table, num_tokens)

    def _release_blocks(self, resident: Resident) -> None:
        self.free_blocks += resident.blocks - resident.shared
        resident.blocks = resident.shared = 0
        if self.pool is not None and resident.table is not None:
            self.pool.release(resident.table)
            self.free_blocks = len(self.pool.free)

    def _victim_index(self) -> int:
        if self.limits.policy == "fcfs":
            return len(self.running) - 1
        # The first of equals in list order, as Python's max() in vLLM.
        return max(range(len(self.running)), key=lambda index: self.running[index].key[:2])

    def _preempt(self, index: int) -> Resident:
        """Recompute preemption: every block freed, outputs kept, back to the front (fcfs) or by key (priority)."""
        victim = self.running.pop(index)
        self._release_blocks(victim)
        victim.computed = victim.cached = victim.placeholders = 0
        victim.stale = victim.in_flight
        if self.limits.policy == "fcfs":
            self.waiting.insert(0, victim)
        else:
            self._enqueue(victim)
        return victim

    def _schedule_running(self, batch: dict[Resident, int], budget: int, threshold: int) -> tuple[int, list[Resident]]:
        preempted: list[Resident] = []
        index = 0
        while index < len(self.running) and budget > 0:
            resident = self.running[index]
            room = self.limits.max_model_len - resident.computed - 1
            num_tokens = min(resident.want, threshold, budget, room)
            if num_tokens <= 0 or resident.is_over:
                index += 1
                continue
            while self._missing_blocks(resident, resident.computed + num_tokens) > self.free_blocks:
                victim_index = self._victim_index()
                victim = self._preempt(victim_index)
                preempted.append(victim)
                if victim is resident:
                    return budget, preempted
                budget += batch.pop(victim, 0)
                index -= victim_index < index
            self._take_blocks(resident, resident.computed + num_tokens)
            batch[resident] = num_tokens
            budget -= num_tokens
            index += 1
        return budget, preempted

    def _hit(self, cached_tokens: int, num_tokens: int) -> int:
        """Tokens of a waiting request that the prefix cache holds: full blocks, and never the last token."""
        if not self.limits.prefix_caching:
            return 0
        return min(cached_tokens, num_tokens - 1) // self.limits.block_size * self.limits.block_size

    def _schedule_waiting(self, batch: dict[Resident, int], budget: int, threshold: int) -> None:
        limits = self.limits
        passed_over = 0  # those whose outputs of before their preemption are still to come keep their place
        while len(self.waiting) > passed_over and budget > 0 and len(self.running) < limits.max_num_seqs:
            resident = self.waiting[passed_over]
            if resident.stale:
                passed_over += 1
                continue
            computed = resident.computed or self._hit(resident.cached, resident.num_tokens)
            found = []
            if self.pool is not None and resident.table is not None:
                found = self.pool.find(resident.table, resident.num_tokens)
                computed = len(found) * limits.block_size
            # Found blocks that nobody holds are among the free ones, and are taken from them.
            num_held_by_others = 0 if self.pool is None else self.pool.num_held(found)
            num_tokens = min(resident.num_tokens - computed, threshold)
            if num_tokens > budget and not limits.chunked_prefill:
                return
            num_tokens = min(num_tokens, budget)
            must_fit = resident.num_tokens if limits.reserve_full_isl else computed + num_tokens
            watermark = int(limits.watermark * limits.num_blocks) if self.running else 0
            if self._missing_blocks(resident, must_fit) - num_held_by_others + watermark > self.free_blocks:
                return
            resident.computed = computed
            if self.pool is not None and resident.table is not None:
                self.pool.take_found(resident.table, found)
                resident.blocks, resident.cached = len(found), computed
                self.free_blocks = len(self.pool.free)
            self._take_blocks(resident, computed + num_tokens)
            self.running.append(self.waiting.pop(passed_over))
            batch[resident] = num_tokens
            budget -= num_tokens

    def _schedule(self) -> tuple[dict[Resident, int], list[Resident]]:
        threshold = self.limits.long_prefill_token_threshold
        if threshold == 0 or len(self.running) + len(self.waiting) == 1:  # alone, a long prefill starves nobody
            threshold = self.limits.max_model_len
        batch: dict[Resident, int] = {}
        budget, preempted = self._schedule_running(batch, self.limits.max_num_batched_tokens, threshold)
        if not preempted:
            self._schedule_waiting(batch, budget, threshold)
        return batch, preempted

    def step(self) -> Batch:
        """Schedule one token batch and apply its outcome, or with async scheduling that of the batch before."""
        batch, preempted = self._schedule()
        free_blocks = self.free_blocks
        chunks = [(n, r.computed, n == 1 and r.output + r.placeholders > 0 and r.want == 1) for r, n in batch.items()]
        scheduled: list[Share] = []
        for resident, num_tokens in batch.items():
            resident.computed += num_tokens
            resident.in_flight += num_tokens
            samples = resident.want <= 0  # else more prompt, or more to recompute
            resident.placeholders += samples
            scheduled.append((resident, num_tokens, samples))
        time_s = batch_time(self.step_time, chunks) if batch or preempted else 0.0
        begun_s = time_s
        if self.limits.async_scheduling:
            scheduled, self.newest = self.newest, scheduled
            begun_s, self.newest_s = self.newest_s, time_s
        first_tokens, finished = self._update(scheduled)
        return Batch(
            {resident.request_id: num_tokens for resident, num_tokens in batch.items()},
            [resident.request_id for resident in preempted],
            free_blocks,
            first_tokens,
            finished,
            time_s,
            begun_s,
        )

    def _update(self, batch: list[Share]) -> tuple[list[str], list[str]]:
        """Apply the outcome of a batch; who got a first output, and who ended."""
        first_tokens: list[str] = []
        finished: list[str] = []
        for resident, num_tokens, samples in batch:
            resident.in_flight -= num_tokens
            is_stale = resident.stale > 0  # it was preempted since, which forgot its placeholder
            resident.stale -= num_tokens if is_stale else 0
            if not samples or resident.gone:  # the latter: cancelled since, or ended by the batch before
                continue
            resident.placeholders -= not is_stale
            resident.output += 1
            if self.limits.async_scheduling and resident.blocks:  # else it was preempted
                self._cache(resident, resident.computed - resident.placeholders)
            self.num_outputs += 1
            if resident.output == 1:
                first_tokens.append(resident.request_id)
            if resident.output >= resident.last_output or resident.num_tokens >= self.limits.max_model_len:
                finished.append(resident.request_id)
                (self.running if resident in self.running else self.waiting).remove(resident)
                self._let_go(resident)
        return first_tokens, finished

    def _let_go(self, resident: Resident) -> None:
        resident.gone = True
        self._release_blocks(resident)

    def signature(self) -> tuple[object, ...]:
        """Everything that decides the future, for finding a cycle."""
        return tuple(
            tuple((r.request_id, r.computed, r.output + r.placeholders, r.blocks) for r in queue)
            for queue in (self.running, self.waiting)
        )


def batch_time(step_time: StepTime, chunks: Iterable[tuple[int, int, bool]]) -> float:
    """Seconds of a batch of (num_scheduled_tokens, context_before, is_decode) chunks."""
    chunks = list(chunks)
    prefills = [(n, context) for n, context, is_decode in chunks if not is_decode]
    decodes = [context for _, context, is_decode in chunks if is_decode]
    b = step_time.named()
    num_tokens = sum(n for n, _, _ in chunks)
    if step_time.form == "six_term":
        contexts = [context for _, context, _ in chunks]
        return (
            b["b0"]
            + b["bp"] * sum(n for n, _ in prefills)
            + b["bpp"] * sum(n * n for n, _ in prefills)
            + b["bd"] * len(decodes)
            + b["bs"] * sum(contexts)
            + b["bss"] * sum(context * context for context in contexts)
        )
    if step_time.form == "knee":
        per_tokens = b["b1_below"] * min(num_tokens, b["knee"]) + b["b1_above"] * max(num_tokens - b["knee"], 0)
    else:
        per_tokens = b["b1"] * num_tokens
    pairs = sum(n * context + n * (n + 1) // 2 for n, context in prefills)
    return b["b0"] + per_tokens + b["b2"] * sum(decodes) + b["b3"] * pairs + b["b_seq"] * len(chunks)


def reference_replay(state: EngineState, request: EngineRequest, step_time: StepTime) -> tuple[float, float, int]:
    """(ttft_s, wait_s, num_steps) of a newcomer; infinite where the engine never gets to it."""
    engine = ReferenceEngine.from_state(state, step_time)
    engine.submit(request)
    is_async = state.limits.async_scheduling
    now_s, wait_s, num_steps = state.residual_s, math.inf, 0
    seen: set[tuple[object, ...]] = set()
    num_outputs = 0
    while True:
        batch = engine.step()
        num_steps += 1
        if request.request_id in batch.num_scheduled_tokens:
            wait_s = min(wait_s, now_s + batch.begun_s if is_async else now_s)
        now_s += batch.begun_s
        if request.request_id in batch.first_tokens:
            return now_s, wait_s, num_steps - is_async  # the last of which was scheduled while its batch ran
        if not batch.num_scheduled_tokens and not batch.preempted and not batch.finished and engine.is_idle:
            return math.inf, wait_s, num_steps
        # Outputs never shrink, so only steps that sample nothing can lead back to an earlier state.
        if engine.num_outputs != num_outputs:
            num_outputs = engine.num_outputs
            seen.clear()
        elif (signature := engine.signature()) in seen:
            return math.inf, wait_s, num_steps
        else:
            seen.add(signature)
