"""One instance of the fleet as it stands, and the requests booked on it.

Plain state with the rule of a resident's expected length; what moves it is in the other files of this room.
"""

from __future__ import annotations

import math

from msgspec import Struct

from headway._core import ReplayedEngine, TruthEngine
from headway.fleet.at_risk import AtRisk
from headway.types import Instance, Snapshot

#: Output tokens expected of a request of which nothing is known.
DEFAULT_OUTPUT_TOKENS = 256.0
#: Observed ÷ estimated TTFT at the 90 % quantile, for an instance whose profile does not say.
DEFAULT_TTFT_RATIO_P90 = 1.1
#: Over how long bookings are averaged to an arrival rate, seconds.
ARRIVAL_RATE_WINDOW_S = 10.0


class LedgerEntry(Struct):
    """A request that was sent to an instance and has not ended yet."""

    request_id: str
    index: int
    prompt_tokens: int
    predicted_output_tokens: float
    max_tokens: int | None
    priority: int
    booked_s: float
    predicted_ttft_s: float | None = None  # by a replay
    first_token_s: float | None = None
    engine_id: str | None = None  # its id inside the engine, once a snapshot showed it


class InstanceView:
    """One instance as it stands. Owned by :class:`FleetView`; read by estimators and the router.

    ``engine`` is None while nothing can be replayed; ``stale`` tells that state was there but is too old;
    ``snapshot`` is what it last showed, at ``shown_s``; ``problem`` says in words what is wrong with the state.
    ``clock_trusted`` is what the residual gate says of predicted and observed times: False keeps the least-work rule,
    which would pile queries up by a wrong clock, away from the instance.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.engine: ReplayedEngine | None = None
        self.stale = False
        self.problem: str | None = None
        self.clock_trusted = True
        self.snapshot: Snapshot | None = None
        self.mirrored: TruthEngine | None = None  # in the lab, what stands in for a snapshot
        self.is_live = False  # ``mirrored`` is the engine itself, looked at anew with every decision
        self.shown_s: float | None = None  # when the engine last showed itself
        self.snapshot_age_s: float | None = None
        self.num_outstanding = 0
        self.healthy = True
        self.draining = False
        self.arrival_rate_per_s = 0.0
        calibration = instance.calibration
        self.ttft_ratio_p90 = DEFAULT_TTFT_RATIO_P90 if calibration is None else calibration.ttft_ratio_p90
        self.ledger: dict[str, LedgerEntry] = {}
        self.unseen: dict[str, LedgerEntry] = {}  # those of the ledger that the engine has not shown yet
        self.at_risk: AtRisk | None = None  # those who stand to lose by a newcomer, for a policy that asks
        self.released: dict[str, float] = {}
        self.aged_to_s = 0.0
        self.fresh_until_s = 0.0
        self.snapshot_is_new = False
        self.rate_at_s = 0.0
        self.ledger_ids: dict[str, str | None] = {}  # engine id -> ledger id, of the requests last shown

    def arrival_rate_at(self, now: float) -> float:
        """Bookings per second, averaged over the last ten seconds or so; fades while nothing is booked."""
        return self.arrival_rate_per_s * math.exp(-max(now - self.rate_at_s, 0.0) / ARRIVAL_RATE_WINDOW_S)
