"""Takes API keys from where a configuration says they are. The one place of this room that reads the environment.

Called by whoever is about to connect, never while a file is parsed: a configuration is right or wrong whatever the
environment holds. It refuses a key that no header can carry.
"""

from __future__ import annotations

import os

from headway.config.tree import Config, Secret
from headway.errors import ConfigError


def api_key_of(config: Config, index: int) -> str | None:
    """The API key of ``config.instances[index]``, None where it names none.

    Raises:
        ConfigError: its environment variable is not set, or holds characters that no header can carry.
    """
    secret = config.instances[index].api_key
    if secret is None:
        return None
    try:
        return resolve(secret)
    except ConfigError as error:
        raise config.error(f"instances[{index}].api_key", str(error)) from None


def resolve(secret: Secret) -> str:
    """The credential itself.

    Raises:
        ConfigError: as :func:`api_key_of`, without a place.
    """
    variable = secret.variable
    value = secret.reference if variable is None else os.environ.get(variable)
    if not value:
        raise ConfigError(f"the environment variable {variable} is not set")
    if not value.isascii() or not value.isprintable():
        raise ConfigError("holds characters that no header can carry")
    return value
