"""The ASGI application: the routed endpoints in raw ASGI, everything else by Starlette, start and stop by lifespan.

There is no middleware: one that wraps answers would buffer streams and hide disconnects.
"""

from __future__ import annotations

import logging

from headway.errors import RequestError
from headway.gateway.admin import cold_routes
from headway.gateway.chat import Exchange, Scope
from headway.gateway.errors import error_answer
from headway.gateway.guard import Receive, Send
from headway.gateway.log import event
from headway.gateway.request import ENDPOINTS, first_headers
from headway.gateway.state import Gateway


class App:
    """Serve ``gateway`` over ASGI 3."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._cold = cold_routes(gateway)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event: a request, or the server's start and stop."""
        if scope["type"] == "http":
            endpoint = ENDPOINTS.get(scope["path"])
            if endpoint is not None and scope["method"] == "POST":
                await Exchange(self.gateway, endpoint, scope, receive, send).run()
                return
            try:
                self.gateway.keys.check_cold(scope["path"], first_headers(scope["headers"]))
            except RequestError as refusal:
                self.gateway.telemetry.rejected("unauthorized")
                await _refuse(refusal, send)
            else:
                await self._cold(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.gateway.start()
                event(
                    logging.INFO,
                    "started",
                    config=self.gateway.config.path,
                    config_hash=self.gateway.config.config_hash,
                )
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.gateway.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return


async def _refuse(refusal: RequestError, send: Send) -> None:
    """Answer without a key; a browser asks its user for the admin's as a password."""
    answer = error_answer(refusal)
    headers = [
        (name, b'Basic realm="headway admin"' if name == b"www-authenticate" else value)
        for name, value in answer.headers
    ]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer.body))]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
