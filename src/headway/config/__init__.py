"""The configuration of a pool: one Struct tree, YAML in.

``load_config`` reads a file and returns a checked :class:`Config`; every complaint names path, line, column and dotted
key. This room refuses to touch the network, profiles or the router: ``headway.assembly`` does that. Only
``config.secrets`` reads the environment, when somebody is about to connect.
"""

from headway.config.load import load_config, parse_config
from headway.config.tree import (
    Alias,
    Config,
    DecisionLogConfig,
    FeedbackConfig,
    InstanceConfig,
    KeyConfig,
    KeysConfig,
    LimitOverrides,
    ModelConfig,
    Price,
    Prior,
    QueueConfig,
    Resilience,
    Routing,
    Secret,
    ServerConfig,
    ShadowConfig,
    SnapshotSource,
    TaskPrior,
    TelemetryConfig,
    TracesConfig,
)

__all__ = [
    "Alias",
    "Config",
    "DecisionLogConfig",
    "FeedbackConfig",
    "InstanceConfig",
    "KeyConfig",
    "KeysConfig",
    "LimitOverrides",
    "ModelConfig",
    "Price",
    "Prior",
    "QueueConfig",
    "Resilience",
    "Routing",
    "Secret",
    "ServerConfig",
    "ShadowConfig",
    "SnapshotSource",
    "TaskPrior",
    "TelemetryConfig",
    "TracesConfig",
    "load_config",
    "parse_config",
]
