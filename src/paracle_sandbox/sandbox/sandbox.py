"""A sandbox, as a user holds it: programs, Python, files and figures of one isolated place.

``Sandbox`` is the one class that users see. It holds its parts, and each of its methods says what
it does and hands over to one of them:

    life        made, connected, watched, removed: what the other parts share
    files       everything that is done with files
    commands    programs and Python
    packages    what pip installs
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, overload

from ..backends.base import Backend, Usage
from ..channel.connection import Connection
from ..results import CommandResult, FileInfo, Isolation, Stats
from .command import Command
from .command_options import AnyPath, CommandOptions
from .commands import Commands, text_of
from .files import MAX_ENTRIES, MAX_READ, Changes, Files
from .life import Life
from .packages import INSTALL_SECONDS, Packages

if TYPE_CHECKING:
    from ..config import SandboxConfig


class Sandbox:
    """One isolated place. ``async with`` makes it and removes it, whatever happens inside.

    Everything may be used concurrently. A program that fails is a result; one that we stopped
    is an exception: SandboxTimeoutError, ResourceLimitError, or SandboxExecutionError when the
    sandbox itself broke, each with what had been printed.

    A command is a str for the shell, or a list, an argv; ``timeout`` is in seconds, by default the
    configuration's; the other options are those of CommandOptions.

    Paths are relative to the working directory, or absolute below what is the sandbox's own:
    the working directory, /tmp, its volumes, and with ``read_only_filesystem=False`` /home, /opt,
    /srv and /mnt. Others raise SandboxPathError. A missing file raises SandboxFileNotFoundError,
    a full disk ResourceLimitError, anything else that goes wrong SandboxFileError.
    """

    def __init__(
        self,
        backend: Backend,
        sandbox_id: str,
        config: SandboxConfig | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._life = Life(backend, sandbox_id, config, labels)
        self.files = Files(self._life)
        self.commands = Commands(self._life, self.files)
        self.packages = Packages(self._life, self.commands)

    @property
    def sandbox_id(self) -> str:
        return self._life.sandbox_id

    @property
    def id(self) -> str:
        return self._life.sandbox_id

    @property
    def config(self) -> SandboxConfig:
        return self._life.config

    @property
    def is_running(self) -> bool:
        """Started, not stopped, and its guest still answers."""
        return self._life.is_running

    @property
    def last_used(self) -> float:
        """time.monotonic() of the last beginning or end of an operation."""
        return self._life.last_used

    @property
    def last_usage(self) -> Usage | None:
        """The usage at the last look; None before the first."""
        return self._life.last_usage

    @property
    def in_use(self) -> int:
        """How many operations run now, background commands included."""
        return self._life.in_use

    @property
    def posture(self) -> Isolation:
        """The isolation of its programs. The layers are proved by ``paracle sandbox health``."""
        return {"backend": self._backend.name, "missing": self._backend.lacking()}

    # Life

    async def start(self) -> None:
        """Make it. On failure nothing is left behind. A second start is a no-op."""
        await self._life.start()

    async def stop(self) -> None:
        """Remove it with everything in it. Idempotent. Raises SandboxCleanupError when
        something stays; another stop tries again."""
        await self._life.stop()

    async def cleanup(self) -> None:
        """stop(), by another name."""
        await self.stop()

    async def close(self) -> None:
        """stop(), by another name."""
        await self.stop()

    def context(self) -> Self:
        """``async with sandbox.context()`` is ``async with sandbox``."""
        return self

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def _live(self) -> Connection:
        return self._life.live()

    async def get_stats(self) -> Stats:
        """Return what it uses now; CPU over the time since the previous call, or since the
        start."""
        return await self._life.get_stats()

    async def check_limits(self) -> None:
        """Raises ResourceLimitError when memory is all but used up, or the disk is full."""
        await self._life.check_limits()

    async def look(self, *, exact: bool = False) -> Usage | None:
        """Return what it uses now; None when that cannot be read."""
        return await self._life.look(exact=exact)

    def overlook(self) -> None:
        """Note that what was seen leaves out what a command did that has ended."""
        self._life.overlook()

    async def kill_leftovers(self) -> None:
        """End what ended commands left behind; a sandbox in which that fails is destroyed."""
        await self._life.kill_leftovers()

    async def kill_programs(self) -> None:
        """Kill everything that runs in it; files stay, and it can be used again. Raises
        SandboxExecutionError when the guest could not kill all of it. It has no deadline of its
        own but the configuration's: a starved guest may take long."""
        await self._life.kill_programs()

    async def condemn(self, reason: str) -> None:
        """Destroy the sandbox, because it does not do what it is told."""
        await self._life.condemn(reason)

    # Programs

    async def start_command(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        """Start a program in the background: a str through ``sh -c``, a list as its argv."""
        return await self.commands.start_command(command, timeout=timeout, **options)

    async def start_code(
        self,
        code: str,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        """Start Python code in the background; it imports from the working directory."""
        return await self.commands.start_code(code, args, timeout=timeout, **options)

    async def start_without_packages(
        self,
        code: str,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        """start_code() for code that needs nothing but the standard library: it does not wait while
        packages are being installed."""
        return await self.commands.start_without_packages(code, args, timeout=timeout, **options)

    async def start_file(
        self,
        path: AnyPath,
        args: Sequence[str] = (),
        *,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Command:
        """Start a Python file of the sandbox in the background."""
        return await self.commands.start_file(path, args, timeout=timeout, **options)

    async def wait_for_packages(self, source: str | bytes) -> None:
        """Wait until the packages can be imported that a program names, if the template of this
        sandbox is still being built. start_code() and start_command() do so themselves; it is for
        a caller that knows the text of a file which is run."""
        await self.commands.wait_for_packages(source)

    async def execute(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        """Run a program to its end; cancelled, it takes everything it started with it."""
        return await self.commands.execute(command, timeout, **options)

    async def run_code(
        self,
        code: str,
        args: Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        """Run Python code to its end."""
        return await self.commands.run_code(code, args, timeout, **options)

    async def run_file(
        self,
        path: AnyPath,
        args: Sequence[str] = (),
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> CommandResult:
        """Run a Python file of the sandbox to its end."""
        return await self.commands.run_file(path, args, timeout, **options)

    async def run_command(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> str:
        """Run a program; what it printed, and its stderr as well when it failed."""
        return text_of(await self.execute(command, timeout, **options))

    def stream(
        self,
        command: str | Sequence[str],
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> AsyncIterator[tuple[str, bytes]]:
        """("stdout" or "stderr", bytes) of a program as it prints; raises at the end when it
        was stopped. Leaving the loop early kills it."""
        return self.commands.stream(command, timeout, **options)

    # Files

    @overload
    async def read_file(
        self,
        path: AnyPath,
        *,
        encoding: str = "utf-8",
        errors: str = "strict",
        max_bytes: int = MAX_READ,
    ) -> str: ...
    @overload
    async def read_file(
        self, path: AnyPath, *, encoding: None, max_bytes: int = MAX_READ
    ) -> bytes: ...
    async def read_file(
        self,
        path: AnyPath,
        *,
        encoding: str | None = "utf-8",
        errors: str = "strict",
        max_bytes: int = MAX_READ,
    ) -> str | bytes:
        """The content as text; the exact bytes without encoding. Raises SandboxFileDecodeError
        when it is no text in that encoding, unless ``errors`` says what to do with the rest, as
        for bytes.decode."""
        return await self.files.read_file(
            path, encoding=encoding, errors=errors, max_bytes=max_bytes
        )

    async def read_bytes(self, path: AnyPath, *, max_bytes: int = MAX_READ) -> bytes:
        """The content, which must fit into memory: use copy_from for what is larger."""
        return await self.files.read_bytes(path, max_bytes=max_bytes)

    async def write_file(self, path: AnyPath, content: str | bytes) -> None:
        """Replace the content of the file, or make it with its parents: whole, or not at all.

        A link is followed, as a program would. Raises SandboxPermissionError for a file that the
        sandbox's user may not write."""
        await self.files.write_file(path, content)

    async def list_files(self, path: AnyPath = ".", recursive: bool = False) -> list[FileInfo]:
        """List what is in a directory, and below it with ``recursive``, in no particular order."""
        return await self.files.list_files(path, recursive)

    async def listed_after(self, command: Command) -> list[FileInfo]:
        """List what was in the working directory, and below it, when a command that was started
        with ``then_listed`` had ended. Can be asked for once."""
        return await self.files.listed_after(command)

    async def list_changes(self, since: str = "", after: Command | None = None) -> Changes:
        """List what is new, changed or gone below the working directory since the listing that gave
        the token ``since``, or all of it: links and special files left out. ``after`` is a
        command that was started with that token as ``then_listed``: as it was when it ended."""
        return await self.files.list_changes(since, after)

    async def stat(self, path: AnyPath) -> FileInfo:
        """Describe one file or directory; links are followed."""
        return await self.files.stat(path)

    async def realpath(self, path: AnyPath) -> str:
        """The absolute path without links and dots; its last name need not be there."""
        return await self.files.realpath(path)

    async def exists(self, path: AnyPath) -> bool:
        return await self.files.exists(path)

    async def mkdir(self, path: AnyPath, parents: bool = True) -> None:
        """Make a directory; with ``parents`` the missing ones above it, and it may exist."""
        await self.files.mkdir(path, parents)

    async def move(self, source: AnyPath, target: AnyPath) -> None:
        await self.files.move(source, target)

    async def remove(self, path: AnyPath, recursive: bool = False) -> None:
        """Remove a file or an empty directory; any directory with ``recursive``."""
        await self.files.remove(path, recursive)

    async def copy_to(self, source: AnyPath, path: AnyPath) -> None:
        """Copy a file or directory of the host into the sandbox, as ``path``; into ``path``
        under its own name when that ends in a slash, and a file also when it is a directory."""
        await self.files.copy_to(source, path)

    async def copy_from(
        self,
        path: AnyPath,
        destination: AnyPath,
        *,
        max_bytes: int | None = None,
        max_entries: int = MAX_ENTRIES,
    ) -> None:
        """Copy a file or directory of the sandbox to the host: whole, or not at all.

        Links and special files are left out. Raises SandboxFileError when it is larger than
        ``max_bytes`` (twice the disk limit if not given) or has more than ``max_entries``.
        """
        await self.files.copy_from(path, destination, max_bytes=max_bytes, max_entries=max_entries)

    def read_stream(
        self, path: AnyPath, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """The content from ``offset`` on, ``length`` bytes at most."""
        return self.files.read_stream(path, offset=offset, length=length)

    async def write_stream(
        self, path: AnyPath, pieces: AsyncIterable[bytes], *, max_bytes: int | None = None
    ) -> int:
        """Replace the file, or make it with its parents: whole, or not at all. Returns its size;
        raises SandboxFileError when there is more than ``max_bytes``."""
        return await self.files.write_stream(path, pieces, max_bytes=max_bytes)

    # Packages

    async def install(
        self,
        *requirements: str,
        timeout: float = INSTALL_SECONDS,
        index_url: str | None = None,
    ) -> CommandResult:
        """Install packages for this sandbox alone; programs that start afterwards import them.

        Requirements are names with extras, versions and markers, as in PEP 508; files,
        addresses and options raise ValueError before anything runs. Works without a network:
        pip runs inside, and only the package index is passed on to it. Raises SandboxError when
        the operator has switched packages off.
        """
        return await self.packages.install(*requirements, timeout=timeout, index_url=index_url)

    async def installed_packages(self) -> list[dict[str, str]]:
        """Name and version of what programs inside can import. Raises SandboxExecutionError when
        the sandbox has no Python that can say so."""
        return await self.packages.installed_packages()
