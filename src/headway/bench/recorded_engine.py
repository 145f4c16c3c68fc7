"""A simulated engine that remembers what it sent, a process: arguments are profile, model, port and segment.

``GET /recorded/ID`` gives the bytes of the answer to the request with that ``x-request-id``; the header ``x-complete``
says whether it was sent to its end. The newest answers are kept, so that a checker that asks soon finds them.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict

from headway.engines.openai_server import Message, Receive, Send
from headway.engines.process import Application, EngineOptions, serve
from headway.profiles import load_truth

MAX_KEPT = 4000
_PATH = "/recorded/"


class Recording:
    """Around an application: passes everything through and keeps the bodies it sends, by request id."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._kept: OrderedDict[str, tuple[list[bytes], list[bool]]] = OrderedDict()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One exchange."""
        if scope["type"] == "http" and scope["path"].startswith(_PATH):
            await self._answer(scope["path"].removeprefix(_PATH), send)
            return
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        body: list[bytes] = []
        complete: list[bool] = []

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
                self._kept[name] = (body, complete)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            else:
                body.append(message.get("body", b""))  # before it is sent: a client may have it before send returns
                if not message.get("more_body", False):
                    complete.append(True)
            await send(message)

        await self._app(scope, receive, recorded)

    async def _answer(self, name: str, send: Send) -> None:
        body, complete = self._kept.get(name, ([], []))
        headers = [(b"x-complete", b"1" if complete else b"0")]
        await send({"type": "http.response.start", "status": 200 if name in self._kept else 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(body)})


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile")
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("segment")
    asked = parser.parse_args()
    serve(
        EngineOptions(
            truth=load_truth(asked.profile),
            model=asked.model,
            host="127.0.0.1",
            port=asked.port,
            segment=asked.segment,
            seed=0,
            time_scale=1.0,
            around=Recording,
        )
    )


if __name__ == "__main__":
    main()
