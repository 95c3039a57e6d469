"""SandboxConfig: defaults, ranges, and what it refuses."""

from typing import Any

import pytest
from pydantic import ValidationError

from paracle_sandbox import SandboxConfig
from paracle_sandbox.quick_config import CHOICES, DEFAULTS, RANGES, QuickConfig, quick_config


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
    with pytest.raises(ValidationError):
        SandboxConfig().memory_mb = 1024


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


# Without pydantic


def test_the_quick_one_says_what_the_real_one_says() -> None:
    assert QuickConfig(DEFAULTS).model_dump() == DEFAULTS == SandboxConfig().model_dump()
    ranges = {
        name: tuple(getattr(limit, side) for side in ("ge", "le") for limit in field.metadata
                    if hasattr(limit, side))
        for name, field in SandboxConfig.model_fields.items()
    }  # fmt: skip
    assert {name: pair for name, pair in ranges.items() if pair} == RANGES
    for name, values in CHOICES.items():
        for value in values:
            assert getattr(SandboxConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    "values",
    [
        {}, {"memory_mb": 128}, {"memory_mb": 16384, "cpu_cores": 0.1}, {"network_mode": "bridge"},
        {"base_image": "paracle/sandbox:ml"}, {"env_vars": {"A_1": "x", "_": ""}},
        {"read_only_filesystem": False},
    ],
)  # fmt: skip
def test_it_takes_what_is_right_beyond_doubt(values: dict[str, Any]) -> None:
    config = quick_config(**values)
    assert isinstance(config, QuickConfig)
    real = SandboxConfig(**values)
    assert {name: getattr(config, name) for name in SandboxConfig.model_fields} == dict(real)
    assert config.model_dump() == real.model_dump()


@pytest.mark.parametrize(
    "values",
    [
        {"memory_mb": 127}, {"memory_mb": 16385}, {"cpu_cores": float("nan")},
        {"network_mode": "lan"}, {"env_vars": {"1A": "x"}}, {"env_vars": {"Ä": "x"}},
        {"env_vars": {"A": "\0"}}, {"no_such_field": 1}, {"working_dir": "/etc"},
    ],
)  # fmt: skip
def test_it_leaves_what_is_wrong_to_the_real_one(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        quick_config(**values)


@pytest.mark.parametrize("values", [{"memory_mb": "256"}, {"working_dir": "/data"}])
def test_it_leaves_what_is_unusual_to_the_real_one(values: dict[str, Any]) -> None:
    assert quick_config(**values) == SandboxConfig(**values)
