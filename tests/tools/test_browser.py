"""The browser tool, with a real browser in a sandbox where there is one to be had."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest

import engines
from paracle_sandbox import LocalSandboxClient, SandboxBrowserTool, SandboxConfig
from paracle_sandbox.tools import ToolResult
from paracle_sandbox.tools.browser_program import NAMES
from paracle_sandbox.tools.image_headers import read_size

PAGE = """<!doctype html><title>Start</title><h1>Hello</h1><a href="two.html">next page</a>
<label>Name <input name="who"></label>
<select name="kind"><option>One</option><option>Two</option></select>
<button onclick="document.title = 'clicked ' + document.querySelector('input').value">Go</button>
<button hidden>never</button><form onsubmit="document.title = 'sent'; return false"><input></form>
<p style="margin-top: 3000px">far below</p>"""


@pytest.fixture
async def browser(client: LocalSandboxClient) -> AsyncIterator[SandboxBrowserTool]:
    if not any(map(shutil.which, NAMES)):
        engines.missing("browser", "apt-get install chromium-headless-shell has one")
    await client.write_file("start.html", PAGE)
    await client.write_file("two.html", "<title>Two</title><p>second page</p>")
    tool = SandboxBrowserTool(client)
    yield tool
    await tool.close()


async def done(tool: SandboxBrowserTool, action: str, **arguments: object) -> ToolResult:
    result = await tool.call({"action": action, **arguments})
    assert not result.is_error, result.text
    return result


async def test_pages_forms_and_pictures(browser: SandboxBrowserTool) -> None:
    seen = await done(browser, "navigate_to", url="/workspace/start.html")
    assert seen.text.splitlines() == [
        "Start - file:///workspace/start.html", "[0] a: next page", "[1] input text: Name",
        "[2] select: One", "[3] button: Go", "[4] input text: ",
    ]  # fmt: skip
    assert read_size(seen.images[0].data) == (1280, 800)
    await done(browser, "type", index=1, text='Ann\'s "x"')
    assert (await done(browser, "click", element=3)).data["title"] == 'clicked Ann\'s "x"'
    assert (await done(browser, "get_dropdown_options", index=2)).data["options"] == ["One", "Two"]
    chosen = await done(browser, "select_dropdown_option", index=2, text="Two")
    assert "[2] select: Two" in chosen.text
    await done(browser, "input_text", index=4, text="q")
    assert (await done(browser, "send_keys", keys="Enter")).data["title"] == "sent"
    await done(browser, "scroll_to_text", text="far below", screenshot=False)
    await done(browser, "scroll_up", amount=10_000)
    assert "Hello" in (await done(browser, "read_page")).data["text"]
    assert (await done(browser, "click_element", index=0)).data["title"] == "Two"
    assert (await done(browser, "go_back")).data["title"] == "Start"


async def test_tabs(browser: SandboxBrowserTool) -> None:
    await done(browser, "navigate_to", url="file:///workspace/start.html")
    opened = await done(browser, "open_tab", url="/workspace/two.html")
    assert opened.data["title"] == "Two" and opened.data["tabs"] == 2
    assert (await done(browser, "switch_tab", tab=0)).data["title"] == "Start"
    assert (await done(browser, "close_tab")).data["title"] == "Two"
    assert not (await done(browser, "wait", seconds=0, screenshot=False)).images


async def test_what_goes_wrong_is_said(browser: SandboxBrowserTool) -> None:
    for request, words in (
        ({"action": "go_back"}, "no page before"),
        ({"action": "navigate_to", "url": "http://example.com"}, "no network"),
        ({"action": "navigate_to", "url": "/workspace/none.html"}, "FILE_NOT_FOUND"),
        ({"action": "click_element", "index": 99}, "no element 99"),
        ({"action": "click_element"}, "needs the argument 'index'"),
        ({"action": "switch_tab", "index": 7}, "no tab 7"),
        ({"action": "scroll_to_text", "text": "nowhere'"}, "no text"),
        ({"action": "fly"}, "must be one of"),
    ):
        result = await browser.call(request)
        assert result.is_error and words in result.text, result.text
    sandbox = await browser.sandbox()
    await sandbox.execute("pkill -9 -f remote-debugging-pipe")
    again = await done(browser, "navigate_to", url="/workspace/two.html")
    assert again.data["title"] == "Two", "it is started again"


async def test_without_a_browser_the_model_is_told_what_to_do() -> None:
    async with LocalSandboxClient(config=SandboxConfig(env_vars={"PATH": "/nowhere"})) as client:
        answer = await SandboxBrowserTool(client).call({"action": "screenshot"})
    assert answer.is_error and answer.data["kind"] == "unavailable"
    assert "chromium-headless-shell" in answer.text and "no browser" in answer.text
