"""The guest: the first process in every sandbox, one thread, no user code in it.

`serve` is all there is to call. The host opens streams over the channel, each with a request;
each request becomes a job (a command, or a file operation), and the loop lends every job a
moment at a time.

PROCESSES (all have the sandbox's one uid; what keeps programs from the guest is that it is not
dumpable, and that the filter of system calls has no ptrace)

    guest          PID 1 of the sandbox (in a container of another backend, of the container).
     ├ program     the direct command: the first one, and whatever it starts
     ├ keeper      one for each command that runs beside another. It is a child subreaper, so that
     │  └ program  what its program leaves behind never mixes with another command's
     ├ preforked   a Python process that waits for the next program    (for speed only: `prefork`)
     └ fork server forks those while programs follow each other at once (for speed only: `prefork`)

SOCKETS AND PIPES

    host - guest        the channel. Frames both ways, under credits: a program that prints faster
                        than the host reads has to wait.
    guest - program     its standard streams: pipes, or a terminal.
    keeper - guest      a pipe for the program's pid and its wait status. Only the keeper has it.
    guest - preforked   a socket for the program, its directory and its streams.

WAITING

    The guest waits in one place, `Loop.run_once`: for the channel, pipes, timers, and SIGCHLD by a
    wakeup descriptor. It waits for no program and no keeper: their ends come as events, and a
    program's end is told to the host when it has been reaped. A program waits for nothing of ours.

IN WHICH ORDER THINGS DIE

    A command is killed as a tree (`processes.kill_tree`), round after round, until nothing of it
    is left; only then its result is sent. A keeper ends when nothing is left of what it keeps; if
    it is killed, what it kept comes to the guest, and is killed. When the channel ends, the guest
    kills everything and ends; as PID 1 it would take everything with it in any case.
"""

import _signal  # type: ignore[import-not-found]
import fcntl
import gc
import mmap
import os
import signal
import sys
from typing import Any, Callable, Dict, List, NoReturn, Optional

from ..channel import frames
from . import kernel
from .loop import READ, Loop
from .prefork.policy import REQUEST, PreforkPolicy
from .processes.command import Command
from .processes.kill_leftovers import Leftovers
from .processes.kill_tree import TreeKill, kill_everything, strike_all
from .processes.oom import OomFirst
from .processes.process_table import Children
from .processes.stdio import Output
from .python.program_files import Texts
from .request import Invalid, parse_exec, parse_python, parse_text
from .tunnels import Tunnels
from .wire import Channel, ChannelClosed, Wire

PROTOCOL = 1


def serve(channel_fd: int, setup: Dict[str, Any], write_fd: Optional[int] = None) -> NoReturn:
    """Be the guest until the channel ends. write_fd: where that is not one socket but two pipes."""
    guest: Optional[Guest] = None
    code = 1
    try:
        given = {channel_fd, channel_fd if write_fd is None else write_fd}
        read_fd = _claim(channel_fd)
        write_fd = _claim(channel_fd if write_fd is None else write_fd)
        for fd in given:
            os.close(fd)
        _occupy_low_fds()
        _prepare_process()
        if setup.get("own_env"):  # that of the image, which is not the host's
            setup["env"] = _with_commands({**os.environ, **setup["env"]})
        guest = Guest(read_fd, write_fd, setup)
        guest.run()
        code = 0
    except (ChannelClosed, frames.ProtocolError):
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # _exit would keep it to itself
        raise
    finally:
        try:
            if guest is not None:
                kill_everything()
        finally:
            os._exit(code)


def _with_commands(env: Dict[str, str]) -> Dict[str, str]:
    """With the folder in the PATH where pip puts commands of what a program installs for itself."""
    own = env.get("HOME", "/tmp") + "/.local/bin"
    folders = env.get("PATH", os.defpath).split(":")
    return env if own in folders else {**env, "PATH": ":".join([*folders, own])}


def _claim(fd: int) -> int:
    """A copy above 4: below are standard streams, and what keepers need to have there."""
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 5)
    os.set_blocking(copy, False)
    return copy


def _occupy_low_fds() -> None:
    """Nothing but stderr is left of what we were started with, and 0 to 4 are taken."""
    for fd in (0, 1, 2, 3, 4):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if fd == null:
            continue
        if fd != 2:
            os.dup2(null, fd, inheritable=False)
        os.close(null)


def _prepare_process() -> None:
    kernel.prctl(kernel.SET_DUMPABLE, 0)
    if os.getpid() != 1:
        kernel.prctl(kernel.SET_CHILD_SUBREAPER, 1)
    # As a fresh interpreter has them, because programs that are forks of us inherit them.
    ignored = (signal.SIGPIPE, signal.SIGXFSZ)
    for number in range(1, signal.NSIG):
        wanted = _signal.SIG_IGN if number in ignored else _signal.SIG_DFL
        if _signal.getsignal(number) not in (wanted, None):
            _signal.signal(number, wanted)
    # Our life is the channel's: whatever else programs send us stays pending.
    kernel.block_signals(all_but=signal.SIGCHLD)
    # The collector writes into every object it visits, which costs each fork a copied page. So
    # it is not asked to look for garbage first: there is hardly any.
    gc.freeze()


class Guest:
    """The streams and the living children."""

    def __init__(self, read_fd: int, write_fd: int, setup: Dict[str, Any]) -> None:
        self._setup = setup
        self._loop = Loop()
        self._channel = Channel(self._loop, read_fd, write_fd)
        self._wires: Dict[int, Wire] = {}
        self._jobs: Dict[int, Any] = {}
        self._children: Children[Command] = Children()
        self._oom = OomFirst()
        self._preforks = bool(setup.get("preforked", True))
        self._policy = PreforkPolicy(
            self._loop, self._children, self._oom, setup, lambda: self._channel.unread
        )
        self._followers: Dict[int, List[int]] = {}
        # Pages that nothing was read into cost nothing. Private: forks must not share it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._buffer = memoryview(mmap.mmap(-1, frames.CHUNK, flags))
        self._sweep: Optional[TreeKill] = None
        self._tunnels = Tunnels(self._loop)
        self._texts = Texts(self._loop)

    def run(self) -> NoReturn:
        """Raises ChannelClosed, ProtocolError: there is no other end."""
        self._watch_children()
        self._greet()
        while True:
            busy = self._take_turns()
            self._channel.flush()
            # Every answer is on its way: now there is time.
            if self._preforks and self._policy.wanted:
                self._policy.fork(self._rehearse_command)
            self._loop.run_once(block=not busy)

    def _greet(self) -> None:
        self._channel.open(self._receive, self._more_room)
        python = "%d.%d.%d" % sys.version_info[:3]
        self._channel.send_json(
            frames.HELLO, 0, {"protocol": PROTOCOL, "python": python, "pid": os.getpid()}
        )

    def _rehearse_command(self) -> None:
        parse_python(frames.decode_json(REQUEST), self._setup)
        self._children.orphans()
        wire = Wire(self._channel, 0, lambda stream: None)
        ends = os.pipe2(os.O_CLOEXEC)
        output = Output(self._loop, ends[0], frames.DATA, wire, self._buffer)
        output.update()
        output.close()
        os.close(ends[1])

    # Frames

    def _receive(self) -> None:
        for kind, stream, payload in self._channel.receive():
            if kind == frames.OPEN:
                self._open(stream, payload)
            elif stream in self._wires:
                self._pass_on(kind, stream, payload)
            # else: it has ended, which the host could not know yet

    def _open(self, stream: int, payload: bytes) -> None:
        if stream == 0 or stream in self._wires:
            raise frames.ProtocolError("stream %d cannot be opened" % stream)
        wire = self._wires[stream] = Wire(self._channel, stream, self._drop)
        try:
            job = self._job(frames.decode_json(payload), wire)
        except (Invalid, frames.ProtocolError) as error:
            wire.error("invalid", str(error), nothing_runs=True)
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001  see _guarded
            wire.error("internal", _describe(error), nothing_runs=True)
        else:
            if not wire.finished:
                self._jobs[stream] = job

    def _pass_on(self, kind: int, stream: int, payload: bytes) -> None:
        wire, job = self._wires[stream], self._jobs[stream]
        if kind == frames.DATA:
            wire.received(len(payload))
            self._guarded(stream, job.on_data, payload)
        elif kind == frames.END:
            self._guarded(stream, job.on_end)
        elif kind == frames.CREDIT:
            wire.grant(frames.decode_credit(payload))
            self._guarded(stream, job.on_credit)
        elif kind == frames.SIGNAL:
            self._guarded(stream, self._signal, stream, payload)

    def _signal(self, stream: int, payload: bytes) -> None:
        job = self._jobs[stream]
        try:
            request = frames.decode_json(payload)
            if isinstance(job, Command):
                job.on_signal(request)
            elif request.get("kill"):
                job.cancel()
                self._wires[stream].result({"killed": True})
        except (Invalid, frames.ProtocolError):
            pass  # an odd wish is no reason to end the command

    def _job(self, request: Dict[str, Any], wire: Wire) -> Any:
        op = request.get("op")
        if op == "ping":
            wire.result({})
            return None
        if op != "python":
            self._texts.remove()
        if op in ("exec", "python"):
            text = parse_text(request)
            if text is not None:
                self._texts.need(wire.number, text)
            launch = (parse_exec if op == "exec" else parse_python)(request, self._setup)
            command = Command(launch, wire, self._loop, self._children, self._oom, self._buffer)
            self._jobs[wire.number] = command
            self._guarded(wire.number, self._start, command, request)
            return command
        if op in ("kill_leftovers", "kill_programs"):
            if op == "kill_programs":
                self._kill_commands()
            leftovers = Leftovers(self._loop, self._children, wire)
            leftovers.start(running_too=op == "kill_programs")
            return leftovers
        if op in ("listen", "accept"):
            tunnel = self._tunnels.job(request, wire)
            tunnel.start()
            return tunnel
        operations = file_operations()
        if not isinstance(op, str) or op not in operations:
            wire.error("unknown_op", "no such operation: %.100r" % (op,))
            return None
        job = operations[op](request, wire, self._setup)
        after: Any = request.get("after")
        if isinstance(self._jobs.get(after), Command):  # else that one is over
            job.come_after(lambda: after not in self._jobs)
            self._followers.setdefault(after, []).append(wire.number)
        job.start()
        return job

    def _kill_commands(self) -> None:
        """Kill every command that runs; each of them still sends its result."""
        if os.getpid() == 1:
            # At one stroke: each walk through /proc takes long while they hold the processor.
            strike_all(self._children)
        for stream, job in list(self._jobs.items()):
            if stream in self._jobs and isinstance(job, Command):
                self._guarded(stream, job.on_signal, {"kill": True})

    def _start(self, command: Command, request: Dict[str, Any]) -> None:
        if command.is_python:
            self._policy.program_started(request)
        command.start()

    def _drop(self, stream: int) -> None:
        wire = self._wires.pop(stream, None)
        job = self._jobs.pop(stream, None)
        self._texts.ended(stream)
        if wire is not None:
            self._policy.stream_ended(wire)
        followers = [one for one in self._followers.pop(stream, ()) if one in self._jobs]
        for follower in followers:
            self._jobs[follower].on_credit()
        if isinstance(job, Command) and job.is_python:
            self._policy.program_ended(self._wires[followers[-1]] if followers else None)

    def _guarded(self, stream: int, call: Callable[..., None], *args: Any) -> None:
        """One job's mistake must not take the sandbox down: hence the broad except. What goes wrong
        in here once more does: the sandbox ends, rather than that a command is lost sight of."""
        job, wire = self._jobs[stream], self._wires[stream]
        try:
            call(*args)
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001
            if isinstance(job, Command):
                job.fail("internal", _describe(error))
                return
            job.cancel()
            wire.error("internal", _describe(error))

    # Turns

    def _take_turns(self) -> bool:
        """Give every long job a moment; whether one wants another."""
        waiting = False
        for stream, job in list(self._jobs.items()):
            # One that ended in this turn may have ended others.
            if stream in self._jobs and job.wants_turn and self._wires[stream].credit > 0:
                self._guarded(stream, job.turn)
                waiting = waiting or job.wants_turn
        return waiting

    def _more_room(self) -> None:
        for stream, job in list(self._jobs.items()):
            if stream in self._jobs:
                self._guarded(stream, job.on_credit)

    # Children

    def _watch_children(self) -> None:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup_fd = read_fd
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        _signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._loop.watch(read_fd, READ, self._reap)

    def _reap(self) -> None:
        try:
            os.read(self._wakeup_fd, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._children.is_direct(pid):
                self._children.remove(pid)
                self._direct_ended(status)
            elif self._children.is_keeper(pid):
                command = self._children.remove(pid)
                if self._children.was_ended_by_us(pid):
                    continue
                if status != 0:
                    self._keeper_lost(command)
                elif command is not None:
                    command.on_keeper_end()
            else:
                self._children.remove(pid)

    def _direct_ended(self, status: int) -> None:
        command = self._children.direct_owner
        if command is not None:
            command.on_exit(status)

    def _keeper_lost(self, command: Optional[Command]) -> None:
        """Take over what a killed keeper kept: it cannot be told from the direct command's."""
        if command is not None:
            command.on_keeper_lost()
        if self._sweep is None:
            self._sweep = TreeKill(self._loop, self._children, None, self._swept)
            self._loop.call_later(0, self._sweep.round)

    def _swept(self, _survivors: int) -> None:
        self._sweep = None


def file_operations() -> Dict[str, Callable[..., Any]]:
    """Imported with the first that is wanted: most sandboxes run one program, and wait for each
    module that is compiled. May be called ahead of that, in the parent."""
    if not _file_operations:
        from .files.changes import list_changes
        from .files.ops import OPS, operation_starter

        _file_operations.update(OPS)
        _file_operations["changes"] = operation_starter(list_changes)
    return _file_operations


_file_operations: Dict[str, Callable[..., Any]] = {}


def _describe(error: Exception) -> str:
    return "%s: %.500s" % (type(error).__name__, error)
