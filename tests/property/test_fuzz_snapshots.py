"""Snapshots that decode but that no sane engine sends: the router uses them or says no, and goes on deciding.

A wire checks shapes and ranges of single values. Whether they fit each other is for the fleet to find out, on the
request path of a gateway; so whatever comes, a decision must come out.
"""

from __future__ import annotations

import contextlib
import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import SnapshotError
from headway.snapshot import wire
from headway.types import MAX_COUNT, EngineLimits, Snapshot, SnapshotRequest
from pools import LIMITS, instance, pool, query

_COUNT = st.sampled_from([0, 1, 15, 16, 17, 900, 8192, 20_000, 32_767, 32_768, MAX_COUNT]) | st.integers(0, 40_000)
_TIME = st.sampled_from([-1e300, -1.0, 0.0, 9.99, 10.0, 10.01, 1e9, 1e300]) | st.floats(9.0, 11.0)
_REQUEST = st.builds(
    SnapshotRequest,
    st.sampled_from(["a", "b", "c", "chatcmpl-q", "", "é" * 50]),
    *[_COUNT] * 5,
    st.sampled_from([0, -MAX_COUNT, MAX_COUNT, 3]),
    _TIME,
    _COUNT,
    _COUNT,
)
_LIMITS = st.sampled_from([
    LIMITS,
    EngineLimits(max_num_batched_tokens=1, max_num_seqs=1, max_model_len=1, block_size=1, num_blocks=2),
    EngineLimits(max_num_batched_tokens=64, max_num_seqs=2, max_model_len=4096, block_size=128, num_blocks=64,
                 policy="priority", long_prefill_token_threshold=7, watermark=0.5),
    EngineLimits(max_num_batched_tokens=2048, max_num_seqs=4, max_model_len=2048, block_size=16, num_blocks=MAX_COUNT,
                 chunked_prefill=False),
    EngineLimits(max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=32768, block_size=16, num_blocks=20000,
                 async_scheduling=True, prefix_caching=True),
])  # fmt: skip
_SNAPSHOT = st.builds(
    Snapshot,
    instance_id=st.just("e"),
    engine_version=st.sampled_from(["vllm-0.32.0", "vllm-9", ""]),
    engine_start=st.integers(0, 2),
    sequence=st.integers(0, 9),
    engine_s=_TIME,
    limits=_LIMITS,
    running=st.lists(_REQUEST, max_size=4),
    waiting=st.lists(_REQUEST, max_size=4),
    free_blocks=_COUNT,
    batch_start_s=st.none() | _TIME,
)
_BYTES_EDIT = st.tuples(st.integers(0, 600), st.binary(max_size=3))


def _decided(snapshots: list[Snapshot]) -> None:
    """Let a router see them one after the other, and decide and book a query after each."""
    router = pool(instance("e"), instance("other"), default_ttft_s=0.3, stale_after_s=1.0)
    for number, snapshot in enumerate(snapshots):
        now = 10.0 + 0.05 * number
        with contextlib.suppress(SnapshotError):
            router.observe(snapshot, now)
        name = f"q{number}"
        decision = router.explain(query(2000, name=name), now)
        for candidate in decision.candidates:
            if candidate.estimate is not None:
                assert candidate.estimate.ttft_s >= 0.0 or math.isnan(candidate.estimate.ttft_s)
        chosen = decision.candidate
        assert chosen is not None, decision.reason
        router.fleet.book(
            request_id=name,
            instance_id=chosen.instance_id,
            prompt_tokens=2000,
            predicted_output_tokens=200.0,
            max_tokens=None,
            priority=0,
            now=now,
        )


@settings(max_examples=250, deadline=None)
@given(st.lists(_SNAPSHOT, min_size=1, max_size=4))
def test_a_router_outlives_any_snapshot(snapshots: list[Snapshot]) -> None:
    """Counts that contradict each other, clocks that jump, engines that restart: a decision every time."""
    _decided(snapshots)


@settings(max_examples=250, deadline=None)
@given(_SNAPSHOT, st.lists(_BYTES_EDIT, max_size=3))
def test_damaged_bytes_are_refused_and_what_is_not_is_outlived(
    snapshot: Snapshot, edits: list[tuple[int, bytes]]
) -> None:
    """Bytes changed in the body with their checksum put right, as a foreign writer would send them."""
    body = wire.encode(snapshot)[8:]
    for place, piece in edits:
        body = body[:place] + piece + body[place + len(piece) :]
    try:
        read = wire.decode(wire.framed(b"", 0, body))
    except SnapshotError:
        return
    _decided([msgspec.structs.replace(read, instance_id="e")])  # as every reader does
