"""T46 over real sockets: a shadow changes nothing for clients and upstreams; metrics tell agreement and regret."""

from __future__ import annotations

import re
from collections.abc import Mapping

import aiohttp
import pytest

from gateway_clients import CHAT, chat
from headway.config import Config
from headway.errors import ConfigError
from headway.gateway.state import Gateway
from headway.testing import FakeUpstream, Reply, pool, running_gateway
from headway.types import Prediction, Query

MODELS = [
    {"name": "small", "prior": {"quality": 0.4, "output_tokens": 10}},
    {"name": "large", "prior": {"quality": 0.9, "output_tokens": 10}},
]


def config_of(small: FakeUpstream, large: FakeUpstream, **rest: object) -> Config:
    instances = [
        {"id": "s", "model": "small", "api_base": small.url, "engine": "vllm-0.32"},
        {"id": "l", "model": "large", "api_base": large.url, "engine": "vllm-0.32"},
    ]
    return pool(MODELS, instances, **rest)


async def ask(session: aiohttp.ClientSession, url: str, num: int) -> list[tuple[str, str, bytes]]:
    """Instance, decision id and body of each answer."""
    answers = []
    for number in range(num):
        headers = {"x-request-id": f"r{number}"}
        async with session.post(url + CHAT, json=chat(content="What is it?"), headers=headers) as response:
            assert response.status == 200
            body = await response.read()
            answers.append((response.headers["x-headway-instance"], response.headers["x-headway-decision"], body))
    return answers


async def metrics_of(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(url + "/metrics") as response:
        text = await response.text()
    return {name: float(value) for name, value in re.findall(r"^(headway_shadow\S+) (\S+)$", text, re.MULTILINE)}


async def test_a_shadow_changes_nothing_and_is_compared(session: aiohttp.ClientSession) -> None:
    """Round robin beside bear: the same answers from the same instances, and every second decision differs."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        async with running_gateway(config_of(small, large)) as gateway:
            plain = await ask(session, gateway.url, 6)
        num_small, num_large = len(small.requests), len(large.requests)
        shadow = {"policy": "round_robin", "sample": 1.0}
        async with running_gateway(config_of(small, large, shadow=shadow)) as gateway:
            watched = await ask(session, gateway.url, 6)
            metrics = await metrics_of(session, gateway.url)
            async with session.get(f"{gateway.url}/decisions/{watched[0][1]}") as response:
                decision = await response.json()
        assert [(one[0], one[2]) for one in watched] == [(one[0], one[2]) for one in plain]
        assert (len(small.requests), len(large.requests)) == (2 * num_small, 2 * num_large)
        bodies = [[one.body for one in large.requests[part]] for part in (slice(0, num_large), slice(num_large, None))]
        assert bodies[0] == bodies[1]
    assert {one[0] for one in watched} == {"l"}
    assert metrics['headway_shadow_decisions_total{agreement="same_instance"}'] == 3
    assert metrics['headway_shadow_decisions_total{agreement="other_model"}'] == 3
    assert metrics['headway_shadow_regret_sum{of="shadow"}'] == pytest.approx(3 * 0.5)
    assert metrics['headway_shadow_regret_sum{of="live"}'] == pytest.approx(-3 * 0.5)
    assert metrics["headway_shadow_seconds_count"] == 6
    assert decision["policy"] == "bear"
    assert decision["shadow"]["policy"] == "round_robin"
    assert decision["shadow"]["agreement"] in {"same_instance", "other_model"}


async def test_only_the_sample_is_decided(session: aiohttp.ClientSession) -> None:
    """A share of the queries is enough, and what it is not asked costs nothing."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        shadow = {"policy": "round_robin", "sample": 0.5}
        async with running_gateway(config_of(small, large, shadow=shadow), seed=3) as gateway:
            answers = await ask(session, gateway.url, 20)
            decided = [gateway.gateway.decisions.get(one[1]) for one in answers]
            metrics = await metrics_of(session, gateway.url)
    num = sum(record is not None and record.shadow is not None for record in decided)
    assert 4 <= num <= 16
    assert metrics["headway_shadow_seconds_count"] == num


class Backwards:
    """A predictor that takes the small model for the good one, and knows how long answers are."""

    def predict(self, query: Query) -> Mapping[str, Prediction]:
        """As it says."""
        return {
            "small": Prediction(0.9, 5.0, 0.0, "backwards"),
            "large": Prediction(0.2, 5.0, 0.0, "backwards"),
        }


async def test_a_shadow_predictor_is_judged_by_what_answers_came_to(session: aiohttp.ClientSession) -> None:
    """Beside choices, predicted lengths are held against measured ones, the live predictor's and the shadow's alike."""
    async with FakeUpstream(Reply(num_tokens=5)) as small, FakeUpstream(Reply(num_tokens=5)) as large:
        shadow = {"policy": "bear", "sample": 1.0}
        async with running_gateway(config_of(small, large, shadow=shadow)) as gateway:
            assert gateway.gateway.shadow is not None
            gateway.gateway.shadow.router.use_predictor(Backwards())
            answers = await ask(session, gateway.url, 4)
            metrics = await metrics_of(session, gateway.url)
    assert {one[0] for one in answers} == {"l"}
    assert metrics['headway_shadow_decisions_total{agreement="other_model"}'] == 4
    assert metrics['headway_shadow_regret_sum{of="live"}'] == pytest.approx(4 * 0.7)
    assert metrics['headway_shadow_length_error_tokens_sum{of="live"}'] == 4 * 5  # 10 predicted, 5 came
    assert metrics['headway_shadow_length_error_tokens_sum{of="shadow"}'] == 0


class Broken:
    def predict(self, query: Query) -> Mapping[str, Prediction]:
        raise ZeroDivisionError


async def test_a_broken_shadow_hurts_nobody(session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture) -> None:
    """Its failures are counted, and said once."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        shadow = {"policy": "bear", "sample": 1.0}
        async with running_gateway(config_of(small, large, shadow=shadow)) as gateway:
            assert gateway.gateway.shadow is not None
            gateway.gateway.shadow.router.use_predictor(Broken())
            assert len(await ask(session, gateway.url, 3)) == 3
            metrics = await metrics_of(session, gateway.url)
    assert metrics["headway_shadow_failures_total"] == 3
    assert [record.message for record in caplog.records].count("shadow_failed") == 1


async def test_a_shadow_without_a_predictor_follows_the_live_one(session: aiohttp.ClientSession) -> None:
    """After the live predictor was swapped, the shadow predicts by the new one too."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        shadow = {"policy": "latency_agnostic", "sample": 1.0}
        async with running_gateway(config_of(small, large, shadow=shadow)) as gateway:
            gateway.gateway.router.use_predictor(Backwards())
            answers = await ask(session, gateway.url, 2)
            metrics = await metrics_of(session, gateway.url)
    assert {one[0] for one in answers} == {"s"}
    assert metrics['headway_shadow_decisions_total{agreement="same_instance"}'] == 2


async def test_a_queue_that_holds_is_compared_at_release(session: aiohttp.ClientSession) -> None:
    """Under ``on_infeasible: queue`` the shadow decides when the live policy lets a query go."""
    async with FakeUpstream() as small, FakeUpstream() as large:
        config = config_of(
            small, large, routing={"on_infeasible": "queue"}, shadow={"policy": "round_robin", "sample": 1.0}
        )
        async with running_gateway(config) as gateway:
            await ask(session, gateway.url, 4)
            metrics = await metrics_of(session, gateway.url)
    assert metrics["headway_shadow_seconds_count"] == 4


@pytest.mark.parametrize(
    ("shadow", "key", "words"),
    [
        ({}, "shadow", "neither a policy nor a predictor"),
        ({"policy": "bera"}, "shadow.policy", "did you mean 'bear'"),
        ({"policy": "central_fcfs"}, "shadow.policy", "holds queries"),
        ({"policy": "bear", "sample": 1.5}, "shadow.sample", "<= 1"),
    ],
)
def test_what_cannot_be_a_shadow_is_named(shadow: dict[str, object], key: str, words: str) -> None:
    """The key and the nearest known name."""
    instances = [{"id": "a", "model": "small", "api_base": "http://127.0.0.1:9/v1"}]
    with pytest.raises(ConfigError, match=words) as caught:
        pool(MODELS, instances, shadow=shadow)
    assert caught.value.key == key


def test_a_holding_live_policy_needs_a_choosing_shadow() -> None:
    """Without a policy of its own a shadow would take over one that chooses nothing."""
    instances = [{"id": "a", "model": "small", "api_base": "http://127.0.0.1:9/v1"}]
    config = pool(MODELS, instances, routing={"policy": "central_fcfs"}, shadow={"policy": "bear"})
    assert Gateway(config).shadow is not None
