"""A package index, as far as an installer inside a sandbox may see it.

Two kinds of pages exist: the list of files of one project, and one file. A list comes from the
configured index, and every link in it is replaced by a name that only this object can turn back
into an address. So nothing can be fetched but projects by their name, and files that the index
itself offered. Nothing is ever sent but GET, and no header of the asker is passed on. A name and
password in the address of the index are for the index alone, not for where it sends us.
"""

from __future__ import annotations

import base64
import html
import http.client
import json
import re
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from typing import IO, Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from .errors import SandboxError

MAX_PAGE = 64 << 20
MAX_PROJECTS = 2000
FETCH_SECONDS = 60.0

_PROJECT = re.compile(r"/simple/([a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9])?)/?\Z")
_FILE = re.compile(r"/file/([0-9a-f]{32})/[^/]{1,300}\Z")
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_HASH = re.compile(r"(sha256|sha384|sha512)=[0-9a-fA-F]{64,128}\Z")


class NotOffered(Exception):
    """Not something that this index has for an installer; ``status`` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Offer:
    """One file of a project, as the index describes it."""

    name: str
    address: str
    digest: str = ""
    requires_python: str = ""
    yanked: bool = False


class PackageIndex:
    """One index for the length of one installation. Its methods block: call them in a thread."""

    def __init__(self, address: str) -> None:
        self._address, login = _without_login(address.rstrip("/") + "/")
        self._files: dict[str, str] = {}
        self._projects = 0
        handlers = (
            urllib.request.ProxyHandler(), urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(), urllib.request.HTTPRedirectHandler(),
            urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler(),
            _Login(self._address, login),
        )  # fmt: skip
        # Built by hand: the usual opener would also fetch file: and ftp: addresses.
        self._opener = urllib.request.OpenerDirector()
        for handler in handlers:
            self._opener.add_handler(handler)

    def open(self, path: str) -> tuple[str, IO[bytes] | bytes]:
        """The content type, and the page or the open file. Raises NotOffered."""
        if match := _PROJECT.match(path):
            return "text/html; charset=utf-8", self._project(match[1])
        if match := _FILE.match(path):
            address = self._files.get(match[1])
            if address is not None:
                return "application/octet-stream", self._fetch(address)
        raise NotOffered(404, "an installer has no need of this")

    def _project(self, name: str) -> bytes:
        self._projects += 1
        if self._projects > MAX_PROJECTS:
            raise NotOffered(403, "too many projects for one installation")
        with self._fetch(urljoin(self._address, f"{name}/")) as page:
            base = getattr(page, "url", self._address)
            kind = page.headers.get_content_type()  # type: ignore[attr-defined]
            try:
                content = page.read(MAX_PAGE + 1)
            except (OSError, http.client.HTTPException) as error:
                raise NotOffered(502, f"the index broke off: {error}") from None
        if len(content) > MAX_PAGE:
            raise NotOffered(502, "the page is too large")
        offers = _from_json(content, base) if kind.endswith("json") else _from_html(content, base)
        lines = [self._line(offer) for offer in offers]
        return "<!DOCTYPE html><html><body>\n{}</body></html>\n".format("".join(lines)).encode()

    def _line(self, offer: Offer) -> str:
        token = secrets.token_hex(16)
        self._files[token] = offer.address
        address = f"/file/{token}/{offer.name}"
        extra = ""
        if offer.requires_python:
            extra += f' data-requires-python="{html.escape(offer.requires_python)}"'
        if offer.yanked:
            extra += ' data-yanked=""'
        digest = f"#{offer.digest}" if offer.digest else ""
        return f'<a href="{html.escape(address + digest)}"{extra}>{html.escape(offer.name)}</a>\n'

    def _fetch(self, address: str) -> IO[bytes]:
        if urlsplit(address).scheme not in ("http", "https"):
            raise NotOffered(404, "not on the web")
        request = urllib.request.Request(address, headers={"Accept": _ACCEPT})  # noqa: S310
        try:
            answer: IO[bytes] = self._opener.open(request, timeout=FETCH_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                raise NotOffered(error.code, "the index says so") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NotOffered(502, f"the index cannot be reached: {error}") from None
        return answer


class _Login(urllib.request.BaseHandler):
    """Tells one server who we are. A redirect is a new request, and is looked at again."""

    def __init__(self, address: str, login: str) -> None:
        self._server = _server(address)
        self._header = f"Basic {base64.b64encode(login.encode()).decode()}" if login else ""

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        if self._header and _server(request.full_url) == self._server:
            request.add_unredirected_header("Authorization", self._header)
        return request

    https_request = http_request


def _server(address: str) -> tuple[str, str]:
    parts = urlsplit(address)
    return parts.scheme, parts.netloc.lower()


def _without_login(address: str) -> tuple[str, str]:
    """The address as a server knows it, and the ``name:password`` that was in it."""
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl(), unquote(login)


def _from_json(content: bytes, base: str) -> list[Offer]:
    try:
        files = json.loads(content)["files"]
        return [_offer_of(file, base) for file in files]
    except (ValueError, KeyError, TypeError) as error:
        raise NotOffered(502, f"the index gave no list: {error}") from None


def _offer_of(file: dict[str, Any], base: str) -> Offer:
    hashes = file.get("hashes") or {}
    digest = next((f"{k}={v}" for k, v in hashes.items() if _HASH.match(f"{k}={v}")), "")
    return Offer(
        _file_name(file["filename"]),
        urljoin(base, file["url"]),
        digest,
        str(file.get("requires-python") or ""),
        yanked=bool(file.get("yanked")),
    )


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append({name: value or "" for name, value in attrs})


def _from_html(content: bytes, base: str) -> list[Offer]:
    links = _Links()
    links.feed(content.decode("utf-8", "replace"))
    offers = []
    for link in links.found:
        address, digest = urldefrag(urljoin(base, link.get("href", "")))
        name = unquote(urlsplit(address).path.rpartition("/")[2])
        if address and name:
            offers.append(
                Offer(
                    _file_name(name), address, digest if _HASH.match(digest) else "",
                    link.get("data-requires-python", ""), yanked="data-yanked" in link,
                )
            )  # fmt: skip
    return offers


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+!-]", "_", name)[:300] or "_"


@cache
def index_of_this_machine() -> str:
    """Where pip of this Python installs from. Raises SandboxError when nobody can say."""
    program = (
        "from pip._internal.configuration import Configuration as C\n"
        "from pip._internal.models.index import PyPI\n"
        "c = C(isolated=False); c.load(); found = dict(c.items())\n"
        "names = ('install.index-url', 'global.index-url', ':env:.index-url')\n"
        "flat = {}\n"
        "for key, value in found.items():\n"
        "    flat.update(value if isinstance(value, dict) else {key: value})\n"
        "print(next((flat[n] for n in names if n in flat), PyPI.simple_url))\n"
    )
    done = subprocess.run(
        # Without the working directory, which may hold a pip of its own.
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    address = done.stdout.strip()
    if done.returncode or urlsplit(address).scheme not in ("http", "https"):
        raise SandboxError("There is no package index here: name one in SANDBOX_PACKAGE_INDEX")
    return address
