"""Names that are no text: shown, and good for a request."""

from __future__ import annotations

import os

import httpx2
import pytest
from service_place import Place

from paracle_sandbox.service.errors import BadRequest
from paracle_sandbox.service.routes.escaped_paths import escape, is_odd, show, unescape

MAKE = r"""python3 - <<'END'
import os
os.makedirs(b'd\xff/in')
for name in (b'odd\xfe\\x41', b'd\xff/in/\xc3', b'plain\\xff', 'é'.encode()):
    open(name, 'wb').write(b'content of ' + name)
END"""


def check_all_of_it(client: httpx2.Client, user: str) -> None:
    """V13: an odd name ends no listing, and every name that is shown leads to its file."""
    at = f"/sandbox/{user}"
    assert client.post(f"{at}/shell", json={"command": MAKE}).json()["success"]
    listed = client.get(f"{at}/files", params={"recursive": True})
    assert listed.status_code == 200, listed.text
    files = [one for one in listed.json()["files"] if one["kind"] == "file"]
    found = {one["path"]: one["escaped"] for one in files}
    assert found == {
        r"/workspace/odd\xfe\\x41": True,
        r"/workspace/d\xff/in/\xc3": True,
        r"/workspace/plain\xff": False,
        "/workspace/é": False,
    }
    for path, is_escaped in found.items():
        which = {"path": path, "escaped": is_escaped}
        there = client.get(f"{at}/exists", params=which)
        assert there.status_code == 200, there.text
        assert there.json() == {"path": path, "exists": True}
        assert client.get(f"{at}/stat", params=which).json()["path"] == path
        raw = client.get(f"{at}/files/raw", params=which)
        name = os.fsencode(unescape(path) if is_escaped else path).removeprefix(b"/workspace/")
        assert raw.content == b"content of " + name
        assert client.head(f"{at}/files/raw", params=which).status_code == 200
        assert client.get(f"{at}/file", params=which).json()["path"] == path
        assert client.put(f"{at}/files/raw", params=which, content=b"new").status_code == 200
        assert client.get(f"{at}/file", params=which).json()["content"] == "new"
        assert client.delete(f"{at}/file", params=which).json()["output"] == f"Removed {path}"
        gone = client.get(f"{at}/file", params=which)
        assert gone.status_code == 404 and gone.json()["error"]
    below = client.get(f"{at}/files", params={"path": r"d\xff", "escaped": True})
    assert [one["name"] for one in below.json()["files"]] == ["in"]
    wrong = client.get(f"{at}/file", params={"path": r"a\q", "escaped": True})
    assert wrong.status_code == 400 and "backslash" in wrong.json()["error"]


def test_names_that_are_no_text_in_a_native_sandbox(real: httpx2.Client, user: str) -> None:
    check_all_of_it(real, user)


@pytest.mark.parametrize(
    "name",
    [b"a", b"\\", b"\\x41", b"\xff\\xff", b"\xff", b"\xc3", b"\xc3\xa9\xff", b"\xed\xb3\xbf\\"],
)
def test_escapes_come_back(name: bytes) -> None:
    path = os.fsdecode(name)
    assert unescape(escape(path)) == path
    assert show(path) == (escape(path) if is_odd(path) else path)
    show(path).encode()


@pytest.mark.parametrize("text", ["\\", "\\x", "\\x41", "\\xZZ", "\\n", "a\\"])
def test_what_is_no_escape_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        unescape(text)


async def test_kept_files_may_have_odd_names(place: Place) -> None:
    """Oracle: the directory on the host."""
    await place.shell("python3 -c \"open(b'odd\\xff', 'w').write('x')\"")
    home = place.service.sandboxes.find("ann")
    assert home is not None
    top = os.fsencode(home.workspace.directory)
    kept = [name for _, _, names in os.walk(top) for name in names]
    assert b"odd\xff" in kept
