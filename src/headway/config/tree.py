"""The configuration tree as frozen Structs: what a pool's YAML file may say, with units, ranges and defaults.

A field here is a key there. The tree refuses to hold what is not built: a key of a later feature is listed in
``NOT_BUILT_KEYS`` and turned down by name, so that no file promises too much.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit, urlunsplit

from msgspec import Meta, Struct, field

from headway.errors import ConfigError
from headway.types import SchedulingPolicy

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegativeCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400 * 365)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]

EngineKind = Literal["vllm-0.32", "hosted"]

#: Keys of later features. A pattern is a dotted key without its list indices.
NOT_BUILT_KEYS: dict[str, str] = {
    "models[].tokenizer": "tokenizers are not built yet; tokens are counted as bytes/4, corrected by reported usage",
}


class Secret(Struct, frozen=True, repr_omit_defaults=True):
    """A credential or where to find it. Shows ``***`` instead of itself, whoever prints it."""

    reference: str

    def __repr__(self) -> str:
        return f"Secret({self.reference if self.variable else '***'})"

    __str__ = __repr__

    @property
    def variable(self) -> str | None:
        """Name of the environment variable that holds it, None when the file holds it itself."""
        return self.reference[4:] if self.reference.startswith("env:") else None


class Price(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """USD per million tokens."""

    input_per_1m: NonNegative = 0.0
    output_per_1m: NonNegative = 0.0


class TaskPrior(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a model on one task type; a missing field takes the model's own prior."""

    quality: Share | None = None
    output_tokens: Annotated[float, Meta(gt=0)] | None = None


class Prior(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mean judged quality in [0, 1] and mean output tokens before anything was trained."""

    quality: Share = 0.5
    output_tokens: Annotated[float, Meta(gt=0)] = 256.0
    tasks: dict[str, TaskPrior] = {}


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the pool. ``parameters`` is their number (8.2e9)."""

    name: Name
    price: Price = Price()
    context_tokens: Count = 32768
    parameters: Annotated[float, Meta(gt=0)] | None = None
    prior: Prior | None = None


class LimitOverrides(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine limits that replace those of the profile; names and units are those of ``EngineLimits``."""

    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count | None = None
    max_model_len: Count | None = None
    block_size: Count | None = None
    num_blocks: Count | None = None
    long_prefill_token_threshold: NonNegativeCount | None = None
    chunked_prefill: bool | None = None
    policy: SchedulingPolicy | None = None
    watermark: Annotated[float, Meta(ge=0, lt=1)] | None = None
    reserve_full_isl: bool | None = None
    async_scheduling: bool | None = None
    prefix_caching: bool | None = None


class SnapshotSource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an instance publishes its state: a shared-memory segment on this machine, or a ZeroMQ address.

    Exactly one is given. ``zeromq`` is ``tcp://HOST:PORT``.
    """

    shared_memory: Name | None = None
    zeromq: Name | None = None

    @property
    def transport(self) -> str:
        """The key that is given."""
        return "zeromq" if self.shared_memory is None else "shared_memory"

    @property
    def place(self) -> str:
        """What that key says: segment or address."""
        return self.shared_memory or self.zeromq or ""


class InstanceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model instance. ``api_base`` ends in ``/v1`` as OpenAI clients write it.

    ``shadow_state`` tells whether an engine that publishes no snapshots is replayed from what is sent there; by default
    it is where a profile says how.
    """

    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
    model: Name
    api_base: str
    engine: EngineKind = "hosted"
    api_key: Secret | None = None
    profile: Name | None = None
    limits: LimitOverrides | None = None
    snapshots: SnapshotSource | None = None
    shadow_state: bool | None = None

    @property
    def shadowed(self) -> bool:
        """Whether the instance is replayed from what is sent there."""
        able = self.engine != "hosted" and self.profile is not None and self.snapshots is None
        return able and self.shadow_state is not False


class Alias(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that clients may send as ``model``: every model of the pool, or those listed."""

    candidates: Literal["all"] | list[Name]


class BidPriceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights, thresholds and learning of ``bid_price`` (docs/bid-price.md); what is left out is the policy's default.

    Thresholds and ``period_s`` are seconds, ``horizon`` and ``stride`` periods.
    """

    alpha: NonNegative | None = None
    beta: NonNegative | None = None
    gamma: NonNegative | None = None
    sigma: NonNegative | None = None
    zeta1: NonNegative | None = None
    zeta2: NonNegative | None = None
    quality: NonNegative | None = None
    latency_slo_s: Seconds | None = None
    wait_slo_s: Seconds | None = None
    history: Literal["period", "request", "ahead"] | None = None
    horizon: Count | None = None
    stride: Count | None = None
    step_size: Annotated[float, Meta(gt=0)] | None = None
    admission: Literal["work_conserving", "threshold"] | None = None
    period_s: Seconds | None = None
    mode: Literal["mixing", "disaggregated"] | None = None


class Routing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a query finds its instance. ``lambda_per_musd`` is utility per micro-USD, ``delta_per_ms`` utility per ms.

    ``predictor`` is ``prior``, or the path of a trained artifact relative to the configuration's directory.
    ``delta_per_ms`` 0 means a hard target. ``default_ttft_ms`` is the target of queries without one. ``fallback`` is
    where ``best_effort`` sends a query that no instance can answer in time (``bear`` with a hard target only, and there
    ``least_work`` by default). ``price`` is how ``priced_bear`` finds what an instance's time is worth,
    ``bid_price`` holds the options of that policy.
    """

    policy: str = "bear"
    lambda_per_musd: NonNegative = 5e-4
    delta_per_ms: NonNegative = 0.0
    predictor: Name = "prior"
    default_ttft_ms: Annotated[float, Meta(gt=0)] | None = None
    on_infeasible: Literal["best_effort", "reject", "queue"] = "best_effort"
    fallback: Literal["least_ttft", "least_work"] | None = None
    price: Literal["kv_share", "virtual_queue", "learned"] | None = None
    bid_price: BidPriceConfig | None = None


class QueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The central queue of policies that hold queries, and of ``on_infeasible: queue``.

    ``max_length`` counts requests. One that was not released within ``max_wait_s`` (and the deadline) is refused with a
    429, or sent to the best instance there is.
    """

    max_length: Count = 1024
    max_wait_s: Seconds = 30.0
    on_timeout: Literal["reject", "best_effort"] = "reject"


class Resilience(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on waiting and on trying again.

    ``deadline_s`` covers all attempts up to the first byte of a stream, and the whole of an answer that is not
    streamed. ``attempts`` counts upstream calls per request. ``first_byte_timeout_s`` ends at the first byte of a
    stream that is no comment; an answer that is not streamed has until then plus 0.1 s per token of ``max_tokens``.
    ``idle_timeout_s`` is the longest pause inside an answer. After ``breaker_failures`` failures in a row an instance
    gets nothing for ``breaker_open_s``, then one request to prove itself.
    """

    deadline_s: Seconds = 120.0
    attempts: Annotated[int, Meta(ge=1, le=10)] = 2
    first_byte_timeout_s: Seconds = 20.0
    idle_timeout_s: Seconds = 60.0
    breaker_failures: Count = 5
    breaker_open_s: Seconds = 5.0


class ShadowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A second policy or predictor that decides beside the first, for a share of the decisions; nobody is sent by it.

    What is left out is as in ``routing``; ``predictor`` is written as there.
    """

    policy: str | None = None
    predictor: Name | None = None
    sample: Share = 0.1


class FeedbackConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What users say of answers, and how long answers were, as rows for ``headway train --update``.

    ``file`` (relative to the configuration's directory) is where rows are appended; without it nothing is kept.
    ``prompts`` stores prompts and comments too, else only features of prompts. ``outcomes`` also keeps answers of which
    nobody said anything within ``wait_s``. At ``max_mb`` (10^6 bytes) the file is put aside under a number;
    ``num_files`` are kept, the present one included.
    """

    file: Name | None = None
    prompts: bool = False
    outcomes: bool = True
    wait_s: Seconds = 600.0
    max_mb: Annotated[float, Meta(gt=0, le=1e6)] = 64.0
    num_files: Annotated[int, Meta(ge=1, le=1000)] = 4


class DecisionLogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where decisions and what came of them are kept, one line of JSON each, without prompts.

    ``file`` is relative to the configuration's directory; without it nothing is kept. At ``max_mb`` (10^6 bytes) it is
    put aside under a number; ``num_files`` are kept, the present one included. ``sample`` is the share of requests that
    are logged; ``candidates`` shows every instance of a decision, not the chosen one alone.
    """

    file: Name | None = None
    max_mb: Annotated[float, Meta(gt=0, le=1e6)] = 64.0
    num_files: Annotated[int, Meta(ge=1, le=1000)] = 4
    sample: Share = 1.0
    candidates: bool = False


class KeyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's key and its limits; a limit left out does not bind.

    The key itself is in the environment (``key: env:NAME``), or only its SHA-256 is known (64 hex digits). ``rpm`` and
    ``tpm`` count requests and tokens of the last 60 s, ``concurrency`` requests under way, ``budget_usd`` the cost of a
    UTC day, a UTC month, or for good.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    key: Secret | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None
    rpm: Count | None = None
    tpm: Count | None = None
    concurrency: Count | None = None
    budget_usd: Annotated[float, Meta(gt=0)] | None = None
    budget_period: Literal["day", "month", "total"] = "month"


class KeysConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may use the gateway. With this section, a request without a known key is refused.

    ``clients`` are listed here, or in ``file`` (YAML with ``clients`` and ``admin_sha256``), or both. The admin's key
    opens what shows or steers the pool; without one, nobody may. ``spend_file`` keeps what budgets have spent over a
    restart. Paths are relative to the configuration's directory.
    """

    clients: list[KeyConfig] = []
    admin: Secret | None = None
    admin_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None
    file: Name | None = None
    spend_file: Name | None = None


class KeysFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``keys.file`` may say."""

    clients: list[KeyConfig] = []
    admin_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None


class TracesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where OpenTelemetry spans go: a collector's address for OTLP over HTTP (``http://127.0.0.1:4318``).

    ``sample`` is the share of requests that are traced where the client's ``traceparent`` does not say.
    """

    otlp: str
    sample: Share = 1.0

    @property
    def endpoint(self) -> str:
        """The URL that spans are posted to: the usual path, unless the address has one of its own."""
        parts = urlsplit(self.otlp)
        return self.otlp if parts.path.strip("/") else urlunsplit(parts._replace(path="/v1/traces"))


class TelemetryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is sent away of what the gateway sees; nothing, unless it is asked for."""

    traces: TracesConfig | None = None


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway's own socket and bounds. Port 0 takes any free one. ``log_prompts`` puts prompts into the log."""

    host: Name = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    max_body_mb: Annotated[float, Meta(gt=0, le=4096)] = 64.0
    max_inflight: Count = 4096
    drain_s: NonNegative = 30.0
    log_prompts: bool = False


class Config(Struct, frozen=True, kw_only=True):
    """A checked configuration, where it came from, and where in the file each key stands (line, column; 1-based)."""

    models: list[ModelConfig]
    instances: list[InstanceConfig]
    aliases: dict[str, Alias] = {}
    routing: Routing = Routing()
    queue: QueueConfig = QueueConfig()
    shadow: ShadowConfig | None = None
    feedback: FeedbackConfig = FeedbackConfig()
    resilience: Resilience = Resilience()
    decisions: DecisionLogConfig = DecisionLogConfig()
    keys: KeysConfig | None = None
    telemetry: TelemetryConfig = TelemetryConfig()
    server: ServerConfig = ServerConfig()
    path: str = ""
    config_hash: str = ""
    locations: dict[str, tuple[int, int]] = field(default_factory=dict)

    def error(self, key: str, message: str, *, kind: type[ConfigError] = ConfigError) -> ConfigError:
        """A ``kind`` that names this file, ``key`` and where it stands; a missing key points to its nearest parent."""
        parent = key
        while parent and parent not in self.locations:
            parent = parent.rpartition(".")[0] if "." in parent else parent.rpartition("[")[0]
        line, column = self.locations.get(parent, (None, None))
        return kind(message, path=self.path, key=key, line=line, column=column)
