"""The gateway bench's own parts: a paced stream counted whole, and figures that come from what was counted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from headway.bench.gateway import measure, quantile
from headway.bench.idle_streams import kb_per_idle_stream
from headway.bench.paced_client import BrokenStreamError, run
from headway.bench.processes import Measured, serving
from headway.bench.usage import cpu_s, memory_mb
from headway.errors import HeadwayError
from headway.testing import FakeUpstream, Reply

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts by Linux's /proc")


@pytest.fixture
def upstream() -> Iterator[Measured]:
    """A paced server whose tokens are 1 ms apart."""
    with serving([sys.executable, "-m", "headway.bench.paced_upstream", "--interval-ms", "1"]) as process:
        yield process


async def test_a_stream_is_counted_whole(upstream: Measured) -> None:
    """Every event of every stream is counted once, wherever the bytes were cut, and one TTFT taken of each."""
    found = await run(upstream.url, 3, 6)
    assert (found["num_streams"], found["num_events"]) == (6, 300)


async def test_a_cut_stream_is_an_error() -> None:
    """A client never takes half a stream for a whole one."""
    async with FakeUpstream(Reply(dies="after_tokens")) as broken:
        with pytest.raises(ExceptionGroup) as caught:
            await run(broken.url.removesuffix("/v1"), 1, 1)
    assert caught.group_contains(BrokenStreamError)


def test_a_process_that_does_not_start_says_why() -> None:
    """The error holds what the process wrote."""
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with pytest.raises(HeadwayError, match="no such thing"), serving(command):
        pass


def test_usage_grows_with_work() -> None:
    """CPU and memory counters are those of the process."""
    before_s = cpu_s(os.getpid())
    sum(number * number for number in range(300_000))
    assert cpu_s(os.getpid()) > before_s
    resident, peak = memory_mb(os.getpid())
    assert 1 < resident <= peak


def test_idle_streams_are_held_open(upstream: Measured) -> None:
    """Streams that pause cost memory of the process that serves them, and end when the client leaves."""
    assert kb_per_idle_stream(upstream.url, upstream.pid, num_streams=300) > 0


def test_quantiles_are_of_the_sorted_values() -> None:
    """Nearest rank, the last value at most."""
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]


def test_the_whole_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """One short round gives every figure that the command prints, from a real gateway in a process of its own."""
    monkeypatch.setattr("headway.bench.gateway.STREAMS", {1: 1, 32: 32, 256: 64})
    monkeypatch.setattr("headway.bench.idle_streams.NUM_STREAMS", 100)
    found = measure(rounds=1)
    assert set(found["targets"]) == {"direct", "headway"}
    assert found["targets"]["direct"]["per_request_us"] == 0
    ours = found["targets"]["headway"]
    assert all(ours["per_token_us"][streams] > 0 for streams in ("1", "32", "256"))
    assert ours["rss_peak_mb"] >= ours["rss_idle_mb"] > 10
    assert found["decision_p99_ms_16_instances"] > 0
