"""``headway serve``, ``validate`` and ``route`` as a user runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from gateway_clients import CHAT, RawClient, chat
from headway.profiles import TRUTH_DIRECTORY
from headway.testing import FakeUpstream, Reply

LISTENING = re.compile(rb"^headway serve: listening on (http://127\.0\.0\.1:\d+)\n$")


def write_pool(directory: Path, url: str, **rest: object) -> Path:
    """A configuration file with one instance."""
    document = {
        "models": [{"name": "m"}],
        "instances": [
            {"id": "a", "model": "m", "api_base": url, "engine": "vllm-0.32"} | dict(rest.pop("instance", {}))
        ],
        "server": {"port": 0, "drain_s": 5},
        **rest,
    }
    path = directory / "pool.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


async def start(*arguments: str, **environment: str) -> Process:
    """``headway`` with these arguments."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headway", *arguments, stdout=PIPE, stderr=PIPE, env=os.environ | environment
    )


async def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a verb that ends by itself."""
    process = await start(*arguments, **environment)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def serving(path: Path, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    """A gateway process and its address."""
    process = await start("serve", str(path), *arguments)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        match = LISTENING.match(line)
        assert match, (line, await process.stderr.read() if process.stderr else b"")
        yield process, match.group(1).decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_serve_drains_on_sigterm(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """T34: on SIGTERM ``/readyz`` is 503, new requests are refused, running streams finish, and the exit code is 0."""
    async with FakeUpstream(Reply(num_tokens=20, interval_s=0.05)) as upstream:
        async with serving(write_pool(tmp_path, upstream.url)) as (process, url):
            async with RawClient(url, chat()) as client:
                await client.read_until(b"tok ")
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
                async with session.get(url + "/readyz") as response:
                    assert response.status == 503
                    assert (await response.json())["reason"] == "draining"
                async with session.post(url + CHAT, json=chat()) as response:
                    assert response.status == 503
                    assert (await response.json())["error"]["code"] == "draining"
                    assert response.headers["retry-after"] == "1"
                rest = await client.read_until(b"0\r\n\r\n")
                assert b"data: [DONE]" in rest
                assert b"error" not in rest
            assert await asyncio.wait_for(process.wait(), 10) == 0
    assert len(upstream.requests) == 1


async def test_drain_time_over_ends_streams_with_an_error(tmp_path: Path) -> None:
    """T34: a stream that does not finish in ``drain_s`` gets an error event; the exit code is still 0."""
    async with FakeUpstream(Reply(num_tokens=10_000, interval_s=0.05)) as upstream:
        path = write_pool(tmp_path, upstream.url, server={"port": 0, "drain_s": 0.3})
        async with serving(path, "--log-level", "error") as (process, url), RawClient(url, chat()) as client:
            await client.read_until(b"tok ")
            process.send_signal(signal.SIGTERM)
            rest = await client.read_until(b"0\r\n\r\n")
            assert b'"code":"draining"' in rest
            assert await asyncio.wait_for(process.wait(), 10) == 0
        assert upstream.requests[0].disconnected_s is not None


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Whoever is in a hurry sends the signal twice."""
    async with FakeUpstream(Reply(num_tokens=10_000, interval_s=0.05)) as upstream:
        async with serving(write_pool(tmp_path, upstream.url)) as (process, url), RawClient(url, chat()) as client:
            await client.read_until(b"tok ")
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.wait(), 4)


async def test_sighup_reloads(tmp_path: Path) -> None:
    """T33: SIGHUP with bad YAML keeps the old configuration and logs its line and column; good YAML is served."""
    async with FakeUpstream() as upstream, aiohttp.ClientSession() as session:
        path = write_pool(tmp_path, upstream.url)
        good = path.read_text()
        async with serving(path) as (process, url):

            async def until_metric(line: str) -> None:
                async with asyncio.timeout(20):
                    while True:
                        async with session.get(url + "/metrics") as response:
                            if line in (await response.text()).splitlines():
                                return
                        await asyncio.sleep(0.02)

            path.write_text(good + "routing: {policy: bear,\n  polcy: x}\n")
            process.send_signal(signal.SIGHUP)
            await until_metric("headway_config_reload_failed 1.0")
            async with session.post(url + CHAT, json=chat()) as response:
                assert response.status == 200
            path.write_text(good + "routing: {policy: random}\n")
            process.send_signal(signal.SIGHUP)
            await until_metric("headway_config_reload_failed 0.0")
            async with session.post(url + CHAT, json=chat()) as response:
                assert response.headers["x-headway-policy"] == "random"
            process.send_signal(signal.SIGTERM)
            _, err = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0
    events = [json.loads(line) for line in err.decode().splitlines()]
    failed = next(one for one in events if one["event"] == "reload_failed")
    assert (failed["key"], failed["column"]) == ("routing.polcy", 3)
    assert failed["line"] == len(good.splitlines()) + 2
    assert "did you mean 'policy'" in failed["error"]


async def test_serve_logs_one_line_of_json_per_event(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Standard output holds the address alone; standard error holds JSON lines."""
    async with FakeUpstream() as upstream:
        async with serving(write_pool(tmp_path, upstream.url)) as (process, url):
            async with session.post(url + CHAT, json=chat()) as response:
                await response.read()
            process.terminate()
            out, err = await asyncio.wait_for(process.communicate(), 10)
    assert out == b""
    events = [json.loads(line) for line in err.decode().splitlines() if line.startswith("{")]
    assert [event["event"] for event in events][:2] == ["started", "request"]
    assert events[1]["status"] == 200


async def test_serve_refuses_a_truth_profile(tmp_path: Path) -> None:
    """An estimator that reads a simulated engine's own clock proves nothing: exit code 2, at the line that names it."""
    truth = TRUTH_DIRECTORY / "h100-qwen3-8b.yaml"
    path = write_pool(tmp_path, "http://127.0.0.1:9/v1", instance={"profile": str(truth)})
    code, out, err = await run("serve", str(path))
    assert (code, out) == (2, "")
    assert "truth profile" in err
    assert f"{path}:" in err


async def test_serve_refuses_what_is_wrong(tmp_path: Path) -> None:
    """A wrong file and a missing key variable are exit code 2, a taken port is 1, each with one line that says so."""
    path = write_pool(tmp_path, "http://127.0.0.1:9/v1", routing={"polcy": "bear"})
    code, _, err = await run("serve", str(path))
    assert code == 2
    assert "routing.polcy: unknown key; did you mean 'policy'?" in err
    path = write_pool(tmp_path, "http://127.0.0.1:9/v1", instance={"api_key": "env:NO_SUCH_KEY_HERE"})
    code, _, err = await run("serve", str(path))
    assert code == 2
    assert "NO_SUCH_KEY_HERE is not set" in err
    async with FakeUpstream() as upstream:
        path = write_pool(tmp_path, upstream.url)
        code, _, err = await run("serve", str(path), "--port", upstream.url.split(":")[2].split("/")[0])
    assert code == 1
    assert "cannot listen" in err


async def test_validate_says_yes_and_no(tmp_path: Path) -> None:
    """``validate`` gives 0 and what the file amounts to, or 2 and what is wrong; ``--json`` tells programs the same."""
    path = write_pool(tmp_path, "http://127.0.0.1:9/v1", instance={"api_key": "env:NO_SUCH_KEY_HERE"})
    code, out, _ = await run("validate", str(path))
    assert code == 0
    assert "valid" in out
    assert "NO_SUCH_KEY_HERE is not set" in out
    code, out, _ = await run("validate", str(path), "--json")
    answer = json.loads(out)
    assert (code, answer["valid"], answer["instances"][0]["estimate"]) == (0, True, "history")
    path = write_pool(tmp_path, "http://127.0.0.1:9/v1", shadow={"policy": "randon"})
    code, _, err = await run("validate", str(path))
    assert code == 2
    assert "unknown policy 'randon'; did you mean 'random'?" in err
    code, out, _ = await run("validate", str(path), "--json")
    answer = json.loads(out)
    assert (code, answer["valid"], answer["error"]["key"]) == (2, False, "shadow.policy")
    assert answer["error"]["line"] > 0


async def test_route_explains_against_the_live_pool(tmp_path: Path) -> None:
    """``route`` shows where a prompt would go and why, as a table or JSON, and sends nothing."""
    async with FakeUpstream() as upstream, serving(write_pool(tmp_path, upstream.url)) as (_, url):
        code, out, _ = await run("route", "What is a headway?", "--url", url, "--ttft-ms", "300", COLUMNS="200")
        assert code == 0
        for word in ("instance", "verdict", "utility", "default", "bear chose a", "300 ms"):
            assert word in out
        code, out, _ = await run("route", "hi", "--url", url + "/v1", "--max-tokens", "9", "--json")
        assert (code, json.loads(out)["chosen"]) == (0, "a")
        code, _, err = await run("route", "hi", "--url", url, "--model", "gpt-x")
        assert code == 1
        assert "does not exist here" in err
    assert upstream.requests == []
    code, _, err = await run("route", "hi", "--url", url)
    assert code == 1
    assert "no gateway answers" in err


@pytest.mark.parametrize("url", ["ftp://x", "nonsense"])
async def test_route_refuses_foreign_addresses(url: str) -> None:
    """An address that is none is a usage error."""
    code, _, err = await run("route", "hi", "--url", url)
    assert code == 2
    assert "--url" in err
