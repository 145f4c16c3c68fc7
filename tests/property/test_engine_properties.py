"""Laws that every step of a replayed engine keeps, whatever its state and whatever is done to it."""

from __future__ import annotations

import math

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway._core import ReplayedEngine, TokenBatch
from headway.errors import EngineInputError
from headway.types import EngineLimits, EngineRequest, EngineState, SchedulingPolicy, StepTime
from random_states import Case, blocks_for, cache_hit, random_case
from reference_scheduler import reference_replay
from replay_comparison import same_replay

CASES = st.builds(random_case, st.integers(0, 1_000_000), ties=st.just(False))
FCFS_CASES = st.builds(random_case, st.integers(0, 1_000_000), policy=st.just("fcfs"))
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
MANY = settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def engine_of(case: Case) -> ReplayedEngine:
    return ReplayedEngine.from_state(case.state, case.step_time)


def present(engine: ReplayedEngine) -> dict[str, EngineRequest]:
    return {request.request_id: request for request in [*engine.running, *engine.waiting]}


def own_blocks(request: EngineRequest) -> int:
    """Blocks that come free when this request goes; what a waiting one will share it does not hold yet."""
    return (request.num_blocks or 0) - (request.shared_blocks if request.computed_tokens else 0)


def check_tokens(
    limits: EngineLimits, before: dict[str, EngineRequest], after: dict[str, EngineRequest], batch: TokenBatch
) -> None:
    """Every token is accounted for: computed grows by the scheduled ones, and only a complete request samples.

    An asynchronous engine applies the outcome of the batch before, and shows what it scheduled in ``scheduled_tokens``.
    """
    for request_id, old in before.items():
        scheduled = batch.num_scheduled_tokens.get(request_id, 0)
        comes = old.scheduled_tokens > 0 and old.computed_tokens == old.prompt_tokens + old.output_tokens
        known = old.prompt_tokens + old.output_tokens + comes
        computed = old.computed_tokens + scheduled
        if scheduled and not old.computed_tokens:  # just admitted
            computed += cache_hit(old, limits)
        samples = comes if limits.async_scheduling else scheduled > 0 and computed == known
        assert (request_id in batch.first_tokens) == (samples and old.output_tokens == 0)
        assert computed <= known
        if request_id in batch.finished:
            assert samples
            assert request_id not in after
            continue
        new = after[request_id]
        assert new.output_tokens == old.output_tokens + samples
        if request_id in batch.preempted:
            assert (new.computed_tokens, new.num_blocks, scheduled) == (0, 0, 0)
            continue
        assert new.computed_tokens == computed
        assert new.scheduled_tokens == (scheduled if limits.async_scheduling else 0)
        assert new.prompt_tokens + new.output_tokens < 2**31


@FEW
@given(CASES)
def test_tokens_are_conserved(case: Case) -> None:
    """No token is scheduled twice or lost, and no output appears without its context being complete."""
    engine = engine_of(case)
    for _ in range(25):
        before = present(engine)
        batch = engine.step()
        after = present(engine)
        assert set(after) == set(before) - set(batch.finished)
        check_tokens(case.state.limits, before, after, batch)


@FEW
@given(CASES)
def test_blocks_are_conserved_and_never_negative(case: Case) -> None:
    """Free and held blocks always add up, each request holds enough for its computed tokens, none is negative.

    A block that two hold is one of the ``shared_blocks`` of all but one of them.
    """
    engine = engine_of(case)
    total = engine.free_blocks + sum(map(own_blocks, present(engine).values()))
    for _ in range(25):
        batch = engine.step()
        held = {request_id: request.num_blocks or 0 for request_id, request in present(engine).items()}
        assert engine.free_blocks >= 0
        assert 0 <= batch.free_blocks <= engine.free_blocks
        assert engine.free_blocks + sum(map(own_blocks, present(engine).values())) == total
        for request_id, request in present(engine).items():
            assert held[request_id] >= blocks_for(request.computed_tokens, case.state.limits.block_size)


@FEW
@given(CASES)
def test_no_batch_exceeds_its_limits(case: Case) -> None:
    """Tokens stay within the budget, requests within max_num_seqs, chunks are positive, and time is never negative."""
    engine, limits = engine_of(case), case.state.limits
    for _ in range(25):
        batch = engine.step()
        assert sum(batch.num_scheduled_tokens.values()) <= limits.max_num_batched_tokens
        assert all(num_tokens > 0 for num_tokens in batch.num_scheduled_tokens.values())
        assert len(batch.num_scheduled_tokens) <= limits.max_num_seqs
        assert engine.num_running <= limits.max_num_seqs
        nothing = not batch.num_scheduled_tokens and not batch.preempted
        assert batch.time_s == 0.0 if nothing else batch.time_s > 0.0


@FEW
@given(FCFS_CASES)
def test_fcfs_keeps_the_order_of_arrival(case: Case) -> None:
    """Running followed by waiting never changes its order: admission takes the head, preemption the tail."""
    engine = engine_of(case)
    for number in range(25):
        order = [request.request_id for request in [*engine.running, *engine.waiting]]
        if number % 5 == 0:
            engine.submit(EngineRequest(request_id=f"s{number}", prompt_tokens=1, target_output_tokens=3))
            order.append(f"s{number}")
        finished = set(engine.step().finished)
        assert [request.request_id for request in [*engine.running, *engine.waiting]] == [
            request_id for request_id in order if request_id not in finished
        ]


@FEW
@given(CASES, st.floats(0.0, 0.2))
def test_a_clone_and_its_original_are_independent_and_equal(case: Case, seconds: float) -> None:
    """Whatever happens to one does not show in the other; doing the same to both gives the same."""
    engine = engine_of(case)
    before = engine.state()
    clone = engine.clone()
    clone.advance(seconds)
    clone.submit(EngineRequest(request_id="extra", prompt_tokens=1, target_output_tokens=3))
    clone.step()
    assert engine.state() == before
    assert "extra" not in engine
    engine.advance(seconds)
    engine.submit(EngineRequest(request_id="extra", prompt_tokens=1, target_output_tokens=3))
    engine.step()
    assert engine.state() == clone.state()


@FEW
@given(CASES, st.floats(0.0, 0.2))
def test_a_state_read_back_is_the_same_state(case: Case, seconds: float) -> None:
    """from_state(state()) is lossless at any time, and load() equals from_state()."""
    engine = engine_of(case)
    engine.advance(seconds)
    now = engine.state()
    assert ReplayedEngine.from_state(now, case.step_time).state() == now
    other = ReplayedEngine(case.state.limits, case.step_time)
    other.load(now)
    assert other.state() == now
    assert other.first_token(1) == ReplayedEngine.from_state(now, case.step_time).first_token(1)


@FEW
@given(CASES)
def test_a_first_token_comes_after_the_wait_and_the_wait_after_the_batch_in_flight(case: Case) -> None:
    """residual <= wait < ttft wherever there is a first token at all, and at least one step leads to it."""
    newcomer = case.newcomer
    answer = engine_of(case).first_token(newcomer.prompt_tokens, newcomer.priority, newcomer.arrival_s)
    assert case.state.residual_s <= answer.wait_s <= answer.ttft_s
    if math.isfinite(answer.ttft_s):
        assert answer.wait_s < answer.ttft_s
        assert answer.num_steps >= 1


# ---------------------------------------------------------------- small states, shrunk by hypothesis


@st.composite
def small_requests(draw: st.DrawFn, name: str, *, may_hold: bool) -> EngineRequest:
    """A request of a dozen tokens, possible under any limits that hold it."""
    prompt, output = draw(st.integers(1, 12)), draw(st.integers(0, 4))
    computed = draw(st.integers(0, prompt + output - 1)) if may_hold else 0
    return EngineRequest(
        request_id=name,
        prompt_tokens=prompt,
        computed_tokens=computed,
        output_tokens=output,
        target_output_tokens=draw(st.integers(1, 9)),
        max_tokens=draw(st.one_of(st.none(), st.integers(output + 1, 9))),
        priority=draw(st.integers(0, 1)),
        arrival_s=draw(st.one_of(st.none(), st.integers(0, 2).map(float))),
        cached_tokens=0 if computed else draw(st.sampled_from([0, 0, 3, 8, 20])),
    )


def shares(draw: st.DrawFn, request: EngineRequest) -> EngineRequest:
    """The running request on an asynchronous engine, with or without a share of the newest batch."""
    known = request.prompt_tokens + request.output_tokens
    if request.computed_tokens == 0 or draw(st.integers(0, 3)) == 0:
        return request
    if request.computed_tokens == known - 1 and request.output_tokens > 0:
        most = 1 if request.output_tokens > 1 else request.computed_tokens
        share = draw(st.integers(1, most))
        return msgspec.structs.replace(request, output_tokens=request.output_tokens - 1, scheduled_tokens=share)
    return msgspec.structs.replace(request, scheduled_tokens=draw(st.integers(1, request.computed_tokens)))


@st.composite
def small_cases(
    draw: st.DrawFn, policies: tuple[SchedulingPolicy, ...] = ("fcfs", "priority")
) -> tuple[EngineState, EngineRequest]:
    """An engine of few blocks and seats, nearly full."""
    running = [draw(small_requests(f"r{index}", may_hold=True)) for index in range(draw(st.integers(0, 4)))]
    waiting = [
        draw(small_requests(f"w{index}", may_hold=draw(st.integers(0, 9)) == 9))
        for index in range(draw(st.integers(0, 3)))
    ]
    newcomer = msgspec.structs.replace(draw(small_requests("n", may_hold=False)), output_tokens=0)
    async_scheduling = draw(st.booleans())
    if async_scheduling:
        running = [shares(draw, request) for request in running]
    everyone = [*running, *waiting, newcomer]
    block_size = draw(st.integers(1, 4))
    held = sum(blocks_for(request.computed_tokens, block_size) for request in everyone)
    largest = max(blocks_for(request.prompt_tokens + request.output_tokens, block_size) for request in everyone)
    chunked_prefill = draw(st.booleans())
    max_model_len = draw(st.integers(18, 24))
    limits = EngineLimits(
        max_num_batched_tokens=draw(st.integers(1, 20)) + (0 if chunked_prefill else max_model_len),
        max_num_seqs=len(running) + draw(st.integers(0 if running else 1, 3)),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=1 + max(held, largest) + draw(st.integers(0, 6)),
        long_prefill_token_threshold=draw(st.integers(0, 6)),
        chunked_prefill=chunked_prefill,
        policy=draw(st.sampled_from(policies)),
        watermark=draw(st.sampled_from([0.0, 0.1, 0.3])),
        reserve_full_isl=draw(st.booleans()),
        async_scheduling=async_scheduling,
        prefix_caching=draw(st.booleans()),
    )
    return EngineState(limits=limits, running=running, waiting=waiting), newcomer


@MANY
@given(small_cases())
def test_small_states_replay_as_the_reference_does(small: tuple[EngineState, EngineRequest]) -> None:
    """On small, nearly full engines native first tokens equal the reference's, livelocks included."""
    state, newcomer = small
    clock = StepTime.six_term(b0=1e-3, bp=1e-4, bpp=1e-6, bd=1e-5, bs=1e-7, bss=1e-9)
    engine = ReplayedEngine.from_state(state, clock)
    expected = reference_replay(state, newcomer, clock)
    for _ in range(2):
        native = engine.first_token(
            newcomer.prompt_tokens, newcomer.priority, newcomer.arrival_s, newcomer.cached_tokens
        )
        assert same_replay(native, expected), f"native {native}, reference {expected}"


@MANY
@given(
    small_cases(policies=("fcfs",)),
    st.lists(st.sampled_from([0.0, 1e-3, 5e-3, 0.02, 1.0]), min_size=1, max_size=3),
    st.booleans(),
)
def test_answers_stay_right_while_time_passes(
    small: tuple[EngineState, EngineRequest], spans_s: list[float], asks_before: bool
) -> None:
    """After any time, also one that led into a livelock, an answer equals the reference's on the present state."""
    state, newcomer = small
    clock = StepTime.linear(b0=1e-3, b1=1e-4, b2=1e-6, b3=1e-6)
    engine = ReplayedEngine.from_state(state, clock)
    for seconds in spans_s:
        if asks_before:
            engine.first_token(newcomer.prompt_tokens, cached_tokens=newcomer.cached_tokens)
        engine.advance(seconds)
        now = engine.state()
        expected = reference_replay(now, msgspec.structs.replace(newcomer, priority=0, arrival_s=None), clock)
        native = engine.first_token(newcomer.prompt_tokens, cached_tokens=newcomer.cached_tokens)
        assert same_replay(native, expected), f"native {native}, reference {expected}"


# ---------------------------------------------------------------- nothing crashes or hangs

SMALL = st.one_of(st.integers(-2, 40), st.sampled_from([0, 1, 100, 2**31 - 1, 2**31, 2**63, -(2**63)]), st.none())
ODD = st.one_of(SMALL, st.floats(), st.booleans(), st.text(max_size=2))
SECONDS = st.one_of(st.none(), st.floats(), st.floats(0.0, 10.0))


def requests(prefix: str) -> st.SearchStrategy[list[dict[str, object]]]:
    """Argument sets of requests, most of them possible, some absurd."""
    one: st.SearchStrategy[dict[str, object]] = st.fixed_dictionaries(
        {
            "request_id": st.sampled_from([f"{prefix}{index}" for index in range(6)]),
            "prompt_tokens": st.one_of(st.integers(1, 60), st.integers(1, 60), ODD),
            "target_output_tokens": st.one_of(st.integers(1, 60), st.integers(1, 60), ODD),
        },
        optional={
            "computed_tokens": st.one_of(st.integers(0, 60), ODD),
            "output_tokens": st.one_of(st.integers(0, 60), ODD),
            "max_tokens": st.one_of(st.integers(1, 60), ODD),
            "priority": st.one_of(st.integers(-3, 3), ODD),
            "arrival_s": SECONDS,
            "num_blocks": st.one_of(st.integers(0, 10), ODD),
            "cached_tokens": st.one_of(st.integers(0, 60), ODD),
            "scheduled_tokens": st.one_of(st.integers(0, 20), ODD),
            "shared_blocks": st.one_of(st.integers(0, 4), ODD),
        },
    )
    return st.lists(one, max_size=4)


LIMITS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.one_of(st.integers(1, 200), st.integers(1, 200), ODD),
        "max_num_seqs": st.one_of(st.integers(1, 8), st.integers(1, 8), ODD),
        "max_model_len": st.one_of(st.integers(1, 120), st.integers(1, 120), st.just(2**31 - 1), ODD),
        "block_size": st.one_of(st.integers(1, 16), st.integers(1, 16), ODD),
        "num_blocks": st.one_of(st.integers(2, 60), st.integers(2, 60), st.just(2**31 - 1), ODD),
    },
    optional={
        "long_prefill_token_threshold": st.one_of(st.integers(0, 20), ODD),
        "chunked_prefill": st.one_of(st.booleans(), ODD),
        "policy": st.sampled_from(["fcfs", "priority", "lifo"]),
        "watermark": st.one_of(st.floats(0.0, 0.9), ODD),
        "reserve_full_isl": st.booleans(),
        "async_scheduling": st.booleans(),
        "prefix_caching": st.booleans(),
    },
)


def check_named(error: EngineInputError) -> None:
    assert error.field
    assert str(error).startswith(error.field)


@MANY
@given(LIMITS, requests("r"), requests("w"), requests("n"), SECONDS, st.one_of(st.none(), st.integers(-1, 60)))
def test_any_input_is_refused_by_name_or_works(  # noqa: PLR0917
    limits: dict[str, object],
    running: list[dict[str, object]],
    waiting: list[dict[str, object]],
    newcomers: list[dict[str, object]],
    residual_s: float | None,
    free_blocks: int | None,
) -> None:
    """Arbitrary values either raise an EngineInputError or make an engine that steps, advances and answers."""
    clock = StepTime.linear(b0=1e-3, b1=1e-6, b2=1e-8, b3=1e-10)
    try:
        state = EngineState(
            limits=EngineLimits(**limits),  # type: ignore[arg-type]
            running=[EngineRequest(**fields) for fields in running],  # type: ignore[arg-type]
            waiting=[EngineRequest(**fields) for fields in waiting],  # type: ignore[arg-type]
            residual_s=0.0 if residual_s is None else residual_s,
            free_blocks=free_blocks,
        )
        engine = ReplayedEngine.from_state(state, clock)
    except EngineInputError as error:
        return check_named(error)
    for fields in newcomers:
        try:
            request = EngineRequest(**fields)  # type: ignore[arg-type]
            engine.first_token(request.prompt_tokens, request.priority, request.arrival_s)
            engine.submit(request)
        except EngineInputError as error:
            check_named(error)
    for _ in range(10):
        assert engine.step().time_s >= 0.0
        if state.limits.max_model_len > 1:
            assert engine.first_token(1).ttft_s > 0.0
    engine.advance(0.5)
    assert ReplayedEngine.from_state(engine.state(), clock).state() == engine.state()
    return None
