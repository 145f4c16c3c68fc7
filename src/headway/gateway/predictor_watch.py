"""Follows a predictor's file: a new artifact is loaded beside the old one and takes its place, without a restart.

The file is looked at off the request path and loaded in another thread. Only a file that has stopped changing is read,
and one that cannot be loaded leaves the old predictor where it is: the log says why, once, and a metric stays up until
it is mended. It refuses to know what is in the file.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.errors import ConfigError, HeadwayError
from headway.gateway.log import event
from headway.predict.base import Predictor

#: How often a predictor's file is looked at, seconds.
WATCH_INTERVAL_S = 2.0

#: A file's content → its predictor. Raises HeadwayError for what is none.
Load = Callable[[bytes], Predictor]


class _Signature(NamedTuple):
    """What changes when a file does."""

    inode: int
    num_bytes: int
    modified_ns: int


class PredictorWatch:
    """One file and the predictor in it. ``role`` names it in log and metrics: ``live`` or ``shadow``.

    The file is loaded when the watch is made; ``use`` gets every predictor loaded later.

    Raises:
        ConfigError: the file cannot be read, or holds no predictor.
    """

    def __init__(self, role: str, path: Path, load: Load, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.role, self.path = role, path
        self.use: Callable[[Predictor], None] = lambda predictor: None
        self.problem: str | None = None
        self.num_failures = 0
        self._load, self._wall_clock = load, wall_clock
        self._seen: _Signature | None = None
        self._tried: _Signature | None = None
        try:
            self._tried = _signature(path)
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", path=str(path)) from error
        self.checksum = _checksum(content)
        self.predictor = load(content)
        self.loaded_wall_s = wall_clock()

    async def look(self) -> None:
        """Load the file if it has changed and has come to rest."""
        try:
            signature = await asyncio.to_thread(_signature, self.path)
        except OSError as error:
            self._failed(None, f"cannot be read: {error.strerror}")
            return
        if signature == self._tried:
            self._seen = signature
            return
        if signature != self._seen:  # it may still be written
            self._seen = signature
            return
        try:
            content = await asyncio.to_thread(self.path.read_bytes)
            checksum = _checksum(content)
            if checksum != self.checksum:
                self.predictor = await asyncio.to_thread(self._load, content)
                self.checksum, self.loaded_wall_s = checksum, self._wall_clock()
                self.use(self.predictor)
                event(logging.INFO, "predictor_loaded", role=self.role, path=str(self.path), checksum=checksum)
        except OSError as error:
            self._failed(None, f"cannot be read: {error.strerror}")
        except HeadwayError as error:
            self._failed(signature, str(error))
        except Exception as error:  # a library's own complaint about what it was given
            self._failed(signature, f"{type(error).__name__}: {error}")
        else:
            self._tried, self.problem = signature, None

    def _failed(self, signature: _Signature | None, problem: str) -> None:
        """Keep the old predictor. With ``signature`` the file is not tried again until it changes."""
        if signature is not None:
            self._tried = signature
        if problem == self.problem and signature is None:
            return  # still not there: said once
        self.problem = problem
        self.num_failures += 1
        event(logging.ERROR, "predictor_not_loaded", role=self.role, path=str(self.path), error=problem)


class PredictorCollector(Collector):
    """What there is to tell of the watches when somebody scrapes."""

    def __init__(self, watches: Callable[[], Iterable[PredictorWatch]]) -> None:
        self._watches = watches

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        loaded = GaugeMetricFamily("headway_predictor_loaded_timestamp_seconds", "When it was loaded", labels=["role"])
        broken = GaugeMetricFamily("headway_predictor_broken", "1 while its file cannot be loaded", labels=["role"])
        failures = CounterMetricFamily("headway_predictor_load_failures", "Files that were none", labels=["role"])
        for watch in self._watches():
            loaded.add_metric([watch.role], watch.loaded_wall_s)
            broken.add_metric([watch.role], float(watch.problem is not None))
            failures.add_metric([watch.role], watch.num_failures)
        return [loaded, broken, failures]


def _signature(path: Path) -> _Signature:
    found = path.stat()
    return _Signature(found.st_ino, found.st_size, found.st_mtime_ns)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
