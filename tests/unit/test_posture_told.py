"""Every result and health report the part of the isolation that is missing on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from paracle_sandbox.backends.health_probe import limit_layers
from paracle_sandbox.backends.machine.cgroup_usage import KeptLimits, read_limits
from paracle_sandbox.backends.native.spawner_protocol import missing_layers
from paracle_sandbox.cli.execute import _show_end
from paracle_sandbox.cli.program import Outcome
from paracle_sandbox.config import SandboxConfig
from paracle_sandbox.executor import SandboxExecutor
from paracle_sandbox.manager import SandboxManager
from paracle_sandbox.testing.fake import FakeBackend

CONFIG = SandboxConfig(memory_mb=256, cpu_cores=0.5)


class Weak(FakeBackend):
    def lacking(self) -> list[str]:
        return ["memory limit", "cpu limit"]


async def test_every_result_says_what_is_missing() -> None:
    async with SandboxExecutor(SandboxManager(backend=Weak())) as executor:
        result = await executor.execute_agent("print(1)")
    assert result["posture"] == {"backend": "fake", "missing": ["memory limit", "cpu limit"]}


def test_the_command_line_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    posture = {"backend": "native", "missing": ["cpu limit"]}
    _show_end(Outcome({"success": True, "sandbox_id": "x", "posture": posture}), verbose=False)  # type: ignore[typeddict-item]
    assert "Without: cpu limit (see paracle sandbox health)" in capsys.readouterr().err


def test_what_a_spawner_could_not_have() -> None:
    assert missing_layers({"cgroup_version": 1, "volume": True, "landlock": True}) == []
    assert missing_layers({"cgroup_version": 0, "volume": False, "landlock": False}) == [
        "memory limit", "cpu limit", "disk limit apart from memory", "landlock",
    ]  # fmt: skip


def group(place: Path, **files: str) -> dict[str, str]:
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text + "\n")
    return dict.fromkeys(("memory", "pids", "cpu"), str(place))


def test_limits_are_read_back_from_either_kind_of_group(tmp_path: Path) -> None:
    separate = group(
        tmp_path, memory__limit_in_bytes=str(256 << 20), pids__max="100",
        cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000",
    )  # fmt: skip
    kept = KeptLimits(256 << 20, 0.5, 100)
    assert read_limits(separate) == kept
    group(tmp_path, memory__max=str(256 << 20), cpu__max="50000 100000")
    assert read_limits({"unified": str(tmp_path)}) == kept
    assert all(layer.in_force for layer in limit_layers(kept, CONFIG, "cgroup"))


def test_no_limit_is_none(tmp_path: Path) -> None:
    separate = group(
        tmp_path, memory__limit_in_bytes="9223372036854771712", pids__max="max",
        cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000",
    )  # fmt: skip
    assert read_limits(separate) == KeptLimits(None, None, None)
    group(tmp_path, memory__max="max", cpu__max="max 100000")
    kept = read_limits({"unified": str(tmp_path)})
    assert kept == KeptLimits(None, None, None)
    layers = list(limit_layers(kept, CONFIG, "cgroup", "do this"))
    assert not any(layer.in_force for layer in layers)
    assert {layer.remedy for layer in layers} == {"do this"}
    wide = KeptLimits(512 << 20, 1.0, 100)
    assert [layer.in_force for layer in limit_layers(wide, CONFIG, "")] == [False, False, True]
