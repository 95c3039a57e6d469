"""SandboxBrowserTool lets a model use a browser in the sandbox, if the sandbox has one."""

from __future__ import annotations

import base64
from functools import cache, partial
from importlib.resources import files
from typing import Any, ClassVar

from ..channel.frames import ProtocolError, decode_json
from ..client import LocalSandboxClient
from ..sessions import CellResult, PythonSession
from .arguments import ArgumentFault
from .result import Image, ToolResult, make_failure, shorten
from .schema import boolean, number, schema, text
from .tool import SandboxTool

ACTION_SECONDS = 90.0
# The arguments of each action. Those in brackets may be left out.
_ACTIONS: dict[str, tuple[str, ...]] = {
    "navigate_to": ("url",), "go_back": (), "wait": ("[seconds]",), "screenshot": (),
    "read_page": (), "click_element": ("index",), "input_text": ("index", "text"),
    "send_keys": ("keys",), "scroll_down": ("[amount]",), "scroll_up": ("[amount]",),
    "scroll_to_text": ("text",), "get_dropdown_options": ("index",),
    "select_dropdown_option": ("index", "text"), "open_tab": ("[url]",), "switch_tab": ("index",),
    "close_tab": (), "click_coordinates": ("x", "y"), "drag_drop": ("x", "y", "to_x", "to_y"),
}  # fmt: skip
_ACTION_ALIASES = {
    "navigate": "navigate_to", "goto": "navigate_to", "open": "navigate_to", "back": "go_back",
    "click": "click_element", "type": "input_text", "press": "send_keys", "read": "read_page",
    "get_text": "read_page", "take_screenshot": "screenshot",
}  # fmt: skip
MISSING = (
    "There is no browser in this sandbox, and this tool cannot work without: it needs Chromium. "
    "Tell the user to choose an image that has it: on Docker base_image=paracle/sandbox:browser, "
    "which `paracle image build browser` builds; elsewhere Debian's package "
    "chromium-headless-shell. Go on without a browser."
)


_number = partial(number, least=0, most=100_000)


class SandboxBrowserTool(SandboxTool):
    """Controls a browser. Each result has the address, the elements that can be used, and a
    screenshot.

    The browser starts with the first action. It has the network of its sandbox, which by default
    is none."""

    name = "sandbox_browser"
    description = (
        "Use a browser in the sandbox. Answers list the elements of the page with numbers, which "
        "click_element, input_text and the dropdown actions take as index, and show the page."
    )
    parameters = schema(
        ["action"],
        action=text("What to do.", enum=list(_ACTIONS)),
        url=text("The address, for navigate_to and open_tab; a path is a file of the sandbox."),
        index=_number("The number of an element, or of a tab for switch_tab."),
        text=text("What to type, to find, or the option to choose."),
        keys=text("A key such as Enter or Control+a, or text, for send_keys."),
        amount=_number("Pixels to scroll; 600 if left out."),
        seconds=_number("How long to wait; 3 if left out, 30 at most."),
        x=_number("Where to click, or where to drag from."),
        y=_number("Where to click, or where to drag from."),
        to_x=_number("Where to drag to."),
        to_y=_number("Where to drag to."),
        screenshot=boolean("Show the page; true if left out."),
    )
    aliases: ClassVar = {
        "link": "url", "address": "url", "element": "index", "element_index": "index",
        "page_id": "index", "tab": "index", "value": "text", "option": "text", "key": "keys",
        "command": "action",
    }  # fmt: skip

    action_aliases = _ACTION_ALIASES

    def __init__(self, client: LocalSandboxClient | None = None) -> None:
        super().__init__(client)
        self._session: PythonSession | None = None

    def checked(self, arguments: Any) -> dict[str, Any]:
        found = super().checked(arguments)
        wanted = _ACTIONS[found["action"]]
        missing = [name for name in wanted if name not in found and not name.startswith("[")]
        if missing:
            raise ArgumentFault(f"{found['action']} needs the argument {missing[0]!r}.")
        allowed = {name.strip("[]") for name in wanted}
        return {k: v for k, v in found.items() if k in allowed or k in ("action", "screenshot")}

    async def run(self, action: str, screenshot: bool = True, **arguments: Any) -> ToolResult:
        given = {k: int(v) if k == "index" else v for k, v in arguments.items()}
        session = await self._open_session()
        request = {"action": action, "screenshot": screenshot, **given}
        call = f"_browser.act(show=display, **{request!r})"
        return _from_cell(await session.run(call, ACTION_SECONDS))

    async def _open_session(self) -> PythonSession:
        """Return a session that runs browser_program.py. If it is gone, start another."""
        sandbox = await self.sandbox()
        if self._session is None or self._session.sandbox is not sandbox:
            self._session = PythonSession(sandbox)
        if not self._session.is_running:
            await self._session.run(_read_program() + "\n_browser = Browser()\n")
        return self._session

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.sandbox.is_running:
            await session.close()


@cache
def _read_program() -> str:
    return files(__package__).joinpath("browser_program.py").read_text(encoding="utf-8")


def _from_cell(cell: CellResult) -> ToolResult:
    if cell["error"] is not None:
        if cell["error"]["name"] == "NoBrowser":
            return make_failure(MISSING, error_type="browser", kind="unavailable")
        return make_failure(cell["error"]["message"], error_type="browser")
    images = tuple(
        Image(base64.b64decode(shown["image/png"]))
        for shown in cell["shown"]
        if "image/png" in shown
    )
    state = _parse_state(cell["shown"][-1].get("application/json", "{}")) if cell["shown"] else {}
    return ToolResult(_describe_state(state), images=images, data=state)


def _parse_state(text: str) -> dict[str, Any]:
    """Parse the state. A page may have forged it: only texts, numbers and lists are kept."""
    try:
        state = decode_json(text.encode("utf-8", "surrogatepass"))
    except ProtocolError:
        return {}
    lists = {key: list(filter(_is_plain, v)) for key, v in state.items() if isinstance(v, list)}
    return {**{key: value for key, value in state.items() if _is_plain(value)}, **lists}


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int, float))


def _get_items(state: dict[str, Any], name: str) -> list[Any]:
    items = state.get(name)
    return items if isinstance(items, list) else []


def _describe_state(state: dict[str, Any]) -> str:
    lines = [f"{state.get('title') or '(no title)'} - {state.get('url')}"]
    tabs = state.get("tabs")
    if isinstance(tabs, int) and tabs > 1:
        lines.append(f"Tab {state.get('tab')} of {tabs}.")
    lines += [str(line) for line in _get_items(state, "elements")]
    if "options" in state:
        lines.append("Options: " + ", ".join(map(str, _get_items(state, "options"))))
    if "text" in state:
        lines.append(f"Text of the page:\n{state['text']}")
    return shorten("\n".join(lines))
