"""The images, built on a real engine: who runs in them, what is in them, and what is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_docker import PROJECT, docker, inspect, paracle, run_in

import engines
from paracle_sandbox import __version__

pytestmark = pytest.mark.timeout(900)

# Nobody answers there. Of a further index pip goes on without it; its password must not stay.
SECRET = "s3cr3t-of-the-index"
NO_INDEX = {"PIP_INDEX_URL": f"http://me:{SECRET}@127.0.0.1:9/simple", "PIP_RETRIES": "0"}
PACKAGES = {
    "sandbox": ["requests", "pydantic", "click", "rich", "jinja2", "yaml"],
    "dev": ["IPython", "ipdb", "pytest", "black"],
    "ml": ["numpy", "pandas", "sklearn", "matplotlib", "seaborn"],
    "api": ["httpx", "aiohttp", "fastapi", "websockets"],
}
NAMES = {variant: f"paracle/sandbox:{variant}" for variant in PACKAGES}
NAMES["sandbox"] = "paracle/sandbox:latest"
VARIANTS = [pytest.param(variant, id=variant) for variant in PACKAGES]


@pytest.fixture(scope="module")
def built() -> Iterator[dict[str, dict[str, object]]]:
    """The two small ones are built anew, the two large ones when they are outdated; and those
    that start from the first all at once."""
    remove_what_is_not_of_a_recipe()
    found = {"sandbox": build("sandbox")}
    with ThreadPoolExecutor() as pool:
        others = {"api": (), "dev": ("--if-missing",), "ml": ("--if-missing",)}
        tasks = {variant: pool.submit(build, variant, *how) for variant, how in others.items()}
        found.update((variant, task.result()) for variant, task in tasks.items())
    yield found
    # The former ones of the same names.
    docker("image", "prune", "-f", "--filter", "label=paracle.image.variant")


def remove_what_is_not_of_a_recipe() -> None:
    """Somebody may have built one of these by hand, which is not to be built again (--if-missing)
    and not to be judged."""
    rows = json.loads(paracle("image", "list", "--json").stdout)
    names = [row["name"] for row in rows if row["name"] in NAMES.values() and row["built"]]
    by_hand = {row["name"] for row in rows if row["current"] is None}
    for name in by_hand.intersection(names):
        docker("rmi", "-f", name)


def build(variant: str, *how: str) -> dict[str, object]:
    index = {"PIP_EXTRA_INDEX_URL": f"http://me:{SECRET}@127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    done = paracle("image", "build", variant, "--json", *how, **index)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.fixture(params=VARIANTS)
def image(request: pytest.FixtureRequest, built: object) -> str:
    return NAMES[request.param]


def test_build_says_what_it_built(built: dict[str, dict[str, object]]) -> None:
    for variant, name in NAMES.items():
        said = built[variant]
        assert said["name"] == name
        assert said["variant"] == variant
        assert said["id"] == inspect(name)["Id"]
        assert said["built"] is said["current"] is True
    assert built["sandbox"]["built_now"] is built["api"]["built_now"] is True


def test_the_user_is_paracle_without_rights(image: str) -> None:
    assert inspect(image)["Config"]["User"] == "paracle"
    assert run_in(image, "id", "-un") == run_in(image, "id", "-gn") == "paracle"
    assert run_in(image, "id", "-u") == run_in(image, "id", "-g") == "1000"


def test_no_program_runs_as_its_owner(image: str) -> None:
    find = ["find", "/", "-xdev", "-type", "f", "-perm", "/6000"]
    assert run_in(image, *find, options=["--user", "root"]) == ""


def test_only_the_workspace_is_the_users(image: str) -> None:
    places = "for d in / /usr /etc /usr/local/lib /workspace; do test -w $d && echo $d; done; pwd"
    assert run_in(image, "sh", "-c", places).split() == ["/workspace", "/workspace"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_packages_can_be_imported(variant: str, built: object) -> None:
    # With a root that is read-only, as sandboxes have it.
    names = sorted({*PACKAGES["sandbox"], *PACKAGES[variant]})
    program = f"import {', '.join(names)}; print('imported')"
    options = ["--read-only", "--tmpfs", "/tmp"]
    assert run_in(NAMES[variant], "python3", "-c", program, options=options) == "imported"


def test_the_development_image_has_its_tools(built: object) -> None:
    tools = "vim --version; ipython3 --version; pytest --version; black --version; ruff --version"
    said = run_in("paracle/sandbox:dev", "sh", "-ec", tools, options=["-e", "HOME=/tmp"])
    assert "VIM - Vi IMproved" in said


def test_the_package_list_names_what_is_there(image: str) -> None:
    listed = json.loads(run_in(image, "cat", "/usr/share/paracle/packages.json"))
    assert listed["image"] == image
    assert listed["python"] in run_in(image, "python3", "--version")
    versions = {(p["kind"], p["name"].lower()): p["version"] for p in listed["packages"]}
    program = "import importlib.metadata as m; print(m.version('requests'))"
    assert versions["python", "requests"] == run_in(image, "python3", "-c", program)
    assert ("debian", "libc6") in versions


def test_labels_say_what_it_is(image: str) -> None:
    labels = inspect(image)["Config"]["Labels"]
    variant = next(variant for variant, name in NAMES.items() if name == image)
    assert labels["paracle.image.variant"] == variant
    assert labels["org.opencontainers.image.licenses"] == "MIT"
    assert labels["org.opencontainers.image.title"].startswith("paracle/sandbox")
    assert labels["org.opencontainers.image.version"] == __version__
    assert "paracle.image.stage" not in labels


def test_nothing_of_the_machine_stays(built: object) -> None:
    for name in ("paracle/sandbox:latest", "paracle/sandbox:api"):
        assert SECRET not in docker("history", "--no-trunc", name)
        assert lines_with(SECRET, name) == 0
        assert lines_with("list_packages.py", name) > 0, "this way a text is found"
    assert stages() == []


def stages() -> list[str]:
    """First stages that builds of ours have left: not those of a plain docker build, which leaves
    its own to whoever calls it."""
    form = '{{index .Config.Labels "paracle.image.stage"}}'
    found = docker("images", "-aq", "--filter", "label=paracle.image.stage").split()
    marks = docker("inspect", "-f", form, *found).split() if found else []
    return [mark for mark in marks if mark != "by-hand"]


def lines_with(text: str, image: str) -> int:
    """In every layer of an image, and in all that the engine says of it."""
    with tempfile.NamedTemporaryFile() as file:
        docker("save", "-o", file.name, image)
        done = subprocess.run(["grep", "-acF", text, file.name], capture_output=True, check=False)
    return int(done.stdout)


def test_a_build_that_fails_says_so_and_leaves_nothing(built: object) -> None:
    before = inspect("paracle/sandbox:api")["Id"]
    done = paracle("image", "build", "api", **NO_INDEX)
    assert done.returncode == 3
    assert "Error: The image paracle/sandbox:api could not be built" in done.stderr
    assert "paracle image build api" in done.stderr
    assert SECRET not in done.stderr
    assert inspect("paracle/sandbox:api")["Id"] == before
    assert stages() == []


def test_a_build_that_is_broken_off_leaves_nothing(built: object) -> None:
    environment = {**os.environ, "DOCKER_HOST": engines.DOCKER_HOST}
    environment["PYTHONPATH"] = str(PROJECT / "src")
    before = inspect("paracle/sandbox:api")["Id"]
    argv = [sys.executable, "-m", "paracle_sandbox", "image", "build", "api"]
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        while "Collecting" not in command.stderr.readline():
            assert command.poll() is None
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=60)
    assert command.returncode == 128 + signal.SIGINT
    assert inspect("paracle/sandbox:api")["Id"] == before
    assert stages() == []


def test_an_image_that_is_there_is_not_built_again(built: object) -> None:
    done = paracle("image", "build", "api", "--if-missing")
    assert done.returncode == 0
    assert "✅ Image paracle/sandbox:api is there already" in done.stdout
    assert done.stderr == ""


def test_list_shows_all_variants_and_what_was_made_from_them(built: object) -> None:
    docker("tag", "paracle/sandbox:latest", "somebodys/own:1")
    try:
        done = paracle("image", "list", "--json")
        rows = {row["name"]: row for row in json.loads(done.stdout)}
        assert {*NAMES.values(), "somebodys/own:1"} <= set(rows)
        assert all(rows[name]["current"] and rows[name]["built"] for name in NAMES.values())
        assert rows["somebodys/own:1"]["current"] is None
        table = paracle("image", "list").stdout
        assert "paracle/sandbox:ml" in table and "current" in table
    finally:
        docker("rmi", "somebodys/own:1")


def test_an_outdated_image_is_told_apart_and_built_again(built: object) -> None:
    name = "paracle/sandbox:api"
    current = inspect(name)["Id"]
    container = docker("create", name).strip()
    try:
        docker("commit", "--change", "LABEL paracle.image.recipe=older", container, name)
        rows = json.loads(paracle("image", "list", "--json").stdout)
        assert [row["current"] for row in rows if row["name"] == name] == [False]
        # That it fails shows that it was tried.
        done = paracle("image", "build", "api", "--if-missing", **NO_INDEX)
        assert done.returncode == 3
    finally:
        docker("rm", container)
        docker("tag", current, name)
