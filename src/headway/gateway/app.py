"""The ASGI application: the routed endpoints in raw ASGI, everything else by Starlette, start and stop by lifespan.

There is no middleware: one that wraps answers would buffer streams and hide disconnects.
"""

from __future__ import annotations

import logging

from headway.gateway.admin import cold_routes
from headway.gateway.chat import Exchange, Scope
from headway.gateway.guard import Receive, Send
from headway.gateway.log import event
from headway.gateway.request import ENDPOINTS
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
