"""An Incus server of a test's own, which may be killed and configured."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import engines

CACHE = Path(os.environ.get("PARACLE_TEST_CACHE", "/var/cache/paracle-sandbox-tests"))
INCUSD = "/usr/libexec/incus/incusd"


class PrivateServer:
    """One of its own, which may be killed."""

    def __init__(self, folder: Path) -> None:
        self.run_folder, self.cache = folder / "run", folder / "cache"
        self.cache.mkdir()
        for part in CACHE.glob("base-*.tar"):
            (self.cache / part.name).symlink_to(part)
        self.environment = {
            **os.environ,
            "PARACLE_TEST_RUN": str(self.run_folder),
            "PARACLE_TEST_CACHE": str(self.cache),
        }
        self.socket = str(self.run_folder / "incus/unix.socket")
        self.restarted: subprocess.Popen[bytes] | None = None

    def script(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [engines.SCRIPT, *words], env=self.environment, capture_output=True, text=True,
            check=False, timeout=200,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return int((self.run_folder / "incusd.pid").read_text())

    def incus(self, *words: str, conf: Path | None = None) -> str:
        """What the server's own client says."""
        folders = {"INCUS_DIR": self.cache / "incus", "INCUS_CONF": conf or self.cache / "client"}
        environment = {**os.environ, **{name: str(path) for name, path in folders.items()}}
        done = subprocess.run(
            ["incus", *words], env=environment, capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def restart(self) -> None:
        """With everything that it has, unlike the script, which begins anew."""
        with (self.run_folder / "incusd.log").open("a") as log:
            self.restarted = subprocess.Popen(
                [INCUSD, "--group", "root", "--logfile", f"{self.run_folder}/incusd-own.log"],
                env={**os.environ, "INCUS_DIR": str(self.cache / "incus")},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        (self.run_folder / "incusd.pid").write_text(str(self.restarted.pid))

    def remains(self) -> list[str]:
        here = str(self.cache.parent)
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found = [f"mount {line}" for line in mounts if here in line]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found += [f"process {line}"] if here in line else []
        return found + [f"file {path}" for path in self.run_folder.glob("*")]


@contextmanager
def private_server() -> Iterator[PrivateServer]:
    engines.require("incus")
    folder = Path(tempfile.mkdtemp(prefix="inc"))  # a short name: sockets have short paths
    folder.chmod(0o755)  # the root of an instance is nobody here
    server = PrivateServer(folder)
    started = server.script("start", "incus")
    assert started.returncode == 0, started.stderr
    try:
        yield server
    finally:
        stopped = server.script("stop", "incus")
        if server.restarted is not None:
            server.restarted.wait(10)
        remains = server.remains()
        shutil.rmtree(folder)
    assert stopped.returncode == 0, stopped.stderr
    assert remains == []
