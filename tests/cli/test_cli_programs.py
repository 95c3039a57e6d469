"""``execute`` beyond one file: code, folders, workspaces, commands, packages, terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from paracle_cli import Cli, end, wait_for

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="native sandboxes need Linux")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, SANDBOX_MODE="fake")


@pytest.fixture
def project(cli: Cli) -> Path:
    folder = cli.home / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "main.py").write_text("import helper, sys; print(helper.word(), sys.argv[1:])")
    (folder / "helper.py").write_text("def word(): return open('lib/data.txt').read()")
    (folder / "lib" / "data.txt").write_text("data")
    return folder


# What to run


def test_code_from_the_command_line(cli: Cli) -> None:
    done = cli.run("sandbox", "execute", "-c", "import sys; print(sys.argv[1:])", "a", "--", "-b")
    assert (done.code, done.stdout) == (0, "['a', '-b']\n"), done


def test_a_command_after_the_dashes(cli: Cli) -> None:
    assert cli.run("sandbox", "execute", "--", "echo 'a  b' | cat; exit 0").stdout == "a  b\n"
    done = cli.run("sandbox", "execute", "--", "printf", "%s|", "$HOME", "-c", "--cpu")
    assert (done.code, done.stdout) == (0, "$HOME|-c|--cpu|"), done


@pytest.mark.parametrize("words", [[], ["--cpu", "1"], ["-c", "1", "--json", "-t"], ["--"]])
def test_nothing_to_run_or_what_cannot_be_is_two(cli: Cli, words: list[str]) -> None:
    done = cli.run("sandbox", "execute", *words)
    assert (done.code, done.stderr.count("\n")) == (2, 1), done


def test_a_folder_is_run_among_its_files(cli: Cli, project: Path) -> None:
    done = cli.run("sandbox", "execute", "project", "x")
    assert (done.code, done.stdout) == (0, "data ['x']\n"), done
    (project / "__main__.py").write_text("print('__main__')")
    assert cli.run("sandbox", "execute", "project").stdout == "__main__\n"


def test_the_program_has_its_own_name(cli: Cli) -> None:
    source = "import sys; print(sys.argv[0], __file__); raise ValueError('here')"
    done = cli.run("sandbox", "execute", cli.program(source, "report.py"))
    assert all(path.endswith("/report.py") for path in done.stdout.split())
    assert '/report.py", line 1, in <module>' in done.stderr
    assert "agent_code" not in done.stderr


def test_a_file_of_the_workspace_is_found_from_here_and_from_there(cli: Cli, project: Path) -> None:
    for file in ("project/main.py", "main.py", str(project / "main.py")):
        done = cli.run("sandbox", "execute", "--workspace", "project", file)
        assert (done.code, done.stdout) == (0, "data []\n"), done
    other = cli.program("import helper; print(helper.word())", "other.py")
    assert cli.run("sandbox", "execute", "--workspace", "project", other).stdout == "data\n"
    clash = cli.program("print('another')", "main.py")
    done = cli.run("sandbox", "execute", "--workspace", "project", clash)
    assert (done.code, "another main.py" in done.stderr) == (2, True), done


# Exit codes and what is said


@pytest.mark.parametrize(
    ("source", "documented", "own"),
    [("pass", 0, 0), ("raise SystemExit(7)", 1, 7), ("import os; os.kill(os.getpid(), 9)", 1, 137)],
)
def test_whose_exit_code(cli: Cli, source: str, documented: int, own: int) -> None:
    assert cli.run("sandbox", "execute", "-c", source).code == documented
    assert cli.run("sandbox", "execute", "-c", source, "--exit-code", "program").code == own


def test_a_sandbox_that_failed_is_not_taken_for_the_program(cli: Cli) -> None:
    words = ("-c", "1", "--backend", "docker", "--exit-code", "program")
    done = cli.run("sandbox", "execute", *words)
    assert (done.code, "Docker" in done.stderr) == (125, True), done


def test_nothing_is_said_beside_the_program(cli: Cli) -> None:
    source = "import sys; print('out'); print('err', file=sys.stderr)"
    for words in ([], ["--quiet"]):
        done = cli.run("sandbox", "execute", "-c", source, *words)
        assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert "Execution Successful" in cli.run("sandbox", "execute", "-c", source, "-v").stderr


# Files in and out


def test_files_go_in_where_they_are_wanted(cli: Cli, project: Path) -> None:
    (cli.home / "a:b.txt").write_text("colon")
    code = "print(*[open(p).read() for p in ('data.txt', 'in/x.txt', 'a:b.txt', 'p/lib/data.txt')])"
    done = cli.run(
        "sandbox", "execute", "-c", code, "--file", "project/lib/data.txt", "--file",
        "project/lib/data.txt:in/x.txt", "--file", "a:b.txt", "--file", "project:p",
    )  # fmt: skip
    assert (done.code, done.stdout) == (0, "data data colon data\n"), done


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--file", "missing.txt"], "--file: there is no missing.txt"),
        (["--file", "project/main.py:/etc/passwd"], "--file: DEST must be below /workspace"),
        (["--file", "project/main.py:../x"], "--file: DEST must be below /workspace"),
        (["--file", "project/main.py:"], "--file: write PATH:DEST"),
        (["--workspace", "missing"], "--workspace: There is no folder missing"),
        (["--apply"], "--apply needs --workspace"),
        (["--diff"], "--diff needs --workspace"),
        (["--save", "project"], "--save: project is there already"),
        (["--install", "https://example.com/x.whl"], "--install: Not a package"),
        (["--quiet", "--verbose"], "--quiet and --verbose"),
    ],
)
def test_what_cannot_be_taken_along_is_two(
    cli: Cli, project: Path, words: list[str], message: str
) -> None:
    done = cli.run("sandbox", "execute", "-c", "print('ran')", *words)
    assert (done.code, done.stdout) == (2, ""), done
    assert message in done.stderr


def _state(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


_CHANGES = """
import os, pathlib
pathlib.Path('helper.py').write_text('changed')
pathlib.Path('new').mkdir()
pathlib.Path('new/file.txt').write_text('new')
os.remove('lib/data.txt')
"""


def test_changes_come_back_only_when_asked_for(cli: Cli, project: Path) -> None:
    before = _state(project)
    words = ("sandbox", "execute", "--workspace", "project", "-c", _CHANGES)
    assert cli.run(*words).code == 0
    assert _state(project) == before
    done = cli.run(*words, "--diff")
    assert "+++ b/new/file.txt\n@@ -0,0 +1 @@\n+new" in done.stderr, done
    assert _state(project) == before
    done = cli.run(*words, "--apply")
    listed = done.stderr.splitlines()
    assert (done.code, listed[:3]) == (0, ["M helper.py", "D lib/data.txt", "A new/file.txt"]), done
    assert _state(project) == {
        "main.py": before["main.py"], "helper.py": b"changed", "new/file.txt": b"new",
    }  # fmt: skip


def test_what_is_ours_is_not_written_back(cli: Cli, project: Path) -> None:
    (cli.home / "in.json").write_text("{}")
    other = cli.program("open('made.txt', 'w').close()", "other.py")
    done = cli.run(
        "sandbox", "execute", "--workspace", "project", "--apply", "--inputs", "in.json",
        "--file", "in.json:deep/copy.json", other,
    )  # fmt: skip
    assert done.code == 0, done
    assert sorted(_state(project)) == ["helper.py", "lib/data.txt", "made.txt", "main.py"]


_EVIL = """
import os, pathlib
for name in ('.git/hooks/pre-commit', '.github/workflows/x.yml', '.claude/settings.json',
             '.mcp.json', 'bare/HEAD', 'bare/objects/x', 'bare/refs/x', 'bare/config',
             'a\\nb.txt', 'fine.txt', '.gitignore'):
    path = pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('evil')
os.symlink('/etc/passwd', 'link')
"""


def test_what_would_run_by_itself_is_not_written_back(cli: Cli, project: Path) -> None:
    before = set(_state(project))
    done = cli.run("sandbox", "execute", "--workspace", "project", "--apply", "-c", _EVIL)
    assert done.code == 3, done
    assert set(_state(project)) - before == {"fine.txt", ".gitignore"}
    assert not os.path.lexists(project / "link")
    for name in (".github", ".claude", ".mcp.json", "bare/config", "'a\\nb.txt'"):
        assert name in done.stderr


def test_nothing_goes_through_a_link(cli: Cli, project: Path) -> None:
    outside = cli.home / "outside"
    outside.mkdir()
    (project / "way").symlink_to(outside)
    code = "import os; os.mkdir('way'); open('way/x', 'w').close()"
    done = cli.run("sandbox", "execute", "--workspace", "project", "--apply", "-c", code)
    assert (done.code, "is a link" in done.stderr) == (3, True), done
    assert list(outside.iterdir()) == []


def test_one_that_cannot_be_written_keeps_all_back(cli: Cli, project: Path) -> None:
    """A name as long as a folder may be inside, and no draft of it outside."""
    before = _state(project)
    (project / "plain").write_text("a file")
    code = f"{_CHANGES}\nos.remove('plain'); os.mkdir('plain'); open('plain/x', 'w').close()"
    done = cli.run("sandbox", "execute", "--workspace", "project", "--apply", "-c", code)
    assert (done.code, "nothing was written back" in done.stderr) == (3, True), done
    assert _state(project) == {**before, "plain": b"a file"}
    assert not (project / "new").exists()


def test_the_working_directory_is_saved_also_when_the_program_fails(
    cli: Cli, project: Path
) -> None:
    code = f"{_CHANGES}\nraise SystemExit(1)"
    done = cli.run("sandbox", "execute", "--workspace", "project", "--save", "out", "-c", code)
    assert done.code == 1, done
    saved = _state(cli.home / "out")
    assert (saved["new/file.txt"], saved["main.py"]) == (b"new", (project / "main.py").read_bytes())
    assert "lib/data.txt" not in saved


def test_nothing_is_left_beside_the_users_files(cli: Cli, project: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    cli.env["TMPDIR"] = str(temporary)
    cli.run("sandbox", "execute", "--workspace", "project", "--apply", "-c", _CHANGES)
    left = [path.name for path in temporary.iterdir() if path.name.startswith("paracle-")]
    assert left == []


# Terminals


class Screen:
    """A terminal with the command on it, as its user has it."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.shown = b""
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
        self.process = subprocess.Popen(
            cli.argv(*words), env={**cli.env, "TERM": "xterm"}, cwd=cli.home, stdin=theirs,
            stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=self._control,
        )  # fmt: skip

    def _control(self) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSCTTY, 0)

    def wait_for(self, text: bytes) -> None:
        while text not in self.shown:
            there, _, _ = select.select([self.ours], [], [], 0.2)
            if there:
                self.shown += os.read(self.ours, 65536)
            else:
                assert self.process.poll() is None, self.shown

    def type(self, text: bytes) -> None:
        os.write(self.ours, text)

    def end(self) -> int:
        os.set_blocking(self.ours, False)

        def drained() -> bool:
            try:
                self.shown += os.read(self.ours, 65536)
            except OSError:
                pass
            return self.process.poll() is not None

        wait_for(drained, 60)
        return self.process.returncode

    @property
    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.theirs) == self.before

    def close(self) -> None:
        end(self.process)
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def screens(cli: Cli) -> Iterator[list[Screen]]:
    opened: list[Screen] = []
    yield opened
    for screen in opened:
        screen.close()


def test_input_is_asked_of_the_terminal(cli: Cli, screens: list[Screen]) -> None:
    screen = Screen(cli, "sandbox", "execute", "-c", "print('hello', input('name? '))")
    screens.append(screen)
    screen.wait_for(b"name? ")
    screen.type(b"ada\n")
    screen.wait_for(b"hello ada")
    assert screen.end() == 0


def test_a_background_job_does_not_read_the_terminal(cli: Cli, screens: list[Screen]) -> None:
    """To read it would stop the command; the shell gives the terminal to another job."""
    program = (
        "import os, subprocess, sys; "
        "p = subprocess.Popen(sys.argv[1:], process_group=0); print('end', p.wait(), flush=True)"
    )
    words = cli.argv("sandbox", "execute", "-c", "import sys; print(repr(sys.stdin.read()))")
    screen = Screen(cli)
    screen.close()
    cli.argv = lambda *_: [sys.executable, "-c", program, *words]  # type: ignore[method-assign]
    screen = Screen(cli)
    screens.append(screen)
    screen.wait_for(b"end 0")
    assert b"''" in screen.shown


_AT_A_TERMINAL = """
import os, signal, sys, time
print(sys.stdin.isatty(), sys.stdout.isatty(), os.get_terminal_size(), os.environ['TERM'])
# A signal that comes before somebody waits for it stays. A handler would come in the middle of a
# print, which lets no second one in, or just before a read, which then waits all the same.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGWINCH})
print('ready', flush=True)
signal.sigwait({signal.SIGINT})
print('interrupted', flush=True)
print('got', input())
while os.get_terminal_size().columns != 120:
    signal.sigwait({signal.SIGWINCH})
print(os.get_terminal_size(), flush=True)
print('got', input())
"""


def test_a_program_with_a_terminal_of_its_own(cli: Cli, screens: list[Screen]) -> None:
    screen = Screen(cli, "sandbox", "execute", "-it", "-c", _AT_A_TERMINAL)
    screens.append(screen)
    screen.wait_for(b"ready")
    assert b"True True os.terminal_size(columns=99, lines=33) xterm" in screen.shown
    assert not screen.is_as_before, "keys reach the program one by one"
    screen.type(b"\x03")
    screen.wait_for(b"interrupted")
    screen.type(b"one\r")
    screen.wait_for(b"got one")
    fcntl.ioctl(screen.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    screen.process.send_signal(signal.SIGWINCH)
    screen.wait_for(b"os.terminal_size(columns=120, lines=40)")
    screen.type(b"two\r")
    assert screen.end() == 0
    assert screen.is_as_before


_DEAF = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('up', flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("how", ["keys", "signal", "two signals"])
def test_the_terminal_is_as_before_however_it_ends(
    cli: Cli, screens: list[Screen], how: str
) -> None:
    screen = Screen(cli, "sandbox", "execute", "-t", "-c", _DEAF)
    screens.append(screen)
    screen.wait_for(b"up")
    assert not screen.is_as_before
    if how == "keys":
        screen.type(b"\x1d\x1d\x1d")
    else:
        screen.process.send_signal(signal.SIGTERM)
        if how == "two signals":
            screen.process.send_signal(signal.SIGTERM)
    assert screen.end() == (130 if how == "keys" else 143)
    assert screen.is_as_before


def test_a_terminal_without_one_of_ours(cli: Cli) -> None:
    code = "import sys; print(sys.stdin.isatty(), len(sys.stdin.read())); input()"
    done = cli.run("sandbox", "execute", "-t", "-c", code, stdin=b"typed")
    assert (done.code, "True 5" in done.stdout, "EOFError" in done.stdout) == (1, True, True), done


# Over real sandboxes


@needs_linux
def test_a_workspace_in_a_native_sandbox(tmp_path: Path) -> None:
    cli = Cli(tmp_path, SANDBOX_MODE="native")
    folder = cli.home / "project"
    folder.mkdir()
    (folder / "run.sh").write_text("cat data.txt > copy.txt; id -u")
    (folder / "data.txt").write_text("data")
    words = ("--workspace", "project", "--apply", "--exit-code", "program")
    done = cli.run("sandbox", "execute", *words, "--", "sh", "run.sh")
    assert (done.code, done.stdout, (folder / "copy.txt").read_text()) == (0, "1000\n", "data"), (
        done
    )
    assert cli.remains() == []


@needs_linux
def test_a_shell_on_a_terminal_in_a_native_sandbox(tmp_path: Path, screens: list[Screen]) -> None:
    cli = Cli(tmp_path, SANDBOX_MODE="native")
    screen = Screen(cli, "sandbox", "execute", "-it", "--", "sh")
    screens.append(screen)
    screen.type(b"echo $((6 * 7)) $(tty)\r")
    screen.wait_for(b"42 /dev/pts/")
    screen.type(b"exit 0\r")
    assert screen.end() == 0
    assert cli.remains() == []


@needs_linux
def test_packages_are_installed_first(tmp_path: Path) -> None:
    from service.index_server import IndexServer, wheel

    index = IndexServer(wheel("greeting", "1.0"))
    try:
        cli = Cli(tmp_path, SANDBOX_MODE="native", SANDBOX_PACKAGE_INDEX=index.url)
        code = "import greeting; print(greeting.VERSION)"
        done = cli.run("sandbox", "execute", "--install", "greeting==1.0", "-q", "-c", code)
        assert (done.code, done.stdout, done.stderr) == (0, "1.0\n", ""), done
        done = cli.run("sandbox", "execute", "--install", "missing", "-c", code)
        assert (done.code, done.stdout) == (3, ""), done
        assert "--install: missing could not be installed" in done.stderr
    finally:
        index.close()
    assert cli.remains() == []
