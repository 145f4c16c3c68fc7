"""Where an instance's state comes from: its snapshots, in shared memory or over ZeroMQ, or a plain engine's gauges.

Snapshots are polled right before each decision, which costs next to nothing when there is nothing new, and by a slow
task so that an idle gateway's view is right too. What comes over a network is also taken from its socket as it arrives:
only so is it known when that was. Gauges are polled once a second, never on the request path. A source that fails is
reported once, not per poll; its instance then shows as stale and is routed on the fallback estimate.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import aiohttp

from headway.config import Config, SnapshotSource
from headway.errors import SnapshotError
from headway.fleet import Gauges, InstanceView
from headway.gateway.log import event
from headway.gateway.upstream import Upstreams, UpstreamTarget
from headway.router import Router
from headway.snapshot.shared_memory import SharedMemoryReader
from headway.types import Snapshot

if TYPE_CHECKING:
    from headway.snapshot.zeromq import ZeroMQSubscriber

#: How often an idle gateway looks for snapshots, seconds.
IDLE_POLL_S = 0.25
#: How often gauges are read, seconds.
GAUGE_POLL_S = 1.0
_GAUGE_TIMEOUT_S = 2.0
_MAX_METRICS_BYTES = 8 << 20
_GAUGE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total)"
    rb"(?:\{[^}\n]*\})?\s+(\S+)",
    re.MULTILINE,
)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)


class SnapshotReader(Protocol):
    """A transport's end: the newest snapshot when it is new, else None. Raises SnapshotError on what is none."""

    def poll(self) -> Snapshot | None: ...
    def close(self) -> None: ...


class Feeds:
    """The state sources of a pool. ``errors`` holds the present complaint of each source that has one."""

    def __init__(self, config: Config, router: Router, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._clock = clock
        self.subscribers: dict[str, ZeroMQSubscriber] = {}
        self.readers: dict[str, SnapshotReader] = {}
        self.gauged: list[str] = []
        self.gauges: dict[str, Gauges] = {}
        self.errors: dict[str, str] = {}
        self._sources: dict[str, SnapshotSource] = {}
        self._silent: set[str] = set()
        self._items: list[tuple[str, SnapshotReader]] = []
        self._problems: dict[str, str | None] = {}
        self._watching: asyncio.AbstractEventLoop | None = None
        self.reconfigure(config, router)

    def reconfigure(self, config: Config, router: Router) -> None:
        """Watch the instances of ``config`` for ``router`` from now on; sources that stay are not opened anew."""
        self._router = router
        wanted = {one.id: one.snapshots for one in config.instances if one.snapshots is not None}
        shown = {view.instance.id for view in router.fleet.views if view.snapshot is not None}
        for name, source in list(self._sources.items()):
            # One whose view began anew is opened anew too: an idle engine's snapshot is not new to its reader.
            if wanted.get(name) != source or (name not in shown and name not in self._silent):
                self._close(name)
        for name, source in wanted.items():
            if name not in self._sources:
                self._sources[name], self.readers[name] = source, self._reader(name, source)
                self._silent.add(name)
        self.gauged = [one.id for one in config.instances if one.engine != "hosted" and one.snapshots is None]
        names = {one.id for one in config.instances}
        self.gauges = {name: found for name, found in self.gauges.items() if name in self.gauged}
        self.errors = {name: text for name, text in self.errors.items() if name in self.readers}
        self._problems = {name: text for name, text in self._problems.items() if name in names}
        self._items = list(self.readers.items())

    def _close(self, instance_id: str) -> None:
        subscriber = self.subscribers.pop(instance_id, None)
        if subscriber is not None and self._watching is not None:
            self._watching.remove_reader(subscriber.fileno())
        self.readers.pop(instance_id).close()
        del self._sources[instance_id]
        self._silent.discard(instance_id)

    def _reader(self, instance_id: str, source: SnapshotSource) -> SnapshotReader:
        if source.shared_memory is not None:
            return SharedMemoryReader(source.shared_memory, instance_id=instance_id)
        from headway.snapshot.zeromq import ZeroMQSubscriber  # pools on one machine need no ZeroMQ

        subscriber = ZeroMQSubscriber(source.place, instance_id=instance_id, clock=self._clock)
        self.subscribers[instance_id] = subscriber
        if self._watching is not None:
            self._watching.add_reader(subscriber.fileno(), subscriber.receive)
        return subscriber

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let ``loop`` take what arrives over networks from its sockets, until :meth:`close`."""
        self._watching = loop
        for subscriber in self.subscribers.values():
            loop.add_reader(subscriber.fileno(), subscriber.receive)

    @property
    def silent(self) -> set[str]:
        """Instances whose first snapshot is still to come."""
        return self._silent

    def poll(self, now: float) -> bool:
        """Hand every new snapshot to the router; whether there was one. About 1 µs per instance, 5 µs over ZeroMQ."""
        any_new = False
        for instance_id, reader in self._items:
            try:
                snapshot = reader.poll()
            except SnapshotError as error:
                self._complain(instance_id, str(error))
                continue
            if snapshot is not None:
                self._router.observe(snapshot, now)
                self._silent.discard(instance_id)
                self.errors.pop(instance_id, None)
                any_new = True
        return any_new

    def observe_gauges(self, instance_id: str, gauges: Gauges | None) -> None:
        """Keep what an engine's gauges say, and tell the fleet; None where they could not be read."""
        if instance_id not in self.gauged:  # it was removed while they were read
            return
        if gauges is None:
            self.gauges.pop(instance_id, None)
        else:
            self.gauges[instance_id] = gauges
        self._router.fleet.observe_gauges(instance_id, gauges, self._clock())

    def report_problems(self) -> None:
        """Log, once per change, what is wrong with an instance's state: staleness, or an engine unlike its profile."""
        for view in self._router.fleet.views:
            problem = self.problem_of(view)
            if self._problems.get(view.instance.id) != problem:
                self._problems[view.instance.id] = problem
                level = logging.WARNING if problem else logging.INFO
                event(level, "instance_state", instance=view.instance.id, problem=problem or "none")

    def problem_of(self, view: InstanceView) -> str | None:
        """What is wrong with what is known of an instance, in words."""
        if view.stale and view.shadow is not None:
            return view.problem or "the replay has lost the engine: a first token is overdue"
        if view.stale:
            return "snapshots are stale"
        if view.problem is None and not view.clock_trusted:
            ratio = self._router.residuals.residual(view.instance.id).ratio
            return (
                f"the profile is stale: first tokens come at {ratio:.2g} times the replayed TTFT, "
                "so other estimates are used"
            )
        return view.problem

    def close(self) -> None:
        """Give back segments and sockets."""
        for name in list(self.readers):
            self._close(name)
        self._items = []
        self._watching = None

    def _complain(self, instance_id: str, message: str) -> None:
        if self.errors.get(instance_id) != message:
            self.errors[instance_id] = message
            event(logging.WARNING, "snapshot_error", instance=instance_id, error=message)


async def read_gauges(feeds: Feeds, upstreams: Upstreams, target: UpstreamTarget) -> None:
    """Read one engine's gauges into ``feeds``; what cannot be read is forgotten rather than kept."""
    try:
        async with upstreams.get(target.metrics_url, timeout_s=_GAUGE_TIMEOUT_S) as response:
            text = await response.content.read(_MAX_METRICS_BYTES) if response.status == 200 else b""
            while response.status == 200 and len(text) < _MAX_METRICS_BYTES:
                more = await response.content.read(_MAX_METRICS_BYTES - len(text))
                if not more:
                    break
                text += more
        gauges = parse_gauges(text, time.monotonic())
    except (aiohttp.ClientError, TimeoutError, OSError):
        gauges = None
    feeds.observe_gauges(target.instance_id, gauges)


def parse_gauges(text: bytes, now: float) -> Gauges | None:
    """An engine's gauges in a Prometheus text, summed over engine cores (the cache share: their mean); None without."""
    found: dict[bytes, list[float]] = {}
    for name, value in _GAUGE.findall(text):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError:
            return None
    if b"num_requests_running" not in found or b"num_requests_waiting" not in found:
        return None
    usage = found.get(b"kv_cache_usage_perc", [0.0])
    generated = found.get(b"generation_tokens_total")
    cache = _CACHE.search(text)
    settings = b"" if cache is None else cache[1]
    return Gauges(
        num_running=sum(found[b"num_requests_running"]),
        num_waiting=sum(found[b"num_requests_waiting"]),
        kv_cache_usage=sum(usage) / len(usage),
        read_s=now,
        generated_tokens=None if generated is None else sum(generated),
        num_blocks=_number(settings, b"num_gpu_blocks"),
        block_size=_number(settings, b"block_size"),
        prefix_caching=_switch(settings, b"enable_prefix_caching"),
    )


def _setting(settings: bytes, name: bytes) -> bytes | None:
    """One of the labels of ``cache_config_info``, None where it is not there."""
    match = re.search(rb"(?:^|,)\s*" + name + rb'="([^"]*)"', settings)
    return None if match is None else match[1]


def _number(settings: bytes, name: bytes) -> int | None:
    value = _setting(settings, name)
    return int(value) if value is not None and value.isdigit() else None


def _switch(settings: bytes, name: bytes) -> bool | None:
    return {b"True": True, b"False": False}.get(_setting(settings, name) or b"")
