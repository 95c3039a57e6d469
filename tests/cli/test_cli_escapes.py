"""E05: what comes from inside a sandbox steers no terminal, whichever way it is shown."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from paracle_cli import Cli, on_a_terminal

from paracle_sandbox.audit.log import AuditLog

pytestmark = pytest.mark.case("E05")

# OSC 52 fills the clipboard, OSC 8 makes a link, CSI clears the screen, and one of C1 is a CSI of
# a single character; the last one reverses what follows.
EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b]8;;http://evil\x1b\\\x1b[2J\x9b31m\u202egnp.exe\rX"
SHOWN = "\\x1b]52;c;ZXZpbA==\\x07"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, SANDBOX_MODE="fake")


def text_of(shown: bytes) -> str:
    """Without our colours and the terminal's own line ends; EVIL has other sequences too."""
    return re.sub("\x1b\\[[0-9;]*m", "", shown.decode().replace("\r\n", "\n"))


def assert_harmless(shown: bytes) -> None:
    text = text_of(shown)
    assert SHOWN in text, text
    assert_steers_nothing(text)


def assert_steers_nothing(text: str) -> None:
    assert [c for c in "\x1b\x07\x9b\u202e\r" if c in text] == [], text


def test_a_traceback(cli: Cli) -> None:
    """The message, the name of the exception, and a name of a function in it."""
    source = (
        f"class E(Exception): pass\nE.__name__ = {EVIL!r}\n"
        f"def f(): raise E({EVIL!r})\nf.__code__ = f.__code__.replace(co_name={EVIL!r})\nf()"
    )
    assert_harmless(on_a_terminal(cli, "sandbox", "execute", cli.program(source)))


def test_names_of_files_that_come_back(cli: Cli) -> None:
    (cli.home / "project").mkdir()
    name = EVIL.replace("/", "_")
    source = f"open({name!r}, 'w').write({EVIL!r}); open('plain', 'w').write({EVIL!r})"
    shown = b""
    for flag in ("--diff", "--apply"):
        words = ("sandbox", "execute", "--workspace", "project", flag, "-c", source)
        shown = on_a_terminal(cli, *words)
        assert_steers_nothing(text_of(shown))
    assert b"plain" in shown


def test_both_logs(cli: Cli) -> None:
    for name, command in (("service", ("audit", "show")), ("agents", ("agents", "audit"))):
        log = AuditLog(cli.home / "data" / name / "audit.jsonl")
        log.record(EVIL, user=EVIL, agent=EVIL, path=EVIL, sandbox_id=EVIL)
        log.close()
        assert_harmless(on_a_terminal(cli, *command))


# A command that logs what came from inside, and then fails with it.
FAILING = f"""
import logging, sys
import paracle_sandbox.cli.list_cleanup as inventory
from paracle_sandbox.cli.app import run
from paracle_sandbox.cli.options import settings_or_fault
from paracle_sandbox.errors import SandboxError
def failing(*_):
    settings_or_fault()
    try:
        raise ValueError({EVIL!r})
    except ValueError:
        logging.getLogger("paracle_sandbox.x").exception("a tool said %s", {EVIL!r} + chr(10) + "W")
    raise {{error}}({EVIL!r})
inventory.list_sandboxes = failing
sys.exit(run(["sandbox", "list"]))
"""


@pytest.mark.parametrize("level", ["warning", "debug"])
@pytest.mark.parametrize("error", ["SandboxError", "KeyError", "OSError", "ValueError"])
def test_records_and_errors(cli: Cli, level: str, error: str) -> None:
    cli.env["PARACLE_SANDBOX_LOG_LEVEL"] = level
    program = cli.program(FAILING.format(error=error))
    cli.argv = lambda *words: [sys.executable, *words]  # type: ignore[method-assign]
    shown = on_a_terminal(cli, program)
    assert_harmless(shown)
    assert b"Error: " in shown and b"a tool said" in shown
    assert b"X W" in shown, "a record takes one line"


@contextmanager
def service_that_says(answer: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(500)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_errors_of_a_service(cli: Cli) -> None:
    told = {"error": EVIL, "error_type": "SandboxExecutionError", "kind": EVIL, "hint": EVIL}
    with service_that_says(json.dumps(told).encode()) as url:
        cli.env.update(SANDBOX_MODE="remote", SANDBOX_API_URL=url, SANDBOX_API_KEY="k" * 40)
        for words in (["sandbox", "execute", "-c", "print(1)"], ["sandbox", "health"]):
            assert_harmless(on_a_terminal(cli, *words))
