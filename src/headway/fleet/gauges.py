"""What an engine's own gauges say, and whether that agrees with what this router sent there.

A router that replays an engine from its own dispatches is right only while it is the only way in. Every vLLM tells how
many requests it has; more than were sent from here means that others send too. Gauges lag behind by a step or more, so
only what several readings in a row agree on counts. Where some of the load is unknown, requests of unknown content
stand in for it. This file refuses to explain a disagreement away: its size is always at hand.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from headway.types import EngineLimits, EngineRequest

#: What was sent or ended this shortly before a reading, seconds, may or may not show in it.
SETTLE_S = 3.0
#: So many readings in a row have to disagree, or to agree again.
NUM_READINGS = 3
#: Names of the requests that stand in for those of others; no client's id begins so.
_FOREIGN = "\0foreign-"


class Gauges(Struct, frozen=True):
    """What an engine's own ``/metrics`` said at ``read_s`` (monotonic). ``kv_cache_usage`` is a share in [0, 1].

    ``generated_tokens`` counts since the engine's start; ``num_blocks``, ``block_size`` and ``prefix_caching`` are of
    its cache. None where the engine does not tell.
    """

    num_running: float
    num_waiting: float
    kv_cache_usage: float
    read_s: float
    generated_tokens: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None

    def unlike(self, limits: EngineLimits) -> str | None:
        """What the engine says of its cache that ``limits`` do not, in words."""
        found = [
            f"{name} is {told}, not {known}"
            for name, told, known in (
                ("num_blocks", self.num_blocks, limits.num_blocks),
                ("block_size", self.block_size, limits.block_size),
                ("prefix_caching", self.prefix_caching, limits.prefix_caching),
            )
            if told is not None and told != known
        ]
        return f"the engine's limits differ from the configured ones: {', '.join(found)}" if found else None


class Agreement:
    """Follows how far gauges and the router's own count are apart, over the last few readings."""

    def __init__(self) -> None:
        self.num_foreign = 0
        self.num_missing = 0
        self.num_own = 0
        self._foreign: deque[int] = deque([0] * NUM_READINGS, maxlen=NUM_READINGS)
        self._missing: deque[int] = deque([0] * NUM_READINGS, maxlen=NUM_READINGS)

    def read(self, num_shown: float, *, num_settled: int, num_possible: int) -> None:
        """Take in a reading.

        ``num_settled`` of the router's requests had been there for :data:`SETTLE_S`, ``num_possible`` may have been.
        """
        self.num_own = num_possible
        self._foreign.append(max(0, round(num_shown) - num_possible))
        self._missing.append(max(0, num_settled - round(num_shown)))
        self.num_foreign = _settled(self.num_foreign, self._foreign)
        self.num_missing = _settled(self.num_missing, self._missing)

    @property
    def holds(self) -> bool:
        """Whether gauges and own count have agreed."""
        return self.num_foreign == 0 and self.num_missing == 0

    @property
    def is_hopeless(self) -> bool:
        """Whether more of the engine's requests came past this router than through it."""
        return self.num_foreign > self.num_own

    def in_words(self) -> str | None:
        """The disagreement, None while there is none."""
        if self.num_foreign:
            return f"{self.num_foreign} of its requests did not come through here"
        if self.num_missing:
            return f"{self.num_missing} requests sent there do not show in its gauges"
        return None


def _settled(known: int, readings: deque[int]) -> int:
    """What all readings agree on at least; between that and none the former word stands, but no more than seen."""
    least, most = min(readings), max(readings)
    return least if least > 0 else min(known, most)


def stand_ins(
    gauges: Gauges, agreement: Agreement, limits: EngineLimits, own: tuple[int, int, int], *, output_tokens: int
) -> tuple[list[EngineRequest], list[EngineRequest]]:
    """Running and waiting requests in the place of those that others sent; of them only number and room are known.

    ``own`` are this router's running requests, waiting requests and blocks held. The blocks that the gauges show beyond
    these are shared out evenly; a waiting one is taken to be as long as a running one, at least a block.
    """
    num_running = min(agreement.num_foreign, max(0, round(gauges.num_running) - own[0]))
    num_waiting = agreement.num_foreign - num_running
    used = round(gauges.kv_cache_usage * (limits.num_blocks - 1))
    blocks = max(1, (used - own[2]) // num_running) if num_running else 1
    tokens = min(blocks * limits.block_size, limits.max_model_len - 2)
    running = [
        EngineRequest(
            request_id=f"{_FOREIGN}{number}",
            prompt_tokens=tokens,
            computed_tokens=tokens,
            output_tokens=1,
            target_output_tokens=1 + output_tokens,
        )
        for number in range(num_running)
    ]
    waiting = [
        EngineRequest(
            request_id=f"{_FOREIGN}{num_running + number}", prompt_tokens=tokens, target_output_tokens=output_tokens
        )
        for number in range(num_waiting)
    ]
    return running, waiting
