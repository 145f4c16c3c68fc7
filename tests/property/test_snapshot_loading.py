"""The native loading of a snapshot is the plain one: same engine, same answers, and a refusal where that refuses."""

from __future__ import annotations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from headway._core import ReplayedEngine, shown_ids
from headway.errors import EngineInputError
from headway.fleet import InstanceView, LedgerEntry, LengthRule
from headway.types import EngineLimits, Snapshot, SnapshotRequest, StepTime
from pools import instance
from reference_completion import complete

STEP_TIME = StepTime.knee(b0=0.006, b1_below=1e-6, b1_above=8e-5, knee=200, b2=2e-8, b3=1e-9, b_seq=1e-5)
RULES = {
    "survival": LengthRule("survival"),
    "plain": LengthRule("plain"),
    "conditional_median": LengthRule("conditional_median", edges=(64, 512), lengths=((9, 30), (80.5, 200), (1, 900))),
}
DEFAULT_OUTPUT_TOKENS = 120.0
NAMES = ("a", "b", "chatcmpl-c", "d-0", "e", "f", "g")

_LIMITS = st.builds(
    EngineLimits,
    max_num_batched_tokens=st.sampled_from([512, 2048]),
    max_num_seqs=st.sampled_from([3, 64]),
    max_model_len=st.sampled_from([700, 4096]),
    block_size=st.sampled_from([16, 64]),
    num_blocks=st.sampled_from([60, 2000]),
    policy=st.sampled_from(["fcfs", "priority"]),
    async_scheduling=st.booleans(),
    prefix_caching=st.booleans(),
)


@st.composite
def _request(draw: st.DrawFn, name: str, limits: EngineLimits, *, runs: bool, odd: bool) -> SnapshotRequest:
    """What an engine shows; where ``odd`` now and then a figure that does not fit the others."""
    prompt, output = draw(st.integers(1, 600)), draw(st.integers(0, 300)) if runs else 0
    scheduled = draw(st.sampled_from([0, 1, 1, 40])) if runs else 0
    # Not scheduled: what there is but the last. Scheduled: a decode, or a chunk of the prompt that ends it or not.
    whole = prompt + output - (0 if scheduled else 1)
    computed = draw(st.sampled_from([whole, whole, max(whole - 30, 0)])) if runs else 0
    computed += draw(st.sampled_from([0] * 12 + [1, 500])) if odd else 0
    needed = -(-computed // limits.block_size)
    return SnapshotRequest(
        name, prompt, computed, output, needed + (draw(st.sampled_from([0] * 8 + [1, -1])) if odd and needed else 0),
        draw(st.sampled_from([0, 0, 1, output, output + 1, output + 50])), draw(st.integers(-2, 2)),
        draw(st.floats(0, 10)), min(scheduled, computed), draw(st.sampled_from([0, 16, 200])),
        draw(st.sampled_from([0, 0, 2])) if not runs and (odd or limits.prefix_caching) else 0,
    )  # fmt: skip


@st.composite
def _snapshot(draw: st.DrawFn) -> Snapshot:
    limits, odd = draw(_LIMITS), draw(st.integers(0, 3)) == 0
    names = list(draw(st.permutations(NAMES)))
    if odd and draw(st.integers(0, 9)) == 0:
        names[0] = names[1]  # shown twice
    num_running, num_waiting = draw(st.integers(0, 5)), draw(st.integers(0, 2))
    requests = [
        draw(_request(name, limits, runs=place < num_running, odd=odd))
        for place, name in enumerate(names[: num_running + num_waiting])
    ]
    held = sum(one.num_blocks for one in requests)
    surplus = draw(st.sampled_from([0, 1, 7])) if odd or limits.prefix_caching else 0
    free = max(limits.num_blocks - 1 - held + surplus - draw(st.sampled_from([0, 1])), 0)
    return Snapshot(
        instance_id="i", engine_version="vllm-0.32.0", engine_start=1, sequence=1, engine_s=10.0, limits=limits,
        running=requests[:num_running], waiting=requests[num_running:], free_blocks=free,
    )  # fmt: skip


@st.composite
def _view(draw: st.DrawFn) -> InstanceView:
    view = InstanceView(instance("i"))
    for name in ("a", "b", "c", "d", "elsewhere"):
        fate = draw(st.sampled_from(["booked", "released", "unknown"]))
        if fate == "booked":
            view.ledger[name] = LedgerEntry(name, 0, 100, draw(st.floats(1, 400)), None, 0, 0.0)
        elif fate == "released":
            view.released[name] = 9.0
    return view


def _match(engine_id: str) -> str | None:
    name = engine_id.removeprefix("chatcmpl-").removesuffix("-0")
    return name if name in ("a", "b", "c", "d") else None


@settings(max_examples=250)
@given(_snapshot(), _view(), st.sampled_from(sorted(RULES)), st.booleans())
def test_native_loading_is_the_plain_one(snapshot: Snapshot, view: InstanceView, kind: str, is_filled: bool) -> None:
    """Whatever an engine shows: requests, order, expected lengths, blocks, residual and departed are the plain ones',
    also in an engine that held something else, and so are the answers and the steps that follow."""
    rule = RULES[kind]
    view.ledger_ids = shown_ids(snapshot, {}, _match)
    engine = ReplayedEngine(snapshot.limits, STEP_TIME)
    if is_filled:
        other = EngineLimits(
            max_num_batched_tokens=64, max_num_seqs=2, max_model_len=4096, block_size=128, num_blocks=64
        )
        engine = ReplayedEngine(other, STEP_TIME)
        held = Snapshot(
            instance_id="i", engine_version="", engine_start=1, sequence=1, engine_s=0.0, limits=other, free_blocks=61,
            running=[SnapshotRequest("z", 200, 205, 6, 2, 0, 0, 0.0, 0)], waiting=[],
        )  # fmt: skip
        engine.load_snapshot(held, {"z": None}, {}, {}, rule, DEFAULT_OUTPUT_TOKENS)
        engine.advance(1.0)
    try:
        plain = ReplayedEngine.from_state(complete(view, snapshot, STEP_TIME, rule, DEFAULT_OUTPUT_TOKENS), STEP_TIME)
    except EngineInputError as refusal:
        event(f"refused for {refusal.field}")
        try:
            engine.load_snapshot(snapshot, view.ledger_ids, view.ledger, view.released, rule, DEFAULT_OUTPUT_TOKENS)
        except EngineInputError:
            return
        raise AssertionError(f"the plain loading refuses this: {refusal}") from refusal
    event("loaded")
    engine.load_snapshot(snapshot, view.ledger_ids, view.ledger, view.released, rule, DEFAULT_OUTPUT_TOKENS)
    assert engine.state() == plain.state()
    for one in (engine, plain):
        one.start_batch()
    for prompt_tokens in (1, 300):
        assert engine.first_token(prompt_tokens) == plain.first_token(prompt_tokens)
    for name in NAMES[:2]:
        assert engine.cancel(name) == plain.cancel(name)
    for seconds in (0.004, 0.3, 5.0):
        assert engine.advance(seconds) == plain.advance(seconds)
        assert engine.state() == plain.state()


def test_names_once_found_are_kept() -> None:
    """Only requests that were not shown before are looked for in the ledger; those that are gone are forgotten."""
    asked: list[str] = []

    def match(engine_id: str) -> str | None:
        asked.append(engine_id)
        return engine_id.removeprefix("cmpl-") if engine_id.startswith("cmpl-") else None

    def shown(*names: str) -> Snapshot:
        requests = [SnapshotRequest(name, 10, 0, 0, 0, 0, 0, 0.0, 0) for name in names]
        limits = instance("i").limits
        assert limits is not None
        return Snapshot(
            instance_id="i", engine_version="", engine_start=1, sequence=1, engine_s=0.0, limits=limits,
            running=requests[:1], waiting=requests[1:], free_blocks=9,
        )  # fmt: skip

    first = shown_ids(shown("cmpl-a", "b"), {}, match)
    assert first == {"cmpl-a": "a", "b": None}
    assert shown_ids(shown("b", "cmpl-c"), first, match) == {"b": None, "cmpl-c": "c"}
    assert asked == ["cmpl-a", "b", "cmpl-c"]
