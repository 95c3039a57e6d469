"""The page about the service names every address, and the deployment files hold together."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from service_process import ServiceProcess

import paracle_sandbox.service.app  # noqa: F401  every fault there is, wherever it is defined
from paracle_sandbox.errors import SandboxCreationError, SandboxError
from paracle_sandbox.service.errors import ServiceFault, classify, status_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/service.md"
DEPLOY = ROOT / "deploy"


def test_the_page_lists_every_address_and_no_other(client: httpx2.Client) -> None:
    listed = set(re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", PAGE.read_text(), re.MULTILINE))
    served = {
        f"{method.upper()} {path}"
        for path, methods in client.get("/openapi.json").json()["paths"].items()
        for method in methods
    }
    assert listed == served, (served - listed, listed - served)


def test_the_page_has_every_status_and_kind() -> None:
    """A row a status; of what cannot be made by a class alone, the few are named here."""
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    told = {
        (int(status), kind) for status, text in rows for kind in re.findall(r"`([a-z_]+)`", text)
    }
    given = {(one.status, one.kind) for one in below(ServiceFault)}
    # Backends may have more of their own, if one was imported: they are told as what they are.
    known = [one for one in below(SandboxError) if one.__module__ == SandboxError.__module__]
    failures = [one("x") for one in known]
    failures.append(SandboxCreationError("x", step="mount"))
    given |= {(status_of(one), classify(one).kind) for one in failures}
    given |= {(405, "bad_input"), (500, "internal")}
    assert {pair for pair in told if pair[1] != "state_lost"} == given


def below(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("paracle_sandbox."):
            yield one
            yield from below(one)


def test_the_python_of_the_page_works(client: httpx2.Client) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"client": client}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["answer"]["output"] == "42\n"  # type: ignore[index]


def test_the_first_start_prints_a_line_that_works(fake: ServiceProcess) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl; apt install curl")
    assert "curl" in fake.lines[-1]
    done = subprocess.run(fake.lines[-1], shell=True, capture_output=True, text=True, timeout=60)
    assert '"output":"42\\n"' in done.stdout, done


def test_the_compose_file_has_what_is_specified() -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    services = compose["services"]
    assert set(services) == {"sandbox-image", "sandbox-api", "caddy"}
    api = services["sandbox-api"]
    assert any(port.endswith("8080:8080") for port in api["ports"])
    assert "/var/run/docker.sock:/var/run/docker.sock" in api["volumes"]
    assert "sandbox-data:/data" in api["volumes"] and "sandbox-data" in compose["volumes"]
    assert {"SANDBOX_API_KEY", "SANDBOX_DOCKER_IMAGE", "SANDBOX_MAX_CONTAINERS"} <= set(
        api["environment"]
    )
    assert services["caddy"]["image"] == "caddy:2" and "443:443" in services["caddy"]["ports"]
    for service in services.values():
        for place in [service["build"]] if "build" in service else []:
            assert (DEPLOY / place["context"] / place["dockerfile"]).is_file()
    assert "reverse_proxy sandbox-api:8080" in (DEPLOY / "Caddyfile").read_text()


@pytest.mark.case("N12")
def test_no_secret_is_shipped() -> None:
    for path in filter(Path.is_file, DEPLOY.rglob("*")):
        assert not re.search(r"SANDBOX_API_KEY[=:] *[A-Za-z0-9]", path.read_text()), path


def test_the_unit_is_one(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze; apt install systemd")
    text = (DEPLOY / "paracle-sandbox.service").read_text()
    unit = tmp_path / "paracle-sandbox.service"
    unit.write_text(text.replace("/opt/paracle/bin/paracle", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "paracle-sandbox.service" in line]
    assert not ours, ours


# What would break native sandboxes; the unit says how.
HARMFUL = (
    "ProtectClock", "PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectHostname",
    "ProtectKernelTunables", "ProtectControlGroups", "RestrictNamespaces", "ProtectProc",
    "ProcSubset", "PrivateUsers", "RestrictSUIDSGID", "MemoryDenyWriteExecute", "IPAddressDeny",
)  # fmt: skip
NEEDED = {
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_MKNOD", "CAP_NET_ADMIN",
    "CAP_SETGID", "CAP_SETUID", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE",
}  # fmt: skip


def test_the_unit_gives_away_little_and_keeps_what_sandboxes_need() -> None:
    unit = DEPLOY / "paracle-sandbox.service"
    lines = [line for line in unit.read_text().splitlines() if not line.startswith("#")]
    pairs = [(name, value) for name, _, value in (line.partition("=") for line in lines) if value]
    assert not {name for name, _ in pairs} & set(HARMFUL)
    dropped = [value for name, value in pairs if name == "CapabilityBoundingSet"]
    assert all(value.startswith("~") for value in dropped), "only what is named is taken away"
    assert not {word for value in dropped for word in value[1:].split()} & NEEDED
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "ProtectKernelModules"):
        assert (name, "yes") in pairs
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze; apt install systemd")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=65", "--no-pager"]
    done = subprocess.run([*command, str(unit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


def test_the_installation_is_from_the_checkout() -> None:
    """The package is on no index."""
    text = (DEPLOY / "README.md").read_text()
    assert re.findall(r"pip install '([^']+)'", text) == ["..[service]"]
    assert (DEPLOY / "../pyproject.toml").is_file()
