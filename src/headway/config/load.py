"""Reads a pool's YAML file and checks what one key alone cannot say: names that must exist, names that must differ.

It refuses to look outside the file: whether a profile exists, an environment variable is set or a port answers is
for ``headway.assembly`` and the gateway to find out.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from headway.config.nodes import NodeReader, did_you_mean, read_text
from headway.config.tree import (
    Alias,
    Config,
    DecisionLogConfig,
    FeedbackConfig,
    InstanceConfig,
    KeysConfig,
    ModelConfig,
    QueueConfig,
    Resilience,
    Routing,
    Secret,
    ServerConfig,
    ShadowConfig,
    SnapshotSource,
    TelemetryConfig,
)
from headway.policy.registry import POLICIES
from headway.predict.tasks import TASK_TYPES


class _Document(Struct, frozen=True, kw_only=True):
    """The top level of the file."""

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


def load_config(path: str | Path) -> Config:
    """The checked configuration in the file at ``path``.

    Raises:
        ConfigError: the file cannot be read or is wrong; path, line, column and dotted key are in its message.
    """
    return parse_config(read_text(path), path=str(path))


def parse_config(text: str, *, path: str = "<text>") -> Config:
    """The checked configuration in ``text``; ``path`` only appears in complaints.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    reader = NodeReader(text, path)
    document = reader.read(_Document)
    config = Config(
        models=document.models,
        instances=document.instances,
        aliases={"auto": Alias(candidates="all"), **document.aliases},
        routing=document.routing,
        queue=document.queue,
        shadow=document.shadow,
        feedback=document.feedback,
        resilience=document.resilience,
        decisions=document.decisions,
        keys=document.keys,
        telemetry=document.telemetry,
        server=document.server,
        path=path,
        config_hash=_hash(document),
        locations=reader.locations,
    )
    _check_models(config)
    _check_instances(config)
    _check_routing(config)
    _check_keys(config)
    _check_shadow(config)
    if config.telemetry.traces is not None:
        where = "telemetry.traces.otlp"
        _check_url(config, where, config.telemetry.traces.otlp, "http://127.0.0.1:4318", "OTEL_EXPORTER_OTLP_HEADERS")
    return config


def _hash(document: _Document) -> str:
    """Twelve hex digits that change with every setting but not with comments, order of keys, or secrets."""

    def encode(value: object) -> object:
        if isinstance(value, Secret):
            return value.variable
        raise NotImplementedError(type(value).__name__)

    instances = [msgspec.structs.replace(instance, api_key=None) for instance in document.instances]
    keys = [encode(instance.api_key) if instance.api_key else None for instance in document.instances]
    canonical = msgspec.json.encode((msgspec.structs.replace(document, instances=instances), keys), order="sorted")
    return hashlib.sha256(canonical).hexdigest()[:12]


def _check_models(config: Config) -> None:
    if not config.models:
        raise config.error("models", "a pool needs at least one model")
    names: set[str] = set()
    for index, model in enumerate(config.models):
        if model.name in names:
            raise config.error(f"models[{index}].name", f"the name {model.name!r} is used twice")
        names.add(model.name)
        for task in model.prior.tasks if model.prior else ():
            if task not in TASK_TYPES:
                raise config.error(
                    f"models[{index}].prior.tasks.{task}", f"unknown task type{did_you_mean(task, list(TASK_TYPES))}"
                )
    known = sorted(names)
    for alias, target in config.aliases.items():
        if alias in names and f"aliases.{alias}" in config.locations:
            raise config.error(f"aliases.{alias}", "a model of the pool has this name already")
        if target.candidates == "all":
            continue
        if not target.candidates:
            raise config.error(f"aliases.{alias}.candidates", "needs at least one model, or 'all'")
        for index, name in enumerate(target.candidates):
            if name not in names:
                raise config.error(
                    f"aliases.{alias}.candidates[{index}]", f"unknown model {name!r}{did_you_mean(name, known)}"
                )


def _check_instances(config: Config) -> None:
    if not config.instances:
        raise config.error("instances", "a pool needs at least one instance")
    names = [model.name for model in config.models]
    ids: set[str] = set()
    places: dict[str, str] = {}
    for index, instance in enumerate(config.instances):
        key = f"instances[{index}]"
        if instance.id in ids:
            raise config.error(f"{key}.id", f"the id {instance.id!r} is used twice")
        ids.add(instance.id)
        if instance.model not in names:
            raise config.error(f"{key}.model", f"unknown model {instance.model!r}{did_you_mean(instance.model, names)}")
        _check_url(config, f"{key}.api_base", instance.api_base)
        if instance.engine == "hosted":
            for name in ("profile", "limits", "snapshots"):
                if getattr(instance, name) is not None:
                    raise config.error(
                        f"{key}.{name}", "nothing is known inside a hosted instance; set engine: vllm-0.32"
                    )
        if instance.limits is not None and instance.profile is None:
            raise config.error(f"{key}.limits", "override the limits of a profile, and this instance names none")
        if instance.snapshots is not None:
            _check_snapshots(config, f"{key}.snapshots", instance, instance.snapshots, places)
        if instance.shadow_state and not instance.shadowed:
            raise config.error(f"{key}.shadow_state", _why_no_shadow(instance))
        if instance.api_key is not None and instance.api_key.variable == "":
            raise config.error(f"{key}.api_key", "names no environment variable; write env:NAME")


def _check_snapshots(
    config: Config, key: str, instance: InstanceConfig, source: SnapshotSource, places: dict[str, str]
) -> None:
    if (source.shared_memory is None) == (source.zeromq is None):
        raise config.error(key, "takes one of shared_memory (this machine) and zeromq (others)")
    if source.place in places:
        raise config.error(f"{key}.{source.transport}", f"instance {places[source.place]!r} publishes there already")
    places[source.place] = instance.id


def _why_no_shadow(instance: InstanceConfig) -> str:
    if instance.engine == "hosted":
        return "nothing is known inside a hosted instance; set engine: vllm-0.32"
    if instance.snapshots is not None:
        return "an instance with snapshots is replayed from these"
    return "needs a profile, which tells how long a step of the engine takes"


def _check_url(
    config: Config, key: str, url: str, example: str = "http://127.0.0.1:8101/v1", secrets: str = "api_key"
) -> None:
    """``secrets`` is where credentials belong."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
        parts = urlsplit("")
    if not usable:
        raise config.error(key, f"must be an http or https URL such as {example}, not {url!r}")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise config.error(key, f"takes neither credentials nor a query; use {secrets}")


def _check_routing(config: Config) -> None:
    if config.routing.policy not in POLICIES:
        raise config.error(
            "routing.policy",
            f"unknown policy {config.routing.policy!r}{did_you_mean(config.routing.policy, sorted(POLICIES))}",
        )
    if POLICIES[config.routing.policy].holds and config.routing.on_infeasible == "reject":
        raise config.error(
            "routing.on_infeasible",
            f"policy {config.routing.policy} holds queries; queue.on_timeout says what becomes of those held too long",
        )


def _check_shadow(config: Config) -> None:
    shadow = config.shadow
    if shadow is None:
        return
    if shadow.policy is None and shadow.predictor is None:
        raise config.error("shadow", "names neither a policy nor a predictor")
    if shadow.policy is None:
        return
    if shadow.policy not in POLICIES:
        nearest = did_you_mean(shadow.policy, sorted(POLICIES))
        raise config.error("shadow.policy", f"unknown policy {shadow.policy!r}{nearest}")
    if POLICIES[shadow.policy].holds:
        raise config.error("shadow.policy", f"{shadow.policy} holds queries in a queue, so it has no choice to compare")


def _check_keys(config: Config) -> None:
    """What a file must not hold: a client's or the admin's key in clear."""
    keys = config.keys
    if keys is None:
        return
    secrets = {"keys.admin": keys.admin}
    for index, client in enumerate(keys.clients):
        where = f"keys.clients[{index}]"
        if (client.key is None) == (client.sha256 is None):
            raise config.error(where, "takes one of key (env:NAME) and sha256")
        secrets[f"{where}.key"] = client.key
    for where, secret in secrets.items():
        if secret is not None and not secret.variable:
            raise config.error(where, "must not stand in the file: write env:NAME, or its sha256")
