"""A8, A23: what old snapshots cost, what ageing, ledger and length rule save, and how routers cost each other.

A snapshot "every step" shows an engine as its step began, so the ledger counts even there. Nothing else is changed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from headway.calibrate.acceptance import AcceptanceRow
from headway.lab.acceptance.settings import DEFAULT_FALLBACK, Settings
from headway.lab.acceptance.table import Group, Results, on_time, row
from headway.lab.acceptance.units import Maker, Play, bear, grid
from headway.lab.intervals import Interval, paired_gain
from headway.lab.simulate import Sight

#: Time between snapshots, milliseconds; 0 shows each step as it begins, as an engine publishes it.
INTERVALS_MS = (0, 25, 100, 400, 1000)
_MOST_LOSS = {400: 0.01, 1000: 0.02}
_ROUTERS = (1, 2, 4)
_SHARED_INTERVALS_MS = (0, 100, 500)


class Variant(NamedTuple):
    """What a router does about the age of what it sees."""

    name: str
    ageing: bool = True
    ledger: bool = True
    length_rule: Literal["survival", "plain"] = "survival"


_ALL_ON = Variant("all")
VARIANTS = (
    _ALL_ON,
    Variant("no_ageing", ageing=False),
    Variant("no_ledger", ledger=False),
    Variant("no_length_rule", length_rule="plain"),
    Variant("ageing_only", ledger=False, length_rule="plain"),
    Variant("ledger_only", ageing=False, length_rule="plain"),
    Variant("length_rule_only", ageing=False, ledger=False),
    Variant("none", ageing=False, ledger=False, length_rule="plain"),
)


def _stale(settings: Settings, variant: Variant, interval_ms: int, num_routers: int = 1) -> Maker:
    sight = Sight(
        interval_s=interval_ms / 1000, every_step=interval_ms == 0, ageing=variant.ageing, ledger=variant.ledger
    )
    return bear(settings, sight=sight, length_rule=variant.length_rule, num_routers=num_routers)


def _stale_needs(settings: Settings) -> list[Play]:
    makers = [_stale(settings, variant, interval) for variant in VARIANTS for interval in INTERVALS_MS]
    return grid(makers, [settings.nearest(8.0)], settings.seeds)


def _loss(settings: Settings, results: Results, make: Maker, fresh: Maker) -> Interval:
    """The share of OnTimeUtility lost against ``fresh``, paired by seed."""
    rate = settings.nearest(8.0)
    ours, theirs = ([on_time(one) for one in results.scores(each, rate, settings.seeds)] for each in (make, fresh))
    gain = paired_gain(ours, theirs)
    if gain.low is None or gain.high is None:
        return Interval(-gain.value, None, None)
    return Interval(-gain.value, -gain.high, -gain.low)


def _stale_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rate, rows = settings.nearest(8.0), []
    fresh = _stale(settings, _ALL_ON, 0)
    for variant in VARIANTS:
        for interval in INTERVALS_MS:
            shown = "every step" if interval == 0 else f"every {interval} ms"
            rows.append(
                row(
                    f"A8-{variant.name}-{interval}",
                    "share of OnTimeUtility lost against a snapshot per step with all on",
                    settings.describe(
                        f"{rate:g} qps, snapshots {shown}, ageing {_on(variant.ageing)}, ledger {_on(variant.ledger)}, "
                        f"length rule {variant.length_rule}, fallback {DEFAULT_FALLBACK}"
                    ),
                    _loss(settings, results, _stale(settings, variant, interval), fresh),
                    at_most=_MOST_LOSS.get(interval) if variant is _ALL_ON else None,
                )
            )
    return rows


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _shared_needs(settings: Settings) -> list[Play]:
    makers = [
        _stale(settings, _ALL_ON, interval, num_routers)
        for num_routers in _ROUTERS
        for interval in _SHARED_INTERVALS_MS
    ]
    return grid(makers, [settings.nearest(8.0)], settings.seeds)


def _shared_rows(settings: Settings, results: Results) -> list[AcceptanceRow]:
    rate, rows = settings.nearest(8.0), []
    for num_routers in _ROUTERS:
        for interval in _SHARED_INTERVALS_MS:
            shown = "every step" if interval == 0 else f"every {interval} ms"
            loss = _loss(
                settings, results, _stale(settings, _ALL_ON, interval, num_routers), _stale(settings, _ALL_ON, 0)
            )
            rows.append(
                row(
                    f"A23-{num_routers}-{interval}",
                    f"share of OnTimeUtility lost by {num_routers} routers with private ledgers against one that sees "
                    "every step",
                    settings.describe(
                        f"{rate:g} qps, snapshots {shown}, queries to the routers in turn, fallback {DEFAULT_FALLBACK}"
                    ),
                    loss,
                )
            )
    return rows


GROUPS = (Group("A8", _stale_needs, _stale_rows), Group("A23", _shared_needs, _shared_rows))
