"""Takes up a changed configuration while requests run: on SIGHUP, and when its file or its file of keys has changed.

A file is read once it has stood still for one look, so that a half-written one is not taken. What is wrong keeps the
old configuration in service, and is told by line, column and key in the log, by a gauge, and in ``/instances``. It
refuses to pretend: what needs a restart is named.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config import Config, load_config
from headway.config.keys import beside
from headway.errors import ConfigError
from headway.gateway.log import event

if TYPE_CHECKING:
    from headway.gateway.state import Gateway

#: How often files are looked at, seconds.
WATCH_INTERVAL_S = 0.5
#: What only a start reads.
_AT_START_ONLY = ("host", "port")

Stamp = tuple[tuple[int, int, int], ...]


class Reloader:
    """Follows the file of a gateway's configuration; one that came from elsewhere is never reloaded.

    ``problem`` is what was wrong with the last file, None while the one that serves is the newest.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        path = Path(gateway.config.path)
        self.path = path if path.is_file() else None
        self.problem: str | None = None
        self._taken = self._seen = self._stamp()

    async def look(self) -> None:
        """Reload when a file has changed and has stood still since the last look."""
        if self.path is None:
            return
        stamp = await asyncio.to_thread(self._stamp)
        if stamp != self._taken and stamp == self._seen:
            self.reload("file")
        self._seen = stamp

    def reload(self, cause: str) -> bool:
        """Read the file now, and serve it where it is right; whether it does."""
        gateway = self._gateway
        if self.path is None:
            event(logging.WARNING, "reload_impossible", cause=cause, reason="the configuration is no file")
            return False
        self._taken = self._seen = self._stamp()
        before = gateway.config
        try:
            config = load_config(self.path)
            gateway.reconfigure(config)
        except ConfigError as error:
            self.problem = str(error)
            gateway.telemetry.reloaded("failed")
            event(
                logging.ERROR, "reload_failed", cause=cause, path=error.path, line=error.line, column=error.column,
                key=error.key or None, error=str(error), serving=before.config_hash,
            )  # fmt: skip
            return False
        self.problem = None
        if before.keys != config.keys:  # another file of keys may be watched from now on
            self._taken = self._seen = self._stamp()
        gateway.telemetry.reloaded("ok")
        event(logging.INFO, "reloaded", cause=cause, **_changes(before, config))
        for name in _AT_START_ONLY:
            if getattr(before.server, name) != getattr(config.server, name):
                event(logging.WARNING, "needs_restart", key=f"server.{name}")
        for name in ("feedback", "decisions", "telemetry"):
            if getattr(before, name) != getattr(config, name):
                event(logging.WARNING, "needs_restart", key=name)
        return True

    def _stamp(self) -> Stamp:
        """What tells that a file was written again; a file that is away has none."""
        if self.path is None:
            return ()
        paths = [self.path]
        keys = self._gateway.config.keys
        if keys is not None and keys.file is not None:
            paths.append(beside(self._gateway.config, keys.file))
        return tuple(_stamp_of(path) for path in paths)


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _changes(before: Config, after: Config) -> dict[str, object]:
    old, new = ({one.id: one for one in config.instances} for config in (before, after))
    return {
        "config_hash": after.config_hash,
        "before": before.config_hash,
        "added": [name for name in new if name not in old] or None,
        "removed": [name for name in old if name not in new] or None,
        "changed": [name for name in new if name in old and new[name] != old[name]] or None,
    }
