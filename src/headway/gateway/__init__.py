"""The OpenAI-compatible HTTP gateway: raw ASGI hot path, cold routes beside it."""
