"""Settings: the table, where values come from, and what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paracle_sandbox
from paracle_sandbox import SandboxConfig, SandboxError, SandboxSettings, Settings, load_settings
from paracle_sandbox.settings import SHARED_KEYS, SPEED, parse_memory_mb, settings_table

PACKAGE = Path(paracle_sandbox.__file__).parent


def write(directory: Path, text: str) -> Path:
    file = directory / "config.toml"
    file.write_text(text, encoding="utf-8")
    return file


def python(*lines: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )
    return done.stdout


def test_without_anything_the_defaults_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"HOME": str(tmp_path)})
    places = ("state_dir", "data_dir", "service_dir", "agents_dir")
    derived = {name: getattr(settings, name) for name in places}
    assert settings == Settings(**derived)
    assert (settings.mode, settings.stock, settings.request_timeout) == ("auto", 4, 60.0)
    assert settings.docker_image == "python:3.12-slim"
    assert (settings.docker_idle_timeout, settings.docker_memory_mb) == (900, 512)
    assert (settings.incus_image, settings.incus_memory_mb) == ("images:debian/12/cloud", 512)
    assert settings.incus_remote == "local"
    assert settings.default_config() == SandboxConfig()


def test_environment_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, '[sandbox]\nstock = 7\ndefault_memory_mb = 256\nmode = "native"\n')
    settings = load_settings({"PARACLE_STOCK": "9", "PARACLE_CONFIG": str(file)})
    assert (settings.stock, settings.default_memory_mb, settings.mode) == (9, 256, "native")
    assert settings.default_config().memory_mb == 256


def test_the_file_is_found_in_the_working_directory_then_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    (home / ".config/paracle").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    write(home / ".config/paracle", "[sandbox]\nstock = 1\n")
    assert load_settings({"HOME": str(home)}).stock == 1
    write(here, "[other]\nstock = 3\n")
    assert load_settings({"HOME": str(home)}).stock == 4
    write(here, "[sandbox]\nstock = 2\n")
    assert load_settings({"HOME": str(home)}).stock == 2


def test_an_empty_variable_is_unset_and_a_named_file_must_exist(tmp_path: Path) -> None:
    assert load_settings({"PARACLE_STOCK": "", "HOME": str(tmp_path)}).stock == 4
    with pytest.raises(SandboxError, match=r"no configuration file .*nothing\.toml"):
        load_settings({"PARACLE_CONFIG": str(tmp_path / "nothing.toml")})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("SANDBOX_MODE", "vm", "auto, native, docker"),
        ("PARACLE_STOCK", "many", "int, from 0 to 256"),
        ("PARACLE_STOCK", "-1", "int, from 0 to 256"),
        ("PARACLE_SANDBOX_DEFAULT_CPU_CORES", "nan", "from 0.1 to 16"),
        ("PARACLE_SANDBOX_DEFAULT_MEMORY_MB", "1", "from 128"),
        ("PARACLE_SANDBOX_NETWORK_MODE", "wifi", "none, bridge, host"),
        ("PARACLE_SANDBOX_READ_ONLY_FS", "maybe", "true or false"),
        ("DOCKER_SANDBOX_MEMORY", "lots", "512m"),
        ("DOCKER_SANDBOX_MEMORY", "1k", "from 128"),
        ("PARACLE_STATE_DIR", "relative", "an absolute path"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(SandboxError) as caught:
        load_settings({name: value})
    for part in (name, repr(value), allowed):
        assert part in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    for text, complaint in [
        ("[sandbox\n", r"Cannot read .*config\.toml"),
        ("[sandbox]\nstock = true\n", "stock = 'True' is not allowed"),
        ("sandbox = 3\n", "must be a section"),
        ("[sandbox]\nstock = [3]\n", r"stock = '\[3\]' is not allowed"),
        ("[sandbox]\ndocker_image = 3\n", "docker_image = '3' is not allowed: any text"),
    ]:
        with pytest.raises(SandboxError, match=complaint):
            load_settings({}, write(tmp_path, text))


@pytest.mark.parametrize(
    "line", ['mode = "fake"', 'python = "./evil"', 'failpoints = ["x"]', 'data_dir = "/tmp/x"']
)
def test_a_file_cannot_weaken_the_host(tmp_path: Path, line: str) -> None:
    with pytest.raises(SandboxError, match="not taken from a file"):
        load_settings({}, write(tmp_path, f"[sandbox]\n{line}\n"))


def test_modes_and_lists() -> None:
    assert load_settings({"SANDBOX_MODE": "local"}).mode == "docker"
    assert load_settings({"SANDBOX_MODE": "fake"}).mode == "fake"
    assert load_settings({"PARACLE_FAILPOINTS": "a, b,"}).failpoints == ("a", "b")


def test_what_is_there_for_speed_can_be_switched_off() -> None:
    assert load_settings({}).speed_off == ()
    assert load_settings({"PARACLE_SPEED": "off"}).speed_off == SPEED
    assert load_settings({"PARACLE_SPEED": "keep-alive"}).speed_off == ("keep-alive",)
    with pytest.raises(SandboxError, match="faster"):
        load_settings({"PARACLE_SPEED": "faster"})


def test_a_key_is_never_shown(tmp_path: Path) -> None:
    assert "hunter2" not in repr(load_settings({"SANDBOX_API_KEY": "hunter2"}))
    index = {"SANDBOX_PACKAGE_INDEX": "https://ann:hunter2@index.example/simple"}
    assert "hunter2" not in repr(load_settings(index))
    assert load_settings({"SANDBOX_API_KEY": "hunter2"}).api_key == "hunter2"


def test_directories_follow_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"HOME": "/home/someone", "XDG_RUNTIME_DIR": str(tmp_path)}
    owner = tmp_path.stat().st_uid or 1234
    if not tmp_path.stat().st_uid:
        os.chown(tmp_path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    settings = load_settings(env)
    assert settings.state_dir == f"{tmp_path}/paracle-sandbox"
    assert settings.data_dir == "/home/someone/.local/share/paracle-sandbox"
    assert load_settings({"HOME": "/"}).state_dir == f"/tmp/paracle-sandbox-{owner}"
    # It came with `su` from another user, who owns it; or there is none.
    for others in ("/run", "/nonexistent"):
        env["XDG_RUNTIME_DIR"] = others
        assert load_settings(env).state_dir == f"/tmp/paracle-sandbox-{owner}"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    settings = load_settings(env)
    assert settings.state_dir == "/run/paracle-sandbox"
    assert settings.data_dir == "/var/lib/paracle-sandbox"
    assert load_settings({"PARACLE_STATE_DIR": "/elsewhere"}).state_dir == "/elsewhere"


def test_the_table_is_complete_and_unambiguous() -> None:
    table = settings_table()
    assert not set(table) & SHARED_KEYS
    variables = [row.variable for row in table.values()]
    assert len(variables) == len(set(variables))
    assert all(row.meaning and row.allowed for row in table.values())
    assert set(SandboxSettings.__dataclass_fields__) == SHARED_KEYS


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [("512m", 512), ("1g", 1024), ("512MiB", 512), ("536870912", 512), ("1.5G", 1536),
     ("512 MB", 512), ("1GiB", 1024), ("262144k", 256), ("1", 1)],
)  # fmt: skip
def test_amounts_of_memory(text: str, megabytes: int) -> None:
    assert parse_memory_mb(text) == megabytes


@pytest.mark.parametrize("text", ["", "m", "lots", "-1m", "1.2.3g", "1x", "1mm", "0x10", "1e3m"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount of memory"):
        parse_memory_mb(text)


def test_sandbox_settings_convert() -> None:
    settings = SandboxSettings()
    assert (settings.use_sandbox, settings.timeout) == (False, 300)
    config = settings.to_config()
    assert config.base_image == "python:3.12-slim"
    assert (config.memory_mb, config.cpu_cores, config.timeout_seconds) == (512, 1.0, 300)
    assert (config.working_dir, config.network_mode) == ("/workspace", "none")
    assert SandboxSettings(network_enabled=True).to_config().network_mode == "bridge"
    with pytest.raises(ValueError, match="memory_mb"):
        SandboxSettings(memory_limit="1m").to_config()


def test_sandbox_settings_come_from_the_same_section(tmp_path: Path) -> None:
    file = write(tmp_path, '[sandbox]\nmemory_limit = "1g"\nuse_sandbox = true\nstock = 2\n')
    settings = SandboxSettings.load({}, file)
    assert (settings.memory_limit, settings.use_sandbox, settings.image) == (
        "1g", True, "python:3.12-slim",
    )  # fmt: skip
    assert load_settings({}, file).stock == 2
    with pytest.raises(SandboxError, match="timeout"):
        SandboxSettings.load({}, write(tmp_path, '[sandbox]\ntimeout = "soon"\n'))


def test_nobody_else_reads_the_environment() -> None:
    """A variable that is read elsewhere would be missing in the table."""
    readers = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)", file.read_text(encoding="utf-8"))
    ]
    # What runs inside a sandbox, or stands for it in tests, has an environment of its own.
    inside = ("guest/", "jail/", "testing/", "tools/browser_program.py", "sandbox/packages.py")
    others = [name for name in readers if not name.startswith(inside)]
    # What starts ahead of our imports only asks whether some of the table's variables are set.
    # The kind of the user's terminal is no setting.
    assert sorted(others) == ["backends/native/prestart.py", "cli/tty.py", "settings.py"]


def test_loading_settings_is_light() -> None:
    loaded = python(
        "import sys",
        "from paracle_sandbox.settings import load_settings",
        "load_settings({'HOME': '/nowhere'})",
        "print(*sys.modules)",
    ).split()
    assert not {"pydantic", "tomllib", "asyncio"} & set(loaded)


def test_every_export_exists() -> None:
    for name in paracle_sandbox.__all__:
        assert getattr(paracle_sandbox, name) is not None, name
    assert sorted(paracle_sandbox.__all__) == dir(paracle_sandbox)
    assert paracle_sandbox.__version__ == "1.0.1"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = paracle_sandbox.nothing


def test_run_stays_a_function_whatever_was_imported_before() -> None:
    said = python(
        "import paracle_sandbox as p",
        "p.run_async",
        "import paracle_sandbox.executor",
        "print(callable(p.run))",
    )
    assert said == "True\n"


def test_older_keys_hold_for_every_sandbox(tmp_path: Path) -> None:
    older = 'memory_limit = "256m"\ntimeout = 60\nwork_dir = "/home/user"\nnetwork_enabled = true\n'
    file = write(tmp_path, f"[sandbox]\n{older}cpu_limit = 0.5\ndefault_cpu_cores = 2.0\n")
    config = load_settings({"PARACLE_CONFIG": str(file)}).default_config()
    assert (config.memory_mb, config.timeout_seconds, config.cpu_cores) == (256, 60, 2.0)
    assert (config.working_dir, config.network_mode) == ("/home/user", "bridge")
    assert config.base_image == SandboxConfig().base_image, "nobody asked for another"


def test_a_home_that_is_not_ours_to_look_into_has_no_file(tmp_path: Path) -> None:
    """As for whoever became another user and kept the variable."""
    (tmp_path / "closed").mkdir(0)
    said = python(
        "import os",
        "from paracle_sandbox.settings import load_settings",
        "os.geteuid() or os.setuid(65534)",
        f"print(load_settings({{'HOME': {str(tmp_path / 'closed')!r}}}).mode)",
    )
    assert said == "auto\n"


def test_a_user_whom_no_file_knows_has_no_home() -> None:
    said = python(
        "import os",
        "from paracle_sandbox.settings import load_settings",
        "os.geteuid() or os.setuid(54321)",
        "print(load_settings({}).mode)",
    )
    assert said == "auto\n"


def test_a_quoted_no_is_no_yes(tmp_path: Path) -> None:
    file = write(tmp_path, '[sandbox]\nnetwork_enabled = "false"\n')
    config = load_settings({"PARACLE_CONFIG": str(file)}).default_config()
    assert config.network_mode == "none"


@pytest.mark.parametrize(
    "line",
    [
        'memory_limit = "lots"', "timeout = 5", 'cpu_limit = "two"', 'network_enabled = "maybe"',
        "timeout = 30.9", "cpu_limit = true",
    ],
)  # fmt: skip
def test_older_keys_that_make_no_sense_are_told(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, f"[sandbox]\n{line}\n")
    with pytest.raises(SandboxError, match="config.toml"):
        load_settings({"PARACLE_CONFIG": str(file)}).default_config()


def test_a_machine_has_an_image_for_machines() -> None:
    assert load_settings({}).default_config("incus-vm").base_image == "images:debian/12/cloud"
    assert load_settings({}).default_config("incus").base_image == "paracle/sandbox:latest"


FOREIGN = '[sandbox]\nprovider = "e2b"\nstok = 3\nregion = "eu"\n'


def test_keys_of_another_program_are_warned_of_once_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, FOREIGN + "stock = 9\n")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert load_settings({"HOME": str(tmp_path)}).stock == 9, "what is known holds"
    [said] = caplog.messages
    assert said.startswith("config.toml: ")
    for word in ("'provider'", "'region'", "'stok' (is 'stock' meant?)", "PARACLE_CONFIG=FILE"):
        assert word in said
    assert len(said) < 400


@pytest.mark.parametrize(
    "text", ["sandbox = 3\n", "[sandbox]\nmode = 'strict'\n", "[sandbox]\napi_key = 'x'\n", "]"]
)
def test_a_foreign_file_that_does_stop_us_says_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    write(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SandboxError, match=r"config\.toml.*PARACLE_CONFIG=FILE"):
        load_settings({"HOME": str(tmp_path)})
    assert load_settings({"HOME": str(tmp_path), "PARACLE_CONFIG": "/dev/null"}).mode == "auto"


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[sandbox]\nstock = 999\n")
    with pytest.raises(SandboxError, match=f"^{re.escape(str(file))}: stock = '999'"):
        load_settings({"PARACLE_CONFIG": str(file)})
    file = write(tmp_path, "[sandbox]\ntimeout = 5\n")
    with pytest.raises(SandboxError, match=f"^{re.escape(str(file))}, section"):
        load_settings({"PARACLE_CONFIG": str(file)}).default_config()


def test_one_of_two_names_that_are_alike_holds_for_both() -> None:
    names = ("DOCKER_SANDBOX_IMAGE", "SANDBOX_DOCKER_IMAGE")
    for name in names:
        settings = load_settings({name: "mine:1"})
        assert settings.default_config("docker").base_image == "mine:1"
        assert settings.for_service("docker").service_image == "mine:1"
    both = load_settings(dict(zip(names, ("library:1", "service:1"), strict=True)))
    assert both.default_config("gvisor").base_image == "library:1"
    assert both.for_service("gvisor").service_image == "service:1"
    containers = load_settings({"DOCKER_SANDBOX_IMAGE": "mine:1", "DOCKER_SANDBOX_MEMORY": "1g"})
    native = containers.for_service("native")
    assert (native.service_image, native.service_memory_mb) == ("python:3.12-slim", 512)
    assert containers.for_service("docker").service_memory_mb == 1024
