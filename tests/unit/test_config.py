"""Tests of SandboxConfig: defaults, ranges, and what it refuses."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import pytest

from paracle_sandbox import SandboxConfig, SandboxSettings
from paracle_sandbox.config import InvalidConfigError


def test_defaults_are_the_specified_ones() -> None:
    config = SandboxConfig()
    assert config.base_image == "paracle/sandbox:latest"
    assert (config.cpu_cores, config.memory_mb, config.disk_mb) == (1.0, 512, 1024)
    assert (config.timeout_seconds, config.cleanup_timeout) == (300, 30)
    assert config.network_mode == "none"
    assert config.read_only_filesystem is True
    assert config.drop_capabilities is True
    assert config.working_dir == "/workspace"
    assert config.env_vars == {}


def test_given_values_are_kept() -> None:
    config = SandboxConfig(cpu_cores=2.5, memory_mb=1024, network_mode="bridge", env_vars={"A": ""})
    assert (config.cpu_cores, config.memory_mb) == (2.5, 1024)
    assert (config.network_mode, config.env_vars) == ("bridge", {"A": ""})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpu_cores", 0.05), ("cpu_cores", 20.0), ("cpu_cores", float("nan")),
        ("memory_mb", 64), ("memory_mb", 20000),
        ("disk_mb", 255), ("disk_mb", 10241),
        ("timeout_seconds", 9), ("timeout_seconds", 3601),
        ("cleanup_timeout", 4), ("cleanup_timeout", 301),
        ("network_mode", "foo"),
        ("working_dir", "workspace"), ("working_dir", "/a/../b"), ("working_dir", "/etc/x"),
        ("working_dir", "/"), ("working_dir", "/tmp/x"), ("working_dir", "//app"),
        ("working_dir", ""), ("working_dir", "//"), ("working_dir", "/tmp/"),
        ("env_vars", {"A=B": "1"}), ("env_vars", {"A": "x\0y"}), ("env_vars", {"": "1"}),
        ("base_image", "--privileged"), ("base_image", ""),
        ("no_such_field", 1),
    ],
)  # fmt: skip
def test_bad_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SandboxConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [("cpu_cores", 0.1, 16.0), ("memory_mb", 128, 16384), ("disk_mb", 256, 10240),
     ("timeout_seconds", 10, 3600), ("cleanup_timeout", 5, 300)],
)  # fmt: skip
def test_the_ends_of_a_range_belong_to_it(field: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(SandboxConfig(**{field: value}), field) == value  # type: ignore[arg-type]


def test_it_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SandboxConfig().memory_mb = 1024  # type: ignore[misc]


def test_presets() -> None:
    untrusted = SandboxConfig.untrusted()
    assert (untrusted.cpu_cores, untrusted.memory_mb, untrusted.timeout_seconds) == (0.5, 256, 60)
    assert untrusted.network_mode == "none"
    assert SandboxConfig.standard() == SandboxConfig()
    big = SandboxConfig.high_performance()
    assert (big.cpu_cores, big.memory_mb, big.disk_mb) == (4.0, 2048, 4096)
    assert (big.network_mode, big.timeout_seconds) == ("bridge", 600)


def test_a_slash_at_the_end_of_the_working_directory_means_nothing() -> None:
    assert SandboxConfig(working_dir="/app/").working_dir == "/app"
    assert SandboxConfig(working_dir="/data/deep//").working_dir == "/data/deep"


def test_texts_of_numbers_and_words_for_yes_are_taken() -> None:
    config = SandboxConfig(memory_mb="256", cpu_cores=2, disk_mb=512.0, drop_capabilities="no")  # type: ignore[arg-type]
    assert (config.memory_mb, config.disk_mb) == (256, 512)
    assert (config.cpu_cores, config.drop_capabilities) == (2.0, False)
    assert isinstance(config.cpu_cores, float) and isinstance(config.disk_mb, int)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_mb", 256.5), ("memory_mb", True), ("memory_mb", "much"), ("memory_mb", None),
        ("memory_mb", float("inf")), ("memory_mb", "9" * 5000), ("cpu_cores", "nan"),
        ("read_only_filesystem", "perhaps"), ("read_only_filesystem", 2),
        ("env_vars", {"A": 1}), ("env_vars", ["A=1"]), ("env_vars", None),
        ("volumes", {"/a": None}), ("volumes", "/a:/b"), ("volumes", {"a": "/b"}),
        ("volumes", {"/a": "/etc/x"}), ("allow_degraded", "cgroup"), ("allow_degraded", [1]),
        ("working_dir", None), ("base_image", 3), ("network_mode", ["none"]),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidConfigError, match=field):
        SandboxConfig(**{field: value})  # type: ignore[arg-type]


def test_all_that_is_wrong_is_told() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        SandboxConfig(memory_mb=1, cpu_cores=99, network_mode="bridge")
    told = {one["loc"]: (one["msg"], one["input"]) for one in caught.value.errors()}
    assert told == {
        ("memory_mb",): ("it must be from 128 to 16384", 1),
        ("cpu_cores",): ("it must be from 0.1 to 16", 99),
    }


def test_the_names_of_pydantic_work() -> None:
    config = SandboxConfig(memory_mb=256, allow_degraded=["b", "a"], env_vars={"A": "1"})  # type: ignore[arg-type]
    assert SandboxConfig.model_validate(config.model_dump()) == config
    assert SandboxConfig.model_validate(json.loads(config.model_dump_json())) == config
    assert config.model_dump(mode="json")["allow_degraded"] == ["a", "b"]
    assert config.model_dump(include={"memory_mb", "env_vars"}, exclude={"env_vars"}) == {
        "memory_mb": 256
    }
    changed = config.model_copy(update={"memory_mb": 512})
    assert (changed.memory_mb, config.memory_mb) == (512, 256)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    for wrong in (None, [], {1: 2}, {"none": 1}):
        with pytest.raises(InvalidConfigError):
            SandboxConfig.model_validate(wrong)


def test_it_keeps_copies_of_what_it_was_given() -> None:
    given = {"A": "1"}
    config = SandboxConfig(env_vars=given)
    given["B"] = "2"
    config.model_dump()["env_vars"]["C"] = "3"
    assert config.env_vars == {"A": "1"}


def test_it_is_had_without_pydantic() -> None:
    program = "import sys, paracle_sandbox as p; p.SandboxConfig(); p.SandboxExecutor; p.run"
    program += "; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.case("M10")
@pytest.mark.parametrize(
    "name",
    [
        "--privileged", "-v", "img:tag@sha256:0; rm -rf /", "../../etc", "a/../../containers/json",
        "host:5000/../x", "a/./b", "a//b", "/abs", "a/", "img\n--privileged", "img\0", "a b",
        "$(id)",
        "pyt\u0125on", "py\u0442hon:3", "x" * 10_000, "a/" * 200 + "b", "", ".", "..", "a/..",
    ],
)  # fmt: skip
def test_what_is_no_name_of_an_image_reaches_no_engine(name: str) -> None:
    with pytest.raises(InvalidConfigError, match="not an image name"):
        SandboxConfig(base_image=name)
    with pytest.raises(InvalidConfigError):
        SandboxSettings(image=name).to_config()


@pytest.mark.parametrize(
    "name",
    [
        "a", "IMG", "python:3.12-slim", "paracle/sandbox:latest", "ghost.example:5000/a/b:1.0",
        "localhost/x@sha256:" + "a" * 64, "a_b/c__d", "a/_x",
    ],
)  # fmt: skip
def test_names_of_images(name: str) -> None:
    assert SandboxConfig(base_image=name).base_image == name
