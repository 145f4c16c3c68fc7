"""Bid-price control of a central queue: release what brings more than what it will occupy is worth.

In each routing period the prices take some steps (``bid_dual.py``) on columns of the history, every waiting request
gets a margin ``r − a·p`` on every device, and the best go while their planned span fits (``bid_admission.py``,
``bid_plan.py``). Source: arXiv 2607.03948, with two departures that docs/bid-price.md measures: the plan follows what
really happens, and capacity that no margin claims is not left idle while something fits it. It knows periods, tokens
and rewards alone; ``bid_price.py`` brings it to a fleet, the lab to simulated devices.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.policy.bid_admission import Admission, Room, Waiting, admit
from headway.policy.bid_dual import Columns, DualPrices
from headway.policy.bid_history import ColumnHistory, RateShift
from headway.policy.bid_plan import Devices, PlannedOccupancy

Grid = NDArray[np.float64]
Index = NDArray[np.int64]

History = Literal["period", "request", "ahead"]


class BidSettings(Struct, frozen=True, kw_only=True):
    """How far ahead is planned and how prices are learned.

    ``horizon`` is in periods, priced at every ``stride``-th; rewards are counted in ``reward_periods``. ``num_steps``
    subgradient steps of ``step_size`` on ``minibatch`` columns each are taken per routing period. ``history`` says
    which columns there are, of which the newest ``window`` count: ``period``, the best of each period (the paper's);
    ``request``, each request's best when it is first seen (the released code's); ``ahead``, each request where it is
    best at the step, spread over the horizon and as many as are to come: the first two begin all of them now.
    ``threshold`` is what a margin must exceed; with ``work_conserving`` the others take what is then still free, best
    margin first. ``num_columns`` is N, for how many columns that begin now the capacity is: the slots of all devices by
    default. ``reset_on_rise`` drops old columns when requests begin to come faster; ``reconcile`` lets the plan follow
    what really ends.

    Raises:
        ConfigError: a number out of range; ``.key`` names it.
    """

    horizon: int = 2048
    reward_periods: int = 1024
    stride: int = 16
    num_steps: int = 5
    minibatch: int = 64
    step_size: float = 1e-3
    history: History = "period"
    window: int = 512
    threshold: float = 0.0
    work_conserving: bool = True
    num_columns: float | None = None
    reset_on_rise: bool = True
    reconcile: bool = True

    def __post_init__(self) -> None:
        for key in ("horizon", "reward_periods", "stride", "minibatch", "window"):
            if getattr(self, key) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, key)}", key=f"routing.{key}")
        if self.num_steps < 0:
            raise ConfigError(f"must be at least 0, not {self.num_steps}", key="routing.num_steps")
        if self.stride > self.horizon:
            raise ConfigError(f"must not exceed the horizon of {self.horizon}, not {self.stride}", key="routing.stride")
        if not 0.0 < self.step_size < float("inf"):
            raise ConfigError(f"must be above 0 and finite, not {self.step_size!r}", key="routing.step_size")
        if self.num_columns is not None and not 0.0 < self.num_columns < float("inf"):
            raise ConfigError(f"must be above 0 and finite, not {self.num_columns!r}", key="routing.num_columns")
        if self.history not in get_args(History):
            raise ConfigError(
                f"must be one of {', '.join(get_args(History))}, not {self.history!r}", key="routing.history"
            )


class BidControl:
    """Prices, plan and history of one pool; moved by :meth:`route` once per routing period."""

    def __init__(self, devices: Devices, settings: BidSettings, rng: np.random.Generator) -> None:
        self.devices, self.settings = devices, settings
        self._rng = rng
        num_priced = -(-settings.horizon // settings.stride)
        self._others = np.zeros((2, len(devices)))
        self.plan = PlannedOccupancy(devices, num_priced * settings.stride, follow=settings.reconcile)
        self.prices = DualPrices(devices, num_periods=num_priced, stride=settings.stride)
        self._devices = np.arange(len(devices))
        self.history = ColumnHistory(settings.window, len(devices) if settings.history == "ahead" else 1)
        self._rates = RateShift(settings.window)
        self._slots = np.array(devices.max_num_seqs, np.float64)
        self._kv_tokens = np.array(devices.kv_tokens, np.float64)
        self._speeds = devices.speeds
        self._num_columns = float(sum(devices.max_num_seqs)) if settings.num_columns is None else settings.num_columns
        self._seen: dict[Hashable, None] = {}
        self._period, self._learned = 0, -1
        #: How often old columns were dropped because requests came faster.
        self.num_resets = 0

    def never_fits(self, devices: Index, durations: Index, base_tokens: Grid) -> str | None:
        """Why a request could not run on any of ``devices`` even alone, or None; the arrays run parallel.

        Its planned span is what counts: longer than the horizon, or growing beyond the memory.
        """
        if (durations > self.settings.horizon).all():
            return (
                f"is expected to run for {durations.min()} periods, and {self.settings.horizon} are planned ahead: "
                "raise routing.horizon, or ask for fewer tokens"
            )
        finals = base_tokens + self._speeds[devices] * (durations - 1)
        sizes = self._kv_tokens[devices]
        if (finals > sizes).all():
            return f"would grow to {finals.min():.0f} KV tokens, and the largest instance holds {sizes.max():.0f}"
        return None

    def arrived(self, num: int, period: int) -> None:
        """Count arrivals, for the arrival rate."""
        if self._rates.arrived(num, period) and self.settings.reset_on_rise:
            self.history.forget_before(period - self._rates.window)
            self.num_resets += 1

    def occupied_by_others(self, slots: Sequence[float], tokens: Sequence[float]) -> None:
        """Slots and KV tokens per device that are taken by what was never committed here, for as long as this says."""
        self._others[0], self._others[1] = slots, tokens

    def ended(self, request: Hashable, period: int) -> None:
        """The request has left its device before ``period``."""
        self.plan.end(request, period)

    def has_room(self, period: int) -> bool:
        """Whether any device has a slot that is not taken by plan. Nothing can go where this is False. O(devices)."""
        self._advance(period)
        return bool((self._free_slots(period) >= 1.0).any())

    @property
    def may_change(self) -> bool:
        """Whether what is held now may go in a later period without anything having ended in between."""
        return not (self.settings.work_conserving and self.settings.reconcile)

    def route(self, period: int, waiting: Waiting) -> list[Admission]:
        """Move the prices, once per period, and commit what goes now, best margin first. ``period`` never falls."""
        learning, settings = period > self._learned, self.settings
        self._advance(period)
        if not waiting.requests:
            return []
        num_priced = -(-waiting.durations // settings.stride)
        if learning:
            self._learned = period
            self._learn(period)
        margins = waiting.rewards - self.prices.charges(num_priced, waiting.base_tokens)
        if learning:
            self._remember(period, waiting, num_priced, margins)
        if not settings.work_conserving:
            margins = np.where(margins > settings.threshold, margins, -np.inf)
        return admit(self.plan, period, waiting, margins, Room(self._free_slots(period), self._others[1]))

    def _advance(self, period: int) -> None:
        stride = self.settings.stride
        self.prices.advance(period // stride - self._period // stride)
        self._period = period
        self.plan.catch_up(period)

    def _free_slots(self, period: int) -> Grid:
        found: Grid = self._slots - self._others[0] - self.plan.window(period)[0][:, 0]
        return found

    def _learn(self, period: int) -> None:
        num, settings = len(self.history), self.settings
        if num == 0 or settings.num_steps == 0:
            return
        picks = self._rng.integers(num, size=(settings.num_steps, settings.minibatch))
        starts, num_columns = None, self._num_columns
        if settings.history == "ahead":
            starts = self._rng.integers(self.prices.num_periods, size=picks.shape)
            num_columns = self.history.rate(period) * settings.horizon
        slots, tokens = (grid[:, :: settings.stride] for grid in self.plan.window(period))
        free_slots = (self._slots - self._others[0])[:, None] - slots
        free_tokens = (self._kv_tokens - self._others[1])[:, None] - tokens
        scarcity = self.prices.scarcity(free_slots, free_tokens, num_columns)
        self.prices.steps(self.history.columns(), picks, scarcity, settings.step_size, starts)

    def _remember(self, period: int, waiting: Waiting, num_priced: Index, margins: Grid) -> None:
        if self.settings.history == "period":
            rows = [int(margins.argmax()) // margins.shape[1]]
        else:
            seen = self._seen
            rows = [row for row, request in enumerate(waiting.requests) if request not in seen]
            self._seen = dict.fromkeys(waiting.requests)
        for row in rows:
            device = int(margins[row].argmax())
            if margins[row, device] == -np.inf:
                continue
            column = Columns(self._devices, num_priced[row], waiting.base_tokens[row], waiting.rewards[row])
            if self.settings.history != "ahead":  # on the device that was best when it was seen, for good
                own = (part[device if len(part) > 1 else 0] for part in column[1:])
                column = Columns(np.array(device), *own)
            self.history.add(column, period)
