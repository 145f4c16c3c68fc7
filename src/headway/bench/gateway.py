"""What a gateway costs: CPU per request and token, added time to first token, memory, beside direct and another router.

One run measures all targets in turn against the same paced upstream (50 tokens, 20 ms apart), several rounds, so that a
noisy machine disturbs them alike. CPU time is the gateway process's own, client and upstream are other processes. It
refuses to compare across runs: the figures of one call belong together.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import yaml
from msgspec import Struct

from headway.bench.idle_streams import kb_per_idle_stream
from headway.bench.pool16 import decision_p99_ms
from headway.bench.processes import Measured, free_port, headway_command, serving
from headway.bench.usage import cpu_s, memory_mb, reset_peak
from headway.errors import HeadwayError

CONCURRENCIES: Final = (1, 32, 256)
#: Streams of one round at each concurrency: as many seconds each.
STREAMS: Final = {1: 6, 32: 128, 256: 1024}
NUM_TOKENS: Final = 50

Progress = Callable[[str], None]


class Round(Struct, frozen=True):
    """One target at one concurrency: CPU of the gateway in seconds, and the client's sorted TTFTs in seconds."""

    cpu_s: float
    num_streams: int
    num_events: int
    ttft_s: list[float]


class Target(Struct, frozen=True):
    """Where to send, and whose CPU and memory to count (None: nobody stands between)."""

    url: str
    pid: int | None
    rss_idle_mb: float


def measure(*, rounds: int = 3, vllm_router: Path | None = None, progress: Progress = lambda text: None) -> Any:
    """All figures as one JSON object. ``vllm_router`` is that program's executable, if it is to be measured too.

    Raises:
        HeadwayError: a process did not start, or a stream was cut.
    """
    with ExitStack() as stack:
        upstream = stack.enter_context(serving([sys.executable, "-m", "headway.bench.paced_upstream"]))
        targets = {"direct": Target(upstream.url, None, 0.0)}
        gateway = stack.enter_context(_headway(upstream.url))
        targets["headway"] = _idle(gateway)
        if vllm_router is not None:
            url = f"http://127.0.0.1:{free_port()}"
            command = [
                str(vllm_router), "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--worker-urls",
                upstream.url, "--policy", "round_robin", "--prometheus-port", str(free_port()),
            ]  # fmt: skip
            targets["vllm-router"] = _idle(stack.enter_context(serving(command, url=url)))
        found: dict[str, dict[int, list[Round]]] = {name: {c: [] for c in CONCURRENCIES} for name in targets}
        for target in targets.values():
            _play(target, 32, 32)  # a warm start for everybody
            if target.pid is not None:
                reset_peak(target.pid)
        for number in range(rounds):
            for concurrency in CONCURRENCIES:
                for name, target in targets.items():
                    progress(f"round {number + 1} of {rounds}: {concurrency} streams, {name}")
                    found[name][concurrency].append(_play(target, concurrency, STREAMS[concurrency]))
        peaks = {name: 0.0 if t.pid is None else memory_mb(t.pid)[1] for name, t in targets.items()}
        progress("idle streams")
        idle_kb = kb_per_idle_stream(gateway.url, gateway.pid)
    progress("decisions over 16 instances")
    figures = {name: _figures(found, name, targets[name], peaks[name]) for name in targets}
    return {
        "targets": figures,
        "ratio_per_token_256": _ratio(found) if vllm_router is not None else None,
        "kb_per_idle_stream": round(idle_kb, 1),
        "decision_p99_ms_16_instances": round(decision_p99_ms(), 3),
        "rounds": rounds,
    }


def _idle(process: Measured) -> Target:
    return Target(process.url, process.pid, memory_mb(process.pid)[0])


@contextmanager
def _headway(upstream_url: str) -> Iterator[Measured]:
    config = {
        "models": [{"name": "m"}],
        "instances": [{"id": "a", "model": "m", "api_base": f"{upstream_url}/v1", "engine": "hosted"}],
        "server": {"port": 0},
    }
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        path = Path(folder) / "gateway.yaml"
        path.write_text(yaml.safe_dump(config))
        with serving(headway_command("serve", str(path))) as gateway:
            yield gateway


def _play(target: Target, concurrency: int, num_streams: int) -> Round:
    before_s = 0.0 if target.pid is None else cpu_s(target.pid)
    client = subprocess.run(
        [sys.executable, "-m", "headway.bench.paced_client", target.url, str(concurrency), str(num_streams)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if client.returncode != 0:
        errors = [line.strip(" |") for line in client.stderr.splitlines() if "Error: " in line]
        raise HeadwayError(f"the client of {target.url} failed: {errors[-1] if errors else client.stderr}")
    after_s = 0.0 if target.pid is None else cpu_s(target.pid)
    seen = json.loads(client.stdout)
    if seen["num_events"] != num_streams * NUM_TOKENS:
        raise HeadwayError(f"{target.url} lost events: {seen['num_events']} of {num_streams * NUM_TOKENS} came")
    return Round(after_s - before_s, seen["num_streams"], seen["num_events"], seen["ttft_s"])


def _figures(found: dict[str, dict[int, list[Round]]], name: str, target: Target, peak_mb: float) -> dict[str, Any]:
    rounds, direct = found[name], found["direct"]

    def added_ms(share: float) -> float:
        ours = [quantile(one.ttft_s, share) for one in rounds[32]]
        theirs = [quantile(one.ttft_s, share) for one in direct[32]]
        return round(1e3 * median(a - b for a, b in zip(ours, theirs, strict=True)), 3)

    return {
        "per_token_us": {
            str(concurrency): round(1e6 * median(one.cpu_s / one.num_events for one in rounds[concurrency]), 2)
            for concurrency in CONCURRENCIES
        },
        "per_request_us": round(1e6 * median(one.cpu_s / one.num_streams for one in rounds[256]), 1),
        "added_ttft_p50_ms": added_ms(0.5),
        "added_ttft_p99_ms": added_ms(0.99),
        "rss_idle_mb": round(target.rss_idle_mb, 1),
        "rss_peak_mb": round(peak_mb, 1),
    }


def _ratio(found: dict[str, dict[int, list[Round]]]) -> float:
    """CPU per token at 256 streams, over the other router's in the same round: the median of the rounds."""
    pairs = zip(found["headway"][256], found["vllm-router"][256], strict=True)
    return round(median((a.cpu_s / a.num_events) / (b.cpu_s / b.num_events) for a, b in pairs), 3)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of sorted values."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
