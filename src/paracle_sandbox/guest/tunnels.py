"""Tunnels: programs inside connect to a port of the loopback, and the host answers them.

A `listen` stream opens a port. It announces the port and every connection as EVENTs, and lasts
until the host cancels it. For each connection the host opens an `accept` stream, which has DATA
both ways, an END when the host has no more to send, and a RESULT when both sides are done.
Connections that the host does not accept are closed with the listener. The guest itself never
connects anywhere.
"""

from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Dict, Optional

from ..channel.frames import CHUNK
from .loop import READ, WRITE, Loop
from .request import Invalid
from .wire import Wire

if TYPE_CHECKING:
    import socket

MAX_WAITING = 64
_ADDRESS = "127.0.0.1"


class Tunnels:
    """The connections that wait for the host to accept them."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: Dict[int, "socket.socket"] = {}
        self._last = 0

    def job(self, request: Dict[str, Any], wire: Wire) -> Any:
        """Create the job for a `listen` or `accept` request. Raises Invalid."""
        if request["op"] == "listen":
            return Listener(self._loop, wire, self)
        connection = self._waiting.pop(request.get("connection"), None)  # type: ignore[arg-type]
        if connection is None:
            raise Invalid("there is no connection with this number; it may have been closed")
        return Tunnel(self._loop, wire, connection)

    def add_waiting(self, connection: "socket.socket") -> Optional[int]:
        """Keep a connection until the host accepts it, by the number that this returns.

        Returns None if too many are waiting.
        """
        if len(self._waiting) >= MAX_WAITING:
            return None
        self._last += 1
        self._waiting[self._last] = connection
        return self._last

    def hang_up(self) -> None:
        """Close all connections that wait."""
        waiting, self._waiting = self._waiting, {}
        for connection in waiting.values():
            connection.close()


class Listener:
    """The job of a `listen` stream: one open port."""

    wants_turn = False

    def __init__(self, loop: Loop, wire: Wire, tunnels: Tunnels) -> None:
        self._loop = loop
        self._wire = wire
        self._tunnels = tunnels
        self._socket: Optional["socket.socket"] = None

    def start(self) -> None:
        # A module that is imported at the start would be in the memory of every sandbox.
        import socket

        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setblocking(False)
        try:
            listening.bind((_ADDRESS, 0))
            listening.listen(MAX_WAITING)
        except OSError as error:
            listening.close()
            self._wire.os_error(error, "cannot listen")
            return
        self._socket = listening
        self._wire.event({"port": listening.getsockname()[1]})
        self._loop.watch(listening.fileno(), READ, self._accept)

    def _accept(self) -> None:
        if self._socket is None:
            return
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        connection.setblocking(False)
        number = self._tunnels.add_waiting(connection) if self._wire.credit > 0 else None
        if number is None:
            connection.close()
        else:
            self._wire.event({"connection": number})

    def on_data(self, data: bytes) -> None:
        self._wire.consumed(len(data))

    def on_end(self) -> None:
        self.cancel()
        self._wire.result({})

    def on_credit(self) -> None:
        pass

    def turn(self) -> None:
        pass

    def cancel(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._tunnels.hang_up()


class Tunnel:
    """The job of an `accept` stream: one connection of a program inside."""

    wants_turn = False

    def __init__(self, loop: Loop, wire: Wire, connection: "socket.socket") -> None:
        self._loop = loop
        self._wire = wire
        self._socket: Optional["socket.socket"] = connection
        self._unwritten: Deque[bytes] = deque()
        self._program_done = False
        self._host_done = False

    def start(self) -> None:
        self._update()

    def on_data(self, data: bytes) -> None:
        self._unwritten.append(data)
        self._write()

    def on_end(self) -> None:
        self._host_done = True
        self._write()

    def on_credit(self) -> None:
        self._update()

    def turn(self) -> None:
        pass

    def cancel(self) -> None:
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _ready(self) -> None:
        if self._socket is not None and self._unwritten:
            self._write()
        if self._socket is not None and not self._program_done and self._wire.credit > 0:
            self._read()

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(min(CHUNK, self._wire.credit))
        except BlockingIOError:
            return
        except OSError:
            self._finish()
            return
        if data:
            self._wire.data(data)
        else:
            self._program_done = True
        self._update()

    def _write(self) -> None:
        if self._socket is None:
            return
        try:
            while self._unwritten:
                count = self._socket.send(self._unwritten[0])
                self._wire.consumed(count)
                rest = self._unwritten.popleft()[count:]
                if rest:
                    self._unwritten.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:
            self._finish()
            return
        self._update()

    def _update(self) -> None:
        """Watch for the directions in which data can move; end the job when none is left."""
        if self._socket is None:
            return
        if self._host_done and not self._unwritten:
            self._finish()
            return
        events = WRITE if self._unwritten else 0
        if not self._program_done and self._wire.credit > 0:
            events |= READ
        if events:
            self._loop.watch(self._socket.fileno(), events, self._ready)
        else:
            self._loop.unwatch(self._socket.fileno())

    def _finish(self) -> None:
        self.cancel()
        self._wire.result({})
