"""The page at ``/`` and its event stream: a few static files of this package and one long answer.

The page loads nothing from elsewhere, and its content policy forbids it to. It refuses to build anything: what is
served is what lies in ``static/``.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headway.errors import RequestError
from headway.gateway.live import LiveFeed
from headway.gateway.state import Gateway

_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class LiveRoutes:
    """The page's paths."""

    def __init__(self, gateway: Gateway) -> None:
        self._feed = LiveFeed(gateway)
        folder = files("headway.gateway") / "static"
        self._files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}

    async def index(self, request: Request) -> Response:
        """The page itself. It holds no figures, so anybody who reaches the port may load it."""
        return self._file("index.html")

    async def asset(self, request: Request) -> Response:
        """One of the page's own files."""
        return self._file(request.path_params["name"])

    async def events(self, request: Request) -> Response:
        """What the page shows, as server-sent events."""
        return StreamingResponse(
            await self._feed.watch(),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    def _file(self, name: str) -> Response:
        content = self._files.get(name)
        if content is None:
            raise RequestError("no such path", status=404, code="not_found")
        return Response(content, media_type=_TYPES[name.rpartition(".")[2]], headers=dict(_HEADERS))
