"""The gateway's metrics: GenAI names where they exist, own ones with the prefix ``headway_``.

Every app has its own registry. Labels take configured values only; whatever a client made up becomes ``other``, so that
no request can mint a series. Gauges of the fleet are read from it at scrape time: they cannot drift from the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from headway.types import Decision, Outcome

if TYPE_CHECKING:
    from headway.gateway.state import Gateway

M = TypeVar("M", bound=MetricWrapperBase)

OTHER = "other"

#: GenAI semantic-convention metrics as Prometheus names them, version 1.36 of the conventions.
GEN_AI = {
    "ttft": "gen_ai_server_time_to_first_token_seconds",
    "tpot": "gen_ai_server_time_per_output_token_seconds",
    "duration": "gen_ai_server_request_duration_seconds",
    "tokens": "gen_ai_client_token_usage",
}
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKEN_BUCKETS = tuple(float(4**power) for power in range(11))
_ERROR_BUCKETS = (-5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_DECISION_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_SPEECH = ("gen_ai_operation_name", "gen_ai_request_model", "gen_ai_response_model")


class Served(NamedTuple):
    """What telemetry is told of one finished client request. Names are already restricted to configured ones."""

    operation: str
    requested_model: str
    model: str
    instance: str
    status: int
    duration_s: float
    ttft_s: float | None
    target_s: float | None
    predicted_ttft_s: float | None
    source: str | None


class Telemetry:
    """Counts and times of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._ttft = Histogram(
            GEN_AI["ttft"], "From the request's arrival to its first token", _SPEECH, buckets=_TTFT_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._tpot = Histogram(
            GEN_AI["tpot"], "Time per output token after the first", _SPEECH, buckets=_TPOT_BUCKETS, registry=registry
        )
        self._duration = Histogram(
            GEN_AI["duration"], "Whole requests", (*_SPEECH, "error_type"), buckets=_DURATION_BUCKETS, registry=registry
        )
        self._tokens = Histogram(
            GEN_AI["tokens"], "Tokens per request", (*_SPEECH, "gen_ai_token_type"), buckets=_TOKEN_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._predicted = Histogram(
            "headway_predicted_ttft_seconds", "Predicted TTFT of the chosen instance", ("instance", "source"),
            buckets=_TTFT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._error = Histogram(
            "headway_ttft_prediction_error_seconds", "Measured minus predicted TTFT", ("instance", "source"),
            buckets=_ERROR_BUCKETS, registry=registry,
        )  # fmt: skip
        self._attained = Counter("headway_slo_attained", "TTFT targets met", ("instance", "model"), registry=registry)
        self._missed = Counter("headway_slo_missed", "TTFT targets missed", ("instance", "model"), registry=registry)
        self._decision = Histogram(
            "headway_decision_seconds", "Router.decide", buckets=_DECISION_BUCKETS, registry=registry
        )
        self._requests = Counter(
            "headway_requests", "Client requests by HTTP status (499: client gone)", ("instance", "model", "status"),
            registry=registry,
        )  # fmt: skip
        self._retries = Counter("headway_retries", "Upstream calls after the first", ("reason",), registry=registry)
        self._rejected = Counter(
            "headway_rejected", "Requests turned down without an upstream call", ("reason",), registry=registry
        )
        self._queue_wait = Histogram(
            "headway_queue_wait_seconds", "Time in the central queue until release", buckets=_WAIT_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._queue_left = Counter(
            "headway_queue_left", "Requests that left the central queue: released, forced, timeout, shed, cancelled",
            ("how",), registry=registry,
        )  # fmt: skip
        self._cost = Counter("headway_cost_usd", "Cost by counted tokens", ("instance", "model"), registry=registry)
        self._wasted = Counter(
            "headway_wasted_cost_usd", "Part of the cost whose answer did not reach its client whole",
            ("instance", "model", "status"), registry=registry,
        )  # fmt: skip
        self._key_tokens = Counter("headway_key_tokens", "Tokens by client key", ("key",), registry=registry)
        self._key_cost = Counter("headway_key_cost_usd", "Cost by client key", ("key",), registry=registry)
        self._reloads = Counter(
            "headway_config_reloads", "Reloads of the configuration: ok, failed", ("result",), registry=registry
        )
        self._children: dict[tuple[int, tuple[str, ...]], MetricWrapperBase] = {}

    def decided(self, decision: Decision) -> None:
        """Count a decision and, where one was chosen, its prediction."""
        if decision.decision_s is not None:
            self._decision.observe(decision.decision_s)
        candidate = decision.candidate
        estimate = None if candidate is None else candidate.estimate
        if candidate is not None and estimate is not None and math.isfinite(estimate.ttft_s):
            self._child(self._predicted, (candidate.instance_id, estimate.source)).observe(estimate.ttft_s)

    def attempted(self, outcome: Outcome, model: str) -> None:
        """Count the cost of one upstream call, whatever its end was; what was paid for in vain also apart."""
        if outcome.cost_usd:
            self._child(self._cost, (outcome.instance_id, model)).inc(outcome.cost_usd)
            if outcome.status != "ok":
                labels = (outcome.instance_id, model, outcome.status)
                self._child(self._wasted, labels).inc(outcome.cost_usd)

    def reloaded(self, result: str) -> None:
        """Count a reload of the configuration."""
        self._child(self._reloads, (result,)).inc()

    def charged(self, client: str, tokens: int, cost_usd: float) -> None:
        """Count what a client's request took; ``client`` is the configured name of its key."""
        self._child(self._key_tokens, (client,)).inc(tokens)
        self._child(self._key_cost, (client,)).inc(cost_usd)

    def retried(self, reason: str) -> None:
        """Count one more upstream call for the same request."""
        self._child(self._retries, (reason,)).inc()

    def rejected(self, reason: str) -> None:
        """Count a request that got no upstream call."""
        self._child(self._rejected, (reason,)).inc()

    def left_queue(self, how: str, held_s: float | None) -> None:
        """Count a request that left the central queue; ``held_s`` where it goes on to an instance."""
        self._child(self._queue_left, (how,)).inc()
        if held_s is not None:
            self._queue_wait.observe(held_s)

    def served(self, served: Served, outcome: Outcome | None) -> None:
        """Count a client request that is over."""
        speech = (served.operation, served.requested_model, served.model)
        error_type = "" if served.status < 400 else str(served.status)
        self._child(self._duration, (*speech, error_type)).observe(served.duration_s)
        self._child(self._requests, (served.instance, served.model, str(served.status))).inc()
        if served.ttft_s is not None:
            self._child(self._ttft, speech).observe(served.ttft_s)
            if served.target_s is not None:
                met = self._attained if served.ttft_s <= served.target_s else self._missed
                self._child(met, (served.instance, served.model)).inc()
            if served.predicted_ttft_s is not None and served.source is not None:
                error = self._child(self._error, (served.instance, served.source))
                error.observe(served.ttft_s - served.predicted_ttft_s)
        if outcome is None:
            return
        if outcome.prompt_tokens is not None:
            self._child(self._tokens, (*speech, "input")).observe(outcome.prompt_tokens)
        if outcome.output_tokens is not None:
            self._child(self._tokens, (*speech, "output")).observe(outcome.output_tokens)
            if served.ttft_s is not None and outcome.output_tokens > 1 and outcome.status == "ok":
                pause_s = (served.duration_s - served.ttft_s) / (outcome.output_tokens - 1)
                self._child(self._tpot, speech).observe(max(pause_s, 0.0))

    def _child(self, metric: M, labels: tuple[str, ...]) -> M:
        """The metric at these labels; remembered, because finding it anew takes as long as counting does."""
        key = (id(metric), labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return cast("M", child)

    def exposition(self) -> bytes:
        """All metrics in Prometheus text format."""
        return generate_latest(self.registry)


class PoolCollector(Collector):
    """Reads the pool's present state when somebody scrapes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One family per gauge."""
        gateway = self._gateway
        views = gateway.fleet.views
        now = gateway.clock()
        yield _gauge("headway_inflight", "Requests sent and not ended", "instance",
                     ((view.instance.id, view.num_outstanding) for view in views))  # fmt: skip
        yield _gauge("headway_snapshot_age_seconds", "Age of the newest snapshot", "instance",
                     ((view.instance.id, max(now - view.snapshot.engine_s, 0.0))
                      for view in views if view.snapshot is not None))  # fmt: skip
        yield _gauge("headway_snapshot_stale", "1 while snapshots are too old to be replayed", "instance",
                     ((view.instance.id, view.stale) for view in views if view.snapshot is not None))  # fmt: skip
        levels = {"closed": 0, "half_open": 1, "open": 2}
        yield _gauge("headway_breaker_state", "0 closed, 1 half open, 2 open", "instance",
                     ((name, levels[breaker.state]) for name, breaker in gateway.health.breakers.items()))  # fmt: skip
        models = [model.name for model in gateway.config.models]
        yield _gauge("headway_prompt_token_ratio", "Reported over counted prompt tokens", "model",
                     ((model, gateway.token_ratio.ratio(model)) for model in models))  # fmt: skip
        yield _gauge("headway_prompt_token_error", "Mean relative error of corrected counts", "model",
                     ((model, gateway.token_ratio.error(model)) for model in models))  # fmt: skip
        gauges = gateway.feeds.gauges.items()
        yield _gauge("headway_engine_running", "Requests running, by the engine's own gauge", "instance",
                     ((name, found.num_running) for name, found in gauges))  # fmt: skip
        yield _gauge("headway_engine_waiting", "Requests waiting, by the engine's own gauge", "instance",
                     ((name, found.num_waiting) for name, found in gauges))  # fmt: skip
        failed = GaugeMetricFamily("headway_config_reload_failed", "1 while the newest configuration is not in service")
        failed.add_metric([], float(gateway.reloader.problem is not None))
        yield failed
        queue = GaugeMetricFamily("headway_queue_length", "Requests in the central queue")
        queue.add_metric([], len(gateway.queue))
        yield queue
        residuals = [(view.instance.id, gateway.router.residuals.residual(view.instance.id)) for view in views]
        yield _gauge("headway_ttft_residual", "Median of observed over replayed TTFT, uncorrected", "instance",
                     ((name, found.ratio) for name, found in residuals if found.ratio is not None))  # fmt: skip
        yield _gauge("headway_ttft_correction", "Replayed TTFT is multiplied by this", "instance",
                     ((name, found.correction) for name, found in residuals))  # fmt: skip
        yield _gauge("headway_profile_stale", "1 while observed TTFT contradicts the profile", "instance",
                     ((name, not found.trusted) for name, found in residuals))  # fmt: skip
        shadows = [view for view in views if view.shadow is not None]
        yield _gauge("headway_shadow_lost", "1 while an engine without snapshots cannot be replayed", "instance",
                     ((view.instance.id, view.stale) for view in shadows))  # fmt: skip
        yield _gauge("headway_shadow_foreign_requests", "Requests of an engine that came past this gateway", "instance",
                     ((view.instance.id, view.agreement.num_foreign) for view in shadows))  # fmt: skip
        yield _gauge("headway_shadow_missing_requests", "Requests sent that the engine's gauges lack", "instance",
                     ((view.instance.id, view.agreement.num_missing) for view in shadows))  # fmt: skip
        requests = GaugeMetricFamily("headway_requests_inflight", "Client requests being served")
        requests.add_metric([], gateway.num_inflight)
        yield requests


def _gauge(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values:
        family.add_metric([key], float(value))
    return family
