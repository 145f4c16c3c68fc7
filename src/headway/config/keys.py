"""The keys of a configuration: who they belong to, as SHA-256 digests, from the environment and from a file of hashes.

Called when a gateway starts or reloads, never while the pool's file is parsed. A key in clear is read from the
environment only and kept nowhere: what comes back are digests. It refuses a key that stands in a file in clear.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from headway.config.nodes import NodeReader, read_text
from headway.config.secrets import resolve
from headway.config.tree import Config, KeyConfig, KeysFile, Secret
from headway.errors import ConfigError


class KeyTable(Struct, frozen=True, kw_only=True):
    """Digest (SHA-256, hex) → its client; and the digests of admins."""

    clients: dict[str, KeyConfig]
    admins: frozenset[str]


def key_digest(key: str) -> str:
    """The SHA-256 of a key in hex. Keys are long and random, so that a plain hash gives nothing away."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_keys(config: Config) -> KeyTable | None:
    """The keys of ``config``; None where it has no ``keys`` section and everybody may come.

    Raises:
        ConfigError: an environment variable is not set, a file is wrong, or a name or key is used twice.
    """
    keys = config.keys
    if keys is None:
        return None
    table: dict[str, KeyConfig] = {}
    for index, client in enumerate(keys.clients):
        digest = client.sha256 or _digest_of(config, f"keys.clients[{index}].key", client.key)
        if (clash := _clash(table, digest, client)) is not None:
            raise config.error(f"keys.clients[{index}].name", clash)
        table[digest] = client
    admins = {digest for digest in (keys.admin_sha256, _digest_of(config, "keys.admin", keys.admin)) if digest}
    if keys.file is not None:
        admins |= _read_file(beside(config, keys.file), table)
    shared = admins & table.keys()
    if shared:
        raise config.error("keys", f"the admin's key is also that of client {table[min(shared)].name!r}")
    return KeyTable(clients=table, admins=frozenset(admins))


def _read_file(path: Path, table: dict[str, KeyConfig]) -> set[str]:
    """Put the file's clients into ``table``; the digests of admins come back."""
    reader = NodeReader(read_text(path), str(path))
    found = reader.read(KeysFile)
    for index, client in enumerate(found.clients):
        key = f"clients[{index}]"
        line, column = reader.locations[key]
        message = "a file of keys holds their sha256, never a key"
        if client.sha256 is not None and client.key is None:
            clash = _clash(table, client.sha256, client)
            if clash is None:
                table[client.sha256] = client
                continue
            message = clash
        raise ConfigError(message, path=str(path), key=key, line=line, column=column)
    return set() if found.admin_sha256 is None else {found.admin_sha256}


def beside(config: Config, name: str) -> Path:
    """A path that a configuration names, relative to the configuration's directory."""
    return Path(config.path).parent / name


def _digest_of(config: Config, key: str, secret: Secret | None) -> str:
    """The digest of a key in the environment; empty where none is named."""
    if secret is None:
        return ""
    try:
        return key_digest(resolve(secret))
    except ConfigError as error:
        raise config.error(key, str(error)) from None


def _clash(table: Mapping[str, KeyConfig], digest: str, client: KeyConfig) -> str | None:
    if digest in table:
        return f"client {client.name!r} has the key of client {table[digest].name!r}"
    if any(client.name == known.name for known in table.values()):
        return f"the name {client.name!r} is used twice"
    return None
