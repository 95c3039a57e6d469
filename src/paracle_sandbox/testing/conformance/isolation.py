"""Checks of isolation: code sees its own sandbox, and nothing of the host or of others."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from pathlib import Path

from .case import Case
from .expect import contains, equal, expect, read_first_line
from .registry import check

_LOOK = """
import os
seen = set()
for name in os.listdir("/proc"):
    if name.isdigit():
        for part in ("cmdline", "environ"):
            try:
                with open(f"/proc/{name}/{part}", "rb") as file:
                    seen.add(file.read())
            except OSError:
                pass
print(b"|".join(seen).decode(errors="replace"))
"""


@check(quick=True, needs=("identity",))
async def who_it_is(case: Case) -> None:
    """Programs are the user paracle, uid and gid 1000, in no other group."""
    sandbox = await case.sandbox()
    equal(await sandbox.run_command("id -u; id -g; id -G; id -un"), "1000\n1000\n1000\nparacle\n")
    code = "import os, pwd; print(os.getresuid(), os.getresgid(), pwd.getpwuid(1000).pw_name)"
    result = await sandbox.run_code(code)
    equal(result["stdout"], "(1000, 1000, 1000) (1000, 1000, 1000) paracle\n")


@check(needs=("identity",))
async def it_cannot_become_root(case: Case) -> None:
    """No capability is held, and there is no way to another user."""
    sandbox = await case.sandbox()
    status = await sandbox.run_command("grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    for line in status.splitlines():
        name, value = line.split()
        equal(int(value, 16), 1 if name == "NoNewPrivs:" else 0, name)
    code = "import os\ntry:\n    os.setuid(0)\nexcept OSError:\n    print('refused')"
    equal((await sandbox.run_code(code))["stdout"], "refused\n")


@check(quick=True, needs=("root",))
async def it_works_in_the_workspace(case: Case) -> None:
    """The working directory is /workspace, empty and writable; HOME and /tmp are writable."""
    sandbox = await case.sandbox()
    equal(await sandbox.run_command("pwd; ls -A"), "/workspace\n")
    script = (
        'for d in . "$HOME" /tmp /dev/shm; do echo x >"$d/file" && rm "$d/file" || exit 1; done'
    )
    result = await sandbox.execute(script)
    equal(result["exit_code"], 0, result["stderr"])


@check(needs=("root",))
async def the_working_directory_can_be_chosen(case: Case) -> None:
    """working_dir of the configuration is where programs run and files go."""
    sandbox = await case.sandbox(working_dir="/srv/project")
    await sandbox.write_file("file", "x")
    equal(await sandbox.run_command("pwd; cat /srv/project/file"), "/srv/project\nx")
    equal((await sandbox.run_code("import os; print(os.getcwd())"))["stdout"], "/srv/project\n")


@check(quick=True, needs=("root",))
async def the_system_is_read_only(case: Case) -> None:
    """Nothing can be written outside the working directory and /tmp."""
    sandbox = await case.sandbox()
    for folder in ("/", "/usr", "/usr/bin", "/etc", "/bin", "/lib", "/dev", "/proc", "/sys"):
        result = await sandbox.execute(f"echo x >{folder}/paracle-file")
        expect(result["exit_code"] != 0, f"{folder} can be written to")
    words = ("Read-only", "Permission denied", "denied")
    result = await sandbox.execute("touch /etc/x")
    expect(any(word in result["stderr"] for word in words), f"it says {result['stderr']!r}")
    expect((await sandbox.execute("echo x >>/etc/passwd"))["exit_code"], "/etc/passwd is writable")


@check(needs=("root",))
async def files_of_the_host_are_absent(case: Case) -> None:
    """A file of the host in /tmp, in its home or elsewhere cannot be seen."""
    sandbox = await case.sandbox()
    secret = case.directory / "secret.txt"
    secret.write_text("of the host")
    secret.chmod(0o644)
    case.directory.chmod(0o755)
    for path in (secret, "/root", os.path.expanduser("~/.ssh")):
        result = await sandbox.execute(["cat", str(path)])
        expect(result["exit_code"] != 0, f"{path} can be read")
    # An image may have files of its own under these paths.
    for path in ("/etc/machine-id", "/var/lib/dpkg/status"):
        result = await sandbox.execute(["cat", path], max_output=64 << 20)
        if result["exit_code"] == 0 and os.path.exists(path):
            theirs = Path(path).read_text(errors="replace")
            expect(result["stdout"] != theirs or not theirs, f"{path} is the host's")
    equal(secret.read_text(), "of the host")


@check(quick=True, needs=("identity",))
async def the_environment_of_the_host_is_absent(case: Case) -> None:
    """No variable of the host reaches a program, or any process that it can look at."""
    token = secrets.token_hex(16)
    os.environ["PARACLE_CHECK_TOKEN"] = token
    try:
        sandbox = await case.sandbox()
        seen = await sandbox.run_command("env")
        seen += (await sandbox.run_code("import os; print(os.environ)"))["stdout"]
        seen += (await sandbox.run_code(_LOOK))["stdout"]
    finally:
        del os.environ["PARACLE_CHECK_TOKEN"]
    expect(token not in seen and "PARACLE_CHECK_TOKEN" not in seen, "a host variable is there")
    contains(seen, "PATH=")


@check(needs=("identity",))
async def the_host_name_is_its_own(case: Case) -> None:
    """A sandbox does not know the name of the host."""
    sandbox = await case.sandbox()
    name = (await sandbox.run_code("import socket; print(socket.gethostname())"))["stdout"].strip()
    expect(name and name != socket.gethostname(), f"its name is {name!r}")


@check()
async def three_descriptors(case: Case) -> None:
    """Programs have stdin, stdout and stderr open, and nothing else."""
    sandbox = await case.sandbox()
    look = """
import os
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
print([fd for fd in range(4096) if is_open(fd)])
"""
    equal((await sandbox.execute(["python3", "-c", look]))["stdout"], "[0, 1, 2]\n")
    equal((await sandbox.run_code(look))["stdout"], "[0, 1, 2]\n")
    equal((await sandbox.run_code(look, stdin="x"))["stdout"], "[0, 1, 2]\n")


@check(quick=True, needs=("network",))
async def there_is_no_network(case: Case) -> None:
    """Neither the host nor anything beyond it can be reached, by TCP, UDP or name."""
    sandbox = await case.sandbox()
    calls = 0

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", 0)  # noqa: S104
    async with server:
        port = server.sockets[0].getsockname()[1]
        await _connect("127.0.0.1", port)
        code = f"""
import socket
def tries(kind, address):
    with socket.socket(socket.AF_INET, kind) as s:
        s.settimeout(3)
        try:
            s.connect(address)
            s.send(b"x")
        except OSError:
            return
    print("reached", kind, address)
hosts = ["{_find_own_address()}", "10.0.0.1", "192.0.2.1", "169.254.169.254", "1.1.1.1"]
for host in ["127.0.0.1", *hosts]:
    tries(socket.SOCK_STREAM, (host, {port}))
for host in hosts:
    if not host.startswith("127."):  # its own loopback, where a datagram always finds a way
        tries(socket.SOCK_DGRAM, (host, 53))
try:
    print("resolved", socket.getaddrinfo("example.com", 80))
except OSError:
    pass
print("done", [name for _, name in socket.if_nameindex() if name != "lo"])
"""
        result = await sandbox.run_code(code, timeout=100)
    contains(result["stdout"], "done")
    expect("reached" not in result["stdout"], result["stdout"])
    expect("resolved" not in result["stdout"], result["stdout"])
    equal(calls, 1, "connections at the host (ours is one)")


async def _connect(host: str, port: int) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    await reader.read()
    writer.close()
    await writer.wait_closed()


def _find_own_address() -> str:
    """Return the address under which others reach this machine, or a loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


@check(needs=("network",))
async def the_loopback_works(case: Case) -> None:
    """Two programs of one sandbox talk over 127.0.0.1; those of another do not hear them."""
    sandbox, other = await case.sandbox(), await case.sandbox()
    server = (
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as s:\n"
        "    print(s.getsockname()[1], flush=True)\n    c, _ = s.accept()\n    c.sendall(b'hi')\n"
    )
    async with await sandbox.start_code(server) as command:
        port = int(await read_first_line(command.output()))
        client = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(9))"
        expect((await other.run_code(client))["exit_code"], "the other sandbox reached it")
        equal((await sandbox.run_code(client))["stdout"], "b'hi'\n")


@check(needs=("root",))
async def files_are_not_shared(case: Case) -> None:
    """Two sandboxes have their own working directory, /tmp and /dev/shm."""
    one, two = await case.sandbox(), await case.sandbox()
    folders = ("/workspace", "/tmp", "/dev/shm")
    for folder in folders:
        equal((await one.execute(f"echo one >{folder}/file; ls {folder}"))["exit_code"], 0)
    for folder in folders:
        equal(await two.run_command(f"ls -A {folder}"), "", folder)
        await two.execute(f"echo two >{folder}/file")
        equal(await one.run_command(f"cat {folder}/file"), "one\n")


@check(needs=("processes",))
async def processes_are_not_shared(case: Case) -> None:
    """A sandbox sees its own processes, and none of the host or of another sandbox."""
    one, two = await case.sandbox(), await case.sandbox()
    mark = secrets.token_hex(16)
    wait = ["python3", "-c", "print(flush=True); input()", mark]
    async with await one.start_command(wait, stdin=True) as command:
        await anext(command.output())
        contains((await one.run_code(_LOOK))["stdout"], mark)
        expect(mark not in (await two.run_code(_LOOK))["stdout"], "another sandbox sees it")
        count = int(await two.run_command("ls -d /proc/[0-9]* | wc -l"))
        expect(count <= 10, f"{count} processes can be seen")
        expect(command.poll() is None, "it has ended")


@check(needs=("processes",))
async def the_first_process_cannot_be_harmed(case: Case) -> None:
    """Killing every process one can see leaves the sandbox working."""
    sandbox = await case.sandbox()
    for number in (15, 9):
        await sandbox.execute(f"kill -{number} -1; kill -{number} 1; exit 1")
        equal(await sandbox.run_command("echo alive"), "alive\n")
