"""Controls Chromium inside the sandbox, over two pipes that speak its DevTools protocol.

The host sends this text as the first cell of a session and never imports it. It runs on any Python
that a guest has, from 3.8, and needs nothing but Chromium.
"""

import base64
import glob
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional

NAMES = ("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser",
         "google-chrome", "google-chrome-stable", "chrome")  # fmt: skip
FOLDERS = (
    "$PLAYWRIGHT_BROWSERS_PATH",
    "~/.cache/ms-playwright",
    "/ms-playwright",
    "/root/.cache/ms-playwright",
)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-zygote",
         "--no-first-run", "--disable-extensions", "--disable-sync", "--mute-audio",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
         "--window-size=1280,800", "--remote-debugging-pipe")  # fmt: skip
ANSWER_SECONDS = 60.0
LOAD_SECONDS = 15.0
MAX_ELEMENTS = 150
MAX_TEXT = 20000
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "Backspace": 8, "Delete": 46, "ArrowUp": 38,
        "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "PageUp": 33,
        "PageDown": 34}  # fmt: skip
MODIFIERS = {"Alt": 1, "Control": 2, "Ctrl": 2, "Meta": 4, "Shift": 8}

# Lists the elements that can be used. Their numbers are valid until the page is listed again.
ELEMENTS = (
    """(() => {
  const kinds = 'a[href],button,input,select,textarea,summary,[role=button],[role=link],' +
    '[role=checkbox],[role=tab],[role=menuitem],[onclick],[contenteditable=true]';
  const found = [], lines = [];
  for (const e of document.querySelectorAll(kinds)) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || !box.height || style.visibility === 'hidden' || e.disabled) continue;
    const label = e.labels && e.labels[0] ? e.labels[0].innerText : '';
    const words = [label, e.tagName === 'SELECT' ? '' : e.innerText, e.value, e.placeholder,
      e.getAttribute('aria-label'), e.title, e.name].filter(w => w && w.trim())[0] || '';
    const kind = e.tagName.toLowerCase() + (e.tagName === 'INPUT' ? ' ' + e.type : '');
    lines.push('[' + found.length + '] ' + kind + ': ' + words.trim().replace(/\\s+/g, ' ')
      .slice(0, 80));
    found.push(e);
    if (found.length >= %d) break;
  }
  window.__paracle = found;
  return lines;
})()"""
    % MAX_ELEMENTS
)


class Problem(Exception):
    """A failure that the caller can correct."""


class NoBrowser(Exception):
    """The sandbox has no browser."""


def find_browser() -> str:
    """Return the path of a browser. Raises NoBrowser."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    for folder in (os.path.expandvars(os.path.expanduser(folder)) for folder in FOLDERS):
        for name in ("chrome", "headless_shell", "chrome-headless-shell"):
            found = sorted(glob.glob(os.path.join(folder, "chromium*", "*", name)))
            if found:
                return found[-1]
    raise NoBrowser("There is no browser in this sandbox.")


class Wire:
    """The DevTools connection: JSON and a zero byte, over descriptors 3 and 4 of Chromium."""

    def __init__(self, path: str) -> None:
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()
        self.profile = tempfile.mkdtemp(prefix="browser-")
        start = 'HOME=$1; export HOME; shift; exec "$@" 3<&%d 4>&%d' % (theirs_in, theirs_out)
        arguments = [path, *FLAGS, "--user-data-dir=" + self.profile, "about:blank"]
        self.log = open(os.path.join(self.profile, "log"), "w+b")
        self.process = subprocess.Popen(
            ["sh", "-c", start, "sh", self.profile, *arguments], pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.number = 0
        self.held = b""

    def call(self, method: str, session: Optional[str] = None, **parameters: Any) -> Any:
        self.number += 1
        request: Dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if session is not None:
            request["sessionId"] = session
        data = json.dumps(request).encode() + b"\0"
        try:
            while data:
                data = data[os.write(self.out, data) :]
        except OSError:
            raise self.make_end_error() from None
        return self.read_answer(method, time.monotonic() + ANSWER_SECONDS)

    def read_answer(self, method: str, deadline: float) -> Any:
        while True:
            while b"\0" in self.held:
                message, _, self.held = self.held.partition(b"\0")
                answer = json.loads(message)
                if answer.get("id") == self.number:
                    if "error" in answer:
                        raise Problem("%s: %s" % (method, answer["error"].get("message")))
                    return answer.get("result", {})
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.into], [], [], left)[0]:
                raise Problem("The browser did not answer (%s)." % method)
            data = os.read(self.into, 1 << 20)
            if not data:
                raise self.make_end_error()
            self.held += data

    def is_alive(self) -> bool:
        """Whether the browser runs and responds. One that was killed may not have ended yet."""
        if self.process.poll() is not None:
            return False
        try:
            self.call("Browser.getVersion")
        except Problem:
            return False
        return True

    def make_end_error(self) -> Problem:
        self.log.seek(0)
        output = self.log.read()[-500:].decode("utf-8", "replace")
        return Problem("The browser has ended: %s" % (output.strip() or "it printed nothing"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self.out, self.into):
            os.close(descriptor)
        self.log.close()
        shutil.rmtree(self.profile, ignore_errors=True)


class Screenshot:
    """A value that a session shows as an image."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def _repr_png_(self) -> bytes:
        return self.data

    def __repr__(self) -> str:
        return "(screenshot)"


class Browser:
    """The browser and its tabs. Actions work on the current tab."""

    def __init__(self) -> None:
        self.wire: Optional[Wire] = None
        self.tabs: List[Dict[str, str]] = []
        self.current = 0

    def act(
        self, action: str, show: Callable[[Any], None], screenshot: bool, **arguments: Any
    ) -> Dict[str, Any]:
        """Do an action and return the state of the page after it. ``show`` gets a screenshot."""
        if self.wire is None or not self.wire.is_alive():
            self.start()
        more = getattr(self, "do_" + action)(**arguments) or {}
        self.wait_until_loaded()
        state = {
            "url": self.evaluate("location.href"),
            "title": self.evaluate("document.title"),
            "tab": self.current,
            "tabs": len(self.tabs),
            "elements": self.evaluate(ELEMENTS),
        }
        if screenshot:
            taken = self.call("Page.captureScreenshot", format="png")
            show(Screenshot(base64.b64decode(taken["data"])))
        return dict(state, **more)

    def start(self) -> None:
        if self.wire is not None:
            self.wire.close()
        self.wire, self.tabs, self.current = Wire(find_browser()), [], 0
        self.do_open_tab()

    # The page

    def call(self, method: str, **parameters: Any) -> Any:
        assert self.wire is not None
        return self.wire.call(method, self.tabs[self.current]["session"], **parameters)

    def evaluate(self, text: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=text, returnByValue=True,
                          awaitPromise=True)  # fmt: skip
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details.get("text", "")
            raise Problem(text.partition("\n")[0].replace("Error: ", ""))
        return answer["result"].get("value")

    def wait_until_loaded(self) -> None:
        """Wait until the page is loaded, but no longer than LOAD_SECONDS."""
        deadline = time.monotonic() + LOAD_SECONDS
        time.sleep(0.1)
        while time.monotonic() < deadline:
            try:
                if self.evaluate("document.readyState") == "complete":
                    return
            except Problem:  # the page is being replaced
                pass
            time.sleep(0.1)

    def run_on_element(self, index: int, script: str) -> Any:
        """Run a script with an element, which the script calls ``e``."""
        return self.evaluate(
            "(() => { const e = (window.__paracle || [])[%d];"
            " if (!e || !e.isConnected) throw new Error('There is no element %d any more; look at"
            " the list again.'); %s })()" % (index, index, script)
        )

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    # Actions

    def do_navigate_to(self, url: str) -> None:
        if "://" not in url and not url.startswith(("about:", "data:")):
            url = ("file://" if url.startswith("/") else "http://") + url
        failure = self.call("Page.navigate", url=url).get("errorText")
        if failure:
            hint = ""
            if "DISCONNECTED" in failure or "NAME_NOT_RESOLVED" in failure:
                hint = " The sandbox may have no network; only the user can give it one."
            raise Problem("%s cannot be opened: %s.%s" % (url, failure, hint))

    def do_go_back(self) -> None:
        history = self.call("Page.getNavigationHistory")
        if history["currentIndex"] == 0:
            raise Problem("There is no page before this one.")
        entry = history["entries"][history["currentIndex"] - 1]
        self.call("Page.navigateToHistoryEntry", entryId=entry["id"])

    def do_wait(self, seconds: float = 3) -> None:
        time.sleep(min(max(seconds, 0), 30))

    def do_screenshot(self) -> None:
        pass

    def do_read_page(self) -> Dict[str, Any]:
        text = self.evaluate("document.body ? document.body.innerText : ''") or ""
        return {"text": text[:MAX_TEXT]}

    def do_click_element(self, index: int) -> None:
        x, y = self.run_on_element(
            index,
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2];",
        )
        self.click_at(x, y)

    def do_click_coordinates(self, x: float, y: float) -> None:
        self.click_at(x, y)

    def do_drag_drop(self, x: float, y: float, to_x: float, to_y: float) -> None:
        steps = [("mousePressed", x, y), ("mouseMoved", (x + to_x) / 2, (y + to_y) / 2),
                 ("mouseMoved", to_x, to_y), ("mouseReleased", to_x, to_y)]  # fmt: skip
        for kind, at_x, at_y in steps:
            self.call("Input.dispatchMouseEvent", type=kind, x=at_x, y=at_y, button="left",
                     buttons=1, clickCount=1)  # fmt: skip

    def do_input_text(self, index: int, text: str) -> None:
        self.run_on_element(
            index,
            "e.scrollIntoView({block: 'center'}); e.focus();"
            " if (e.select) e.select(); else document.execCommand('selectAll');",
        )
        self.call("Input.insertText", text=text)

    def do_send_keys(self, keys: str) -> None:
        *modifiers, key = keys.split("+") if len(keys) > 1 else [keys]
        if key not in KEYS and not modifiers:
            self.call("Input.insertText", text=keys)
            return
        held = sum(MODIFIERS.get(name, 0) for name in modifiers)
        code = KEYS.get(key) or ord(key[:1].upper() or " ")
        down: Dict[str, Any] = {"text": "\r"} if key == "Enter" else {}
        if held == 2 and key.lower() == "a":
            down["commands"] = ["selectAll"]
        for kind, more in (("keyDown", down), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                     modifiers=held, **more)  # fmt: skip

    def do_scroll_down(self, amount: float = 600) -> None:
        self.evaluate("window.scrollBy(0, %f)" % amount)

    def do_scroll_up(self, amount: float = 600) -> None:
        self.evaluate("window.scrollBy(0, %f)" % -amount)

    def do_scroll_to_text(self, text: str) -> None:
        found = self.evaluate(
            "(() => { const w = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);"
            " while (w.nextNode()) if (w.currentNode.data.includes(%s)) {"
            " w.currentNode.parentElement.scrollIntoView({block: 'center'}); return true; }"
            " return false; })()" % json.dumps(text)
        )
        if not found:
            raise Problem("There is no text %r on this page." % text)

    def do_get_dropdown_options(self, index: int) -> Dict[str, Any]:
        script = "return e.options ? [...e.options].map(o => o.text) : null;"
        options = self.run_on_element(index, script)
        if options is None:
            raise Problem("Element %d is no dropdown." % index)
        return {"options": options}

    def do_select_dropdown_option(self, index: int, text: str) -> None:
        options = self.do_get_dropdown_options(index)["options"]
        if text not in options:
            raise Problem("There is no option %r; there are: %s." % (text, ", ".join(options)))
        self.run_on_element(
            index,
            "e.selectedIndex = %d; for (const n of ['input', 'change'])"
            " e.dispatchEvent(new Event(n, {bubbles: true}));" % options.index(text),
        )

    def do_open_tab(self, url: str = "") -> None:
        assert self.wire is not None
        target = self.wire.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.wire.call("Target.attachToTarget", targetId=target, flatten=True)
        self.tabs.append({"target": target, "session": session["sessionId"]})
        self.current = len(self.tabs) - 1
        self.call("Page.enable")
        if url:
            self.do_navigate_to(url)

    def do_switch_tab(self, index: int) -> None:
        if not 0 <= index < len(self.tabs):
            raise Problem("There is no tab %d; there are %d." % (index, len(self.tabs)))
        self.current = index
        self.call("Page.bringToFront")

    def do_close_tab(self) -> None:
        assert self.wire is not None
        tab = self.tabs.pop(self.current)
        self.wire.call("Target.closeTarget", targetId=tab["target"])
        self.current = max(0, self.current - 1)
        if not self.tabs:
            self.do_open_tab()
