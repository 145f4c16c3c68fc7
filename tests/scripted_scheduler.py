"""A scheduler shaped like vLLM's, small enough to follow: the publisher's tests run on it where no vLLM is installed.

It has the attributes that Headway reads of vLLM 0.32.0's scheduler, and the simplest of rules: whoever waits is
admitted with the whole prompt, whoever runs decodes one token, and answers end at ``max_tokens``. It makes no claim on
vLLM; the same publisher runs on the real scheduler in ``make conformance``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

BLOCK_SIZE, NUM_BLOCKS = 16, 256


class ScriptedRequest:
    """A request; ``prompt_blocks`` of its prompt are in the prefix cache."""

    def __init__(self, request_id: str, prompt_tokens: int = 20, max_tokens: int = 4, **rest: Any) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = prompt_tokens
        self.num_computed_tokens = 0
        self.num_output_tokens = 0
        self.num_output_placeholders = self.num_stale_output_tokens = 0
        self.is_prefill_chunk = False
        self.max_tokens = max_tokens
        self.priority = rest.get("priority", 0)
        self.arrival_time = rest.get("arrival_time", 1.7e9)
        self.block_hashes = [bytes([i] * 32) for i in range(prompt_tokens // BLOCK_SIZE)]
        self.prompt_blocks = rest.get("prompt_blocks", 0)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class ScriptedScheduler:
    """The scheduler. Where ``is_async``, ``schedule()`` may be called again before the update of the batch before."""

    def __init__(self, *, is_async: bool = False, policy: str = "fcfs", prefix_caching: bool = False) -> None:
        self.scheduler_config = SimpleNamespace(
            max_num_batched_tokens=512, long_prefill_token_threshold=0, enable_chunked_prefill=True, watermark=0.0,
            async_scheduling=is_async,
        )  # fmt: skip
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name=["tiny"], model="/models/tiny")
        )
        self.parallel_config = SimpleNamespace(data_parallel_size=1)
        self.max_num_scheduled_tokens, self.max_num_active_reqs, self.max_model_len = 512, 64, 4096
        self.block_size, self.scheduler_reserve_full_isl = BLOCK_SIZE, True
        self.policy = SimpleNamespace(value=policy)
        self.num_spec_tokens = self.max_num_encoder_input_tokens = 0
        self.connector = self.ec_connector = self.lora_config = None
        self.is_encoder_decoder = self.use_pp = self.adaptive_long_prefill_threshold = False
        self.num_sampled_tokens_per_step = self.dcp_world_size = self.pcp_world_size = 1
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())])
        self._blocks: dict[str, list[int]] = {}
        self.kv_cache_manager = SimpleNamespace(
            enable_caching=prefix_caching,
            prefix_cache_lookup_enabled=lambda request: prefix_caching,
            coordinator=SimpleNamespace(
                single_type_managers=[SimpleNamespace(req_to_blocks=self._blocks)],
                find_longest_cache_hit=self._find_longest_cache_hit,
            ),
            block_pool=SimpleNamespace(num_gpu_blocks=NUM_BLOCKS, get_num_free_blocks=self._num_free_blocks),
        )
        self.requests: dict[str, ScriptedRequest] = {}
        self.running: list[ScriptedRequest] = []
        self.waiting: Any = SimpleNamespace(_heap=[]) if policy == "priority" else deque()
        self.kv_holding_waiting: deque[ScriptedRequest] = deque()
        self.is_shut_down = False
        self.max_running = 2
        self.cached_blocks = self.held_blocks = 0  # what the prefix cache has of everybody, and how much is in use

    def schedule(self) -> Any:
        tokens: dict[str, int] = {}
        new = []
        for request in self.running:
            wanted = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            if wanted > 0:
                tokens[request.request_id] = wanted
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting.popleft()
            self.running.append(request)
            hit = min(self.cached_blocks, request.num_prompt_tokens // BLOCK_SIZE) * BLOCK_SIZE
            request.num_computed_tokens = hit
            new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=hit))
            tokens[request.request_id] = request.num_tokens - hit
        for request_id, count in tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            request.num_output_placeholders += self.scheduler_config.async_scheduling
            self._blocks[request_id] = list(range(-(-request.num_computed_tokens // BLOCK_SIZE)))
        cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_new_reqs=new, scheduled_cached_reqs=cached)

    def update_from_output(self, scheduler_output: Any, model_runner_output: object) -> dict[int, Any]:
        outputs = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_output_tokens += 1
            request.num_output_placeholders -= self.scheduler_config.async_scheduling
            ends = request.num_output_tokens >= request.max_tokens
            outputs.append(
                SimpleNamespace(request_id=request_id, new_token_ids=[5], finish_reason="length" if ends else None)
            )
            if ends:
                self._remove(request)
        return {0: SimpleNamespace(outputs=outputs)}

    def add_request(self, request: ScriptedRequest) -> None:
        self.requests[request.request_id] = request
        if self.policy.value == "priority":
            self.waiting._heap.append(request)
        else:
            self.waiting.append(request)

    def finish_requests(self, request_ids: Iterable[str], finished_status: object) -> list[ScriptedRequest]:
        found = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        for request in found:
            self._remove(request)
        return found

    def preempt(self, request: ScriptedRequest) -> None:
        """Take the request off the running ones, as a shortage of blocks would."""
        self.running.remove(request)
        self._preempt_request(request, 0.0)

    def _preempt_request(self, request: ScriptedRequest, timestamp: float) -> None:
        self._blocks.pop(request.request_id)
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _remove(self, request: ScriptedRequest) -> None:
        del self.requests[request.request_id]
        self._blocks.pop(request.request_id, None)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _num_free_blocks(self) -> int:
        return NUM_BLOCKS - 1 - sum(len(blocks) for blocks in self._blocks.values())

    def _find_longest_cache_hit(self, block_hashes: list[bytes], most: int) -> tuple[object, int, int]:
        num_found = min(self.cached_blocks, len(block_hashes), most // BLOCK_SIZE)
        found = [SimpleNamespace(ref_cnt=int(place < self.held_blocks)) for place in range(num_found)]
        return (found,), num_found * BLOCK_SIZE, 0


class FullAttentionSpec:
    """Bears the name by which vLLM calls the one kind of cache that the replay knows."""
