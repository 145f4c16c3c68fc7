"""A14, A17, A21: what routing costs, whether weights steer, and whether prices tell which resource is scarce."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.queue_rows import Figure, Runs, absent, latency, queue, slo_missed, tokens, told, units
from headway.lab.acceptance.queue_units import (
    CUT_KV_TOKENS,
    LATENCY,
    NUM_OWN_REQUESTS,
    NUM_REQUESTS,
    TAIL,
    THROUGHPUT,
    QueueRun,
    Weights,
    trace_directory,
)
from headway.lab.acceptance.settings import Settings
from headway.lab.acceptance.table import Group, Results, row
from headway.lab.intervals import Interval, paired_interval, t_interval
from headway.lab.queue_cost import routing_ms
from headway.policy.bid_control import BidSettings, History

_RATES = (0.4, 0.5)
#: Devices, and the most CPU that a routing period may take on so many, in milliseconds.
_ROUTED = {4: 0.3, 64: 3.0}
_NUM_PERIODS, _QUICK_PERIODS = 400, 60
_HISTORIES: tuple[History, ...] = ("period", "ahead")
#: Weights of the wait objective beside the latency weights.
_WAIT_WEIGHTS = (0.0, 0.05, 0.1, 0.4, 0.8)
_MIN_SPEARMAN = 0.9
_LIGHT, _NEGLIGIBLE_PRICE = 0.1, 0.01


# ---- A14 -------------------------------------------------------------------------------------------------------------


class RoutingCost(Struct, frozen=True, kw_only=True):
    """CPU time of routing periods with 200 waiting, on so many devices."""

    num_devices: int
    num_periods: int
    seed: int
    history: History = "period"

    @property
    def cost(self) -> float:
        """A moment, but without others beside it."""
        return math.inf

    def run(self) -> float:
        """The median, in milliseconds."""
        settings = BidSettings(history=self.history)
        return routing_ms(self.num_devices, num_periods=self.num_periods, seed=self.seed, settings=settings)


def _costs(settings: Settings, num_devices: int, history: History) -> list[RoutingCost]:
    num_periods = _QUICK_PERIODS if settings.name == "quick" else _NUM_PERIODS
    return [
        RoutingCost(num_devices=num_devices, num_periods=num_periods, seed=seed, history=history)
        for seed in settings.seeds
    ]


def _all_costs(settings: Settings) -> list[RoutingCost]:
    return [one for num in _ROUTED for history in _HISTORIES for one in _costs(settings, num, history)]


def _cost_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rows = []
    quick = "QUICK, reduced: " if settings.name == "quick" else ""
    for history in _HISTORIES:
        for num, most_ms in _ROUTED.items():
            found = t_interval([results.of(one) for one in _costs(settings, num, history)])
            judged, words = history == "period", {"period": "the paper's columns", "ahead": "columns spread ahead"}
            setting = (
                f"{quick}{num} devices, 200 waiting of mean length 200, horizon 2,048, {words[history]}, "
                f"5 steps of 64; {len(settings.seeds)} seeds"
            )
            claim = "median CPU time of a routing period, ms: rewards, price steps, margins, admission, plan"
            name = f"A14-{num}{'' if judged else '-ahead'}"
            rows.append(row(name, claim, setting, found, at_most=most_ms if judged else None))
    return rows


# ---- A17 -------------------------------------------------------------------------------------------------------------


_SETS: tuple[tuple[str, Weights, str, Figure], ...] = (
    ("latency", LATENCY, "mean latency", lambda one: -latency(one)),
    ("tail", TAIL, "objectives met", lambda one: -slo_missed(one)),
    ("throughput", THROUGHPUT, "output tokens per period", tokens),
)


def _weighted(settings: Settings, rate: float, weights: Weights) -> QueueRun:
    return replace(queue(settings, rate), weights=weights)


def _waiting(settings: Settings, rate: float, zeta2: float) -> QueueRun:
    weights = LATENCY._replace(zeta2=zeta2)
    return replace(queue(settings, rate, num_requests=NUM_OWN_REQUESTS), weights=weights)


def _weight_runs(settings: Settings) -> list[QueueRun]:
    sets = [_weighted(settings, rate, weights) for rate in _RATES for _, weights, _, _ in _SETS]
    return [*sets, *(_waiting(settings, rate, zeta2) for rate in _RATES for zeta2 in _WAIT_WEIGHTS)]


def _weight_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    if trace_directory() is None:
        return absent(settings, "A17", "each set of weights best on its own metric")
    runs = Runs(settings, results)
    rows: list[AcceptanceRow] = []
    for rate in _RATES:
        setting = told(settings, f"lambda = {rate:g} per period, lengths known")
        for name, weights, what, figure in _SETS:
            best, other = _lead(settings, runs, rate, weights, figure)
            claim = f"{what}: lead of the {name} weights over the best other set ({other})"
            passed = best.low is not None and best.low > 0.0
            rows.append(row(f"A17-{rate:g}-{name}", claim, setting, best, at_least=0.0, passed=passed))
        rows.append(_steering_row(settings, runs, rate))
    return rows


def _lead(settings: Settings, runs: Runs, rate: float, weights: Weights, figure: Figure) -> tuple[Interval, str]:
    """The smallest lead of a set over another by a figure of which more is better, and which other set that is."""
    ours = runs.figures(_weighted(settings, rate, weights), figure)
    leads = {
        name: paired_interval(ours, runs.figures(_weighted(settings, rate, other), figure))
        for name, other, _, _ in _SETS
        if other != weights
    }
    nearest = min(leads, key=lambda name: leads[name].value)
    return leads[nearest], nearest


def _steering_row(settings: Settings, runs: Runs, rate: float) -> AcceptanceRow:
    """Whether more weight on waits means fewer that are too long: rank correlation of their means over seeds."""
    met = [
        float(np.mean(runs.figures(_waiting(settings, rate, zeta2), lambda one: 1.0 - one.wait_missed)))
        for zeta2 in _WAIT_WEIGHTS
    ]
    shown = ", ".join(f"{share:.4f}" for share in met)
    setting = told(
        settings, f"lambda = {rate:g}, zeta2 = {', '.join(f'{z:g}' for z in _WAIT_WEIGHTS)}", NUM_OWN_REQUESTS
    )
    claim = f"rank correlation of zeta2 with the share of waits below 49 periods ({shown})"
    return row(f"A17-{rate:g}-q", claim, setting, spearman(_WAIT_WEIGHTS, met), at_least=_MIN_SPEARMAN)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation, equal values sharing their mean rank; 0 where one of the two does not vary."""
    first, second = _mean_ranks(a), _mean_ranks(b)
    if np.ptp(first) == 0.0 or np.ptp(second) == 0.0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _mean_ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    column = np.array(values)
    return np.array([(column < value).sum() + ((column == value).sum() - 1) / 2.0 for value in column], np.float64)


# ---- A21 -------------------------------------------------------------------------------------------------------------


def _priced(settings: Settings) -> dict[str, QueueRun]:
    light = queue(settings, _LIGHT, num_requests=NUM_OWN_REQUESTS)
    own_full = queue(settings, _RATES[1], num_requests=NUM_OWN_REQUESTS)
    cut = replace(queue(settings, _RATES[0], num_requests=NUM_OWN_REQUESTS), kv_tokens=CUT_KV_TOKENS)
    full = queue(settings, _RATES[1])
    ahead = {f"ahead-{key}": replace(run, history="ahead") for key, run in (("cut", cut), ("light", light))}
    return {"cut": cut, "full": full, "light": light, **ahead, "ahead-full": replace(own_full, history="ahead")}


def _price_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    if trace_directory() is None:
        return absent(settings, "A21", "which resource the prices call scarce")
    runs = Runs(settings, results)
    return [one for key, run in _priced(settings).items() for one in _prices_of(settings, runs, key, run)]


def _prices_of(settings: Settings, runs: Runs, key: str, run: QueueRun) -> list[AcceptanceRow]:
    what = "mean charge of a request, in units of the largest reward"
    num_requests = NUM_REQUESTS if key == "full" else NUM_OWN_REQUESTS
    columns = "columns spread ahead" if run.history == "ahead" else "the paper's columns"
    words = f"lambda = {run.rate:g}, {run.kv_tokens:,} KV tokens per device, {runs.loads(run)}, {columns}"
    setting, found = told(settings, words, num_requests), runs.all(run)
    slots, memory = [one.slot_price for one in found], [one.memory_price for one in found]
    if key.endswith("light"):
        both = t_interval([a + b for a, b in zip(slots, memory, strict=True)])
        return [row(f"A21-{key}", f"{what}, slots and memory", setting, both, at_most=_NEGLIGIBLE_PRICE)]
    first, second = (memory, slots) if key.endswith("cut") else (slots, memory)
    names = "memory less slots" if key.endswith("cut") else "slots less memory"
    claim, passed = f"{what}: {names}, above 0 on every seed", all(a > b for a, b in zip(first, second, strict=True))
    return [
        row(f"A21-{key}", claim, setting, paired_interval(first, second), at_least=0.0, passed=passed),
        row(f"A21-{key}-slots", f"{what} for slots", setting, t_interval(slots)),
        row(f"A21-{key}-memory", f"{what} for memory", setting, t_interval(memory)),
    ]


GROUPS = (
    Group("A14", _all_costs, _cost_rows),
    Group("A17", lambda settings: units(settings, _weight_runs(settings)), _weight_rows),
    Group("A21", lambda settings: units(settings, list(_priced(settings).values())), _price_rows),
)
