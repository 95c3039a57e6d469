"""A package index, as far as an installer inside a sandbox may see it.

Two kinds of pages exist: the list of files of one project, and one file. A list comes from the
configured index, and every link in it is replaced by a name that only this object can turn back
into an address. So nothing can be fetched but projects by their name, and files that the index
itself offered. Nothing is ever sent but GET, and no header of the asker is passed on. A name and
password in the address of the index are for the index alone, not for where it sends us.

Links and redirects may lead to other servers on the internet, as those of most indexes do; but
not to loopback, private or link-local addresses, where services of the host and its network
listen, unless that is the server of the index itself or one that the operator named
(SANDBOX_PACKAGE_HOSTS). The address is looked at after the connection is made and before anything
is sent, so that no name server can tell us one thing and mean another. Through an HTTP proxy the
proxy decides; only addresses that are written out are refused here then.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import html
import http.client
import ipaddress
import json
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from typing import IO, Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from ..channel.frames import has_more_items
from ..errors import SandboxError

MAX_PAGE = 32 << 20
MAX_ITEMS = 500_000  # of a page in JSON: a project of 30,000 files has fewer
MAX_PROJECTS = 2000
# Of all projects of one installation; each costs this process some 300 bytes.
MAX_LINKS = 50_000
FETCH_SECONDS = 60.0

_PROJECT = re.compile(r"/simple/([a-z0-9](?:[a-z0-9._-]{0,98}[a-z0-9])?)/?\Z")
_FILE = re.compile(r"/file/([0-9a-f]{32})/[^/]{1,300}\Z")
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
# Taking a large page apart keeps the interpreter busy: not many at a time.
_PARSING = threading.BoundedSemaphore(2)
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

    def __init__(self, address: str, hosts: Iterable[str] = ()) -> None:
        self._address, login = _without_login(address.rstrip("/") + "/")
        self._files: dict[bytes, str] = {}
        self._key = secrets.token_bytes(16)
        self._projects = 0
        own = _Own(self._address, hosts)
        handlers = (
            urllib.request.ProxyHandler(), _Http(own), _Https(own),
            urllib.request.HTTPRedirectHandler(),
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
            address = self._files.get(bytes.fromhex(match[1]))
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
            content = _whole(page)
        with _PARSING:
            is_json = kind.endswith("json")
            offers = _from_json(content, base) if is_json else _from_html(content, base)
            lines = [self._line(offer) for offer in offers]
        return "<!DOCTYPE html><html><body>\n{}</body></html>\n".format("".join(lines)).encode()

    def _line(self, offer: Offer) -> str:
        # The same address has the same name, however often its list is asked for.
        token = hmac.digest(self._key, offer.address.encode(), hashlib.sha256)[:16]
        if token not in self._files and len(self._files) >= MAX_LINKS:
            raise NotOffered(403, f"more than {MAX_LINKS} files for one installation")
        self._files[token] = offer.address
        address = f"/file/{token.hex()}/{offer.name}"
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
        except _Inner as refusal:
            raise NotOffered(403, str(refusal)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NotOffered(502, f"the index cannot be reached: {error}") from None
        return answer


def _whole(page: IO[bytes]) -> bytes:
    """A page that comes within FETCH_SECONDS and is not too large. Raises NotOffered."""
    held = bytearray()
    deadline = time.monotonic() + FETCH_SECONDS
    try:
        while piece := page.read1(1 << 20):  # type: ignore[attr-defined]
            held += piece
            if len(held) > MAX_PAGE:
                raise NotOffered(502, "the page is too large")
            if time.monotonic() > deadline:
                raise NotOffered(504, f"the page took longer than {FETCH_SECONDS:g} seconds")
    except (OSError, http.client.HTTPException) as error:
        raise NotOffered(502, f"the index broke off: {error}") from None
    return bytes(held)


class _Inner(Exception):
    """An address of this machine or its network, which is not the index's own."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"{host} is not on the internet: name it in SANDBOX_PACKAGE_HOSTS if packages "
            "come from there"
        )


class _Own:
    """The servers that may be anywhere: that of the index, and those that the operator named."""

    def __init__(self, index: str, hosts: Iterable[str]) -> None:
        parts = urlsplit(index)
        self._name = (parts.hostname or "").lower()
        # Without a port it is one of the usual two: many servers send from http to https.
        self._ports = {None, 443, parts.port or (443 if parts.scheme == "https" else 80)}
        self._hosts = {host.lower() for host in hosts}

    def __contains__(self, netloc: str) -> bool:
        parts = urlsplit(f"//{netloc}")
        name = (parts.hostname or "").lower()
        if name == self._name and parts.port in self._ports:
            return True
        return name in self._hosts or netloc.lower() in self._hosts


class _Http(urllib.request.HTTPHandler):
    def __init__(self, own: _Own) -> None:
        super().__init__()
        self._own = own

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        kind = _connecting(http.client.HTTPConnection, req, self._own)
        return self.do_open(kind, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, own: _Own) -> None:
        super().__init__()
        self._own = own

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        kind = _connecting(http.client.HTTPSConnection, req, self._own)
        return self.do_open(kind, req)


def _connecting(
    kind: type[http.client.HTTPConnection], request: urllib.request.Request, own: _Own
) -> Any:
    """Return what makes the connection for a request. Raises _Inner."""
    wanted = urlsplit(request.full_url)
    if wanted.netloc in own:
        return kind
    # urllib connects to the name without its escapes: %31%32%37.0.0.1 is 127.0.0.1.
    if _is_inner(unquote(wanted.hostname or "")):
        raise _Inner(wanted.netloc)
    if _goes_through_proxy(request):
        return kind

    def make(host: str, **options: Any) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        # The one place to look at the address before anything is sent, TLS included.
        connection._create_connection = functools.partial(_create_outer, host)  # type: ignore[attr-defined]
        return connection

    return make


def _goes_through_proxy(request: urllib.request.Request) -> bool:
    """Judge by what was done to the request, not by its names: these can be written in several
    ways."""
    return request.has_proxy() or bool(getattr(request, "_tunnel_host", None))


def _create_outer(host: str, *arguments: Any, **options: Any) -> socket.socket:
    connected = socket.create_connection(*arguments, **options)
    if _is_inner(str(connected.getpeername()[0])):
        connected.close()
        raise _Inner(host)
    return connected


def _is_inner(host: str) -> bool:
    """An address that is not one of the internet; a name is not looked up."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower().rstrip(".").endswith("localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return not mapped.is_global or mapped.is_multicast


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
    # The parser lets no other thread run until it is done.
    if has_more_items(content, MAX_ITEMS):
        raise NotOffered(502, "the index's list is too long")
    try:
        # No number is asked for, and thousands of long ones take longer than all else.
        files = json.loads(content, parse_int=str)["files"]
        return [_offer_of(file, base) for file in files]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
    """Return where pip of this Python installs from. Raises SandboxError when it does not say."""
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
