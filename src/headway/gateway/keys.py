"""Who may use the gateway: clients by their keys, the admin by another; nobody is asked where no keys are configured.

Only digests are held, so that nothing here could leak a key into a log or an answer. What budgets have spent can be
kept in a file over a restart. This file refuses to tell a wrong key from an unknown one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import logging
import os
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headway.config import Config
from headway.config.keys import beside, key_digest, load_keys
from headway.errors import ConfigError, RequestError
from headway.gateway.headers import ADMIN_HEADER
from headway.gateway.limits import ClientLimits
from headway.gateway.log import event
from headway.gateway.request import Headers

#: How often spending is written, seconds.
SAVE_INTERVAL_S = 5.0

#: Paths that anybody may read: they show neither decisions nor the pool.
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/version", "/metrics", "/openapi.json"})
_OPEN_PREFIX = "/static/"
_CLIENT_PREFIXES = ("/v1/models", "/v1/feedback")


class KeyRing:
    """The keys of a configuration with the limits of their clients. ``earlier``: whose counts go on.

    Raises:
        ConfigError: as :func:`load_keys`, or the spend file is none.
    """

    def __init__(self, config: Config, earlier: KeyRing | None = None) -> None:
        table = load_keys(config)
        self.enforced = table is not None
        known = {} if earlier is None else {limits.name: limits for limits in earlier.clients.values()}
        self.clients: dict[str, ClientLimits] = {}
        self._admins = frozenset[str]() if table is None else table.admins
        self._changed_limits = []
        for digest, client in ({} if table is None else table.clients).items():
            limits = known.get(client.name)
            if limits is None:
                limits = ClientLimits(client)
            else:
                self._changed_limits.append((limits, client))
            self.clients[digest] = limits
        self._spend_path: Path | None = None
        if config.keys is not None and config.keys.spend_file is not None:
            self._spend_path = beside(config, config.keys.spend_file)
        self._saved = b""
        if earlier is None or earlier._spend_path != self._spend_path:
            self._load_spend(set(known))

    def take_effect(self) -> None:
        """Let the limits of clients that an earlier ring knew be those of this one."""
        for limits, client in self._changed_limits:
            limits.reconfigure(client)

    # ---- who is it -----------------------------------------------------------------------------------------------

    def client_of(self, headers: Headers) -> ClientLimits | None:
        """Whose request this is; None where no keys are in use.

        Raises:
            RequestError: 401, no key or none that is known.
        """
        if not self.enforced:
            return None
        given = _keys_in(headers)
        if not given:
            raise RequestError("a key is needed: send 'Authorization: Bearer KEY'", status=401, code="missing_api_key")
        for key in given:
            limits = self.clients.get(key_digest(key))
            if limits is not None:
                return limits
        raise RequestError("this key is not known here", status=401, code="invalid_api_key")

    def is_admin(self, headers: Headers) -> bool:
        """Whether the request may see and steer: with the admin's key, or where no keys are in use."""
        if not self.enforced:
            return True
        given = [*_keys_in(headers), headers.get(ADMIN_HEADER, b"").decode("latin-1")]
        return any(key_digest(key) in self._admins for key in given)

    def check_cold(self, path: str, headers: Headers) -> None:
        """Let a request to one of the gateway's own paths pass.

        Raises:
            RequestError: 401 without a key, 403 with one that does not open this path.
        """
        if not self.enforced or path in OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return
        if self.is_admin(headers):
            return
        if any(path == prefix or path.startswith(prefix + "/") for prefix in _CLIENT_PREFIXES):
            self.client_of(headers)
            return
        if not self._admins:
            raise RequestError(
                "nobody may: no admin key is configured (keys.admin)", status=403, code="admin_key_missing"
            )
        if not _keys_in(headers) and ADMIN_HEADER not in headers:
            raise RequestError("the admin's key is needed", status=401, code="missing_api_key")
        raise RequestError("the admin's key is needed, and this is another", status=403, code="admin_key_needed")

    # ---- spending ------------------------------------------------------------------------------------------------

    def _load_spend(self, known: set[str]) -> None:
        path = self._spend_path
        if path is None or not path.exists():
            return
        try:
            self._saved = path.read_bytes()
            spent = msgspec.json.decode(self._saved, type=dict[str, tuple[str, float]])
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"holds no spending: {error}", path=str(path), key="keys.spend_file") from None
        for limits in self.clients.values():
            if limits.name in spent and limits.name not in known:
                limits.budget.restore(*spent[limits.name])

    def save_spend(self) -> None:
        """Write what was spent, where that has changed; a file that cannot be written is reported, not fatal."""
        path = self._spend_path
        if path is None:
            return
        budgets = {limits.name: limits.budget for limits in self.clients.values()}
        data = msgspec.json.encode({name: (one.period_name, one.spent_usd) for name, one in sorted(budgets.items())})
        if data == self._saved:
            return
        draft = path.with_name(path.name + ".new")
        try:
            draft.write_bytes(data)
            os.replace(draft, path)
        except OSError as error:
            event(logging.ERROR, "spend_file_error", path=str(path), error=error.strerror)
            return
        self._saved = data


def warn_if_open(address: str, ring: KeyRing) -> None:
    """Say loudly that anybody who reaches ``address`` may use the gateway and see inside, where that is so."""
    if not ring.enforced and not is_loopback(address):
        event(
            logging.WARNING,
            "open_to_the_network",
            address=address,
            message="no keys are configured: whoever reaches this address can spend your money, see every decision and "
            "drain instances; set keys in the configuration, or server.host to 127.0.0.1",
        )


def is_loopback(address: str) -> bool:
    """Whether a URL's host is this machine alone."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys_in(headers: Headers) -> list[str]:
    """The keys that a request brings, in whatever way clients send one; browsers send the admin's as a password."""
    found = []
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        found.append(value.strip())
    elif scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error, ValueError):
            found.append(base64.b64decode(value, validate=True).partition(b":")[2])
    found += [headers[name].strip() for name in (b"x-api-key", b"api-key") if name in headers]
    return [key.decode("latin-1") for key in found if key]
