"""The cold routes: what the pool looks like, why a query went where, whether to send traffic here.

Starlette serves these; the hot path never touches it. Nothing here sends a request to an instance, and nothing here
shows a secret or a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import headway
from headway.errors import HeadwayError, RequestError
from headway.fleet import InstanceView, Shadow
from headway.gateway.decisions import decision_as_json
from headway.gateway.errors import error_answer, error_body
from headway.gateway.feedback import MAX_FEEDBACK_BYTES, read_feedback
from headway.gateway.live_routes import LiveRoutes
from headway.gateway.openapi import document
from headway.gateway.request import CHAT, ENDPOINTS, body_too_large, first_headers, parse_request, request_id
from headway.gateway.state import READY_GRACE_S, Gateway

Handler = Callable[[Request, Exception], Awaitable[Response]]

_OWNER = "headway"
#: Of a long queue so many requests are shown: each costs a look at every instance.
MAX_LISTED = 64


def cold_routes(gateway: Gateway) -> Starlette:
    """The application that serves everything but the routed endpoints."""
    routes, live = AdminRoutes(gateway), LiveRoutes(gateway)
    return Starlette(
        routes=[
            Route("/", live.index),
            Route("/static/{name}", live.asset),
            Route("/events", live.events),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/route", routes.route, methods=["POST"]),
            Route("/v1/feedback", routes.feedback, methods=["POST"]),
            Route("/decisions/{id}", routes.decision),
            Route("/queue", routes.queue),
            Route("/instances", routes.instances),
            Route("/instances/{id:path}/drain", routes.drain, methods=["POST"]),
            Route("/metrics", routes.metrics),
            Route("/health", routes.health),
            Route("/livez", routes.health),
            Route("/readyz", routes.ready),
            Route("/version", routes.version),
            Route("/openapi.json", routes.openapi),
            *(Route(path, routes.hot, methods=["POST"]) for path in ENDPOINTS),  # so that other methods are a 405
        ],
        exception_handlers={
            404: _http_error(404, "no such path", "not_found"),
            405: _http_error(405, "this path does not take that method", "method_not_allowed"),
            HeadwayError: _headway_error,
            Exception: _headway_error,
        },
    )


class AdminRoutes:
    """One method per path."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """What clients may send as ``model``."""
        data = [self._model(name) for name in self._gateway.model_names]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        self._gateway.candidates_of(name)
        return _json(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": _OWNER}

    async def route(self, request: Request) -> Response:
        """Decide and send nothing. Takes the body of any routed endpoint."""
        gateway = self._gateway
        headers = first_headers(request.scope["headers"])
        arrival_s = gateway.clock()
        body = await self._body(request)
        endpoint = CHAT
        try:
            fields = msgspec.json.decode(body)
            if isinstance(fields, dict):
                endpoint = next((e for e in ENDPOINTS.values() if any(key in fields for key in e.prompt_fields)), CHAT)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # parse_request says what is wrong
        parsed = parse_request(endpoint, headers, body, prefix_block_tokens=gateway.fleet.prefix_block_tokens)
        name = request_id(headers)
        record, refusal = gateway.decide(gateway.query_of(parsed, name, arrival_s), name, counted=False)
        if isinstance(refusal, RequestError):
            raise refusal
        return _json(decision_as_json(record))

    async def feedback(self, request: Request) -> Response:
        """What a user says of an answer."""
        name, quality, comment = read_feedback(await self._body(request, MAX_FEEDBACK_BYTES))
        keys, headers = self._gateway.keys, first_headers(request.scope["headers"])
        limits = None if keys.is_admin(headers) else keys.client_of(headers)
        client = None if limits is None else limits.name
        answer = await self._gateway.feedback.give(name, quality, comment, client=client)
        return _json({"stored": True, "request_id": answer.request_id, "decision_id": answer.decision_id})

    async def _body(self, request: Request, max_bytes: int | None = None) -> bytes:
        body = bytearray()
        if max_bytes is None:
            max_bytes = int(self._gateway.config.server.max_body_mb * 1e6)
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise body_too_large(max_bytes)
        return bytes(body)

    async def decision(self, request: Request) -> Response:
        """A recent decision with every candidate's figures; by a request's id, why it is still held."""
        name = request.path_params["id"]
        record = self._gateway.decisions.get(name)
        if record is None:
            record = self._gateway.queue.explain(name)
        if record is None:
            raise RequestError("no such decision, or it is too old", status=404, code="decision_not_found")
        return _json(decision_as_json(record))

    async def queue(self, request: Request) -> Response:
        """What is held, in the order of service, each with the reason why."""
        queue = self._gateway.queue
        return _json({"length": len(queue), "held": queue.listing(MAX_LISTED)})

    async def instances(self, request: Request) -> Response:
        """Every instance as the router sees it now."""
        gateway = self._gateway
        now = gateway.clock()
        gateway.feeds.poll(now)
        sources = gateway.router.sources(now)
        return _json(
            {
                "config_hash": gateway.config.config_hash,
                "config_problem": gateway.reloader.problem,
                "instances": [self._instance(index, source, now) for index, source in enumerate(sources)],
            }
        )

    def _instance(self, index: int, estimate: str, now: float) -> dict[str, object]:
        gateway = self._gateway
        view = gateway.fleet.views[index]
        instance, snapshot, engine = view.instance, view.snapshot, view.engine
        source = gateway.config.instances[index].snapshots
        subscriber = gateway.feeds.subscribers.get(instance.id)
        gauges = gateway.feeds.gauges.get(instance.id)
        residual = gateway.router.residuals.residual(instance.id)
        return {
            "id": instance.id,
            "model": instance.model,
            "engine": instance.engine,
            "engine_version": None if snapshot is None else snapshot.engine_version,
            "profile": instance.profile,
            "healthy": view.healthy,
            "breaker": gateway.health.breakers[instance.id].state,
            "draining": view.draining,
            "resting": view.resting,
            "outstanding": view.num_outstanding,
            "estimate": estimate,
            "snapshots": None if source is None else source.place,
            "clock_offset_s": None if subscriber is None else subscriber.clock_offset_s,
            "snapshot_sequence": None if snapshot is None else snapshot.sequence,
            "snapshot_age_s": None if snapshot is None else round(view.snapshot_age_s or 0.0, 6),
            "stale": view.stale,
            "clock_trusted": view.clock_trusted,
            "profile_stale": not view.clock_trusted,
            "ttft_residual": residual.ratio,
            "ttft_correction": residual.correction,
            "shadow": None if view.shadow is None else _shadow(view, view.shadow, now),
            "prefix_blocks": None if view.prefixes is None else len(view.prefixes),
            "problem": gateway.feeds.errors.get(instance.id) or gateway.feeds.problem_of(view),
            "running": None if engine is None else engine.num_running,
            "waiting": None if engine is None else engine.num_waiting,
            "gauges": None if gauges is None else msgspec.to_builtins(gauges),
        }

    async def drain(self, request: Request) -> Response:
        """Give an instance nothing new (``{"draining": false}`` takes it back)."""
        gateway = self._gateway
        name = request.path_params["id"]
        if name not in gateway.targets:
            raise RequestError(f"no instance '{name}'", status=404, param="id", code="instance_not_found")
        body = await self._body(request)
        try:
            wanted = msgspec.json.decode(body or b"{}", type=_Drain).draining
        except msgspec.MsgspecError as error:
            raise RequestError(f"the body is wrong: {error}", param="draining") from None
        gateway.fleet.set_draining(name, wanted)
        gateway.queue.wake()
        return _json({"id": name, "draining": wanted})

    async def metrics(self, request: Request) -> Response:
        """All metrics in Prometheus text format."""
        return Response(self._gateway.telemetry.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether to send traffic here."""
        reason = self._gateway.not_ready_because()
        body = {"ready": reason is None, "reason": reason, "grace_s": READY_GRACE_S}
        return _json(body, 200 if reason is None else 503)

    async def hot(self, request: Request) -> Response:
        """Never reached: the app takes these requests before Starlette sees them."""
        raise RequestError("this path is served elsewhere", status=500)

    async def openapi(self, request: Request) -> Response:
        """These paths, described."""
        return _json(document())

    async def version(self, request: Request) -> Response:
        """What runs here, under which configuration."""
        return _json({"version": headway.__version__, "config_hash": self._gateway.config.config_hash})


def _shadow(view: InstanceView, shadow: Shadow, now: float) -> dict[str, object]:
    """How well the replay of an instance that shows nothing holds."""
    return {
        "foreign": view.agreement.num_foreign,
        "missing": view.agreement.num_missing,
        "overdue_s": round(shadow.overdue_s(now), 6),
        "tokens_per_event": round(shadow.tokens_per_event, 3),
    }


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    draining: bool = True


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _http_error(status: int, message: str, code: str) -> Handler:
    async def handler(request: Request, error: Exception) -> Response:
        return Response(error_body(message, "invalid_request_error", None, code), status, media_type="application/json")

    return handler


async def _headway_error(request: Request, error: Exception) -> Response:
    answer = error_answer(error)
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, answer.status, headers, media_type="application/json")
