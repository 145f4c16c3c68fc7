"""``bid_price``: queries wait in a central queue and go where they bring more than what they occupy is worth.

The adapter between a fleet in real time and :class:`~headway.policy.bid_control.BidControl`, which counts in periods.
A device is an instance: slots and KV tokens are its engine's limits, its speed the tokens that one sequence gains in a
period. What the engine shows beyond what was sent from here counts as taken. Source: arXiv 2607.03948, and
docs/bid-price.md for what is ours. It refuses a query that could not run anywhere by plan, instead of holding it for
good, and looks at no estimate of a first token: a query waits here, hardly there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import cast, get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.estimate.work import own_work
from headway.fleet import FleetView, InstanceView
from headway.policy.base import CHOOSABLE, HeldQuery, Release
from headway.policy.bid_admission import Waiting
from headway.policy.bid_control import BidControl, BidSettings, History
from headway.policy.bid_objective import Objective
from headway.policy.bid_plan import Devices
from headway.policy.central_queue import DEFAULT_HOSTED_SLOTS
from headway.policy.options import Options, number, word
from headway.policy.residents import num_requests_on
from headway.types import Candidate, Instance, Outcome

#: KV tokens of an instance whose engine is unknown: they never bind.
HOSTED_KV_TOKENS = 2**40
#: Seconds of a period where no step time is known (the paper's).
DEFAULT_PERIOD_S = 0.03
#: Periods planned ahead: some minutes of decoding, so that hardly an answer is predicted to be longer.
DEFAULT_HORIZON = 16_384
#: Columns spread over the horizon: measured to be the better ones where instances are unlike (docs/bid-price.md).
DEFAULT_HISTORY = "ahead"
ADMISSIONS, MODES = ("work_conserving", "threshold"), ("mixing", "disaggregated")
#: Options of the registered policy.
OPTIONS = (
    *("alpha", "beta", "gamma", "sigma", "zeta1", "zeta2", "quality", "latency_slo_s", "wait_slo_s"),
    *("history", "horizon", "stride", "step_size", "admission", "period_s", "mode"),
)


class _Row(Struct, frozen=True):
    """A held query by device: periods, KV tokens in the first, and what its answer is worth in [0, 1]."""

    durations: list[int]
    base_tokens: list[float]
    values: list[float]


class BidPricePolicy:
    """Releases by bid prices.

    ``mode`` ``mixing`` counts a first period in which the prompt is computed, ``disaggregated`` none: the prompt comes
    from elsewhere. ``admission`` ``threshold`` holds what no margin lets go even where there is room.

    Raises:
        ConfigError: an option out of range; ``.key`` names it.
    """

    name = "bid_price"
    needs_estimates = False

    def __init__(self, rng: np.random.Generator, options: Options) -> None:
        self._rng = rng
        defaults = Objective()
        weights = ("alpha", "beta", "gamma", "sigma", "zeta1", "zeta2", "quality", "latency_slo_s", "wait_slo_s")
        self._objective = Objective(**{key: number(options, key, getattr(defaults, key)) for key in weights})
        self._settings = BidSettings(
            horizon=_whole(options, "horizon", DEFAULT_HORIZON),
            stride=_whole(options, "stride", BidSettings().stride),
            step_size=number(options, "step_size", BidSettings().step_size),
            history=cast("History", word(options, "history", DEFAULT_HISTORY, get_args(History))),
            work_conserving=word(options, "admission", "work_conserving", ADMISSIONS) == "work_conserving",
        )
        self._first_periods = int(word(options, "mode", "mixing", MODES) == "mixing")
        self._period_s = number(options, "period_s", 0.0)
        self._control: BidControl | None = None
        self._rows: dict[str, _Row] = {}
        self._holds = False

    @property
    def control(self) -> BidControl:
        """Prices, plan and history, once bound to a fleet."""
        assert self._control is not None, "the router binds its policy"
        return self._control

    @property
    def period_s(self) -> float:
        """Seconds of a period."""
        return self._period_s

    def bind(self, fleet: FleetView) -> None:
        """Know the devices of this fleet, and begin with an empty plan."""
        instances = [view.instance for view in fleet.views]
        steps_s = [step_s for one in instances if (step_s := _full_step_s(one)) is not None]
        self._period_s = self._period_s or (median(steps_s) if steps_s else DEFAULT_PERIOD_S)
        self._columns = {one.id: number for number, one in enumerate(instances)}
        self._speeds = [self._period_s / (_full_step_s(one) or self._period_s) for one in instances]
        self._longest = [None if one.limits is None else one.limits.max_model_len for one in instances]
        devices = Devices(
            max_num_seqs=tuple(
                DEFAULT_HOSTED_SLOTS if one.limits is None else one.limits.max_num_seqs for one in instances
            ),
            kv_tokens=tuple(_kv_tokens(one) for one in instances),
            tokens_per_period=tuple(self._speeds),
        )
        self._control = BidControl(devices, self._settings, self._rng)
        self._rows.clear()

    def observe(self, outcome: Outcome, now: float) -> None:
        """The query has left its instance, however it ended: what was planned of it is free."""
        self.control.ended(outcome.query_id, self._period(now))

    def never_fits(self, held: HeldQuery) -> str | None:
        """Why a query could not run by plan on any instance that may take it; None where it could."""
        row = self._row(held)
        places = [self._columns[one.instance_id] for one in held.candidates if one.verdict in CHOOSABLE]
        if not places:
            return None
        why = self.control.never_fits(
            np.array(places), np.array(row.durations)[places], np.array(row.base_tokens)[places]
        )
        return None if why is None else f"the request {why}"

    def release(self, queue: Sequence[HeldQuery], fleet: FleetView, now: float) -> list[Release]:
        """What the prices let go now. The queue is looked at only while a slot is free by plan."""
        control, period = self.control, self._period(now)
        self._reconcile(fleet, period)
        self._holds = len(queue) > 0
        if not self._holds or not control.has_room(period):
            return []
        known = set(self._rows)
        rows = [self._row(held) for held in queue]
        control.arrived(sum(held.query.id not in known for held in queue), period)
        self._rows = {held.query.id: row for held, row in zip(queue, rows, strict=True)}
        waiting = Waiting(
            [held.query.id for held in queue],
            np.array([row.durations for row in rows]),
            np.array([row.base_tokens for row in rows]),
            self._rewards(queue, rows, now),
            _priorities(queue),
        )
        admitted = control.route(period, waiting)
        names = list(self._columns)
        for one in admitted:
            self._rows.pop(queue[one.row].query.id, None)
        return [
            Release(
                queue[one.row].query.id, names[one.device], f"its margin of {one.margin:.3f} was the best that fitted"
            )
            for one in admitted
        ]

    def next_release_s(self, now: float) -> float | None:
        """The next period while queries are held: what does not fit now may fit then."""
        if not self._holds:
            return None
        soon = (self._period(now) + 1) * self._period_s
        return soon if soon > now else soon + self._period_s

    def why_held(self, held: HeldQuery, now: float) -> str:
        """What it waits for."""
        if not any(one.verdict in CHOOSABLE for one in held.candidates):
            return "no instance can take it now"
        if self._settings.work_conserving:
            return "no instance has room for all that it is planned to hold"
        return "what it would occupy is worth more than what it brings, or no instance has room for all of it"

    def _period(self, now: float) -> int:
        return math.floor(now / self._period_s)

    def _row(self, held: HeldQuery) -> _Row:
        """What the query would occupy on each device; it does not change while it is held."""
        known = self._rows.get(held.query.id)
        if known is not None:
            return known
        num = len(self._columns)
        row = _Row([1] * num, [0.0] * num, [0.0] * num)  # where it may not go, nothing of this counts
        for one in held.candidates:
            device = self._columns[one.instance_id]
            prompt_tokens, outputs = one.prompt_tokens or 1, self._output_tokens(one, device)
            row.durations[device] = self._first_periods + math.ceil(outputs / self._speeds[device])
            row.base_tokens[device] = float(prompt_tokens + 1 - self._first_periods)
            row.values[device] = 0.0 if one.utility is None else one.utility
        return row

    def _output_tokens(self, candidate: Candidate, device: int) -> float:
        """Predicted, within what the engine's context leaves; at least one."""
        outputs, longest = candidate.output_tokens or 1.0, self._longest[device]
        if longest is not None:
            outputs = min(outputs, longest - (candidate.prompt_tokens or 1))
        return max(outputs, 1.0)

    def _rewards(self, queue: Sequence[HeldQuery], rows: Sequence[_Row], now: float) -> NDArray[np.float64]:
        waited = np.array([max(now - held.held_since_s, 0.0) for held in queue])[:, None] / self._period_s
        default_s = self._objective.wait_slo_s
        targets_s = [default_s if (own := held.query.ttft_target_s) is None else own for held in queue]
        rewards = self._objective.rewards(
            np.array([row.durations for row in rows]),
            waited,
            reward_periods=self._settings.reward_periods,
            period_s=self._period_s,
            wait_slo_s=np.array(targets_s)[:, None],
            values=np.array([row.values for row in rows]),
        )
        allowed = np.zeros(rewards.shape, bool)
        for row, held in enumerate(queue):
            for one in held.candidates:
                if one.verdict in CHOOSABLE:
                    allowed[row, self._columns[one.instance_id]] = True
        return np.where(allowed, rewards, -np.inf)

    def _reconcile(self, fleet: FleetView, period: int) -> None:
        """Forget what is booked no more, and count what the engines show beyond the plan."""
        control = self.control
        for request in control.plan.requests():
            if str(request) not in fleet:
                control.ended(request, period)
        control.plan.catch_up(period)  # else who outlives the prediction would count as another's
        slots, tokens = control.plan.window(period)
        planned = zip(fleet.views, slots[:, 0].tolist(), tokens[:, 0].tolist(), strict=True)
        others = [_beyond(view, *here) for view, *here in planned]
        control.occupied_by_others([one[0] for one in others], [one[1] for one in others])


def _beyond(view: InstanceView, slots: float, tokens: float) -> tuple[float, float]:
    """Slots and KV tokens that an engine shows taken beyond those planned here, at least 0."""
    extra_slots = max(num_requests_on(view) - slots, 0.0)
    engine, limits = view.engine, view.instance.limits
    if engine is None or view.stale or limits is None:
        return extra_slots, 0.0
    held = (limits.num_blocks - 1 - engine.free_blocks) * limits.block_size
    return extra_slots, max(held - tokens, 0.0) if extra_slots else 0.0


def _priorities(queue: Sequence[HeldQuery]) -> NDArray[np.int64] | None:
    found = np.array([held.query.priority for held in queue])
    return None if (found == found[0]).all() else found


def _full_step_s(instance: Instance) -> float | None:
    """Seconds of a decode step at half of the slots and half of the memory; None without a step time."""
    if instance.step_time is None or instance.limits is None:
        return None
    work = own_work(instance.step_time, instance.limits)
    return work.step_s + 0.5 * (work.decode_token_s * work.max_num_seqs + work.decode_context_s * work.kv_tokens)


def _kv_tokens(instance: Instance) -> int:
    limits = instance.limits
    return HOSTED_KV_TOKENS if limits is None else (limits.num_blocks - 1) * limits.block_size


def _whole(options: Options, key: str, default: int) -> int:
    value = number(options, key, default, minimum=1.0)
    if value != int(value):
        raise ConfigError(f"must be a whole number, not {value!r}", key=f"routing.{key}")
    return int(value)
