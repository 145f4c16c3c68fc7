"""What a step log says of each request: when it came, when it was first scheduled, when its first token was there.

Times come from the engine's own log and are tied to the monotonic clock of client and gateway by one request that a
snapshot showed. The first token is there at the end of the batch that computes the last of its prompt.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from headway.calibrate.read_log import read_batches
from headway.engines.step_log import LoggedBatch


class EngineTimes(Struct, frozen=True, kw_only=True):
    """One request in the engine. Times are seconds on the monotonic clock; batches are counted from the log's first.

    ``seen_s`` is the start of the batch ``seen`` that was the first to see it, ``admitted`` the first that held tokens
    of it, ``first_token`` the one that computed the last of its prompt and ended at ``first_token_s``.
    """

    arrival_s: float
    seen: int
    seen_s: float
    admitted: int
    first_token: int
    first_token_s: float

    @property
    def ttft_s(self) -> float:
        """From the request's arrival at the engine's server to the end of the batch that gave its first token."""
        return self.first_token_s - self.arrival_s


def client_id(engine_id: str) -> str:
    """A request's id as its client knows it: vLLM puts its own before and behind (``cmpl-ID-0-1234abcd``)."""
    parts = engine_id.split("-")
    return "-".join(parts[1:-2])


def engine_times(log: Path, tied_id: str, tied_s: float) -> tuple[dict[str, EngineTimes], float]:
    """Every request of the log by its client's id, and the log's zero on the monotonic clock.

    ``tied_id`` is a request of the log as the engine names it, and ``tied_s`` its arrival on the monotonic clock.
    """
    _, batches = read_batches(log)
    arrivals = {one.request_id: one.arrival_s for batch in batches for one in batch.arrivals}
    zero_s = tied_s - arrivals[tied_id]
    return times_of(batches, zero_s), zero_s


def times_of(batches: list[LoggedBatch], zero_s: float) -> dict[str, EngineTimes]:
    """Every request that got its first token."""
    found: dict[str, EngineTimes] = {}
    seen: dict[str, tuple[int, float, int]] = {}
    admitted: dict[str, int] = {}
    computed: dict[str, int] = {}
    for index, batch in enumerate(batches):
        for one in batch.arrivals:
            seen[one.request_id] = (index, one.arrival_s, one.prompt_tokens)
        for name in batch.preempted:
            computed[name] = 0
        computed.update(batch.cached)
        for name, tokens in batch.scheduled:
            admitted.setdefault(name, index)
            computed[name] = computed.get(name, 0) + tokens
            if name in seen and client_id(name) not in found and computed[name] >= seen[name][2]:
                at, arrival_s, _ = seen[name]
                found[client_id(name)] = EngineTimes(
                    arrival_s=arrival_s + zero_s, seen=at, seen_s=batches[at].start_s + zero_s,
                    admitted=admitted[name], first_token=index,
                    first_token_s=batch.start_s + batch.time_s + zero_s,
                )  # fmt: skip
    return found
