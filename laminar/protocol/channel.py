"""What the controller and the workers need of a transport. ZeroMQ in real runs, `simulation/channels/` in tests and simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class PeerGone(Exception):
    """The peer is not connected (any more)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerClosed:
    """In place of a message, from the channel itself: the peer's connection is closed, and it has not come back.

    Its process ended, was killed, or left; one that hangs or is cut off keeps its connection. It comes after the last
    message of the peer, and once for each connection. Peers that never sent a message are passed over. If the peer
    comes back, its messages arrive as before.
    """

    reason: str


class ControllerChannel(Protocol):
    """The controller's end: many peers, each known by the identity that its first message came with."""

    async def receive(self) -> tuple[bytes, Any]:
        """Next (peer, message), from any peer; (peer, PeerClosed) when a peer's connection has closed."""
        ...

    async def send(self, peer: bytes, message: object) -> None:
        """Queue a message for a peer. Raises PeerGone if it is not connected."""
        ...

    def close(self) -> None:
        """Give everything back; queued messages get a moment to leave."""
        ...


class WorkerChannel(Protocol):
    """A worker's end: one peer, the controller."""

    async def receive(self) -> Any:
        """Next message."""
        ...

    async def send(self, message: object) -> None:
        """Queue a message for the controller."""
        ...

    def close(self) -> None:
        """Give everything back; queued messages get a moment to leave."""
        ...
