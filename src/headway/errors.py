"""Every error Headway raises on purpose, as one tree.

::

    HeadwayError
    ├── ConfigError            a configuration or profile file is wrong: path, key, and where known line and column
    │   ├── ProfileError       a profile is unknown, malformed, or a truth profile where an estimator reads
    │   └── ArtifactError      a trained predictor is damaged, of another version, or cannot be served here
    ├── EngineInputError       also a ValueError: limits, requests or states that no engine could hold; names the field
    ├── RequestError           the client's request is wrong: param, code, status
    ├── SnapshotError
    │   ├── SnapshotStaleError
    │   ├── SnapshotTornError
    │   └── SnapshotVersionError
    ├── RoutingError
    │   ├── NoInstanceError    no healthy instance is left
    │   └── RejectedError      the target cannot be met and the configuration says reject: retry_after_s, best_ttft_s
    ├── UpstreamError          instance_id
    │   ├── UpstreamConnectError
    │   ├── UpstreamTimeoutError
    │   ├── UpstreamProtocolError
    │   └── UpstreamInterruptedError   num_tokens seen before the stream broke
    └── DatasetError           a prompts, trace or log file is malformed: path, line

Each class carries data; ``gateway.errors`` maps every class to a status and an OpenAI error body.
"""

from __future__ import annotations


class HeadwayError(Exception):
    """Root of the tree."""


class ConfigError(HeadwayError):
    """A file the user wrote is wrong. ``key`` is the dotted path inside it (``instances[1].api_base``)."""

    def __init__(
        self, message: str, *, path: str = "", key: str = "", line: int | None = None, column: int | None = None
    ) -> None:
        self.path, self.key, self.line, self.column = path, key, line, column
        where = path
        if line is not None:
            where += f":{line}" + (f":{column}" if column is not None else "")
        super().__init__(": ".join(part for part in (where, key, message) if part))


class ProfileError(ConfigError):
    """A profile is unknown, malformed, or not one an estimator may read."""


class ArtifactError(ConfigError):
    """A trained predictor cannot be used: damaged, of another version, or not to be served on this installation."""


class EngineInputError(HeadwayError, ValueError):
    """Limits, step time, request or state that no engine could hold. ``field`` names the culprit."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(f"{field}: {message}")


class RequestError(HeadwayError):
    """The client's request is wrong. Maps to its own ``status``; ``param`` and ``code`` as in OpenAI error bodies."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        self.status, self.param, self.code = status, param, code
        super().__init__(message)


class SnapshotError(HeadwayError):
    """A snapshot cannot be used. ``instance_id`` may be empty where the transport does not know it yet."""

    def __init__(self, message: str, *, instance_id: str = "") -> None:
        self.instance_id = instance_id
        super().__init__(message)


class SnapshotStaleError(SnapshotError):
    """The newest snapshot is older than allowed."""


class SnapshotTornError(SnapshotError):
    """The writer was inside the slot on every attempt to read it, or the checksum does not hold."""


class SnapshotVersionError(SnapshotError):
    """The bytes are of a wire version this build does not read."""


class RoutingError(HeadwayError):
    """No instance was chosen."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class NoInstanceError(RoutingError):
    """No healthy instance is left for this query."""


class RejectedError(RoutingError):
    """The target cannot be met anywhere and the configuration says ``reject``. ``best_ttft_s`` is the best on offer."""

    def __init__(self, message: str, *, retry_after_s: float, best_ttft_s: float, reason: str) -> None:
        self.best_ttft_s, self.reason = best_ttft_s, reason
        super().__init__(message, retry_after_s=retry_after_s)


class UpstreamError(HeadwayError):
    """The chosen instance failed. ``attempts`` counts the upstream calls made for this request."""

    def __init__(self, message: str, *, instance_id: str = "", attempts: int = 1) -> None:
        self.instance_id, self.attempts = instance_id, attempts
        super().__init__(message)


class UpstreamConnectError(UpstreamError):
    """No connection could be made."""


class UpstreamTimeoutError(UpstreamError):
    """No first byte, or no further byte, in time."""


class UpstreamProtocolError(UpstreamError):
    """The instance answered something that is no valid HTTP answer."""


class UpstreamInterruptedError(UpstreamError):
    """The stream broke after ``num_tokens`` content events."""

    def __init__(self, message: str, *, instance_id: str = "", attempts: int = 1, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens
        super().__init__(message, instance_id=instance_id, attempts=attempts)


class DatasetError(HeadwayError):
    """A prompts, trace or log file is malformed at ``line`` (1-based)."""

    def __init__(self, message: str, *, path: str = "", line: int | None = None) -> None:
        self.path, self.line = path, line
        where = path + (f":{line}" if line is not None else "")
        super().__init__(f"{where}: {message}" if where else message)
