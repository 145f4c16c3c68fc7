"""The trained predictors of a gateway: which files they come from, and who uses what is in them.

The live router and the shadow may each have one; a file that changes is followed while the gateway runs. With another
configuration they are loaded anew where path or models differ, before anything is swapped. It refuses to be half
changed: either everything of a configuration loads, or nothing is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry

from headway.assembly import predictor_path, prior_predictor
from headway.config import Config
from headway.errors import ArtifactError, ConfigError
from headway.gateway.predictor_watch import PredictorCollector, PredictorWatch
from headway.predict.base import Predictor

#: A configuration and an artifact's bytes → the predictor of its models. Raises ArtifactError.
Load = Callable[[Config, bytes], Predictor]

Watches = Mapping[str, PredictorWatch]


class Predictors:
    """The predictors of ``config``'s live router and shadow.

    Raises:
        ConfigError: a file cannot be read, or holds no predictor of these models; names the key.
    """

    def __init__(self, config: Config, load: Load, registry: CollectorRegistry) -> None:
        self._load = load
        self._config = config
        self._watches: Watches = {}
        self._watches = self.prepare(config)
        registry.register(PredictorCollector(self.all))

    def all(self) -> Iterable[PredictorWatch]:
        """The watches there are."""
        return self._watches.values()

    def prepare(self, config: Config) -> Watches:
        """What another configuration needs, loaded; nothing is changed yet.

        Raises:
            ConfigError: as for the class.
        """
        shadow = None if config.shadow is None else config.shadow.predictor
        wanted = {"live": ("routing.predictor", config.routing.predictor), "shadow": ("shadow.predictor", shadow)}
        found = {}
        for role, (key, name) in wanted.items():
            path = None if name is None else predictor_path(config, name)
            if path is None:
                continue
            known = self._watches.get(role)
            if known is not None and known.path == path and config.models == self._config.models:
                found[role] = known
                continue
            try:
                found[role] = PredictorWatch(role, path, lambda content: self._load(config, content))
            except ArtifactError as error:
                raise config.error(key, f"{path}: {error}", kind=ArtifactError) from error
            except ConfigError as error:
                raise config.error(key, str(error)) from error
        return found

    def take(self, config: Config, watches: Watches) -> None:
        """Go on with what :meth:`prepare` gave for ``config``."""
        self._config, self._watches = config, watches

    def of_live(self, config: Config, watches: Watches | None = None) -> Predictor:
        """What the live router predicts with."""
        watch = (self._watches if watches is None else watches).get("live")
        return prior_predictor(config) if watch is None else watch.predictor

    def of_shadow(self, config: Config, otherwise: Predictor, watches: Watches | None = None) -> Predictor:
        """What the shadow predicts with; ``otherwise`` where it names no predictor of its own."""
        if config.shadow is None or config.shadow.predictor is None:
            return otherwise
        watch = (self._watches if watches is None else watches).get("shadow")
        return prior_predictor(config) if watch is None else watch.predictor

    def follow(self, role: str, use: Callable[[Predictor], None]) -> None:
        """Hand every predictor that comes from ``role``'s file from now on to ``use``."""
        watch = self._watches.get(role)
        if watch is not None:
            watch.use = use

    async def look(self) -> None:
        """Look at every file."""
        for watch in list(self._watches.values()):
            await watch.look()
