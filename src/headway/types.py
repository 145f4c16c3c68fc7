"""The nouns of Headway, as frozen msgspec Structs (the design's section 4 in code).

Times are seconds (``_s``) on one monotonic clock unless named ``wall_``; lengths are tokens; money is USD (``_usd``).
Those that come by the hundred and can hold no cycle are left out of garbage collection (``gc=False``).
This file refuses to do anything: it holds values and checks that a value alone can be right.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from headway.errors import EngineInputError

SchedulingPolicy = Literal["fcfs", "priority"]
StepTimeForm = Literal["linear", "knee", "six_term"]

#: Largest token count, block count or batch size the native core holds (its counters are 32 bits wide).
MAX_COUNT = 2**31 - 1

#: Values that arrive over a wire are checked while they are decoded: counts within range, times finite.
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]

_STEP_TIME_NAMES: dict[str, tuple[str, ...]] = {
    "linear": ("b0", "b1", "b2", "b3", "b_seq"),
    "knee": ("b0", "b1_below", "b1_above", "knee", "b2", "b3", "b_seq"),
    "six_term": ("b0", "bp", "bpp", "bd", "bs", "bss"),
}


def _require_count(field: str, value: object, minimum: int) -> None:
    if type(value) is not int:
        raise EngineInputError(field, f"must be an integer, not {value!r}")
    if value < minimum:
        raise EngineInputError(field, f"must be at least {minimum}, not {value}")
    if value > MAX_COUNT:
        raise EngineInputError(field, f"must be at most {MAX_COUNT}, not {value}")


def _require_finite(field: str, value: object, minimum: float = 0.0) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise EngineInputError(field, f"must be a number, not {value!r}")
    if not math.isfinite(value) or value < minimum:
        raise EngineInputError(field, f"must be finite and at least {minimum:g}, not {value!r}")


class ModelPrior(Struct, frozen=True, kw_only=True):
    """What is known of a model before anything was trained: mean judged quality in [0, 1] and mean output tokens."""

    quality: float = 0.5
    output_tokens: float = 256.0


class ModelCard(Struct, frozen=True, kw_only=True):
    """One model of the pool. Prices are USD per million tokens; ``tasks`` maps a task type to its own prior."""

    name: str
    input_per_1m_usd: float = 0.0
    output_per_1m_usd: float = 0.0
    context_tokens: int = 32768
    parameters: float | None = None
    prior: ModelPrior | None = None
    tasks: dict[str, ModelPrior] = {}


class EngineLimits(Struct, frozen=True, kw_only=True, gc=False):
    """The engine settings that shape token batches. vLLM's names, but for these:

    ``chunked_prefill`` is ``enable_chunked_prefill``, ``policy`` is the scheduling ``policy``, ``reserve_full_isl`` is
    ``scheduler_reserve_full_isl``, ``num_blocks`` is ``num_gpu_blocks`` (the null block included), ``prefix_caching``
    is ``enable_prefix_caching``.

    Raises:
        EngineInputError: a limit that no engine accepts; ``.field`` names it.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    policy: SchedulingPolicy = "fcfs"
    watermark: float = 0.0
    reserve_full_isl: bool = True
    async_scheduling: bool = False
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        for field in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size"):
            _require_count(field, getattr(self, field), 1)
        _require_count("num_blocks", self.num_blocks, 2)  # one of them is the null block
        _require_count("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _require_finite("watermark", self.watermark)
        if self.watermark >= 1.0:
            raise EngineInputError("watermark", f"must be below 1, not {self.watermark!r}")
        for field in ("chunked_prefill", "reserve_full_isl", "async_scheduling", "prefix_caching"):
            if type(getattr(self, field)) is not bool:
                raise EngineInputError(field, f"must be true or false, not {getattr(self, field)!r}")
        if self.policy not in ("fcfs", "priority"):
            raise EngineInputError("policy", f"must be 'fcfs' or 'priority', not {self.policy!r}")
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise EngineInputError(
                "max_num_batched_tokens",
                f"must reach max_model_len ({self.max_model_len}) while chunked_prefill is off, "
                f"not {self.max_num_batched_tokens}",
            )


class StepTime(Struct, frozen=True):
    """Processing time of one token batch: a named form and its coefficients, in seconds per unit of each feature.

    Build one with :meth:`linear`, :meth:`knee` or :meth:`six_term`; contexts are taken before the batch. A chunk of
    one token whose context already covers every other token of a request with output is a decode, every other chunk
    is prefill. Source: the paper's eq. 9 (linear); the knee and six-term forms are described in ``docs``.
    """

    form: StepTimeForm
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        names = _STEP_TIME_NAMES.get(self.form)
        if names is None:
            raise EngineInputError("form", f"must be one of {', '.join(_STEP_TIME_NAMES)}, not {self.form!r}")
        if len(self.coefficients) != len(names):
            raise EngineInputError("coefficients", f"{self.form} takes {len(names)}, not {len(self.coefficients)}")
        for name, value in zip(names, self.coefficients, strict=True):
            _require_finite(name, value)

    @classmethod
    def linear(cls, *, b0: float, b1: float, b2: float, b3: float, b_seq: float = 0.0) -> StepTime:
        """``b0 + b1·tokens + b2·Σ decode context + b3·Σ(p·c + p(p+1)/2) + b_seq·num_requests``."""
        return cls("linear", (b0, b1, b2, b3, b_seq))

    @classmethod
    def knee(
        cls, *, b0: float, b1_below: float, b1_above: float, knee: float, b2: float, b3: float, b_seq: float = 0.0
    ) -> StepTime:
        """Linear, with ``b1·tokens`` replaced by ``b1_below·min(tokens, knee) + b1_above·max(tokens − knee, 0)``."""
        return cls("knee", (b0, b1_below, b1_above, knee, b2, b3, b_seq))

    @classmethod
    def six_term(cls, *, b0: float, bp: float, bpp: float, bd: float, bs: float, bss: float) -> StepTime:
        """``b0 + bp·P + bpp·Σp² + bd·D + bs·Σctx + bss·Σctx²``; P prefill tokens, D decodes, ctx of all requests."""
        return cls("six_term", (b0, bp, bpp, bd, bs, bss))

    def named(self) -> dict[str, float]:
        """The coefficients by name, in the order of the form."""
        return dict(zip(_STEP_TIME_NAMES[self.form], self.coefficients, strict=True))


class EngineRequest(Struct, frozen=True, kw_only=True):
    """What an engine sees of a query, as it stands between two steps.

    ``computed_tokens`` is vLLM's ``num_computed_tokens``, ``prompt_tokens`` its ``num_prompt_tokens``,
    ``output_tokens`` its ``num_output_tokens``. ``target_output_tokens`` is the whole answer, ``output_tokens``
    included: the request ends at min(target, max_tokens), or when prompt and output fill ``max_model_len``.
    ``num_blocks`` None means ceil(computed/block_size). Lower ``priority`` is sooner; ``arrival_s`` is no future
    time, it only orders equal priorities, and None means after all present.

    ``cached_tokens`` of a request not yet scheduled are to be found in the engine's prefix cache when it is: they need
    no prefill. The engine's rule is applied to it (full blocks only, never the last token; nothing without
    ``prefix_caching``). ``shared_blocks`` of them are held by residents; the others lie among the free blocks and are
    taken from there. For a running request ``cached_tokens`` is what it found, and ``shared_blocks`` of its
    ``num_blocks`` count at another resident: they do not come free when this one goes. A preempted request is taken to
    find nothing.

    ``scheduled_tokens`` is only for running requests of an engine with ``async_scheduling``: its share of the batch
    that is scheduled while its outcome is not known. As in vLLM ``computed_tokens`` counts that share and
    ``output_tokens`` not yet its output: with an output on its way, computed equals prompt plus output. Such an engine
    foresees an end by ``max_tokens``, and none by ``target_output_tokens`` (a stop token).

    Raises:
        EngineInputError: a negative or impossible count; ``.field`` names it.
    """

    request_id: str
    prompt_tokens: int
    computed_tokens: int = 0
    output_tokens: int = 0
    target_output_tokens: int
    max_tokens: int | None = None
    priority: int = 0
    arrival_s: float | None = None
    num_blocks: int | None = None
    shared_blocks: int = 0
    cached_tokens: int = 0
    scheduled_tokens: int = 0

    def __post_init__(self) -> None:
        _require_count("prompt_tokens", self.prompt_tokens, 1)
        _require_count("computed_tokens", self.computed_tokens, 0)
        _require_count("output_tokens", self.output_tokens, 0)
        _require_count("shared_blocks", self.shared_blocks, 0)
        _require_count("cached_tokens", self.cached_tokens, 0)
        _require_count("scheduled_tokens", self.scheduled_tokens, 0)
        _require_count("target_output_tokens", self.target_output_tokens, 1)
        if self.max_tokens is not None:
            _require_count("max_tokens", self.max_tokens, 1)
        if self.num_blocks is not None:
            _require_count("num_blocks", self.num_blocks, 0)
        if type(self.priority) is not int or abs(self.priority) > MAX_COUNT:
            raise EngineInputError("priority", f"must be an integer within ±{MAX_COUNT}, not {self.priority!r}")
        if self.arrival_s is not None:
            _require_finite("arrival_s", self.arrival_s, -math.inf)
        if self.computed_tokens - bool(self.scheduled_tokens) >= self.prompt_tokens + self.output_tokens:
            raise EngineInputError(
                "computed_tokens",
                f"must be below prompt_tokens + output_tokens ({self.prompt_tokens + self.output_tokens}) between "
                f"steps, not {self.computed_tokens}: the newest token's keys and values are not computed yet",
            )


class EngineState(Struct, frozen=True, kw_only=True):
    """An engine *between* steps: requests in engine order, and the time until the batch in flight ends.

    An engine with ``async_scheduling`` schedules each batch while the one before it runs. Its state between steps holds
    a batch whose outcome is not applied (the requests' ``scheduled_tokens``); ``residual_s`` is the time until *that*
    batch starts, and then the next one is scheduled. ``departed`` are (tokens, context before, is it a decode) of those
    in that batch that are gone: cancelled, or ended by the batch before, which nobody had foreseen.
    ``free_blocks`` None means num_blocks − 1 − Σ held (the null block is never free).
    """

    limits: EngineLimits
    running: tuple[EngineRequest, ...] | list[EngineRequest]
    waiting: tuple[EngineRequest, ...] | list[EngineRequest]
    residual_s: float = 0.0
    free_blocks: int | None = None
    departed: tuple[tuple[int, int, bool], ...] = ()

    def __post_init__(self) -> None:
        _require_finite("residual_s", self.residual_s)
        if self.free_blocks is not None:
            _require_count("free_blocks", self.free_blocks, 0)


class Replay(Struct, frozen=True):
    """What :func:`headway.replay` returns for a newcomer.

    ``ttft_s`` runs from now to the end of the step that computes its last prompt chunk, ``wait_s`` from now to the
    start of the first step that holds a chunk of it; both are infinite where the engine can never admit it.
    ``num_steps`` counts the steps up to that first token, without the batch in flight.
    """

    ttft_s: float
    wait_s: float
    num_steps: int


class Calibration(Struct, frozen=True, kw_only=True):
    """What an estimator may know of an instance beside limits and step time, from a calibration run.

    ``prefill_tokens_per_s`` is θ, over batches that hold a prefill chunk; ``decode_step_s`` is T_dec, the mean time of
    decode-only batches; ``service_rate_per_s`` is μ in queries per second; ``concurrency`` is k of the
    limited-processor-sharing estimate; ``ttft_ratio_p90`` is the 90 % quantile of observed ÷ estimated TTFT.
    """

    prefill_tokens_per_s: float
    decode_step_s: float
    service_rate_per_s: float
    concurrency: int = 25
    ttft_ratio_p90: float = 1.1


class Instance(Struct, frozen=True, kw_only=True):
    """A model instance of the pool. ``limits`` and ``step_time`` are None where nothing can be replayed (hosted)."""

    id: str
    model: str
    api_base: str = ""
    engine: str = "hosted"
    profile: str | None = None
    limits: EngineLimits | None = None
    step_time: StepTime | None = None
    calibration: Calibration | None = None

    @property
    def hosted(self) -> bool:
        """Whether this is an outside API of which no state is known."""
        return self.engine == "hosted"


class SnapshotRequest(Struct, frozen=True, array_like=True, gc=False):
    """One request inside a snapshot, as the engine holds it. ``max_tokens`` 0 means unlimited.

    ``scheduled_tokens`` is its share of the batch in flight, 0 when it is not part of it. The engine has already
    added it to ``computed_tokens`` (vLLM's ``schedule`` does) but not yet appended the output. ``cached_tokens`` are
    those that were found in the prefix cache when it was admitted; of a waiting request, those last found there, of
    which ``shared_blocks`` blocks are held by residents. Of running requests ``num_blocks`` counts shared blocks at
    each of them; how many that are follows from ``free_blocks``.
    """

    request_id: str
    prompt_tokens: Count
    computed_tokens: Count
    output_tokens: Count
    num_blocks: Count
    max_tokens: Count
    priority: Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
    arrival_s: Finite
    scheduled_tokens: Count
    cached_tokens: Count = 0
    shared_blocks: Count = 0


class Snapshot(Struct, frozen=True, kw_only=True):
    """An engine as it published itself right after a step was scheduled (or while idle).

    ``sequence`` rises by one per snapshot of one engine start; ``engine_start`` tells restarts apart. ``engine_s`` is
    the monotonic time of publication, ``batch_start_s`` that of the batch in flight (None when idle). A snapshot with
    ``scheduled_tokens`` all 0 shows the engine between steps. ``unchecked`` names, in words, what the engine runs that
    the replay was not held against: its version, or a feature that no rule covers.
    """

    instance_id: str
    engine_version: str
    engine_start: int
    sequence: Annotated[int, Meta(ge=0)]
    engine_s: Finite
    limits: EngineLimits
    running: list[SnapshotRequest]
    waiting: list[SnapshotRequest]
    free_blocks: Count
    batch_start_s: Finite | None = None
    unchecked: list[str] = []


class Query(Struct, frozen=True, kw_only=True):
    """One request as the router sees it. ``model`` None means every candidate; ``prompt_text`` may be shortened.

    ``prompt_tokens`` maps each model to its own count (models may have unlike tokenizers). ``prompt_chars`` is the
    length of the whole text (None: that of ``prompt_text``), ``num_turns`` counts the user's messages, ``system_chars``
    the characters of system messages.

    ``prefix_blocks`` are 64-bit hashes of the prompt's first full blocks of tokens, each over all tokens up to its end
    (``headway.predict.prefix``), in blocks of ``FleetView.prefix_block_tokens``; of these the whole prompt has
    ``counted_tokens``. Empty where no instance has a prefix cache.
    """

    id: str
    arrival_s: float
    prompt_text: str
    prompt_tokens: dict[str, int]
    max_tokens: int | None = None
    candidates: tuple[str, ...] | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    quality_min: float | None = None
    max_cost_usd: float | None = None
    priority: int = 0
    excluded_instances: frozenset[str] = frozenset()
    prefix_blocks: tuple[int, ...] = ()
    counted_tokens: int = 0
    prompt_chars: int | None = None
    num_turns: int = 1
    system_chars: int = 0


class Prediction(Struct, frozen=True, gc=False):
    """What one model is expected to do with one query. ``source`` is ``prior``, ``default`` or a predictor's name.

    ``p90_output_tokens`` is the length that nine in ten answers do not exceed, None where nobody knows.
    """

    quality: float
    output_tokens: float
    cost_usd: float
    source: str
    p90_output_tokens: float | None = None


class Estimate(Struct, frozen=True, gc=False):
    """When one instance would give the newcomer its first token. ``source`` names the estimator that really spoke.

    ``raw_ttft_s`` is what a replay says before any correction, None where nothing is replayed; where another estimator
    spoke because the replay's times are not to be trusted, it is still the replay's.
    """

    ttft_s: float
    ttft_p90_s: float
    wait_s: float
    source: str
    snapshot_age_s: float | None = None
    raw_ttft_s: float | None = None


Verdict = Literal[
    "feasible", "late", "context", "unhealthy", "draining", "resting", "quality", "budget", "excluded", "saturated"
]


class Candidate(Struct, frozen=True, gc=False):
    """One instance as it stood in one decision. Figures are None where the verdict was reached without them.

    ``price`` and ``harm`` are in utility: what a pricing policy charged for the work the query would take there, and
    for those waiting whom it would make late. None under other policies.
    """

    instance_id: str
    model: str
    verdict: Verdict
    utility: float | None = None
    quality: float | None = None
    cost_usd: float | None = None
    output_tokens: float | None = None
    prompt_tokens: int | None = None
    prediction: str | None = None
    estimate: Estimate | None = None
    num_outstanding: int = 0
    price: float | None = None
    harm: float | None = None


class Decision(Struct, frozen=True, kw_only=True):
    """What was chosen and why. ``chosen`` indexes ``candidates``; None when nothing could be chosen.

    ``slo`` is ``met-expected``, ``infeasible`` or ``none``. ``decision_s`` is filled in by the caller, who owns the
    clock. ``best_ttft_s`` is the smallest estimated TTFT over the eligible candidates. ``held_s`` is how long a holding
    policy's queue kept the query, None where nothing holds; ``ttft_target_s`` is then what was left of the target.
    """

    query_id: str
    policy: str
    arrival_s: float
    candidates: tuple[Candidate, ...]
    chosen: int | None
    reason: str
    slo: Literal["met-expected", "infeasible", "none"]
    ttft_target_s: float | None = None
    best_ttft_s: float | None = None
    retry_after_s: float | None = None
    decision_s: float | None = None
    config_hash: str = ""
    held_s: float | None = None

    @property
    def candidate(self) -> Candidate | None:
        """The chosen candidate."""
        return None if self.chosen is None else self.candidates[self.chosen]


OutcomeStatus = Literal["ok", "error", "cancelled", "timeout", "interrupted", "rejected"]


class Outcome(Struct, frozen=True, kw_only=True):
    """What really happened to a query on an instance."""

    query_id: str
    instance_id: str
    status: OutcomeStatus
    ttft_s: float | None = None
    total_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None
    http_status: int | None = None
