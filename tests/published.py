"""What stands around a simulated engine in tests without sockets: keeps what it publishes, and ignores the rest."""

from __future__ import annotations

from headway.engines.simulated import FinishReason
from headway.snapshot import wire
from headway.types import Snapshot


class Published:
    """Observer and sink of an engine; ``newest`` holds the bytes of its newest snapshot."""

    newest: bytes = b""

    def publish(self, snapshot: Snapshot) -> None:
        self.newest = wire.encode(snapshot)

    def first_token(self, ttft_s: float, queue_s: float) -> None: ...
    def preempted(self, num_requests: int) -> None: ...
    def step(self, prompt_tokens: int, output_tokens: int) -> None: ...
    def finished(self, reason: FinishReason) -> None: ...
