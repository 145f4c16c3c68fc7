"""The scheduler's rules once more, in plain Python, one iteration at a time.

This is what the native core is compared with: no event skipping, no cache, no arithmetic in closed form. It is itself
compared with the real vLLM 0.32 scheduler, live in ``make conformance`` and from recordings in ``make test``. Rules:
``vllm/v1/core/sched/scheduler.py`` (``schedule``, ``_preempt_request``), ``vllm/v1/core/kv_cache_manager.py``
(``allocate_slots``) and ``vllm/v1/core/sched/utils.py`` (``check_stop``) at 0.32.0, synchronous, no prefix cache.
It refuses to check its input; ``headway.types`` and the native core do.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, replace

from headway.types import EngineLimits, EngineRequest, EngineState, StepTime


@dataclass(slots=True, eq=False)
class Resident:
    """A request inside the engine. ``last_output`` is min(target, max_tokens); ``key`` orders the priority policy."""

    request_id: str
    prompt: int
    computed: int
    output: int
    last_output: int
    blocks: int
    key: tuple[int, float, int]
    cached: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.output

    @property
    def want(self) -> int:
        return self.prompt + self.output - self.computed


@dataclass(slots=True)
class Batch:
    """One step, with the fields of the native ``TokenBatch``."""

    num_scheduled_tokens: dict[str, int]
    preempted: list[str]
    free_blocks: int
    first_tokens: list[str]
    finished: list[str]
    time_s: float


class ReferenceEngine:
    """An engine between steps; ``running`` and ``waiting`` are in engine order."""

    def __init__(self, limits: EngineLimits, step_time: StepTime) -> None:
        self.limits, self.step_time = limits, step_time
        self.running: list[Resident] = []
        self.waiting: list[Resident] = []
        self.free_blocks = limits.num_blocks - 1  # the null block is never free
        self.num_submitted = self.num_outputs = 0

    @classmethod
    def from_state(cls, state: EngineState, step_time: StepTime) -> ReferenceEngine:
        engine = cls(state.limits, step_time)
        for request in state.running:
            engine.running.append(engine._admit(request))
        for request in state.waiting:
            engine._enqueue(engine._admit(request))
        engine.free_blocks -= sum(resident.blocks for resident in engine.running + engine.waiting)
        if state.free_blocks is not None:
            engine.free_blocks = state.free_blocks
        return engine

    def clone(self) -> ReferenceEngine:
        twin = ReferenceEngine(self.limits, self.step_time)
        twin.running, twin.waiting = [replace(r) for r in self.running], [replace(r) for r in self.waiting]
        twin.free_blocks, twin.num_submitted = self.free_blocks, self.num_submitted
        return twin

    def submit(self, request: EngineRequest) -> None:
        self._enqueue(self._admit(request))

    def cancel(self, request_id: str) -> bool:
        for queue in (self.running, self.waiting):
            for resident in queue:
                if resident.request_id == request_id:
                    queue.remove(resident)
                    self.free_blocks += resident.blocks
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
        last = request.target_output_tokens if request.max_tokens is None else request.max_tokens
        self.num_submitted += 1
        return Resident(
            request.request_id,
            request.prompt_tokens,
            request.computed_tokens,
            request.output_tokens,
            min(last, request.target_output_tokens),
            held,
            (request.priority, arrival_s, self.num_submitted),
            request.cached_tokens,
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

    def _victim_index(self) -> int:
        if self.limits.policy == "fcfs":
            return len(self.running) - 1
        # The first of equals in list order, as Python's max() in vLLM.
        return max(range(len(self.running)), key=lambda index: self.running[index].key[:2])

    def _preempt(self, index: int) -> Resident:
        """Recompute preemption: every block freed, outputs kept, back to the front (fcfs) or by key (priority)."""
        victim = self.running.pop(index)
        self.free_blocks += victim.blocks
        victim.blocks = victim.computed = victim.cached = 0
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
            if num_tokens <= 0:
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

    def _cache_hit(self, resident: Resident) -> int:
        """Tokens of a waiting request that the prefix cache holds: full blocks, and never the last token."""
        if not self.limits.prefix_caching:
            return 0
        return min(resident.cached, resident.num_tokens - 1) // self.limits.block_size * self.limits.block_size

    def _schedule_waiting(self, batch: dict[Resident, int], budget: int, threshold: int) -> None:
        limits = self.limits
        while self.waiting and budget > 0 and len(self.running) < limits.max_num_seqs:
            resident = self.waiting[0]
            computed = resident.computed or self._cache_hit(resident)
            num_tokens = min(resident.num_tokens - computed, threshold)
            if num_tokens > budget and not limits.chunked_prefill:
                return
            num_tokens = min(num_tokens, budget)
            must_fit = resident.num_tokens if limits.reserve_full_isl else computed + num_tokens
            watermark = int(limits.watermark * limits.num_blocks) if self.running else 0
            if self._missing_blocks(resident, must_fit) + watermark > self.free_blocks:
                return
            resident.computed = computed
            self._take_blocks(resident, computed + num_tokens)
            self.running.append(self.waiting.pop(0))
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
        """Schedule one token batch and apply its outcome."""
        batch, preempted = self._schedule()
        free_blocks = self.free_blocks
        chunks = [(n, r.computed, n == 1 and r.output > 0 and r.want == 1) for r, n in batch.items()]
        first_tokens: list[str] = []
        finished: list[str] = []
        for resident, num_tokens in batch.items():
            resident.computed += num_tokens
            if resident.want > 0:
                continue  # more prompt, or more to recompute: nothing is sampled
            resident.output += 1
            self.num_outputs += 1
            if resident.output == 1:
                first_tokens.append(resident.request_id)
            if resident.output >= resident.last_output or resident.num_tokens >= self.limits.max_model_len:
                finished.append(resident.request_id)
                self.running.remove(resident)
                self.free_blocks += resident.blocks
        return Batch(
            {resident.request_id: num_tokens for resident, num_tokens in batch.items()},
            [resident.request_id for resident in preempted],
            free_blocks,
            first_tokens,
            finished,
            batch_time(self.step_time, chunks) if batch or preempted else 0.0,
        )

    def signature(self) -> tuple[object, ...]:
        """Everything that decides the future, for finding a cycle."""
        return tuple(
            tuple((r.request_id, r.computed, r.output, r.blocks) for r in queue)
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
    now_s, wait_s, num_steps = state.residual_s, math.inf, 0
    seen: set[tuple[object, ...]] = set()
    num_outputs = 0
    while True:
        batch = engine.step()
        num_steps += 1
        if request.request_id in batch.num_scheduled_tokens:
            wait_s = min(wait_s, now_s)
        now_s += batch.time_s
        if request.request_id in batch.first_tokens:
            return now_s, wait_s, num_steps
        if not batch.num_scheduled_tokens and not batch.preempted:
            return math.inf, wait_s, num_steps
        # Outputs never shrink, so only steps that sample nothing can lead back to an earlier state.
        if engine.num_outputs != num_outputs:
            num_outputs = engine.num_outputs
            seen.clear()
        elif (signature := engine.signature()) in seen:
            return math.inf, wait_s, num_steps
        else:
            seen.add(signature)
