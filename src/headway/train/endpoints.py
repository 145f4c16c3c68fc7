"""Outside chat endpoints as collecting and judging know them: address, key, prices, and which fields they understand.

Endpoints differ in small ways: some know no ``stream_options``, some want ``max_completion_tokens``, some take no JSON
schema. What one turns down by name is left out from then on. This file refuses to send anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from headway.assembly import model_card
from headway.config import Config, Secret
from headway.config.nodes import did_you_mean
from headway.config.secrets import api_key_of, resolve
from headway.errors import ConfigError
from headway.predict.base import cost_usd
from headway.predict.tokens import count_tokens, messages_text
from headway.types import ModelCard

#: Tokens that a chat template may add, and by how much a count without a tokenizer may be too low.
_TEMPLATE_TOKENS = 64
_COUNT_MARGIN = 2

Messages = Sequence[Mapping[str, object]]


class Ask(Struct, frozen=True, kw_only=True):
    """What to ask, before an endpoint's own ways are known. ``schema`` is the JSON schema of the answer."""

    messages: Messages
    max_tokens: int
    stream: bool = False
    schema: Mapping[str, object] | None = None
    extra: Mapping[str, object] = {}

    @property
    def num_counted_tokens(self) -> int:
        """Prompt tokens by the project's count without a tokenizer."""
        return count_tokens(messages_text(list(self.messages)))


class Endpoint:
    """One place where a model is served. ``card`` holds its prices; ``id`` names it in complaints."""

    def __init__(self, *, id: str, model: str, api_base: str, api_key: str | None, card: ModelCard) -> None:
        self.id, self.model, self.card = id, model, card
        self.url = api_base.rstrip("/") + "/chat/completions"
        self.headers = {"content-type": "application/json"}
        if api_key is not None:
            self.headers["authorization"] = f"Bearer {api_key}"
        self._api_key = api_key
        self._asks_for_usage = True
        self._cap_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
        self._format: Literal["json_schema", "json_object", "text"] = "json_schema"

    def body(self, ask: Ask) -> bytes:
        """The request's body in the fields that this endpoint takes."""
        fields: dict[str, object] = {
            "model": self.model,
            "messages": list(ask.messages),
            self._cap_field: ask.max_tokens,
        }
        if ask.stream:
            fields["stream"] = True
            if self._asks_for_usage:
                fields["stream_options"] = {"include_usage": True}
        if ask.schema is not None and self._format == "json_schema":
            schema = {"name": "answer", "strict": True, "schema": ask.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif ask.schema is not None and self._format == "json_object":
            fields["response_format"] = {"type": "json_object"}
        return msgspec.json.encode({**fields, **ask.extra})

    def adapt(self, complaint: str) -> bool:
        """Leave out what ``complaint`` (of a 400 or 422) names; False when that changes nothing any more."""
        if self._cap_field == "max_tokens" and "max_completion_tokens" in complaint:
            self._cap_field = "max_completion_tokens"
        elif self._asks_for_usage and ("stream_options" in complaint or "include_usage" in complaint):
            self._asks_for_usage = False
        elif self._format != "text" and any(name in complaint for name in ("response_format", "json_schema", "guided")):
            self._format = "json_object" if self._format == "json_schema" else "text"
        else:
            return False
        return True

    def most_usd(self, ask: Ask) -> float:
        """What the request can cost at most; the prompt is taken at twice its count without a tokenizer."""
        return self.cost_usd(_COUNT_MARGIN * ask.num_counted_tokens + _TEMPLATE_TOKENS, ask.max_tokens)

    def cost_usd(self, prompt_tokens: int, output_tokens: int) -> float:
        """What these tokens cost here."""
        return cost_usd(self.card, prompt_tokens, output_tokens)

    def redacted(self, text: str) -> str:
        """``text`` without the key, should an endpoint repeat it."""
        return text.replace(self._api_key, "***") if self._api_key else text


def pool_endpoints(config: Config, models: Sequence[str] | None = None) -> dict[str, list[Endpoint]]:
    """Model → its endpoints, for ``models`` or every model of the pool that is served.

    Raises:
        ConfigError: an unknown model, one without an instance, or an API key that is not set.
    """
    cards = {model.name: model_card(model) for model in config.models}
    for name in models or ():
        if name not in cards:
            raise ConfigError(f"unknown model {name!r}{did_you_mean(name, sorted(cards))}", key="--models")
    wanted = list(dict.fromkeys(models)) if models is not None else list(cards)
    found: dict[str, list[Endpoint]] = {name: [] for name in wanted}
    for index, instance in enumerate(config.instances):
        if instance.model in found:
            found[instance.model].append(
                Endpoint(
                    id=instance.id,
                    model=instance.model,
                    api_base=instance.api_base,
                    api_key=api_key_of(config, index),
                    card=cards[instance.model],
                )
            )
    for name in wanted:
        if not found[name] and models is not None:
            raise ConfigError(f"no instance serves {name!r}", path=config.path, key="--models")
    served = {name: endpoints for name, endpoints in found.items() if endpoints}
    return served


def url_endpoint(url: str, *, model: str, api_key: str | None, card: ModelCard) -> Endpoint:
    """An endpoint that stands in no configuration; ``api_key`` is ``env:NAME``.

    Raises:
        ConfigError: no http or https URL, or a key that is not set.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise ConfigError(f"must be a URL such as http://127.0.0.1:8101/v1, not {url!r}", key="--judge")
    key = None
    if api_key is not None:
        if not api_key.startswith("env:"):
            raise ConfigError("takes env:NAME, so that no key stands in a command line", key="--api-key")
        try:
            key = resolve(Secret(api_key))
        except ConfigError as error:
            raise ConfigError(str(error), key="--api-key") from None
    return Endpoint(id=parts.netloc, model=model, api_base=url, api_key=key, card=card)
