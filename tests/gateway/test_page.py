"""The page at ``/`` in a real headless browser: what a user sees, reaches by keyboard and hears from a reader."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest

from gateway_clients import CHAT, chat
from headway.testing import FakeUpstream, Reply, pool, running_gateway
from snapshot_engines import LARGE, SMALL, Engine, engines

if TYPE_CHECKING:
    from playwright.async_api import Page

pytest.importorskip("playwright", reason="the browser driver is not installed")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


@asynccontextmanager
async def page_at(url: str, *, dark: bool = False) -> AsyncIterator[Page]:
    """The page in a browser of its own that reaches no other place; complaints on its console fail the test."""
    from playwright.async_api import async_playwright

    complaints: list[str] = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = await browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="dark" if dark else "light")
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith(url) else complaints.append(request.url))
        await page.goto(url + "/")
        try:
            yield page
        finally:
            await browser.close()
    assert complaints == []


async def ask(session: aiohttp.ClientSession, url: str, num: int = 1, **headers: str) -> None:
    """Send streams one after the other and read them to their ends."""
    for _ in range(num):
        async with session.post(url + CHAT, json=chat(), headers=headers) as answer:
            await answer.read()


async def keep_publishing(made: list[Engine]) -> None:
    """An idle engine and one with thirty long prompts in its queue, published again and again."""
    while True:
        made[0].publish()
        made[1].publish(waiting=30, prompt_tokens=30_000)
        await asyncio.sleep(0.1)


async def test_a_user_sees_the_pool_and_asks_why(session: aiohttp.ClientSession) -> None:
    """Occupancy, timeline and queue of an instance show; a decision chosen by keyboard shows its candidates."""
    rows = (("fast", "h100-qwen3-0.6b", "small"), ("slow", "h100-qwen3-8b", "large"))
    async with engines(*rows) as made:
        config = pool([SMALL, LARGE], [engine.instance() for engine in made])
        async with running_gateway(config) as gateway, page_at(gateway.url) as page:
            publishing = asyncio.create_task(keep_publishing(made))
            slow = page.locator("#pool tbody tr", has_text="slow")
            timeline = slow.get_by_role("img", name=re.compile(r"^now [12] running and 2\d waiting; in 8 seconds"))
            await timeline.wait_for()
            assert int(await slow.get_by_role("cell").nth(4).inner_text()) > 20
            await ask(session, gateway.url, **{"x-slo-ttft-ms": "900", "x-request-id": "from-a-user"})
            await page.locator("#decisions .good", has_text="in time").wait_for()
            await page.locator("#met", has_text="100.0 %").wait_for()

            await page.locator("#decisions button").first.focus()
            await page.keyboard.press("Enter")
            dialog = page.get_by_role("dialog", name="Why there?")
            await dialog.get_by_role("row", name="fast (chosen)").wait_for()
            assert await dialog.get_by_role("row").count() == 3  # the heads and both candidates
            assert "from-a-user" in await dialog.inner_text()
            await page.keyboard.press("Escape")
            await dialog.wait_for(state="hidden")
            assert await page.evaluate("document.activeElement.closest('#decisions') !== null")
            publishing.cancel()


async def test_sixty_four_instances_stay_usable(session: aiohttp.ClientSession) -> None:
    """Every instance has its row, the filter finds one, and the page itself scrolls in one direction only."""
    async with FakeUpstream(Reply(num_tokens=2)) as upstream:
        rows: list[dict[str, object]] = [
            {"id": f"api-{number:02d}", "model": "small", "api_base": upstream.url, "engine": "hosted"}
            for number in range(64)
        ]
        async with running_gateway(pool([SMALL], rows)) as gateway, page_at(gateway.url) as page:
            await page.locator("#pool tbody tr").nth(63).wait_for()
            await ask(session, gateway.url, 5)
            await page.locator("#decisions li").nth(4).wait_for()
            await page.get_by_label("Filter").fill("api-17")
            assert await page.locator("#pool tbody tr:visible").count() == 1
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_the_stream_of_decisions_can_be_paused(session: aiohttp.ClientSession) -> None:
    """While paused nothing moves; afterwards what was missed is there."""
    async with FakeUpstream(Reply(num_tokens=2)) as upstream:
        config = pool([SMALL], [{"id": "a", "model": "small", "api_base": upstream.url, "engine": "hosted"}])
        async with running_gateway(config) as gateway, page_at(gateway.url) as page:
            await page.get_by_text("● live").wait_for()
            await page.get_by_role("button", name="Pause").click()
            await ask(session, gateway.url, 2)
            await page.get_by_role("button", name="Go on (2 new)").wait_for()
            assert await page.locator("#decisions li").count() == 0
            await page.get_by_role("button", name="Go on").click()
            assert await page.locator("#decisions li").count() == 2


async def test_what_clients_write_is_shown_as_text(session: aiohttp.ClientSession) -> None:
    """A request id with markup in it stays text."""
    async with FakeUpstream(Reply(num_tokens=2)) as upstream:
        config = pool([SMALL], [{"id": "a", "model": "small", "api_base": upstream.url, "engine": "hosted"}])
        async with running_gateway(config) as gateway, page_at(gateway.url) as page:
            await ask(session, gateway.url, **{"x-request-id": "<b id=injected>x</b>"})
            await page.locator("#decisions button").first.click()
            await page.get_by_text("<b id=injected>x</b>").wait_for()
            assert await page.locator("#injected").count() == 0


@pytest.mark.parametrize("dark", [False, True])
async def test_no_accessibility_rule_is_broken(session: aiohttp.ClientSession, dark: bool) -> None:
    """axe finds nothing in light or dark, with the dialog closed and open."""
    axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="axe is not installed")
    async with engines(("fast", "h100-qwen3-0.6b", "small")) as [engine]:
        async with running_gateway(pool([SMALL], [engine.instance()])) as gateway:
            async with page_at(gateway.url, dark=dark) as page:
                engine.publish(waiting=2)
                await ask(session, gateway.url, 2, **{"x-slo-ttft-ms": "900"})
                await page.locator("#decisions .good").first.wait_for()
                assert await page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
                for state in ("closed", "open"):
                    if state == "open":
                        await page.locator("#decisions button").first.click()
                        await page.get_by_role("row", name="fast (chosen)").wait_for()
                    found = await axe.Axe().run(page)
                    assert found.violations_count == 0, found.generate_report()
