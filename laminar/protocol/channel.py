"""What the controller and the workers need of a transport. ZeroMQ in real runs, `simulation/channels/` in tests and simulation."""

from __future__ import annotations

from typing import Any, Protocol


class PeerGone(Exception):
    """The peer is not connected (any more)."""


class ControllerChannel(Protocol):
    """The controller's end: many peers, each known by the identity that its first message came with."""

    async def receive(self) -> tuple[bytes, Any]:
        """Next (peer, message), from any peer."""
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
