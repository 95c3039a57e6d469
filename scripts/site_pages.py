"""The pages of the documentation site that are not files below docs/.

MkDocs calls the ``on_...`` functions (mkdocs.yml names this file). They add the pages of the
repository's root, and a page with every public name of the package. Links lead from file to file in
the repository, as people read it there; here they are turned into links between the pages of the
site. A link to a file that is no page (an example, a Dockerfile) leads to a copy of it.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "paracle_sandbox"
# Files of the repository, and the pages that they are.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
    "RELEASE.md": "release.md",
    "SECURITY.md": "security.md",
    "deploy/README.md": "deploy.md",
    "docker/README.md": "images.md",
    "tests/README.md": "tests.md",
}
NAMES_PAGE = "reference/python.md"
# Modules whose classes consist of fields: these are shown although they have no docstrings.
MODULES_OF_FIELDS = {"config", "errors", "results"}
# Where copies of files are that are no pages.
COPIES = "files"

_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in PAGES.items():
        text = (REPOSITORY / path).read_text(encoding="utf-8")
        if not path.endswith(".md"):
            text = f"# {path.capitalize()}\n\n{text}"
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, NAMES_PAGE, content=names_page()))
    for page in list(files.documentation_pages()):
        for path in _linked_files(page, files):
            files.append(
                File.generated(config, f"{COPIES}/{path}", abs_src_path=str(REPOSITORY / path))
            )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        path = _repository_path(page.file, match[1])
        target = posixpath.relpath(_site_path(path, files), folder or ".")
        return f"]({target}{match[2] or ''})"

    return "\n".join(line if inside else _LINK.sub(lead, line) for line, inside in _lines(markdown))


def names_page() -> str:
    """Markdown that has mkdocstrings write about each public name."""
    parts = [
        "# Python, every name",
        f"Every name that can be imported from `{PACKAGE}`, with what its source says about it. "
        "[By task](api.md) there are examples.",
    ]
    of_fields = _names_from(MODULES_OF_FIELDS)
    for name in public_names():
        if name.startswith("__"):
            continue
        parts.append(f"::: {PACKAGE}.{name}")
        if name in of_fields:
            parts[-1] += "\n    options:\n      show_if_no_docstring: true"
    parts.append(f'<h2 id="{PACKAGE}.__version__"><code>__version__</code></h2>\n\nThe version.')
    return "\n\n".join(parts) + "\n"


def public_names() -> list[str]:
    """``__all__`` of the package, which is read and not imported."""
    for node in _package().body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise ValueError(f"{PACKAGE} has no __all__ that can be read")


def _names_from(modules: set[str]) -> set[str]:
    return {
        alias.name
        for node in ast.walk(_package())
        if isinstance(node, ast.ImportFrom) and node.level and node.module in modules
        for alias in node.names
    }


def _package() -> ast.Module:
    return ast.parse((REPOSITORY / "src" / PACKAGE / "__init__.py").read_text(encoding="utf-8"))


def _linked_files(page: File, files: Files) -> set[str]:
    found = set()
    for line, inside in _lines(page.content_string):
        for match in () if inside else _LINK.finditer(line):
            path = _repository_path(page, match[1])
            if (REPOSITORY / path).is_file() and _site_path(path, files).startswith(COPIES):
                found.add(path)
    return found


def _lines(markdown: str) -> list[tuple[str, bool]]:
    """Each line, and whether it is code."""
    inside = False
    found = []
    for line in markdown.splitlines():
        fence = bool(_FENCE.match(line))
        found.append((line, inside or fence))
        inside ^= fence
    return found


def _repository_path(page: File, target: str) -> str:
    """The file of the repository that a link of the page means."""
    sources = {site: path for path, site in PAGES.items()}
    source = sources.get(page.src_uri, f"docs/{page.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _site_path(path: str, files: Files) -> str:
    """Where the site has a file of the repository. A link to what is not there stays broken, and
    fails the build."""
    if path in PAGES:
        return PAGES[path]
    below = path.removeprefix("docs/")
    if path.startswith("docs/") and files.get_file_from_path(below):
        return below
    return f"{COPIES}/{path}"
