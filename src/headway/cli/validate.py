"""``headway validate``: say whether a configuration is right and what it amounts to, without starting anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.config import Config
    from headway.types import Instance


def validate(config: Path, /, *, json: bool = False) -> int:
    """Check a configuration: keys, values, names, profiles.

    Exit code 0 when it is right, 2 when not, with path, line, column and key of what is wrong.

    Parameters
    ----------
    config
        The pool's YAML file.
    json
        Print the result as JSON.
    """
    import sys

    import msgspec

    from headway.assembly import build_instances, build_router
    from headway.config import load_config
    from headway.errors import ConfigError

    try:
        loaded = load_config(config)
        build_router(loaded)
        instances = build_instances(loaded)
    except ConfigError as error:
        if not json:
            raise
        found = {
            "message": str(error), "path": error.path, "key": error.key, "line": error.line, "column": error.column
        }  # fmt: skip
        sys.stdout.write(msgspec.json.encode({"valid": False, "error": found}).decode() + "\n")
        return 2
    if json:
        sys.stdout.write(msgspec.json.encode(_as_json(loaded, instances)).decode() + "\n")
        return 0
    _show(loaded, instances)
    return 0


def _as_json(config: Config, instances: list[Instance]) -> dict[str, object]:
    return {
        "valid": True,
        "path": config.path,
        "config_hash": config.config_hash,
        "policy": config.routing.policy,
        "models": [model.name for model in config.models],
        "aliases": sorted(config.aliases),
        "instances": [
            {
                "id": instance.id,
                "model": instance.model,
                "engine": instance.engine,
                "profile": instance.profile,
                "estimate": _estimate(config, index, instance),
            }
            for index, instance in enumerate(instances)
        ],
        "warnings": _warnings(config),
    }


def _estimate(config: Config, index: int, instance: Instance) -> str:
    """The estimator that will speak for an instance while its state comes in."""
    from headway.policy.registry import POLICIES

    entry = config.instances[index]
    by_state = POLICIES[config.routing.policy].estimator
    if instance.step_time is None or (entry.snapshots is None and not entry.shadowed):
        return "history"
    return "shadow" if by_state == "replay" and entry.shadowed else by_state


def _warnings(config: Config) -> list[str]:
    """What is no error in the file but will be one, or a surprise, when it is served."""
    found = []
    for entry in config.instances:
        variable = entry.api_key.variable if entry.api_key is not None else None
        if variable is not None and not os.environ.get(variable):
            found.append(f"instance {entry.id}: the environment variable {variable} is not set here")
        if entry.snapshots is not None and entry.profile is None:
            found.append(f"instance {entry.id}: snapshots without a profile cannot be replayed")
    found.extend(_fallback_warnings(config))
    found.extend(_key_warnings(config))
    if config.telemetry.traces is not None:
        try:
            import headway.gateway.tracing  # noqa: F401
        except ImportError as error:
            found.append(f"telemetry.traces: {error.name} is missing here: pip install 'headway[tracing]'")
    used = {entry.model for entry in config.instances}
    found.extend(f"model {model.name}: no instance serves it" for model in config.models if model.name not in used)
    return found


def _fallback_warnings(config: Config) -> list[str]:
    if config.routing.fallback != "least_work":
        return []
    if config.routing.on_infeasible == "reject":
        return ["routing.fallback least_work is never used: on_infeasible is reject"]
    return [
        f"instance {entry.id}: without a profile its work cannot be told, and the least_work fallback leaves it out"
        for entry in config.instances
        if entry.profile is None
    ]


def _key_warnings(config: Config) -> list[str]:
    from headway.config.keys import load_keys
    from headway.errors import ConfigError
    from headway.gateway.keys import is_loopback

    try:
        table = load_keys(config)
    except ConfigError as error:
        return [str(error)]
    host = config.server.host
    if table is None and not is_loopback(f"http://[{host}]" if ":" in host else f"http://{host}"):
        return [f"server.host {host} is open to the network, and no keys are configured"]
    if table is not None and not table.admins:
        return ["keys: no admin key, so nobody may see decisions or drain instances"]
    return []


def _show(config: Config, instances: list[Instance]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{config.path}: valid (policy {config.routing.policy}, hash {config.config_hash})", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("instance", "model", "engine", "profile", "estimate"):
        table.add_column(name)
    for index, instance in enumerate(instances):
        table.add_row(
            instance.id, instance.model, instance.engine, instance.profile or "-", _estimate(config, index, instance)
        )
    console.print(table)
    for warning in _warnings(config):
        console.print(f"warning: {warning}", soft_wrap=True)
