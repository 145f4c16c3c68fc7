"""``/metrics`` of a simulated engine, under vLLM's names, so that whoever scrapes vLLM can scrape it.

Gauges are read off the engine when it is scraped; counters and histograms follow it. Times are simulated seconds. Only
what the simulation really has is offered: no cache hit rates, no speculative decoding.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headway.engines.engine_view import EngineView
from headway.engines.simulated import FinishReason, Generation
from headway.types import EngineLimits

_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)  # fmt: skip
_QUEUE_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)  # fmt: skip


class EngineMetrics:
    """The metrics of one engine; the engine's observer."""

    def __init__(self, model: str, limits: EngineLimits) -> None:
        self._registry = CollectorRegistry()
        self._num_usable_blocks = limits.num_blocks - 1
        labels = {"model_name": model, "engine": "0"}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, list(labels), registry=self._registry).labels(**labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, list(labels), registry=self._registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, list(labels), registry=self._registry, buckets=buckets).labels(**labels)

        self._running = gauge("vllm:num_requests_running", "Requests in the running list.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests in the queue.")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 means all.")
        self._preemptions = counter("vllm:num_preemptions", "Preemptions so far.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens prefilled.")
        self._generation_tokens = counter("vllm:generation_tokens", "Output tokens given.")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "Time in the queue.", _QUEUE_BUCKETS_S)
        success = Counter(
            "vllm:request_success", "Requests by how they ended.", [*labels, "finished_reason"], registry=self._registry
        )
        self._finished = {
            reason: success.labels(**labels, finished_reason=reason) for reason in ("stop", "length", "abort")
        }
        config = {
            "engine": "0",
            "block_size": str(limits.block_size),
            "num_gpu_blocks": str(limits.num_blocks),
            "enable_prefix_caching": str(limits.prefix_caching),
        }
        cache = Gauge("vllm:cache_config_info", "The KV cache's settings.", list(config), registry=self._registry)
        cache.labels(**config).set(1)

    def first_token(self, ttft_s: float, queue_s: float) -> None:
        """A request's first token came."""
        self._ttft.observe(ttft_s)
        self._queue.observe(queue_s)

    def preempted(self, num_requests: int) -> None:
        """A step preempted requests."""
        self._preemptions.inc(num_requests)

    def step(self, prompt_tokens: int, output_tokens: int) -> None:
        """A step ended: prompts of requests that got their first token in it, and tokens given."""
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(output_tokens)

    def finished(self, reason: FinishReason) -> None:
        """A request ended."""
        self._finished[reason].inc()

    def exposition(self, view: EngineView[Generation]) -> bytes:
        """Prometheus text of everything, the gauges as ``view`` stands."""
        self._running.set(len(view.running))
        self._waiting.set(len(view.waiting))
        self._usage.set(1 - view.free_blocks / self._num_usable_blocks)
        return generate_latest(self._registry)
