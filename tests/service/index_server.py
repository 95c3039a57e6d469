"""A small package index on the loopback, with packages that are made on the spot."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def wheel(name: str, version: str, requires: str = "", body: str = "") -> tuple[str, bytes]:
    """The file name and content of a package with one module."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires:
        metadata += f"Requires-Dist: {requires}\n"
    files = {
        f"{name}.py": f"VERSION = {version!r}\ndef main(): print(VERSION)\n{body}",
        f"{info}/METADATA": metadata,
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-tool = {name}:main\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


class IndexServer:
    """``asked`` is every request it got, ``logins`` who each said to be; ``as_json`` chooses
    between the two forms of a list."""

    def __init__(self, *wheels: tuple[str, bytes], as_json: bool = False) -> None:
        self.files = dict(wheels)
        self.as_json = as_json
        self.asked: list[str] = []
        self.logins: list[str | None] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append(f"{self.command} {self.path}")
                index.logins.append(self.headers.get("Authorization"))
                index.answer(self)

            def do_POST(self) -> None:
                index.asked.append(f"{self.command} {self.path}")
                self.send_error(500)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/simple/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        parts = handler.path.strip("/").split("/")
        if parts[0] == "files" and parts[1] in self.files:
            self._send(handler, "application/octet-stream", self.files[parts[1]])
        elif parts[0] == "simple" and len(parts) == 2 and self._of(parts[1]):
            kind, body = self._json(parts[1]) if self.as_json else self._html(parts[1])
            self._send(handler, kind, body)
        else:
            handler.send_error(404)

    def _of(self, project: str) -> list[str]:
        return [name for name in self.files if name.split("-")[0] == project]

    def _html(self, project: str) -> tuple[str, bytes]:
        links = [
            f'<a href="/files/{name}#sha256={_digest(self.files[name])}">{name}</a>'
            for name in self._of(project)
        ]
        return "text/html", f"<html><body>{''.join(links)}</body></html>".encode()

    def _json(self, project: str) -> tuple[str, bytes]:
        files = [
            {"filename": name, "url": f"/files/{name}", "yanked": False,
             "hashes": {"sha256": _digest(self.files[name])}}
            for name in self._of(project)
        ]  # fmt: skip
        return "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, kind: str, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
