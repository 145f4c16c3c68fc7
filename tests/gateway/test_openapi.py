"""The gateway's own paths against the document they are served with, fuzzed by schemathesis over real sockets."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headway.gateway.admin import cold_routes
from headway.gateway.openapi import document
from headway.gateway.state import Gateway
from headway.testing import pool

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
INSTANCE = {"id": "a", "model": "m", "api_base": "http://127.0.0.1:9/v1", "engine": "vllm-0.32"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway process; nothing that is fuzzed here sends anything to its instance."""
    directory = tmp_path_factory.mktemp("gateway")
    path = directory / "pool.yaml"
    feedback = {"file": "feedback.jsonl"}
    path.write_text(
        yaml.safe_dump(
            {"models": [{"name": "m"}], "instances": [INSTANCE], "feedback": feedback, "server": {"port": 0}}
        )
    )
    command = [sys.executable, "-m", "headway", "serve", str(path), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert match is not None
        yield match.group()
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_paths_keep_to_their_document(served: str, mode: GenerationMode) -> None:
    """Whatever is sent, right or wrong: a status, content type and body that the document names, never a 5xx but for
    not being ready."""
    schema = schemathesis.openapi.from_url(served + "/openapi.json")
    names = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        names.add(operation.path)

        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def holds(case: Case) -> None:
            case.call_and_validate(checks=CHECKS)

        try:
            holds()
        except Unsatisfiable:  # a path without anything to get wrong has no wrong requests
            assert mode is GenerationMode.NEGATIVE
    assert names == set(document()["paths"]) - {"/openapi.json"}  # type: ignore[call-overload]


def test_every_path_is_described() -> None:
    """A path that is served and not described is found here; so is one described and not served."""
    gateway = Gateway(pool([{"name": "m"}], [INSTANCE]))
    routes = {
        (re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path), method.lower())  # type: ignore[attr-defined]
        for route in cold_routes(gateway).routes
        for method in (route.methods - {"HEAD"})  # type: ignore[attr-defined]
    }
    routed = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}
    page = {"/", "/static/{name}", "/events"}
    served = {(path, method) for path, method in routes if path not in routed | page}
    described = {(path, method) for path, methods in document()["paths"].items() for method in methods}  # type: ignore[attr-defined]
    assert served == described
