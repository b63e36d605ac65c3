"""The channels in memory: for tests and simulation, where controller and workers share one event loop.

Messages pass through the codec, so what works here works over a wire.
"""

from __future__ import annotations

import asyncio
from typing import Any

from laminar.protocol.channel import PeerGone
from laminar.protocol.codec import Codec


class MemoryNetwork:
    """One controller end, and as many worker ends as are asked for. Delivers at once and in order."""

    def __init__(self) -> None:
        self._codec = Codec()
        self._to_controller: asyncio.Queue[tuple[bytes, list[bytes]]] = asyncio.Queue()
        self._to_workers: dict[bytes, asyncio.Queue[list[bytes]]] = {}
        self.controller = _ControllerEnd(self)

    def worker(self, name: str) -> _WorkerEnd:
        """Connect a worker."""
        return _WorkerEnd(self, name.encode())

    def disconnect(self, name: str) -> None:
        """The worker is gone: sending to it fails from now on."""
        self._to_workers.pop(name.encode(), None)

    def _frames(self, message: object) -> list[bytes]:
        return [bytes(frame) for frame in self._codec.encode(message)]


class _ControllerEnd:
    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    async def receive(self) -> tuple[bytes, Any]:
        """Next (peer, message)."""
        peer, frames = await self._network._to_controller.get()
        return peer, self._network._codec.decode(frames)

    async def send(self, peer: bytes, message: object) -> None:
        """Deliver to a worker. Raises PeerGone if it is not connected."""
        queue = self._network._to_workers.get(peer)
        if queue is None:
            raise PeerGone(f"{peer.decode()} is not connected")
        queue.put_nowait(self._network._frames(message))

    def close(self) -> None:
        """Nothing to give back."""


class _WorkerEnd:
    def __init__(self, network: MemoryNetwork, peer: bytes) -> None:
        self._network = network
        self._peer = peer
        self._inbox: asyncio.Queue[list[bytes]] = asyncio.Queue()
        network._to_workers[peer] = self._inbox

    async def receive(self) -> Any:
        """Next message from the controller."""
        return self._network._codec.decode(await self._inbox.get())

    async def send(self, message: object) -> None:
        """Deliver to the controller."""
        self._network._to_controller.put_nowait((self._peer, self._network._frames(message)))

    def close(self) -> None:
        """Leave."""
        self._network._to_workers.pop(self._peer, None)
