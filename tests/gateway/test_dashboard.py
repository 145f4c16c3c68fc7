"""The Grafana dashboard asks for nothing that the gateway does not export."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp

from gateway_clients import CHAT, chat, pool_of
from headway.testing import FakeUpstream, running_gateway

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "headway.json"
_METRIC = re.compile(r"\b(?:headway|gen_ai)_\w+")


async def test_every_metric_of_the_dashboard_is_exported(session: aiohttp.ClientSession) -> None:
    """Names and labels of its expressions are those of the exposition, whose families all have their HELP line."""
    async with FakeUpstream() as upstream, running_gateway(pool_of(upstream)) as gateway:
        async with session.post(gateway.url + CHAT, json=chat(), headers={"x-slo-ttft-ms": "5000"}) as answer:
            await answer.read()
        async with session.get(gateway.url + "/metrics") as response:
            exposition = await response.text()
    families = set(re.findall(r"^# HELP (\S+)", exposition, re.MULTILINE))
    labels = set(re.findall(r'[{,](\w+)="', exposition)) | {"le"}
    expressions = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]
    ]
    assert len(expressions) > 10
    for expression in expressions:
        grouped = {name for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(", ")}
        assert grouped <= labels | {"reason", "instance", "source"}, expression
        without_groups = re.sub(r"by \([^)]*\)", "", expression)
        for name in _METRIC.findall(without_groups):
            assert {name, name.removesuffix("_bucket")} & families, f"{name} is not exported"
