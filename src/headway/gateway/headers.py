"""Which headers cross the gateway, in either direction.

Everything unknown passes. What belongs to one hop, to one host or to one owner does not: hop-by-hop headers, ``Host``,
``Accept-Encoding`` (answers are read on their way), and the client's credentials towards a hosted provider.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from multidict import CIMultiDict

from headway.gateway.errors import HeaderList
from headway.types import Decision

#: The admin's key beside a client's own, on a routed request.
ADMIN_HEADER = b"x-headway-admin-key"
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    b"transfer-encoding upgrade".split()
)
_NOT_TO_UPSTREAM = (
    HOP_BY_HOP
    | frozenset(b"host content-length accept-encoding expect x-request-id x-correlation-id x-headway-explain".split())
    | {ADMIN_HEADER}
)
_CREDENTIALS = frozenset(b"authorization cookie x-api-key api-key".split())
_NOT_TO_CLIENT = HOP_BY_HOP | frozenset(
    b"content-length date server set-cookie alt-svc x-request-id x-accel-buffering".split()
)


def upstream_headers(
    pairs: Sequence[tuple[bytes, bytes]], *, request_id: str, api_key: str | None, owns_credentials: bool
) -> CIMultiDict[str]:
    """The client's headers as the upstream gets them; ``api_key`` replaces the client's credentials.

    ``owns_credentials``: what the client sent to prove itself was meant for the gateway alone.
    """
    dropped = _NOT_TO_UPSTREAM | named_by_connection(pairs)
    if owns_credentials or api_key is not None:
        dropped |= _CREDENTIALS
    headers = CIMultiDict(
        [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs if name not in dropped]
    )
    headers["x-request-id"] = request_id
    headers["accept-encoding"] = "identity"
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    if "content-type" not in headers:
        headers["content-type"] = "application/json"
    return headers


def client_headers(raw: Iterable[tuple[bytes, bytes]]) -> HeaderList:
    """The upstream's headers as the client gets them."""
    pairs = [(name.lower(), value) for name, value in raw]
    dropped = _NOT_TO_CLIENT | named_by_connection(pairs)
    return [(name, value) for name, value in pairs if name not in dropped and _may_pass(name, value)]


def decision_headers(decision: Decision, decision_id: str, ignored: Sequence[str]) -> HeaderList:
    """What the client is told of the decision behind its answer."""
    headers = [
        (b"x-headway-policy", _ascii(decision.policy)),
        (b"x-headway-decision", decision_id.encode("ascii")),
        (b"x-headway-slo", decision.slo.encode("ascii")),
    ]
    candidate = decision.candidate
    if candidate is not None:
        headers.append((b"x-headway-instance", _ascii(candidate.instance_id)))
        headers.append((b"x-headway-model", _ascii(candidate.model)))
        estimate = candidate.estimate
        if estimate is not None:
            if estimate.ttft_s < float("inf"):
                headers.append((b"x-headway-predicted-ttft-ms", b"%.2f" % (estimate.ttft_s * 1e3)))
            if estimate.snapshot_age_s is not None:
                headers.append((b"x-headway-snapshot-age-ms", b"%.1f" % (estimate.snapshot_age_s * 1e3)))
    if decision.held_s is not None:
        headers.append((b"x-headway-held-ms", b"%.1f" % (decision.held_s * 1e3)))
    if ignored:
        headers.append((b"x-headway-ignored", ", ".join(ignored).encode("ascii", "replace")))
    return headers


def named_by_connection(pairs: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers that the ``Connection`` header declares to be hop-by-hop."""
    for name, value in pairs:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            return frozenset(part.strip().lower() for part in value.split(b","))
    return frozenset()


def _may_pass(name: bytes, value: bytes) -> bool:
    return not name.startswith(b"x-headway-") and value.isascii() and value.decode("ascii").isprintable()


def _ascii(text: str) -> bytes:
    return text.encode("ascii", "replace")
