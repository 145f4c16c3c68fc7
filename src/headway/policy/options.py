"""Reading a policy's options: checked here once, so that every complaint names the key.

An option is a number, a choice among words, or a number per instance. This file refuses to know which policy takes
which: that is the registry's.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping

from headway.errors import ConfigError
from headway.fleet import FleetView

#: Per-instance numbers are keyed by instance id, or by model for all of its instances.
Option = float | str | Mapping[str, float]
Options = Mapping[str, Option]


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """What to say of a ``name`` that is not among ``known``."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return f"unknown {kind} {name!r}; {hint}"


def number(options: Options, key: str, default: float, *, minimum: float = 0.0) -> float:
    """A finite number of at least ``minimum``.

    Raises:
        ConfigError: another value; ``.key`` names the option.
    """
    return _checked(options.get(key, default), f"routing.{key}", minimum)


def word(options: Options, key: str, default: str, known: Collection[str]) -> str:
    """One of the ``known`` words.

    Raises:
        ConfigError: another value; ``.key`` names the option.
    """
    value = options.get(key, default)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(unknown("value", str(value), known), key=f"routing.{key}")
    return value


def by_instance(options: Options, key: str) -> dict[str, float]:
    """Numbers above zero by instance id or model; empty where the option is not given.

    Raises:
        ConfigError: no mapping, or a value that is not a finite number above zero; ``.key`` names the entry.
    """
    given = options.get(key, {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"must map instances or models to numbers, not {given!r}", key=f"routing.{key}")
    found = {name: _checked(value, f"routing.{key}.{name}", 0.0) for name, value in given.items()}
    for name, value in found.items():
        if value == 0.0:
            raise ConfigError("must be above 0", key=f"routing.{key}.{name}")
    return found


def spread_over(fleet: FleetView, given: Mapping[str, float], key: str) -> dict[str, float]:
    """``given`` by instance id alone: an instance's own number, else its model's; others are left out.

    Raises:
        ConfigError: a name that is neither an instance nor a model of the fleet.
    """
    instances = [view.instance for view in fleet.views]
    known = {name for instance in instances for name in (instance.id, instance.model)}
    for name in given:
        if name not in known:
            raise ConfigError(unknown("instance or model", name, known), key=f"routing.{key}.{name}")
    return {
        instance.id: given[name]
        for instance in instances
        for name in (instance.id if instance.id in given else instance.model,)
        if name in given
    }


def _checked(value: object, key: str, minimum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"must be a number, not {value!r}", key=key)
    if not math.isfinite(value) or value < minimum:
        raise ConfigError(f"must be finite and at least {minimum:g}, not {value!r}", key=key)
    return float(value)
