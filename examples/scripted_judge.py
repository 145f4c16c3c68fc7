"""A judge without a model, to try ``headway judge`` where there is none: it scores by words shared with the reference.

    python examples/scripted_judge.py 8201

serves an OpenAI-compatible chat endpoint on that port. Its scores say how alike two texts are, not how good one is.
"""

from __future__ import annotations

import json
import sys

from aiohttp import web

from headway.train.metrics import rouge_l


async def complete(request: web.Request) -> web.Response:
    """A verdict on the case in the second message."""
    messages = (await request.json())["messages"]
    case = json.loads(messages[1]["content"])
    reference = case.get("reference", case["request"])
    verdict = {"scores": {name: round(10 * rouge_l(text, reference), 1) for name, text in case["answers"].items()}}
    text = json.dumps(verdict)
    usage = {"prompt_tokens": len(json.dumps(messages)) // 4, "completion_tokens": len(text) // 4}
    message = {"role": "assistant", "content": text}
    return web.json_response(
        {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    )


if __name__ == "__main__":
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", complete)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]))
