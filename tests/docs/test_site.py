"""The documentation site: it builds without a warning, is whole, and asks no other host."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pages import REPOSITORY

import paracle_sandbox

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("material") and importlib.util.find_spec("mkdocstrings")),
    reason="the site is built by what the extra docs installs: pip install -e '.[docs]'",
)
# What a browser loads when it shows a page, unlike an <a>, which only leads somewhere.
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src",
          "video": "src", "audio": "src", "embed": "src", "object": "data"}  # fmt: skip


@dataclass
class Html(HTMLParser):
    """What a built page has, and where it leads to."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attributes}
        self.anchors.update(has[name] for name in ("id", "name") if name in has)
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        if LOADED.get(tag, "") in has:
            self.loaded.append(has[LOADED[tag]])


@cache
def parsed(path: Path) -> Html:
    page = Html()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=240,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def html_files(site: Path) -> list[Path]:
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def local_target(site: Path, page: Path, address: str) -> Path:
    path = unquote(urlsplit(address).path)
    target = page if not path else (site if path.startswith("/") else page.parent) / path.strip("/")
    target = Path(os.path.normpath(target))
    return target / "index.html" if target.is_dir() else target


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    checked = 0
    wrong = []
    for page in html_files(site):
        for address in [*parsed(page).links, *parsed(page).loaded]:
            if is_elsewhere(address) or urlsplit(address).scheme:
                continue
            target = local_target(site, page, address)
            anchor = unquote(urlsplit(address).fragment)
            checked += 1
            if not target.is_file():
                wrong.append(f"{page.relative_to(site)}: {address}: no such page")
            elif anchor and target.suffix == ".html" and anchor not in parsed(target).anchors:
                wrong.append(f"{page.relative_to(site)}: {address}: no such anchor")
    assert not wrong, "\n".join(wrong)
    assert checked > 500


def test_the_checks_of_links_find_what_is_wrong(site: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<a href="gone/">x</a><a href="#gone">y</a><h2 id="here"></h2>')
    assert not local_target(tmp_path, page, "gone/").is_file()
    assert local_target(tmp_path, page, "#here") == page
    assert parsed(page).anchors == {"here"} and parsed(page).links == ["gone/", "#gone"]


def test_a_page_asks_no_other_host(site: Path) -> None:
    """Browsers are told so as well: what a page would load from elsewhere is refused."""
    policy = re.compile(r'http-equiv="Content-Security-Policy" content="default-src \'self\';')
    for page in html_files(site):
        asked = [address for address in parsed(page).loaded if is_elsewhere(address)]
        assert not asked, f"{page.relative_to(site)}: {asked}"
        assert policy.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text()), sheet


def test_there_is_a_search_index(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"", "guide/", "security/", "reference/python/", "reference/settings/"} <= found
    (zygote,) = [e for e in index["docs"] if e["location"] == "architecture/#words"]
    assert "zygote" in zygote["text"]


@pytest.mark.parametrize("name", paracle_sandbox.__all__)
def test_every_public_name_is_in_the_reference(site: Path, name: str) -> None:
    reference = parsed(site / "reference" / "python" / "index.html")
    assert f"paracle_sandbox.{name}" in reference.anchors


def test_the_reference_shows_what_the_source_says(site: Path) -> None:
    page = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "paracle_sandbox.SandboxConfig.memory_mb" in page, "fields of values are shown"
    summary = (paracle_sandbox.SandboxExecutor.__doc__ or "").split(".")[0]
    assert summary and summary in page


def test_every_page_of_the_repository_is_in_the_site(site: Path) -> None:
    """Also those of the root, and those below docs/ that somebody adds."""
    titles = {
        re.sub(r"<[^>]+>", "", title).strip()
        for page in html_files(site)
        for title in re.findall(r"<h1[^>]*>(.*?)<a", page.read_text(encoding="utf-8"), re.DOTALL)
    }
    for path in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]:
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        assert title.replace("`", "") in titles, path.name
