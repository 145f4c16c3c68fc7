"""Seeded random limits, engine states and workloads for the tests of the native core.

One seed gives one value on every Python, so a mismatch is reproduced by its seed alone. The states are rich on
purpose: tight blocks, preempted waiters, half-done prefills, recomputes, excess blocks, both policies. Workloads obey
the limits the real scheduler accepts. Nothing here looks at what the code under test does with them.
"""

from __future__ import annotations

import random

import msgspec
from msgspec import Struct

from headway.types import EngineLimits, EngineRequest, EngineState, SchedulingPolicy, StepTime
from random_texts import chained_hashes, random_texts

#: The kinds of engine that have rules of their own.
KINDS: dict[str, dict[str, bool]] = {
    "plain": {},
    "asynchronous": {"async_scheduling": True},
    "prefix cache": {"prefix_caching": True},
    "asynchronous with a prefix cache": {"async_scheduling": True, "prefix_caching": True},
}


class Workload(Struct, frozen=True):
    """Requests handed to an engine before given steps, and cancels. ``num_steps`` bounds the run.

    Request ids sort in submission order, because vLLM breaks ties of (priority, arrival) by id and we by submission.
    ``texts`` says what the tokens of a request are, prompt and answer, as (text, number of tokens of it) pieces: equal
    beginnings can be found in a prefix cache. Without it all tokens are alike.
    """

    seed: int
    limits: EngineLimits
    num_steps: int
    submissions: list[tuple[int, EngineRequest]]
    cancels: list[tuple[int, str]]
    texts: dict[str, list[tuple[int, int]]] = {}


class Case(Struct, frozen=True):
    """A state, a newcomer to replay on it, and the clock."""

    seed: int
    state: EngineState
    newcomer: EngineRequest
    step_time: StepTime


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def cache_hit(request: EngineRequest, limits: EngineLimits) -> int:
    """Tokens that a waiting request finds in the prefix cache: full blocks, and never its last token."""
    if not limits.prefix_caching:
        return 0
    known = request.prompt_tokens + request.output_tokens
    return min(request.cached_tokens, known - 1) // limits.block_size * limits.block_size


def random_step_time(rng: random.Random) -> StepTime:
    """A clock of any form, with coefficients around those of real GPUs."""

    def around(value: float) -> float:
        return value * rng.uniform(0.3, 3.0)

    form = rng.choice(["linear", "linear", "knee", "six_term"])
    b_seq = around(4e-6) if rng.random() < 0.5 else 0.0
    if form == "linear":
        return StepTime.linear(b0=around(2e-3), b1=around(2e-6), b2=around(4e-8), b3=around(3e-10), b_seq=b_seq)
    if form == "knee":
        knee = float(rng.choice([8, 64, 256]))
        b1_above = around(1e-5)
        return StepTime.knee(
            b0=around(2e-3), b1_below=around(1e-6), b1_above=b1_above, knee=knee, b2=around(4e-8), b3=3e-10, b_seq=b_seq
        )
    return StepTime.six_term(
        b0=around(3e-3), bp=around(2e-6), bpp=around(2e-10), bd=around(2e-5), bs=around(4e-8), bss=around(2e-13)
    )


def block_hashes(workload: Workload, request: EngineRequest) -> list[int]:
    """64-bit hashes of the full blocks of a request, its whole answer included, each over all tokens before it."""
    return chained_hashes(tuple(workload.texts.get(request.request_id, ())), workload.limits.block_size)


def random_workload(
    seed: int, *, max_steps: int = 400, async_scheduling: bool = False, prefix_caching: bool = False
) -> Workload:
    """A workload for one engine start, with limits that vLLM accepts."""
    rng = random.Random(f"workload {seed}")
    max_model_len = rng.choice([64, 128, 256, 512])
    block_size = rng.choice([1, 2, 8, 16, 16, 32])
    chunked_prefill = rng.random() < 0.7
    max_num_seqs = rng.choice([1, 2, 4, 8, 16, 16, 32])
    budget = max(max_num_seqs, rng.choice([8, 16, 48, 64, 128, 256]))
    if not chunked_prefill:
        budget = max_model_len + rng.choice([0, 0, 0, 7])
    # Blocks for one full-length request always exist (as vLLM checks at start), but for a few engines short of them.
    full = blocks_for(max_model_len, block_size)
    num_blocks = 1 + full + rng.choice([0, 1, full // 2, full, 2 * full, 12 * full])
    if rng.random() < 0.1:
        num_blocks = max(2, num_blocks // 2)
    limits = EngineLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        long_prefill_token_threshold=rng.choice([0, 0, 4, 16, 50]),
        chunked_prefill=chunked_prefill,
        policy=rng.choice(["fcfs", "priority"]),
        watermark=rng.choice([0.0, 0.0, 0.01, 0.05, 0.2]),
        reserve_full_isl=rng.random() < 0.6,
        async_scheduling=async_scheduling,
        prefix_caching=prefix_caching,
    )
    longest_prompt = min(max_model_len - 1, (num_blocks - 1) * block_size)
    gap = rng.choice([0.0, 0.5, 2.0, 6.0])
    typical_output = rng.choice([4, 20, 60, max_model_len])
    submissions: list[tuple[int, EngineRequest]] = []
    at_step = 0.0
    for number in range(rng.randint(2, 60)):
        request = _workload_request(rng, number, longest_prompt, typical_output)
        submissions.append((int(at_step), request))
        at_step += rng.expovariate(1 / gap) if gap else 0.0
    cancels: list[tuple[int, str]] = []
    if rng.random() < 0.5:
        for step, request in rng.sample(submissions, k=rng.randint(1, max(1, len(submissions) // 5))):
            cancels.append((step + rng.randint(0, 40), request.request_id))
    texts = random_texts(rng, [request for _, request in submissions], max_model_len) if prefix_caching else {}
    return Workload(seed, limits, max_steps, submissions, sorted(cancels), texts)


def _workload_request(rng: random.Random, number: int, longest_prompt: int, typical_output: int) -> EngineRequest:
    prompt = rng.randint(1, longest_prompt) if rng.random() < 0.6 else rng.randint(1, min(24, longest_prompt))
    target = rng.randint(1, typical_output)
    return EngineRequest(
        request_id=f"r{number:03d}",
        prompt_tokens=prompt,
        target_output_tokens=target,
        max_tokens=rng.choice([None, target, target + 5, max(1, target // 2)]),
        priority=rng.randint(-1, 2),
        # Mostly in the order of submission, sometimes tied with or before an earlier one.
        arrival_s=float(number if rng.random() < 0.7 else rng.randint(0, number)),
    )


def random_case(seed: int, *, policy: SchedulingPolicy | None = None, ties: bool = True) -> Case:
    """A random state between steps and a newcomer that the limits allow.

    ``ties`` allows equal arrivals: the order of submission then decides, which no later state of the engine shows.
    """
    rng = random.Random(f"state {seed}")
    num_running, num_waiting = rng.choice([(4, 0), (8, 4), (8, 4), (24, 0), (24, 12), (60, 0), (50, 40)])
    num_running = rng.randint(0, num_running)
    num_waiting = rng.randint(0, num_waiting)
    longest_prompt = rng.choice([8, 60, 60, 400, 400, 2000])
    longest_rest = rng.choice([1, 10, 10, 40, 40, 150])
    block_size = rng.choice([1, 4, 16, 16, 16, 64])
    # Mostly distinct arrivals; sometimes ties, sometimes none at all (each then counts as after those before it).
    arrival_choices = rng.choice([None, None, None, [None], [1.0, 2.0, 3.0], [None, 1.0, 2.0]])
    if not ties and arrival_choices != [None]:
        arrival_choices = None

    def arrival() -> float | None:
        return rng.uniform(0.0, 100.0) if arrival_choices is None else rng.choice(arrival_choices)

    running = [_resident(rng, f"r{i}", longest_prompt, longest_rest, block_size, arrival()) for i in range(num_running)]
    waiting = [_waiter(rng, f"w{i}", longest_prompt, longest_rest, arrival()) for i in range(num_waiting)]
    newcomer = EngineRequest(
        request_id="newcomer",
        prompt_tokens=rng.randint(1, longest_prompt),
        target_output_tokens=rng.randint(1, 50),
        priority=rng.randint(-2, 2),
        arrival_s=rng.choice([None, None, rng.uniform(0.0, 110.0)]),
    )
    policies: list[SchedulingPolicy] = ["fcfs", "fcfs", "priority"]
    chosen: SchedulingPolicy = rng.choice(policies) if policy is None else policy
    everyone = [*running, *waiting, newcomer]
    longest = max(request.prompt_tokens + request.output_tokens for request in everyone)
    limits = _limits_around(rng, everyone, longest, num_running, block_size=block_size, policy=chosen)
    held = sum(_held(request, block_size) for request in running + waiting)
    free_blocks = None
    if rng.random() < 0.1:  # somebody else sits on some blocks
        free_blocks = rng.randint(0, limits.num_blocks - 1 - held)
    residual_s = rng.choice([0.0, 0.0, rng.uniform(0.0, 0.05)])
    state = EngineState(limits=limits, running=running, waiting=waiting, residual_s=residual_s, free_blocks=free_blocks)
    case = with_cached_tokens(Case(seed, state, newcomer, random_step_time(rng)))
    return with_async_scheduling(case) if random.Random(f"async {seed}").random() < 0.4 else case


def with_cached_tokens(case: Case) -> Case:
    """The case, two times in five on an engine with a prefix cache that holds parts of the waiting and the newcomer."""
    rng = random.Random(f"cached {case.seed}")
    if rng.random() < 0.6:
        return case

    def part_of(request: EngineRequest) -> EngineRequest:
        tokens = request.prompt_tokens + request.output_tokens
        cached = rng.choice([0, 1, tokens // 2, tokens - 1, tokens, rng.randint(0, 2 * tokens)])
        shared = 0 if request.computed_tokens else rng.choice([0, 0, 1, cached, rng.randint(0, tokens)])
        return msgspec.structs.replace(request, cached_tokens=cached, shared_blocks=shared)

    def sharing(request: EngineRequest) -> EngineRequest:
        held = _held(request, case.state.limits.block_size)
        return msgspec.structs.replace(request, shared_blocks=rng.choice([0, 0, held, rng.randint(0, held)]))

    state = msgspec.structs.replace(
        case.state,
        limits=msgspec.structs.replace(case.state.limits, prefix_caching=True),
        running=[sharing(request) for request in case.state.running],
        waiting=[part_of(request) for request in case.state.waiting],
    )
    return msgspec.structs.replace(case, state=state, newcomer=part_of(case.newcomer))


def with_async_scheduling(case: Case) -> Case:
    """The case on an asynchronous engine: what most residents last got came with a batch that is not applied yet."""
    rng = random.Random(f"newest batch {case.seed}")

    def before_update(request: EngineRequest) -> EngineRequest:
        kind = rng.random()
        if kind < 0.15 or request.computed_tokens == 0:
            return request  # it got nothing of the newest batch
        if request.output_tokens == 0 or request.computed_tokens < request.prompt_tokens + request.output_tokens - 1:
            return msgspec.structs.replace(request, scheduled_tokens=rng.randint(1, request.computed_tokens))
        # Its newest output is still to come.
        share = 1 if request.output_tokens > 1 else rng.randint(1, request.computed_tokens)
        return msgspec.structs.replace(request, output_tokens=request.output_tokens - 1, scheduled_tokens=share)

    state = msgspec.structs.replace(
        case.state,
        limits=msgspec.structs.replace(case.state.limits, async_scheduling=True),
        running=[before_update(request) for request in case.state.running],
    )
    return msgspec.structs.replace(case, state=state)


def random_server_case(seed: int) -> Case:
    """A state of a busy server's size: hundreds of decodes, up to hundreds waiting, often short of blocks."""
    rng = random.Random(f"server {seed}")
    num_running, num_waiting = rng.choice([(256, 0), (128, 128), (256, 300), (512, 200)])

    def request(name: str, output: int) -> EngineRequest:
        prompt = rng.randint(100, 2000)
        return EngineRequest(
            request_id=name,
            prompt_tokens=prompt,
            computed_tokens=prompt + output - 1 if output else 0,
            output_tokens=output,
            target_output_tokens=output + rng.randint(1, 600),
        )

    running = [request(f"r{index}", rng.randint(1, 300)) for index in range(num_running)]
    waiting = [request(f"w{index}", 0) for index in range(num_waiting)]
    held = sum(blocks_for(resident.computed_tokens, 16) for resident in running)
    policies: list[SchedulingPolicy] = ["fcfs", "fcfs", "priority"]
    limits = EngineLimits(
        max_num_batched_tokens=8192,
        max_num_seqs=num_running + rng.choice([0, 20]),
        max_model_len=32768,
        block_size=16,
        num_blocks=1 + held + rng.choice([num_running, rng.randint(num_running, 3000), 200_000]),
        policy=rng.choice(policies),
        watermark=rng.choice([0.0, 0.01]),
        reserve_full_isl=rng.random() < 0.5,
    )
    state = EngineState(limits=limits, running=running, waiting=waiting)
    case = Case(seed, state, request("newcomer", 0), random_step_time(rng))
    return with_async_scheduling(case) if seed % 2 else case


def _limits_around(
    rng: random.Random,
    requests: list[EngineRequest],
    longest: int,
    num_running: int,
    *,
    block_size: int,
    policy: SchedulingPolicy,
) -> EngineLimits:
    """Limits under which these requests are possible, often only just."""
    held = sum(_held(request, block_size) for request in requests)
    max_model_len = longest + 1 + rng.choice([0, 5, 30, 200, 5000])
    need = sum(blocks_for(request.prompt_tokens + request.output_tokens, block_size) for request in requests)
    free = rng.choice([0, 1, 2, num_running, need // 4, need, 3 * need + 100, 3 * need + 100])
    least = max(blocks_for(request.prompt_tokens + request.output_tokens + 1, block_size) for request in requests)
    if rng.random() < 0.95:  # else a resident may outgrow the whole cache
        least = max(least, *(_final_blocks(request, max_model_len, block_size) for request in requests))
    chunked_prefill = rng.random() < 0.8
    budget = rng.choice([8, 64, 256, 256, 512, 2048])
    if not chunked_prefill:
        budget = max_model_len + rng.choice([0, 100])
    return EngineLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=max(1, num_running + rng.choice([0, 0, 1, 4, 64])),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=1 + max(held + free, least),
        long_prefill_token_threshold=rng.choice([0, 0, 0, 1, 16, 128]),
        chunked_prefill=chunked_prefill,
        policy=policy,
        watermark=rng.choice([0.0, 0.0, 0.01, 0.1]),
        reserve_full_isl=rng.random() < 0.6,
    )


def _held(request: EngineRequest, block_size: int) -> int:
    return blocks_for(request.computed_tokens, block_size) if request.num_blocks is None else request.num_blocks


def _final_blocks(request: EngineRequest, max_model_len: int, block_size: int) -> int:
    target = max(request.target_output_tokens, request.output_tokens + 1)
    return blocks_for(min(request.prompt_tokens + target, max_model_len), block_size)


def _resident(  # noqa: PLR0917
    rng: random.Random, name: str, longest_prompt: int, longest_rest: int, block_size: int, arrival_s: float | None
) -> EngineRequest:
    """A running request: decoding, half prefilled, or half recomputed."""
    prompt = rng.randint(1, longest_prompt)
    output = rng.choice([0, 1, rng.randint(0, 300)])
    kind = rng.random()
    if kind < 0.7 and output > 0:
        computed = prompt + output - 1
    else:
        computed = rng.randint(min(1, prompt + output - 1), prompt + output - 1)
    excess = rng.randint(1, 3) if rng.random() < 0.1 else 0
    return EngineRequest(
        request_id=name,
        prompt_tokens=prompt,
        computed_tokens=computed,
        output_tokens=output,
        # One resident in twenty has already outlived its target: it takes one more token, then ends.
        target_output_tokens=max(1, output + (0 if rng.random() < 0.05 else rng.randint(1, longest_rest))),
        max_tokens=rng.choice([None, None, output + rng.randint(1, 200)]),
        priority=rng.randint(-2, 2),
        arrival_s=arrival_s,
        num_blocks=blocks_for(computed, block_size) + excess if excess or rng.random() < 0.5 else None,
    )


def _waiter(
    rng: random.Random, name: str, longest_prompt: int, longest_rest: int, arrival_s: float | None
) -> EngineRequest:
    """A waiting request: new, preempted with its outputs kept, or (rarely) holding computed blocks."""
    prompt = rng.randint(1, longest_prompt)
    output = rng.randint(1, 60) if rng.random() < 0.3 else 0
    computed = rng.randint(1, prompt + output - 1) if rng.random() < 0.04 and prompt + output > 1 else 0
    return EngineRequest(
        request_id=name,
        prompt_tokens=prompt,
        computed_tokens=computed,
        output_tokens=output,
        target_output_tokens=output + rng.randint(1, longest_rest),
        priority=rng.randint(-2, 2),
        arrival_s=arrival_s,
    )
