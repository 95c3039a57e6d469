"""Which commands the shell tool refuses, and that it refuses no other."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from paracle_sandbox import LocalSandboxClient, SandboxError
from paracle_sandbox.tools import SandboxShellTool
from paracle_sandbox.tools.dangerous import danger

DANGEROUS = [
    "rm -rf /",
    "rm  -rf   /",
    "rm -fr /*",
    "RM=1 rm -r -f /",
    "sudo rm -rf --no-preserve-root /",
    "rm --recursive --force /etc",
    "chown -R nobody /",
    "chmod -R 777 /",
    "chmod 777 -R /usr",
    "mkfs.ext4 /dev/sda1",
    "mkfs /dev/x",
    "dd if=/dev/zero of=/dev/sda bs=1M",
    "echo x > /dev/sda",
    "cat x >/dev/nvme0n1",
    "cat x >>/dev/sda",
    ":(){ :|:& };:",
    "bomb() { bomb | bomb & }; bomb",
    "ls; rm -rf ~",
    "cd x && rm -rf $HOME/",
    "echo hi\nrm -rf /usr",
    "bash -c 'rm -rf /'",
    'sh -c "rm -rf /var/*"',
    "echo $(rm -rf /)",
    'echo "`rm -rf /`"',
    "find / -delete",
    "find / -name '*' -delete",
    "shutdown -h now",
    "sudo reboot",
    "systemctl poweroff",
    "init 0",
    "kill -9 -1",
    "mv / /tmp/x",
    "mv /etc /tmp",
    "if true; then rm -rf /; fi",
    "eval 'rm -rf /'",
    "bash <<EOF\nrm -rf /\nEOF",
    "(rm -rf /)",
    "env A=1 nice -n 5 rm -rf //",
    "timeout 5 rm -rf /.",
    "rm -rf /home",
    "rm -Rf /usr/../",
    "wipefs -a /dev/sda",
    "yes | rm -r /",
]

HARMLESS = [
    "rm -rf /workspace/build",
    "rm -rf build",
    "rm -rf ./*",
    "echo mkfs.txt",
    "echo 'rm -rf /'",
    'echo "rm -rf /"',
    "grep -r 'shutdown' .",
    "cat > f.sh <<'EOF'\nrm -rf /\nEOF\nls",
    "ls /",
    "rm /tmp/x",
    "chmod -R 755 /workspace",
    "chown -R me /workspace/x",
    "dd if=/dev/zero of=file bs=1M count=1",
    "echo x > /dev/null",
    "find / -name x",
    "find . -delete",
    "rm -rf ~/.cache/pip",
    "rm -rf /home/me/x",
    'git commit -m "don\'t"',
    "# rm -rf /\nls",
    "python3 -c 'print(1)'",
    "kill -9 123",
    "kill -1 5",
    "pkill x",
    "cp a b",
    "mv a /tmp",
    "tar xf a -C /",
    "reboot.sh",
    "./shutdown",
    "rm -rf /tmp/x /var/tmp/y",
    "man reboot",
    "python -m reboot",
    'rm -r "$DIR"',
    "printf '%s' 'it''s'",
    "awk '{print $1}' f",
    "echo $((1+2))",
    "x=$(ls /); echo $x",
    "echo 'unclosed",
    "",
    "cat /etc/passwd",
    "f() { g | h; }; f",
    "while true; do f | g & done",
]


@pytest.mark.parametrize("command", DANGEROUS)
def test_dangerous(command: str) -> None:
    assert danger(command)


@pytest.mark.parametrize("command", HARMLESS)
def test_harmless(command: str) -> None:
    assert danger(command) is None


async def test_shell_tool_refuses_and_records(
    client: LocalSandboxClient, caplog: pytest.LogCaptureFixture
) -> None:
    tool = SandboxShellTool(client)
    with caplog.at_level(logging.WARNING, "paracle_sandbox.audit"):
        for how in ({}, {"blocking": False}, {"session_name": "main"}):
            answer = await tool.call({"command": "touch ran; rm -rf /", **how})
            assert answer.is_error and "Refused" in answer.text and "deletes /" in answer.text
            assert answer.data["kind"] == "blocked"
    assert [vars(r)["event"] for r in caplog.records] == ["command_blocked"] * 3
    assert caplog.records[0].details["command"] == "touch ran; rm -rf /"  # type: ignore[attr-defined]
    assert (await tool.call({"command": "ls; echo fine"})).text == "fine\n"


@pytest.mark.parametrize("how", [{}, {"action": "run"}, {"action": "run", "blocking": False}])
async def test_what_a_program_executes_is_judged_too(
    client: LocalSandboxClient, caplog: pytest.LogCaptureFixture, how: dict[str, Any]
) -> None:
    tool = SandboxShellTool(client)
    with caplog.at_level(logging.WARNING, "paracle_sandbox.audit"):
        with pytest.raises(SandboxError, match="deletes /"):
            await tool.execute("touch ran; rm -rf /", **how)
        with pytest.raises(SandboxError, match="deletes /"):
            await tool.execute(["rm", "-rf", "/"], **how)
    assert [vars(r)["event"] for r in caplog.records] == ["command_blocked"] * 2
    assert (await tool.execute("ls; echo fine"))["stdout"] == "fine\n"


async def test_own_policy(client: LocalSandboxClient) -> None:
    strict = SandboxShellTool(client, policy=lambda c: "no curl here" if "curl" in c else None)
    assert "no curl here" in (await strict.call({"command": "curl x"})).text
    assert (await strict.call({"command": "echo; rm -rf /nothing"})).text == "\n"
    free = SandboxShellTool(client, policy=None)
    assert "deletes" not in (await free.call({"command": "rm -rf /"})).text
