"""A server on the loopback that answers, but does not speak HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def mail_server() -> Iterator[str]:
    """Return its address, in the form in which a user would write it by mistake.

    It answers once.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        threading.Thread(target=greet, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
