"""Run one command: start its program, carry its streams, and end it with one result.

The program is a child of the guest (the direct command), or of a keeper if another command runs
already. A command ends in one of these ways, always with exactly one RESULT or ERROR:

- Its wait status is known: the guest sends what is left in the pipes, and then the RESULT.
- The program could not be started: RESULT with 127 or 126, or ERROR.
- The host asks to kill it: the whole tree is killed first, then comes a RESULT with "killed".
- Its keeper was killed: the tree is killed, too, and the RESULT is -9, never a success.
- The guest itself failed: the whole tree is killed first, then comes an ERROR. An ERROR of a
  command always means that nothing of it runs, and says so ("nothing_runs"). The host destroys a
  sandbox whose guest answers a kill with any other ERROR.
"""

import errno
import os
import signal
from typing import Any, Callable, Dict, List, Optional, Tuple

from ...channel import frames
from ..kernel import slave_path
from ..loop import READ, Loop
from ..prefork.preforked import Preforked
from ..request import Invalid, Launch, parse_size
from ..wire import Wire, os_failure
from . import keeper
from .kill_tree import TreeKill, send_signal
from .oom import OomFirst
from .process_table import Children
from .spawn import BAD_DIRECTORY, BAD_PROGRAM, BAD_SOURCE, Refused, Stdio, refusal, start_program
from .stdio import DEFAULT_PIPE_BYTES, Input, Output, open_terminal, set_size

# How often, and at what interval, a stopped keeper is continued so that it can report what it
# started.
UNTOLD_ROUNDS = 40
UNTOLD_SECONDS = 0.05
# The output of a program that ends sooner is sent with its result. Watching its pipes would not be
# faster: the kernel lets a program that writes go on before its reader.
SOON_SECONDS = 0.003
# A program without stdin has this long, unless it has printed much by then: a full pipe would make
# it wait for us.
SOON_ENOUGH_SECONDS = 0.01
MUCH_BYTES = DEFAULT_PIPE_BYTES // 2
NO_RESOURCES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Command:
    """The job that runs one command."""

    wants_turn = False

    def __init__(
        self,
        launch: Launch,
        wire: Wire,
        loop: Loop,
        children: "Children[Command]",
        oom: OomFirst,
        buffer: memoryview,
    ) -> None:
        self._launch = launch
        self._wire = wire
        self._loop = loop
        self._children = children
        self._oom = oom
        self._buffer = buffer
        self._outputs: List[Output] = []
        self._input: Optional[Input] = None
        # The program's ends of its streams, kept until it has them, and the preforked process that
        # got them.
        self._theirs: List[int] = []
        self._stdio: Stdio = (-1, -1, -1)
        self._preforked: Optional[Preforked] = None
        self._status_fd = -1
        self._keeper: Optional[int] = None
        self._pid = 0
        self._pid_told = False
        self._looked = False
        self._starting = False  # while False, a process exists only if its pid is known
        self._early_signals: List[int] = []
        self._exit_code: Optional[int] = None
        self._kill: Optional[TreeKill] = None
        self._killed = False
        self._survivors = 0
        self._failure: Optional[Tuple[str, str, Optional[int]]] = None

    @property
    def is_python(self) -> bool:
        return self._launch.program is not None

    # Requests of the host

    def start(self) -> None:
        self._start(self._children.take_preforked if self._launch.program else lambda: None)
        if self._launch.terminal_size:
            self._look()
        else:
            self._loop.call_later(SOON_SECONDS, self._look if self._launch.stdin else self._glance)

    def _glance(self) -> None:
        if any(o.waiting() >= MUCH_BYTES for o in self._outputs if not o.closed):
            self._look()
        elif self._exit_code is None:
            self._loop.call_later(SOON_ENOUGH_SECONDS - SOON_SECONDS, self._look)

    def _look(self) -> None:
        """Begin to follow a program that did not end at once: report its pid, watch its output."""
        self._looked = True
        if self._wire.finished or self._exit_code is not None:
            return
        self._see_taken()
        self._tell_pid()
        try:
            for output in self._outputs:
                output.update()
        except OSError as error:  # a limit that the kernel sets for all of this user's processes
            self.fail_os(error, "cannot follow its output")

    def _start(self, take_preforked: Callable[[], Optional[Preforked]]) -> None:
        self._starting = True
        try:
            if not self._theirs:
                self._stdio = self._open_stdio(self._theirs)
            if self._children.has_place_for_direct():
                self._start_direct(take_preforked())
            else:
                self._start_keeper()
            self._starting = False
        except OSError as error:
            self._starting = False
            self.fail_os(error, "cannot start a process")
        except Refused as refused:
            self._starting = False
            self._told(refused.tag, refused.code)
        finally:
            if self._preforked is None:
                self._let_go()

    def _start_direct(self, preforked: Optional[Preforked]) -> None:
        pid = start_program(self._launch, self._stdio, preforked, self._oom)
        if preforked is not None and not preforked.closed:
            self._preforked = preforked
        self._children.add_direct(pid, self)
        self._told(keeper.STARTED, pid)

    def _start_keeper(self) -> None:
        self._status_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._theirs.append(write_fd)
        os.set_blocking(write_fd, True)
        # Watch first: if this fails, no process has been started that the guest does not follow.
        self._loop.watch(self._status_fd, READ, self._news)
        self._keeper = keeper.start_keeper(self._launch, (*self._stdio, write_fd), self._oom)
        self._children.add_keeper(self._keeper, self)

    def on_data(self, data: bytes) -> None:
        if self._input:
            self._input.write(data)
        else:
            self._wire.consumed(len(data))

    def on_end(self) -> None:
        if self._input:
            self._input.end()

    def on_credit(self) -> None:
        if self._exit_code is not None:
            self._settle()
        for output in self._outputs:
            output.update()

    def on_signal(self, request: Dict[str, Any]) -> None:
        """Handle a SIGNAL frame: a kill, the size of the terminal, or a signal. Raises Invalid."""
        if request.get("kill"):
            self.cancel()
        elif "resize" in request:
            size = parse_size(request["resize"])
            if self._input:
                self._input.resize(size)
            if self._launch.simple_terminals:
                self._early_signals.append(signal.SIGWINCH)
                self._send_signals()
        else:
            number = request.get("signal")
            if type(number) is not int or not 0 < number < signal.NSIG:
                raise Invalid("signal must be the number of a signal")
            self._early_signals.append(number)
            self._send_signals()

    def fail(self, code: str, message: str, errno: Optional[int] = None) -> None:
        """End the command because the guest failed. The ERROR is sent when nothing of it runs."""
        if self._failure is None:
            self._failure = (code, message, errno)
        if self._pid or self._keeper is not None or self._starting:
            self.cancel()
        else:
            self._settle()

    def fail_os(self, error: OSError, message: str) -> None:
        self.fail(*os_failure(error, message))

    def cancel(self) -> None:
        self._killed = True
        # A keeper that has not started its program yet would start it during the kill.
        if self._keeper is None or self._pid:
            self._kill_tree()
        else:
            self._press_keeper(UNTOLD_ROUNDS)

    def _press_keeper(self, rounds: int) -> None:
        """Continue the keeper until it reports what it started: the program may have stopped it.

        A keeper that does not report is killed, which leads to on_keeper_lost.
        """
        if self._pid or self._keeper is None or self._wire.finished:
            return
        try:
            os.kill(self._keeper, signal.SIGCONT if rounds else signal.SIGKILL)
        except ProcessLookupError:
            return  # its pipe has ended, or will end
        if rounds:
            self._loop.call_later(UNTOLD_SECONDS, lambda: self._press_keeper(rounds - 1))

    # A preforked process may be killed, by an earlier program, before it takes over the program

    def _see_taken(self) -> None:
        if self._preforked is not None:
            took = self._preforked.took
            if took:
                self._let_go()
                self._send_signals()
            elif took is None:
                self._loop.call_later(SOON_SECONDS, self._see_taken)

    def _died_before(self, status: int) -> bool:
        by_another = os.WIFSIGNALED(status) and not self._killed
        return by_another and self._preforked is not None and self._preforked.took is False

    def _start_again(self) -> None:
        """Start the program once more, without a preforked process: the next preforked process
        might be killed, too."""
        self._drop_preforked()
        self._children.release(self)
        self._pid, self._pid_told = 0, False
        self._start(lambda: None)

    def _let_go(self) -> None:
        """Close the program's ends of its streams: it has its copies, or will never start."""
        self._drop_preforked()
        for fd in set(self._theirs):
            os.close(fd)
        self._theirs.clear()

    def _drop_preforked(self) -> None:
        if self._preforked is not None:
            self._preforked.close()
            self._preforked = None

    # The end of the program

    def on_exit(self, status: int) -> None:
        """Handle the end of the direct command's program."""
        if self._exit_code is None and self._died_before(status):
            self._start_again()
        elif self._exit_code is None:
            self._let_go()
            self._told(keeper.ENDED, status)

    def _news(self) -> None:
        try:
            data = os.read(self._status_fd, 64 * keeper.NEWS.size)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(self._status_fd)
            # A dying keeper still has its children. They can be found once they are orphans.
            if self._keeper not in self._children:
                self.on_keeper_lost()
        for tag, value in keeper.NEWS.iter_unpack(data):
            self._told(tag, value)

    def on_keeper_end(self) -> None:
        """Handle the proper end of the keeper, whose last report is in the pipe."""
        if self._status_fd >= 0:
            self._news()

    def on_keeper_lost(self) -> None:
        """Handle the end of a keeper that was killed: kill the tree unless the program has
        ended."""
        if self._exit_code is None and not self._wire.finished:
            self._keeper = None  # its processes are among the orphans now
            self._kill_tree()

    def _told(self, tag: bytes, value: int) -> None:
        if self._wire.finished:
            return
        if tag == keeper.STARTED:
            self._pid = value
            if self._looked:
                self._tell_pid()
            self._send_signals()
            if self._killed:
                self._kill_tree()
        elif tag == keeper.ENDED:
            self._end(_exit_code(value))
        elif tag == BAD_PROGRAM and value not in NO_RESOURCES:
            self._refused(value)
        else:
            what = {BAD_SOURCE: "cannot write the source", BAD_DIRECTORY: "cwd"}
            self._release()
            message = what.get(tag, "cannot start a process")
            failure = os_failure(OSError(value, os.strerror(value)), message)
            self._wire.error(*failure, nothing_runs=True)

    def _tell_pid(self) -> None:
        if self._pid and not self._pid_told:
            self._pid_told = True
            self._wire.event({"pid": self._pid})

    def _refused(self, code: int) -> None:
        line, exit_code = refusal(self._launch.argv[0], code)
        self._wire.output(frames.DATA if len(self._outputs) == 1 else frames.STDERR, line)
        self._end(exit_code)

    def _send_signals(self) -> None:
        if not self._pid or self._exit_code is not None:
            return
        if self._early_signals and self._preforked is not None and not self._preforked.took:
            return  # a preforked process ignores signals; wait until it is the program
        for number in self._early_signals:
            try:
                send_signal(self._pid, number)
            except (ProcessLookupError, PermissionError):
                pass  # it has just ended, or changed its user
        self._early_signals.clear()

    # The result

    def _kill_tree(self) -> None:
        if self._kill is None and not self._wire.finished:
            self._kill = TreeKill(self._loop, self._children, self._keeper, self._tree_killed)
            self._kill.round()

    def _tree_killed(self, survivors: int) -> None:
        self._kill = None
        self._survivors = survivors
        self._end(-signal.SIGKILL if self._exit_code is None else self._exit_code)

    def _end(self, exit_code: int) -> None:
        self._tell_pid()
        self._exit_code = exit_code
        for output in self._outputs:
            output.settle()
        self._settle()

    def _settle(self) -> None:
        """Send the remaining output, then the result. Called again when the host gives credit."""
        if self._wire.finished:
            self._release()  # the guest has already ended the stream with an ERROR
            return
        if self._failure is not None and self._kill is None:
            self._release()
            if self._survivors:
                self._wire.result(self._verdict())
            else:
                self._wire.error(*self._failure, nothing_runs=True)
            return
        for output in self._outputs:
            output.drain()
            if self._killed and self._wire.exhausted:
                output.close()  # the host killed it and need not read the rest first
        if self._kill is None and all(output.closed for output in self._outputs):
            self._release()
            self._wire.result(self._verdict())

    def _verdict(self) -> Dict[str, Any]:
        verdict: Dict[str, Any] = {"exit_code": self._exit_code}
        if self._killed:
            verdict["killed"] = True
        if self._survivors:
            verdict["survivors"] = self._survivors
        return verdict

    def _release(self) -> None:
        self._let_go()
        for output in self._outputs:
            output.close()
        if self._input:
            self._input.close()
        if self._status_fd >= 0:
            self._loop.unwatch(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = -1
        self._children.release(self)

    # Streams

    def _open_stdio(self, child_fds: List[int]) -> Tuple[int, int, int]:
        """Create the streams. The program's ends are returned and added to child_fds."""
        if self._launch.terminal_size:
            return self._open_terminal(child_fds)
        stdin = self._open_stdin(child_fds)
        for kind in (frames.DATA,) if self._launch.merged else (frames.DATA, frames.STDERR):
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            child_fds.append(write_fd)
            self._add_output(read_fd, kind)
        return stdin, child_fds[1], child_fds[-1]

    def _open_stdin(self, child_fds: List[int]) -> int:
        if self._launch.stdin:
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            self._input = Input(self._loop, write_fd, self._wire, terminal=False)
        else:
            read_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        child_fds.append(read_fd)
        return read_fd

    def _open_terminal(self, child_fds: List[int]) -> Tuple[int, int, int]:
        assert self._launch.terminal_size
        master, slave = open_terminal()
        child_fds.append(slave)
        self._add_output(master, frames.DATA)
        self._input = Input(self._loop, os.dup(master), self._wire, terminal=True)
        set_size(master, self._launch.terminal_size)
        self._launch = self._launch._replace(terminal=slave_path(master))
        return slave, slave, slave

    def _add_output(self, fd: int, kind: int) -> None:
        self._outputs.append(Output(self._loop, fd, kind, self._wire, self._buffer))


def _exit_code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
