"""One instance of the fleet as it stands, and the requests booked on it.

Plain state with the rule of a resident's expected length; what moves it is in the other files of this room.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct

from headway._core import ReplayedEngine, TruthEngine
from headway.fleet.at_risk import AtRisk
from headway.fleet.gauges import Agreement, Gauges
from headway.fleet.prefix import PrefixStore
from headway.types import Instance, Snapshot

if TYPE_CHECKING:
    from headway.fleet.shadow import Shadow

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
    raw_ttft_s: float | None = None  # by a replay, before any correction
    first_token_s: float | None = None
    engine_id: str | None = None  # its id inside the engine, once a snapshot showed it
    is_streamed: bool = True  # else nothing is seen of it before its end
    cached_tokens: int = 0  # of its prompt, that the engine's prefix cache should hold
    shared_blocks: int = 0  # of these, in the engine's blocks, what other requests under way held when it was booked
    prefix_blocks: tuple[int, ...] = ()
    num_events: int = 0  # content events of its stream so far
    last_event_s: float = -math.inf


class InstanceView:
    """One instance as it stands. Owned by :class:`FleetView`; read by estimators and the router.

    ``engine`` is None while nothing can be replayed; ``stale`` tells that state was there but is too old;
    ``snapshot`` is what it last showed, at ``shown_s``; ``problem`` says in words what is wrong with the state.
    ``source`` is what a replay's estimate is called: ``replay`` from snapshots, ``shadow`` from this router's own
    dispatches, ``shadow_widened`` where gauges show requests that did not come through here.
    ``clock_scale`` and ``clock_trusted`` are what observed times to first token say of the instance's step times: by
    how much replayed times are stretched, and whether they may be used at all.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.engine: ReplayedEngine | None = None
        self.stale = False
        self.problem: str | None = None
        self.source = "replay"
        self.clock_scale = 1.0
        self.clock_trusted = True
        self.snapshot: Snapshot | None = None
        self.mirrored: TruthEngine | None = None  # in the lab, what stands in for a snapshot
        self.is_live = False  # ``mirrored`` is the engine itself, looked at anew with every decision
        self.shown_s: float | None = None  # when the engine last showed itself
        self.snapshot_age_s: float | None = None
        self.num_outstanding = 0
        self.healthy = True
        self.draining = False
        self.resting = False  # it said when to come again, and that time has not come
        self.arrival_rate_per_s = 0.0
        calibration = instance.calibration
        self.ttft_ratio_p90 = DEFAULT_TTFT_RATIO_P90 if calibration is None else calibration.ttft_ratio_p90
        self.ledger: dict[str, LedgerEntry] = {}
        self.unseen: dict[str, LedgerEntry] = {}  # those of the ledger that the engine has not shown yet
        self.at_risk: AtRisk | None = None  # those who stand to lose by a newcomer, for a policy that asks
        self.unanswered: dict[str, LedgerEntry] = {}  # those of which nothing came yet, the eldest first
        self.answered_s: float | None = None  # when a first token last came
        self.released: dict[str, float] = {}
        self.aged_to_s = 0.0
        self.batch_ends_s = -math.inf  # of the batch that the last snapshot shows in flight, as replayed
        self.batch_s = 0.0
        self.fresh_until_s = 0.0
        self.snapshot_is_new = False
        self.rate_at_s = 0.0
        self.ledger_ids: dict[str, str | None] = {}  # engine id -> ledger id, of the requests last shown
        self.gauges: Gauges | None = None
        self.generated_tokens = 0.0  # by the gauges, since the engine's start
        self.agreement = Agreement()  # of the gauges with the ledger
        self.shadow: Shadow | None = None
        self.look_s = 0.0  # when the shadow may be looked at again
        self.prefixes: PrefixStore | None = None  # of instances whose limits say prefix_caching

    def waits_for_room(self, prompt_tokens: int) -> bool:
        """Whether a newcomer waits until others end, for want of blocks or slots; False where nothing is replayed.

        How long it waits then says how long their answers became, and next to nothing of the engine's clock.
        """
        engine, limits = self.engine, self.instance.limits
        if engine is None or limits is None:
            return False
        if engine.num_running + engine.num_waiting >= limits.max_num_seqs:
            return True
        return engine.remaining_prefill_tokens + prompt_tokens > engine.free_blocks * limits.block_size

    def arrival_rate_at(self, now: float) -> float:
        """Bookings per second, averaged over the last ten seconds or so; fades while nothing is booked."""
        return self.arrival_rate_per_s * math.exp(-max(now - self.rate_at_s, 0.0) / ARRIVAL_RATE_WINDOW_S)
