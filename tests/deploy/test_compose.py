"""What compose makes of the deployment's file. Needs compose, but no engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from stack import API, ROOT, compose_command

from paracle_sandbox.settings import load_settings, settings_table

NATIVE = "of native sandboxes, which the container has not"
CONFIG = "of the library's own sandboxes; the service's have SANDBOX_DOCKER_*"
ELSEWHERE = "of backends for which the image has no packages"
# Settings that the container does not get, and why.
LEFT_OUT = {
    "SANDBOX_API_URL": "of clients",
    "SANDBOX_API_USER": "of clients",
    "SANDBOX_TIMEOUT": "of clients",
    "PARACLE_SANDBOX_DEFAULT_TIMEOUT": CONFIG,
    "PARACLE_SANDBOX_DEFAULT_MEMORY_MB": CONFIG,
    "PARACLE_SANDBOX_DEFAULT_CPU_CORES": CONFIG,
    "DOCKER_SANDBOX_IMAGE": CONFIG,
    "DOCKER_SANDBOX_TIMEOUT": CONFIG,
    "DOCKER_SANDBOX_MEMORY": CONFIG,
    "DOCKER_SANDBOX_CPU": CONFIG,
    "DOCKER_HOST": "the engine is the one whose socket it has, not the one compose is told",
    "DOCKER_CONTEXT": "the engine is the one whose socket it has, not the one compose is told",
    "DOCKER_CONFIG": "the same",
    "PARACLE_STATE_DIR": "the image says where",
    "PARACLE_DATA_DIR": "the image says where",
    "PARACLE_VOLUMES": "directories of the machine, which it does not see",
    "PARACLE_STOCK": NATIVE,
    "PARACLE_SPEED": NATIVE,
    "PARACLE_PYTHON": NATIVE,
    "PARACLE_TEMPLATE_BUILD": NATIVE,
    "PARACLE_UID_BASE": NATIVE,
    "PARACLE_FAILPOINTS": "of tests",
    "PARACLE_AGENTS_DIR": "of agents",
    "PARACLE_MCP_KEY": "of agents",
    "GOOGLE_API_KEY": "of agents",
    "MISTRAL_API_KEY": "of agents",
    "GROQ_API_KEY": "of agents",
    **{
        row.variable: ELSEWHERE
        for row in settings_table().values()
        if row.variable.startswith(("INCUS_", "DAYTONA_"))
    },
}


def resolved(folder: Path) -> dict[str, Any]:
    """By the .env of the folder, not by what the shell of the tests has."""
    known = {row.variable for row in settings_table().values()}
    environment = {name: value for name, value in os.environ.items() if name not in known}
    command = [*compose_command(), "--profile", "build", "config"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = yaml.safe_load(done.stdout)
    return told


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With the folders that compose may be called in, as somebody has them after the README."""
    for name in ("deploy", "sandbox_service"):
        ignored = shutil.ignore_patterns(".env")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
        example = (tmp_path / name / ".env.example").read_text()
        filled = example.replace("SANDBOX_API_KEY=\n", "SANDBOX_API_KEY=secret\n")
        (tmp_path / name / ".env").write_text(filled)
    return tmp_path


def test_no_setting_is_forgotten() -> None:
    services = yaml.safe_load((ROOT / "deploy/docker-compose.yml").read_text())["services"]
    passed = set(services[API]["environment"])
    known = {row.variable for row in settings_table().values()}
    assert not passed & set(LEFT_OUT)
    assert passed | set(LEFT_OUT) == known, "pass it on in docker-compose.yml, or say why not"


def test_what_the_operator_sets_arrives(checkout: Path) -> None:
    wanted = {
        "SANDBOX_PACKAGES": "0",
        "SANDBOX_USER_RATE": "5",
        "SANDBOX_DOCKER_DISK": "2g",
        "SANDBOX_AUDIT_CONTENT": "1",
        "SANDBOX_PACKAGE_INDEX": "https://index.example/simple",
        "PARACLE_SANDBOX_NETWORK_MODE": "bridge",
        "PARACLE_SANDBOX_READ_ONLY_FS": "false",
        "PARACLE_SANDBOX_LOG_LEVEL": "info",
    }
    lines = "".join(f"{name}={value}\n" for name, value in wanted.items())
    with (checkout / "deploy/.env").open("a") as file:
        file.write(f"{lines}SANDBOX_AUDIT_FILE=\n")
    found = resolved(checkout / "deploy")["services"][API]["environment"]
    assert wanted.items() <= found.items()
    settings = load_settings({name: value for name, value in found.items() if value is not None})
    assert (settings.packages, settings.user_rate, settings.service_disk_mb) == (False, 5, 2048)
    assert (settings.network_mode, settings.read_only_filesystem) == ("bridge", False)
    assert (settings.audit_file_mb, settings.user_sandboxes) == (64, 5), "empty and unset alike"


def test_a_checkout_without_a_key_builds_its_image(checkout: Path) -> None:
    """Building needs no secret. A service without one makes a key at its first start."""
    for folder in ("deploy", "sandbox_service"):
        (checkout / folder / ".env").unlink()
        services = resolved(checkout / folder)["services"]
        assert services["sandbox-image"]["build"]["dockerfile"] == "docker/Dockerfile.sandbox"
        assert not services[API]["environment"]["SANDBOX_API_KEY"]


def test_the_folder_of_the_service_is_the_deployment(checkout: Path) -> None:
    """Services, build contexts, and files of the machine: the same in both folders."""
    service, deploy = (resolved(checkout / name) for name in ("sandbox_service", "deploy"))
    assert service["services"] == deploy["services"]
    assert service["services"][API]["environment"]["SANDBOX_API_KEY"] == "secret"
    for one in service["services"].values():
        if "build" in one:
            assert Path(one["build"]["context"]) == checkout
            assert (ROOT / one["build"]["dockerfile"]).is_file()
    assert str(checkout / "deploy/Caddyfile") in str(service["services"]["caddy"]["volumes"])
