"""GNU make works in a sandbox.

It starts programs in a rare way: by posix_spawn with ids to reset.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paracle_sandbox import Sandbox, SandboxConfig, load_settings
from paracle_sandbox.backends.native.backend import NativeBackend

MAKEFILE = """\
all: one two
\techo $^ $$(cat $^) $(shell echo shell)
%:
\techo made-$@ > $@
"""


@pytest.mark.skipif(not shutil.which("make"), reason="make is missing: apt install make")
async def test_make_runs_what_a_makefile_says(tmp_path: Path) -> None:
    settings = replace(load_settings(), state_dir=str(tmp_path / "state"), stock=0)
    backend = NativeBackend(settings)
    try:
        async with Sandbox(backend, "make", SandboxConfig()) as sandbox:
            await sandbox.write_file("Makefile", MAKEFILE)
            done = await sandbox.execute(["make", "-s", "-j2"])
    finally:
        await backend.close()
    assert done["stderr"] == ""
    assert (done["exit_code"], done["stdout"]) == (0, "one two made-one made-two shell\n")
