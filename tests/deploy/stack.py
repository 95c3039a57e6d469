"""The stack of deploy/docker-compose.yml on the engine of the tests, as an operator would have it.

The file is taken as it is and resolved by compose itself, which validates it. Then only what
belongs to this machine is changed: where the engine's socket is, which ports of the loopback are
free, how images are called that are ours alone, and over which network and pip configuration a
build reaches its packages. A package index of the tests is one more service.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import ssl
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import httpx2
import yaml

import engines
from paracle_sandbox.images.package_index import read_machine_files

ROOT = Path(__file__).resolve().parents[2]
IN_CONTEXT = ("deploy", "docker", "src", "pyproject.toml", "README.md", "LICENSE", ".dockerignore")
API, PROXY, IMAGE = "sandbox-api", "caddy", "sandbox-image"
# Always the same, so that the engine need not build again what has not changed.
INDEX, INDEX_URL = "package-index", "http://package-index:8000/simple/"
BUILT = {API: "paracle-test/sandbox-api:latest", IMAGE: "paracle-test/sandbox:latest"}


def compose_command() -> list[str]:
    newer = ["docker", "compose"]
    asked = [*newer, "version"]
    if shutil.which("docker") and subprocess.run(asked, capture_output=True).returncode == 0:
        return newer
    if shutil.which("docker-compose") is None:
        engines.missing("docker", "no compose; apt install docker-compose")
    return ["docker-compose"]


class Stack:
    """A copy of the checkout, and a project of its own name."""

    def __init__(self, folder: Path, key: str | None = None) -> None:
        self.checkout = folder
        self.name = f"paracle-test-{secrets.token_hex(4)}"
        self.key = secrets.token_hex(32) if key is None else key
        self.label = ""
        self.file = folder / "deploy" / "resolved.yml"
        for name in IN_CONTEXT:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            ignore = {"ignore": shutil.ignore_patterns("__pycache__")}
            copy(ROOT / name, folder / name, **(ignore if copy is shutil.copytree else {}))  # type: ignore[operator]
        for folder_name in ("deploy", "docker"):
            for name, content in read_machine_files().items():
                (folder / folder_name / name).write_bytes(content)
        (folder / "deploy/.env").write_text(
            f"SANDBOX_API_KEY={self.key}\nSANDBOX_DOMAIN=localhost\nSANDBOX_DOCKER_MEMORY=256m\n"
            f"SANDBOX_DOCKER_IMAGE={BUILT[IMAGE]}\nSANDBOX_PACKAGE_INDEX={INDEX_URL}\n"
        )
        write_index(folder / "index")

    def resolve(self) -> dict[str, Any]:
        """What compose makes of the file: it fails on what it does not understand."""
        text = self._run([*compose_command(), "--profile", "build", "config"])
        resolved: dict[str, Any] = yaml.safe_load(text)
        return resolved

    def adapt(self, resolved: dict[str, Any]) -> None:
        services = resolved["services"]
        for name, image in BUILT.items():
            services[name]["image"] = image
            services[name]["build"]["network"] = "host"
        api = services[API]
        api["volumes"] = [_elsewhere(volume) for volume in api["volumes"]]
        assert "docker.sock" in str(api["volumes"])
        api["ports"] = ["127.0.0.1::8080"]
        services[PROXY]["ports"] = ["127.0.0.1::443"]
        services[INDEX] = {
            "image": "python:3.12-slim",
            "command": ["python3", "-m", "http.server", "8000", "--directory", "/index"],
            "volumes": [f"{self.checkout}/index:/index:ro"],
        }
        # A newer compose writes down the names that this project would have had.
        resolved.pop("name", None)
        for kind in ("volumes", "networks"):
            for one in (resolved.get(kind) or {}).values():
                (one or {}).pop("name", None)
        self.file.write_text(yaml.safe_dump(resolved))

    def compose(self, *words: str) -> str:
        return self._run([*compose_command(), "-p", self.name, "-f", str(self.file), *words])

    def docker(self, *words: str) -> str:
        return self._run(["docker", *words])

    def _run(self, argv: list[str]) -> str:
        environment = {
            **os.environ,
            "DOCKER_HOST": engines.DOCKER_HOST,
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_DOCKER_CLI_BUILD": "0",
        }
        done = subprocess.run(
            argv, cwd=self.checkout / "deploy", env=environment, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    def container(self, service: str) -> str:
        """Its id, also when it has ended."""
        filters = [f"label=com.docker.compose.project={self.name}",
                   f"label=com.docker.compose.service={service}"]  # fmt: skip
        words = [word for one in filters for word in ("--filter", one)]
        return self.docker("ps", "-aq", "--no-trunc", *words).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.docker("inspect", self.container(service)))[0]
        return found

    def address(self, service: str, port: int) -> str:
        ports = self.inspect(service)["NetworkSettings"]["Ports"]
        return f"127.0.0.1:{ports[f'{port}/tcp'][0]['HostPort']}"

    def api(self) -> httpx2.Client:
        """Past the proxy."""
        url = f"http://{self.address(API, 8080)}"
        return httpx2.Client(base_url=url, headers={"X-API-Key": self.key}, timeout=60)

    def proxy(self) -> httpx2.Client:
        """Through the proxy, by its name and with its own certificates."""
        place = "/data/caddy/pki/authorities/local/root.crt"
        root = self.docker("exec", self.container(PROXY), "cat", place)
        port = self.address(PROXY, 443).rpartition(":")[2]
        context = ssl.create_default_context(cadata=root)
        return httpx2.Client(base_url=f"https://localhost:{port}", verify=context, timeout=60)

    def installation(self, sandbox_id: str) -> str:
        """What all sandboxes of this service are labelled with."""
        container = f"paracle-sandbox-{sandbox_id}"
        text = self.docker("inspect", "-f", '{{index .Config.Labels "paracle.labels"}}', container)
        return str(json.loads(text)["paracle.service"])

    def sandboxes(self) -> list[str]:
        """Sandboxes that the service has made on the engine, in whichever of its lives; not what
        it keeps ready."""
        form = '{{.ID}} {{.Label "paracle.labels"}}'
        words = ["--filter", "label=paracle.managed=true", "--filter", "name=^/paracle-sandbox-"]
        words += ["--format", form]
        lines = self.docker("ps", "-a", "--no-trunc", *words).splitlines()
        return [line.split()[0] for line in lines if self.label and self.label in line]


def _elsewhere(volume: Any) -> Any:
    """The engine's socket, where the tests have theirs."""
    if isinstance(volume, dict):
        if volume["source"] == "/var/run/docker.sock":
            return {**volume, "source": str(engines.SOCKET)}
        return volume
    return volume.replace("/var/run/docker.sock:", f"{engines.SOCKET}:", 1)


def write_index(folder: Path) -> None:
    """The files of a package index that offers one package, `greeting`."""
    about, name = "greeting-1.0.dist-info", "greeting-1.0-py3-none-any.whl"
    project = folder / "simple" / "greeting"
    project.mkdir(parents=True)
    (project / "index.html").write_text(f'<a href="{name}">{name}</a>')
    with zipfile.ZipFile(project / name, "w") as wheel:
        wheel.writestr("greeting.py", "WORD = 'hello'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
