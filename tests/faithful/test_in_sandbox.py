"""The same programs in a real sandbox: `python3 file.py` there against our way of running."""

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from paracle_sandbox import Sandbox, SandboxConfig
from paracle_sandbox.backends.native.backend import NativeBackend
from paracle_sandbox.backends.native.spawner_process import default_python
from paracle_sandbox.ids import new_sandbox_id
from paracle_sandbox.sandbox.command import Command
from paracle_sandbox.settings import Settings

from .programs import FILE, PROGRAMS, Program

pytestmark = pytest.mark.asyncio(loop_scope="module")
ADDRESS = re.compile(rb"0x[0-9a-f]{6,}")
# Programs that see what may be made before there is a program.
OF_SURROUNDINGS = {
    "argv", "big_output", "breakpoint_chosen", "coroutine_left", "deep_recursion", "empty_stack",
    "environment", "excepthook_sees_no_stack", "exception", "exit_text_descriptor_closed",
    "file_kept_in_sys", "file_name_after_exit", "flags_and_sys", "get_source", "globals_order",
    "input", "keyboard_interrupt", "logging", "main_module", "no_guest_modules",
    "open_descriptors", "positions_of_streams", "random", "resources_left",
    "shadows_what_is_imported", "signals", "site_builtins", "stdin_binary", "stdin_read",
    "stdout_closed", "streams", "subprocess", "tempfile", "thread_pool", "trace_left",
    "who_the_main_thread_is", "writes_bytecode",
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandbox]:
    folder = tmp_path_factory.mktemp("native")
    settings = Settings(
        state_dir=str(folder / "state"),
        data_dir=str(folder / "data"),
        template_build=False,
        stock=0,
    )
    backend = NativeBackend(settings)
    async with Sandbox(backend, new_sandbox_id(), SandboxConfig(cpu_cores=2)) as sandbox:
        yield sandbox
    await backend.close()


async def lay_out(place: Sandbox, program: Program, folder: str) -> None:
    await place.write_file(f"{folder}/{FILE}", program.source)
    for name, content in program.files.items():
        await place.write_file(f"{folder}/{name}", content)


async def outcome(command: Command, folder: str) -> tuple[int, bytes, bytes]:
    result = await command.wait()
    # Folder names have the same length: text that is wrapped is wrapped the same.
    texts = (
        ADDRESS.sub(b"0x", text.replace(os.fsencode(folder), b"FOLDER"))
        for text in (command.stdout_bytes, command.stderr_bytes)
    )
    return (result["exit_code"], *texts)  # type: ignore[return-value]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_same_outcome(program: Program, place: Sandbox) -> None:
    # Not the usual environment, which asks for streams without a buffer.
    env = {"PYTHONUNBUFFERED": "", **program.env}
    await compare(program, place, env, program.stdin)


# What is made in advance is for the usual surroundings, and nothing to read.
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "program",
    [program for program in PROGRAMS if program.name in OF_SURROUNDINGS],
    ids=lambda program: program.name,
)
async def test_same_outcome_in_usual_surroundings(program: Program, place: Sandbox) -> None:
    await compare(program, place, None, None)


# As one of many that follow each other at once, each a fork of what has run none of them.
@pytest.mark.timeout(180)
@pytest.mark.parametrize("usual", [True, False], ids=["usual", "unusual"])
@pytest.mark.parametrize(
    "program",
    [program for program in PROGRAMS if program.name in OF_SURROUNDINGS],
    ids=lambda program: program.name,
)
async def test_same_outcome_in_a_series(program: Program, place: Sandbox, usual: bool) -> None:
    env = None if usual else {"PYTHONUNBUFFERED": "", **program.env}
    await compare(program, place, env, None if usual else program.stdin, before=5)


async def compare(
    program: Program,
    place: Sandbox,
    env: dict[str, str] | None,
    stdin: bytes | None,
    before: int = 0,
) -> None:
    plain, ours = f"/workspace/{program.name}/a", f"/workspace/{program.name}/b"
    await lay_out(place, program, plain)
    await lay_out(place, program, ours)
    # A shell's way, with an interpreter that starts; the environment is the same for both.
    expected = await outcome(
        await place.start_command(
            [default_python(), f"{plain}/{FILE}", *program.argv], cwd=plain, env=env, stdin=stdin
        ),
        plain,
    )
    for _ in range(before):
        await place.run_code("pass")
    got = await outcome(
        await place.start_file(f"{ours}/{FILE}", program.argv, cwd=ours, env=env, stdin=stdin),
        ours,
    )
    assert got == expected
    await place.remove(f"/workspace/{Path(plain).parts[2]}", recursive=True)
