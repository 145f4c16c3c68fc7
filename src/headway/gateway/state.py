"""What one gateway holds: router, upstream session, health, state sources, metrics and the decision log.

``app`` starts and stops it, the hot path and the cold routes use it. It refuses to know HTTP: requests come in as
:class:`~headway.gateway.request.ClientRequest`, errors leave as Headway's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from headway.assembly import build_router, build_shadow, load_predictor, model_card, rebuild_router
from headway.config import Config
from headway.errors import HeadwayError, RejectedError, RequestError
from headway.gateway.decision_log import FLUSH_INTERVAL_S, DecisionLog
from headway.gateway.decisions import DecisionRecord, DecisionStore
from headway.gateway.errors import RestingError
from headway.gateway.feedback import FeedbackBook
from headway.gateway.feeds import GAUGE_POLL_S, IDLE_POLL_S, Feeds, read_gauges
from headway.gateway.guard import Guard
from headway.gateway.health import PROBE_INTERVAL_S, HealthBoard, probe
from headway.gateway.keys import SAVE_INTERVAL_S, KeyRing
from headway.gateway.log import logger
from headway.gateway.predictor_watch import WATCH_INTERVAL_S as PREDICTOR_INTERVAL_S
from headway.gateway.predictors import Load, Predictors
from headway.gateway.queue import CentralQueue
from headway.gateway.reload import WATCH_INTERVAL_S, Reloader
from headway.gateway.request import ClientRequest
from headway.gateway.shadow import LivePredictor, Shadow
from headway.gateway.telemetry import OTHER, PoolCollector, Telemetry
from headway.gateway.token_ratio import TokenRatio
from headway.gateway.upstream import Upstreams, resolve_targets
from headway.policy.base import CHOOSABLE
from headway.types import Decision, ModelCard, Outcome, Query

if TYPE_CHECKING:
    from headway.gateway.tracing import Tracing

#: How long ``/readyz`` waits for the first snapshot of every instance that is to publish some, seconds.
READY_GRACE_S = 10.0
#: How often answers that nobody spoke of are written down, seconds.
FEEDBACK_SWEEP_S = 1.0


class Gateway:
    """One gateway's state. ``load`` makes a predictor of an artifact's bytes.

    Raises:
        ConfigError: the pool cannot be built, or an API key's environment variable is not set.
    """

    def __init__(
        self,
        config: Config,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        load: Load = load_predictor,
    ) -> None:
        self.config = config
        self.clock = clock
        self.telemetry = Telemetry()
        self.predictors = Predictors(config, load, self.telemetry.registry)
        self.router = build_router(config, predictor=self.predictors.of_live(config), seed=seed)
        self.fleet = self.router.fleet
        self.targets = resolve_targets(config)
        self.keys = KeyRing(config)
        self.upstreams = Upstreams()
        self.health = HealthBoard(
            self.fleet,
            failures_to_open=config.resilience.breaker_failures,
            open_s=config.resilience.breaker_open_s,
            clock=clock,
        )
        self.feeds = Feeds(config, self.router)
        self.decisions = DecisionStore()
        self.queue = CentralQueue(self)
        self.token_ratio = TokenRatio(model.name for model in config.models)
        self.telemetry.registry.register(PoolCollector(self))
        self.feedback = FeedbackBook(config, self.telemetry.registry, clock)
        self.decision_log = DecisionLog(config, self.telemetry.registry, seed=seed)
        self.tracing = _tracing_of(config, self.telemetry)
        self.shadow: Shadow | None = None
        if config.shadow is not None:
            predictor = self.predictors.of_shadow(config, LivePredictor(self.router))
            router = build_shadow(config, self.router, predictor, seed=seed)
            self.shadow = Shadow(router, sample=config.shadow.sample, registry=self.telemetry.registry, seed=seed)
        self.cards: dict[str, ModelCard] = {model.name: model_card(model) for model in config.models}
        self.draining = False
        self.num_inflight = 0
        self.guards: set[Guard] = set()
        self._aliases = _aliases_of(config)
        self._models = tuple(model.name for model in config.models)
        self._seed, self._idle_shadow = seed, self.shadow
        self._follow_predictors()
        self.reloader = Reloader(self)
        self.started_s = clock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open the session and begin to watch the pool."""
        await self.upstreams.open()
        self.started_s = self.clock()
        loop = asyncio.get_running_loop()
        self.feeds.watch(loop)
        self._tasks = [
            loop.create_task(_every(IDLE_POLL_S, "poll_snapshots", self._poll_snapshots)),
            loop.create_task(_every(GAUGE_POLL_S, "poll_gauges", self._poll_gauges)),
            loop.create_task(_every(PROBE_INTERVAL_S, "probe", self._probe)),
            loop.create_task(_every(FEEDBACK_SWEEP_S, "feedback", self.feedback.sweep)),
            loop.create_task(_every(FLUSH_INTERVAL_S, "decision_log", self.decision_log.flush)),
            loop.create_task(_every(SAVE_INTERVAL_S, "save_spend", self._save_spend)),
            loop.create_task(_every(WATCH_INTERVAL_S, "watch_files", self.reloader.look)),
            loop.create_task(_every(PREDICTOR_INTERVAL_S, "watch_predictors", self.predictors.look)),
        ]

    async def _poll_snapshots(self) -> None:
        """Keep the fleet's view right while no request comes."""
        now = self.clock()
        self.feeds.poll(now)
        self.fleet.age(now)
        self.feeds.report_problems()
        self.queue.wake()

    async def _poll_gauges(self) -> None:
        await asyncio.gather(
            *(read_gauges(self.feeds, self.upstreams, self.targets[name]) for name in self.feeds.gauged)
        )

    async def _probe(self) -> None:
        await asyncio.gather(*(probe(self.health, self.upstreams, self.targets[name]) for name in self.health.due()))
        self.queue.wake()

    async def _save_spend(self) -> None:
        self.keys.save_spend()

    async def stop(self) -> None:
        """Stop watching and close everything."""
        self.queue.close()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.keys.save_spend()
        await self.upstreams.close()
        self.feeds.close()
        await self.feedback.close()
        await self.decision_log.close()
        if self.tracing is not None:
            await self.tracing.close()

    def reconfigure(self, config: Config) -> None:
        """Serve another configuration from now on. Streams of instances that are gone go on to their end.

        Raises:
            ConfigError: something of it is wrong; nothing has changed then.
        """
        watches = self.predictors.prepare(config)
        predictor = self.predictors.of_live(config, watches)
        trial = build_router(config, predictor=predictor, seed=self._seed)
        if config.shadow is not None:
            build_shadow(config, trial, LivePredictor(trial), seed=self._seed)
        targets, keys = resolve_targets(config), KeyRing(config, self.keys)
        # From here on nothing can fail, and nothing else runs in between.
        router = rebuild_router(
            config, self.router, self.config, now=self.clock(), predictor=predictor, seed=self._seed
        )
        self.config, self.router, self.fleet, self.targets, self.keys = config, router, router.fleet, targets, keys
        keys.take_effect()
        self.health.reconfigure(
            self.fleet,
            failures_to_open=config.resilience.breaker_failures,
            open_s=config.resilience.breaker_open_s,
        )
        self.feeds.reconfigure(config, router)
        self._aliases = _aliases_of(config)
        self._models = tuple(model.name for model in config.models)
        self.cards = {model.name: model_card(model) for model in config.models}
        self.token_ratio.add(self._models)
        self.predictors.take(config, watches)
        self.shadow = self._reconfigured_shadow(config)
        self._follow_predictors()
        self.queue.wake()

    def _reconfigured_shadow(self, config: Config) -> Shadow | None:
        if config.shadow is None:
            return None
        predictor = self.predictors.of_shadow(config, LivePredictor(self.router))
        router = build_shadow(config, self.router, predictor, seed=self._seed)
        sample = config.shadow.sample
        if self._idle_shadow is None:  # one is made once: its metrics can be registered only once
            self._idle_shadow = Shadow(router, sample=sample, registry=self.telemetry.registry, seed=self._seed)
        else:
            self._idle_shadow.reconfigure(router, sample=sample)
        return self._idle_shadow

    def _follow_predictors(self) -> None:
        """Give new predictors to the routers of this configuration."""
        self.predictors.follow("live", self.router.use_predictor)
        if self.shadow is not None:
            self.predictors.follow("shadow", self.shadow.router.use_predictor)

    # ---- names ---------------------------------------------------------------------------------------------------

    @property
    def model_names(self) -> list[str]:
        """What clients may send as ``model``: aliases, then models."""
        return [*(name for name in self._aliases if name not in self._models), *self._models]

    def candidates_of(self, name: str) -> tuple[str, ...] | None:
        """The models behind a name; None means all of them.

        Raises:
            RequestError: 404, no such model.
        """
        if name in self._models:
            return (name,)
        if name in self._aliases:
            return self._aliases[name]
        known = ", ".join(self.model_names)
        raise RequestError(
            f"the model '{name}' does not exist here; known: {known}", status=404, param="model", code="model_not_found"
        )

    def label_of(self, name: str) -> str:
        """``name`` as a metric label: itself when it is configured."""
        return name if name in self._models or name in self._aliases else OTHER

    # ---- decisions -----------------------------------------------------------------------------------------------

    def query_of(
        self,
        request: ClientRequest,
        request_id: str,
        arrival_s: float,
        *,
        spent_s: float = 0.0,
        excluded: frozenset[str] = frozenset(),
    ) -> Query:
        """The router's view of a request; ``spent_s`` is what earlier attempts took from its target."""
        candidates = self.candidates_of(request.model)
        targets = request.targets
        ttft_ms = targets.ttft_ms if targets.ttft_ms is not None else self.config.routing.default_ttft_ms
        ttft_s = None
        if ttft_ms is not None:
            ttft_s = max(ttft_ms / 1e3 - spent_s, 1e-6)
        return Query(
            id=request_id,
            arrival_s=arrival_s,
            prompt_text=request.prompt_text,
            prompt_chars=request.prompt_chars,
            num_turns=request.num_turns,
            system_chars=request.system_chars,
            prompt_tokens={
                model: self.token_ratio.tokens(model, request.num_counted_tokens)
                for model in (self._models if candidates is None else candidates)
            },
            max_tokens=request.max_tokens,
            candidates=candidates,
            ttft_target_s=ttft_s,
            quality_min=targets.quality_min,
            max_cost_usd=targets.max_cost_usd,
            priority=request.priority,
            excluded_instances=excluded,
            prefix_blocks=request.prefix_blocks,
            counted_tokens=request.num_counted_tokens,
        )

    def decide(
        self, query: Query, request_id: str, attempt: int = 1, *, counted: bool = True
    ) -> tuple[DecisionRecord, HeadwayError | None]:
        """The decision, kept in the log, and the router's refusal where there is one. ``counted``: in the metrics."""
        self.feeds.poll(self.clock())
        self.health.end_rests()
        now = self.clock()
        started_s = time.perf_counter()
        refusal: HeadwayError | None = None
        try:
            decision = self.router.decide(query, now)
        except HeadwayError as error:
            decision = self.router.explain(query, now)
            refusal = self._resting(decision) or error
        decision = msgspec.structs.replace(decision, decision_s=time.perf_counter() - started_s)
        if counted:
            return self.keep(decision, query, request_id, attempt), refusal
        return self.decisions.add(request_id, attempt, decision), refusal

    def keep(self, decision: Decision, query: Query, request_id: str, attempt: int) -> DecisionRecord:
        """Count a decision, compare it with the shadow's, and keep it in the log. To be called before it is booked."""
        self.telemetry.decided(decision)
        record = self.decisions.add(request_id, attempt, decision)
        if self.shadow is not None:
            record.shadow = self.shadow.compare(query, decision, self.clock())
        return record

    def settle(
        self,
        record: DecisionRecord,
        request: ClientRequest,
        outcome: Outcome,
        now: float,
        *,
        client: str,
        counted: bool,
    ) -> None:
        """What an upstream call of ``client`` came to: release its ledger entry, and tell whoever learns from it.

        ``counted`` tells that the engine itself reported the tokens.
        """
        record.outcome = outcome
        self.router.observe(outcome, now)
        self.feedback.note(record, request, outcome, client=client, counted=counted)
        if self.shadow is not None:
            self.shadow.learn(outcome, now)
            if record.shadow is not None:
                self.shadow.measure(record.shadow, record.decision, outcome)

    def _resting(self, decision: Decision) -> RestingError | None:
        """The 429 in place of a 503 where those who could serve the query only rest, and it is known how long."""
        resting = [one.instance_id for one in decision.candidates if one.verdict == "resting"]
        if not resting or any(one.verdict in CHOOSABLE for one in decision.candidates):
            return None
        wait_s = max(self.health.rest_ends_s(resting) - self.clock(), 0.0)
        return RestingError(
            f"every instance that could serve this has asked to be left alone: {', '.join(resting)}",
            retry_after_s=wait_s,
        )

    def free_id(self, request_id: str, attempt: int) -> str:
        """A name for a request in queue, ledger and upstream: the client's own, unless it names another there."""
        free = request_id if attempt == 1 else f"{request_id}.{attempt}"
        while free in self.queue or free in self.fleet or any(free in view.released for view in self.fleet.views):
            attempt += 1
            free = f"{request_id}.{attempt}"
        return free

    # ---- readiness -----------------------------------------------------------------------------------------------

    def not_ready_because(self) -> str | None:
        """Why no traffic should come here now; None when it may."""
        if self.draining:
            return "draining"
        silent = self.feeds.silent
        if silent and self.clock() - self.started_s < READY_GRACE_S:
            return f"waiting up to {READY_GRACE_S:g} s for the first snapshot of {', '.join(sorted(silent))}"
        return None


def _aliases_of(config: Config) -> dict[str, tuple[str, ...] | None]:
    return {
        name: None if alias.candidates == "all" else tuple(alias.candidates) for name, alias in config.aliases.items()
    }


def _tracing_of(config: Config, telemetry: Telemetry) -> Tracing | None:
    """What makes spans, where they are asked for; nothing of OpenTelemetry is imported without."""
    if config.telemetry.traces is None:
        return None
    try:
        from headway.gateway.tracing import Tracing
    except ImportError as error:
        raise config.error("telemetry.traces", f"{error.name} is missing: pip install 'headway[tracing]'") from error
    return Tracing(config.telemetry.traces, telemetry.registry)


async def _every(interval_s: float, name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Do ``step`` again and again until cancelled; a step that fails is logged, and the next one still comes."""
    while True:
        try:
            await step()
        except Exception:
            logger.exception("background_error", extra={"fields": {"task": name}})
        await asyncio.sleep(interval_s)


def rejection_reason(error: HeadwayError) -> str:
    """A refusal as a metric label."""
    if isinstance(error, RejectedError):
        return error.reason
    if isinstance(error, RequestError):
        return error.code or "invalid_request"
    return "no_instance"
