"""The byte stream that joins the host to a guest: what a backend provides, and all above it uses.

A channel carries bytes and knows nothing of frames, streams or requests: `connection` puts those on
it. It may be a socket, an attached container, an exec stream or a WebSocket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Channel(ABC):
    """A byte stream to a guest. At a time it has one task that reads and one that writes."""

    @abstractmethod
    async def receive(self) -> bytes:
        """Wait for bytes and return them; b"" means that the guest is gone."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Write all of the data. Raises ConnectionError once the guest is gone."""

    def send_now(self, data: bytes) -> int:
        """Write as much as can be written without waiting, and return how many bytes that was.

        It is called only while no `send` is under way. It never raises: an error that keeps it from
        writing is met by the `send` that follows.
        """
        return 0

    def abandon(self) -> None:  # noqa: B027 - most channels have nothing to do
        """Let go at once of everything that belongs to the running event loop.

        This is called when the loop ends while the channel is still open. Afterwards only `close`
        is called, in another loop.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the channel, which ends the guest. A second call does nothing."""
