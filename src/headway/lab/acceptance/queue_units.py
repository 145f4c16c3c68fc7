"""One run through the central queue of the acceptance table: which load, which devices, which dispatcher.

The setting is that of arXiv 2607.03948: four decode devices of 29 slots and 118,784 KV tokens, one period per token,
prompts and outputs of a recorded trace that fit 4,096 tokens. The trace is not part of the package: ``HEADWAY_DATA``
names the directory that holds it, else a directory ``data`` here or beside is taken.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.steps import data_directory
from headway.lab.queue_bound import fluid_values
from headway.lab.queue_device import ABSTRACT, DeviceSpec, IterationTime
from headway.lab.queue_dispatch import PERIOD_S, AtOnce, BidPriceQueue, CentralQueue
from headway.lab.queue_load import AZURE_CONVERSATIONS, CONTEXT_TOKENS, Lengths, QueueLoad, queue_load, trace_lengths
from headway.lab.queue_prices import PriceWatch
from headway.lab.queue_score import QueueScore, queue_score
from headway.lab.queue_sim import Dispatcher, play
from headway.lab.truth import stream
from headway.policy.bid_control import BidSettings, History
from headway.policy.bid_objective import LATENCY_SLO_S, WAIT_SLO_S, Objective
from headway.policy.registry import make_choosing_policy

NUM_DEVICES, NUM_SLOTS, KV_TOKENS = 4, 29, 118_784
#: An iteration in seconds, which takes a period of 30 ms when the batch is full of average contexts; with prompts too.
_CLOCK = IterationTime(fixed=0.018, per_sequence=0.0002, per_token=2e-7, per_prompt_token=2e-5)
#: KV tokens of a device where memory is to be the scarcer resource.
CUT_KV_TOKENS = 27_000
#: Requests per run of the paper's setting, and of the rows that are ours.
NUM_REQUESTS, NUM_OWN_REQUESTS = 12_000, 3_000
_WAIT_PERIODS, _LATENCY_PERIODS = WAIT_SLO_S / PERIOD_S, LATENCY_SLO_S / PERIOD_S

#: Policies of the registry that send at once, the central queue without and with a plan, and bid prices.
DispatcherName = Literal[
    "round_robin",
    "random",
    "shortest_queue",
    "power_of_two",
    "central_fcfs",
    "central_shortest_first",
    "planned",
    "bid_price",
]


class Weights(NamedTuple):
    """α, β, γ, σ, ζ1, ζ2 as the paper orders them, and the weight of the answer's value."""

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    sigma: float = 0.0
    zeta1: float = 0.0
    zeta2: float = 0.0
    quality: float = 0.0


LATENCY, TAIL, THROUGHPUT = Weights(beta=1.0, gamma=1.0), Weights(zeta1=1.0, zeta2=1.0), Weights(alpha=1.0)
VALUE = Weights(quality=1.0)


class QueueResult(Struct, frozen=True, kw_only=True):
    """Figures of one run. Loads are ρ of slots and of memory, ``service`` the mean periods that an answer takes, prices
    mean charges of a request after the first fifth of the run."""

    score: QueueScore
    slot_load: float
    memory_load: float
    service: float
    slot_price: float
    memory_price: float
    num_resets: int
    fluid_value: float | None


class QueueRun(Struct, frozen=True, kw_only=True):
    """One dispatcher on one load. ``rate`` is per period; ``rate_after`` holds from the middle of the paper's run on.

    ``split`` divides the trace's totals between prompt and output, at the slots' load of the trace itself. ``planned``
    is ``bid_price`` without prices: rewards and the planned occupancy alone. ``in_seconds`` runs devices by a clock of
    their own instead of whole periods, figures then being in seconds; ``mixing`` lets them compute the prompts too.
    """

    data: str
    dispatcher: DispatcherName
    rate: float
    seed: int
    num_requests: int
    kv_tokens: int = KV_TOKENS
    weights: Weights = LATENCY
    history: History = "period"
    length_error: float = 0.0
    rate_after: float | None = None
    split: tuple[int, int] | None = None
    has_values: bool = False
    in_seconds: bool = False
    mixing: bool = False
    reset_on_rise: bool = True
    reconcile: bool = True
    work_conserving: bool = True

    @property
    def cost(self) -> float:
        """Prices take most of the time."""
        return self.num_requests * (30.0 if self.dispatcher in ("bid_price", "planned") else 2.0)

    def run(self) -> QueueResult:
        """The figures of the run."""
        load = self._load()
        unit = PERIOD_S if self.in_seconds else 1.0
        clock = _CLOCK if self.in_seconds else ABSTRACT
        spec = DeviceSpec(max_num_seqs=NUM_SLOTS, kv_tokens=self.kv_tokens, time=clock, mixing=self.mixing)
        watch = PriceWatch(every=100.0 * unit)
        dispatcher = self._dispatcher(watch)
        outcomes = play(load, [spec] * NUM_DEVICES, dispatcher)
        slot_price, memory_price, num_resets = 0.0, 0.0, 0
        if isinstance(dispatcher, BidPriceQueue) and dispatcher.control is not None:
            slot_price, memory_price = watch.series().means(after=float(load.arrivals[-1]) / 5.0)
            num_resets = dispatcher.control.num_resets
        fluid = None if load.values is None else fluid_values(load, np.array([NUM_SLOTS] * NUM_DEVICES))
        return QueueResult(
            score=queue_score(outcomes, wait_slo=_WAIT_PERIODS * unit, latency_slo=_LATENCY_PERIODS * unit),
            slot_load=load.slot_load(NUM_DEVICES * NUM_SLOTS) * unit,
            memory_load=load.memory_load(NUM_DEVICES * self.kv_tokens) * unit,
            service=float(load.output_tokens.mean()) * unit,
            slot_price=slot_price,
            memory_price=memory_price,
            num_resets=num_resets,
            fluid_value=fluid,
        )

    def _load(self) -> QueueLoad:
        unit = PERIOD_S if self.in_seconds else 1.0
        lengths, rate = _lengths(self.data), self.rate / unit
        if self.split is not None:
            whole = float(lengths.output_tokens.mean())
            lengths = lengths.split(*self.split)
            rate *= whole / float(lengths.output_tokens.mean())
        load = queue_load(
            lengths,
            num_requests=self.num_requests,
            rate=rate,
            seed=self.seed,
            length_error=self.length_error,
            rate_after=None if self.rate_after is None else self.rate_after / unit,
            shift_at=self.num_requests / rate / 2.0,
            whole_periods=not self.in_seconds,
        )
        return load if not self.has_values else replace(load, values=two_models(self.num_requests, self.seed))

    def _dispatcher(self, watch: PriceWatch) -> Dispatcher:
        rng = stream(self.seed, "queue policy")
        if self.dispatcher == "central_fcfs":
            return CentralQueue("fcfs")
        if self.dispatcher == "central_shortest_first":
            return CentralQueue("shortest_first")
        if self.dispatcher not in ("bid_price", "planned"):
            return AtOnce(make_choosing_policy(self.dispatcher, rng=rng))
        settings = BidSettings(
            history=self.history,
            reset_on_rise=self.reset_on_rise,
            reconcile=self.reconcile,
            work_conserving=self.work_conserving,
        )
        if self.split is not None:  # answers up to the whole context
            settings = replace(settings, horizon=CONTEXT_TOKENS, reward_periods=CONTEXT_TOKENS)
        if self.dispatcher == "planned":
            settings = replace(settings, num_steps=0)
        period = PERIOD_S if self.in_seconds else 1.0
        return BidPriceQueue(Objective(**self.weights._asdict()), settings, rng, period=period, watch=watch)


def two_models(num_requests: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """What answers are worth on the four devices: Beta(6, 1.5) on the first two, less a uniform share on the others."""
    rng = stream(seed, "queue values")
    strong = rng.beta(6.0, 1.5, num_requests)
    weak = strong * (1.0 - rng.random(num_requests))
    return np.stack((strong, strong, weak, weak), axis=1)


def trace_directory() -> str | None:
    """The data directory that holds the trace, if there is one."""
    found = data_directory(Path(AZURE_CONVERSATIONS))
    return None if found is None else str(found)


def scaled(settings: Settings, num_requests: int) -> int:
    """Requests per run at this size of the table."""
    share = settings.num_queries / 10_000
    return max(40, round(num_requests * (share if settings.name == "full" else share / 2.5)))


@lru_cache(maxsize=1)
def _lengths(data: str) -> Lengths:
    return trace_lengths(Path(data) / AZURE_CONVERSATIONS)
