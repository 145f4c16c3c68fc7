"""``headway serve``: run the gateway of a configuration until a signal ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def serve(
    config: Path,
    /,
    *,
    host: str | None = None,
    port: int | None = None,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    seed: int = 0,
) -> None:
    """Route OpenAI-compatible requests over the pool of a configuration.

    Prints the address it listens on as one line on stdout; logs go to stderr, one line of JSON each. SIGTERM or Ctrl-C
    lets running answers finish within ``server.drain_s``.

    Parameters
    ----------
    config
        The pool's YAML file.
    host
        Address to listen on, in place of ``server.host``.
    port
        Port to listen on, in place of ``server.port``; 0 takes any free one.
    log_level
        The least that is logged.
    seed
        Seed of what a policy draws.
    """
    import gc

    from headway.config import load_config
    from headway.errors import ConfigError
    from headway.gateway import log
    from headway.gateway.server import Server, listen
    from headway.gateway.state import Gateway

    def announce(address: str) -> None:
        print(f"headway serve: listening on {address}", flush=True)
        gc.collect()
        gc.freeze()  # what start-up made lives as long as the process: no collection needs to look at it again
        gc.set_threshold(20_000, 20, 20)  # thousands of streams hold many objects that make no cycles

    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"must be between 0 and 65535, not {port}", key="--port")
    if seed < 0:
        raise ConfigError(f"must be at least 0, not {seed}", key="--seed")
    loaded = load_config(config)
    log.configure(log_level)
    gateway = Gateway(loaded, seed=seed)
    listener = listen(host or loaded.server.host, loaded.server.port if port is None else port)
    Server(gateway, listener, on_listening=announce).run()
    del gateway
    gc.unfreeze()
    gc.collect()  # native engines must go before the interpreter does
