"""Where a vLLM engine's snapshots go: what the environment asks for, and transports that may fail.

A transport is opened when there is something to send, and again later when that failed for a reason that may pass (the
engine before still holds the segment, the host has no memory left). A failure is counted and logged once, and so is the
recovery. Nothing here raises into the engine, and nothing waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from headway.errors import ConfigError

# Below vLLM's own logger, which formats and shows it; without one, warnings go to standard error.
logger = logging.getLogger("vllm.headway")

#: How long a transport that could not be opened is left alone, seconds.
RETRY_S: Final = 5.0


class PublisherOptions(Struct, frozen=True, kw_only=True):
    """What the environment asks for. ``instance`` names the engine in its snapshots; a router goes by its own name."""

    instance: str | None = None
    shared_memory: str | None = None
    zeromq: str | None = None
    step_log: Path | None = None
    step_log_requests: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> PublisherOptions:
        """Read ``HEADWAY_INSTANCE``, ``HEADWAY_SNAPSHOT_SHARED_MEMORY``, ``HEADWAY_SNAPSHOT_ZEROMQ``,
        ``HEADWAY_STEP_LOG`` and ``HEADWAY_STEP_LOG_REQUESTS`` (1: name the requests). Empty is not set."""
        step_log = environment.get("HEADWAY_STEP_LOG")
        return cls(
            instance=environment.get("HEADWAY_INSTANCE") or None,
            shared_memory=environment.get("HEADWAY_SNAPSHOT_SHARED_MEMORY") or None,
            zeromq=environment.get("HEADWAY_SNAPSHOT_ZEROMQ") or None,
            step_log=Path(step_log) if step_log else None,
            step_log_requests=environment.get("HEADWAY_STEP_LOG_REQUESTS", "0") not in ("", "0"),
        )

    @property
    def publishes(self) -> bool:
        """Whether snapshots go anywhere."""
        return self.shared_memory is not None or self.zeromq is not None


class SnapshotSink(Protocol):
    """A transport's writing end."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class Outlet:
    """One transport, opened when first written to. ``num_failed`` counts the snapshots that did not go out."""

    def __init__(self, name: str, connect: Callable[[], SnapshotSink], clock: Callable[[], float]) -> None:
        self.name = name
        self.num_failed = 0
        self._connect = connect
        self._clock = clock
        self._sink: SnapshotSink | None = None
        self._retry_s = float("-inf")
        self._fails = False

    def write(self, data: bytes) -> None:
        """Send the snapshot. A failure is counted, and logged when the one before went well. Raises nothing."""
        try:
            if self._sink is None:
                if self._clock() < self._retry_s:
                    self.num_failed += 1
                    return
                self._sink = self._connect()
            self._sink.write(data)
        except Exception as error:
            self._failed(error)
            return
        if self._fails:
            self._fails = False
            logger.warning("snapshots go out on %s again, after %d that did not", self.name, self.num_failed)

    def close(self) -> None:
        """Give the transport back. Raises nothing."""
        sink, self._sink = self._sink, None
        self._retry_s = float("inf")
        if sink is not None:
            try:
                sink.close()
            except Exception as error:
                logger.warning("%s was not closed: %s", self.name, error)

    def _failed(self, error: Exception) -> None:
        self.num_failed += 1
        if self._sink is None:  # a name or address that is wrong stays wrong; anything else may pass
            self._retry_s = float("inf") if isinstance(error, ConfigError) else self._clock() + RETRY_S
        if not self._fails:
            self._fails = True
            logger.warning("no snapshots on %s, serving goes on: %s", self.name, error)


def outlets(options: PublisherOptions, clock: Callable[[], float] = time.monotonic) -> list[Outlet]:
    """The transports that were asked for, none of them opened yet."""
    found = []
    if options.shared_memory is not None:
        segment = options.shared_memory

        def shared_memory() -> SnapshotSink:
            from headway.snapshot.shared_memory import SharedMemoryWriter

            return SharedMemoryWriter(segment)

        found.append(Outlet(f"shared memory {segment}", shared_memory, clock))
    if options.zeromq is not None:
        address = options.zeromq

        def zeromq() -> SnapshotSink:
            from headway.snapshot.zeromq import ZeroMQPublisher

            return ZeroMQPublisher(address)

        found.append(Outlet(f"ZeroMQ {address}", zeromq, clock))
    return found
