"""The channels over ZeroMQ: ROUTER at the controller, DEALER at each worker, CURVE on every connection.

Each socket belongs to the event loop that made it. A peer that does not know the run's worker key is refused during the
handshake and never reaches the controller's code. Invariant: a backlog of messages does not keep the loop from its other
coroutines; a peer's last words are received before the notice that its connection closed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, overload

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from laminar.errors import UserError
from laminar.protocol.channel import PeerClosed, PeerGone
from laminar.protocol.codec import Codec
from laminar.protocol.connection import Connection, CurveKeys
from laminar.protocol.peer_watch import PeerWatch

MAX_MESSAGE_BYTES = 1 << 30  # per frame; larger ones end the connection
LINGER_MS = 1000
LONGEST_TURN_S = 0.002  # for which a receiver of many messages holds the loop
LONGEST_NOTICE_S = 1.0  # for which an interruption waits until nothing is left to receive


class _LoopSocket:
    """A plain socket on the running event loop.

    `zmq.asyncio` makes a future, a callback and a timer of every message. Here a message that is there costs one call.

    ZeroMQ's file descriptor becomes readable when something happened that the socket does not know of, and is quiet again
    once it knows, whoever made it look: reading, sending and asking for EVENTS all do. So a receiver waits only after
    the socket has said that nothing is there, and after every other use one looks whether something has come.
    """

    def __init__(self, kind: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # no limit: a send never waits
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None  # that the receiver waits for
        self._turn_began = time.perf_counter()
        self._interrupted: float | None = None  # when; by time.perf_counter
        self._descriptor = self.socket.fileno()
        self._loop.add_reader(self._descriptor, self._look)

    async def first_frame(self) -> bytes:
        """First frame of the next message, whose others `rest` takes at once; b"" after `interrupt`. One receiver at a time."""
        if time.perf_counter() - self._turn_began > LONGEST_TURN_S:
            await asyncio.sleep(0)
            self._turn_began = time.perf_counter()
            if self._interrupted is not None and self._turn_began - self._interrupted > LONGEST_NOTICE_S:
                self._interrupted = None
                return b""
        while True:
            try:
                return self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                if self._interrupted is not None:
                    self._interrupted = None
                    return b""
                self._arrival = self._loop.create_future()
                try:
                    await self._arrival
                finally:
                    self._arrival = None
                self._turn_began = time.perf_counter()

    @overload
    def rest(self) -> list[bytes]: ...

    @overload
    def rest(self, *, copy: Literal[False]) -> list[zmq.Frame]: ...

    def rest(self, *, copy: bool = True) -> list[Any]:
        """The frames after the first; as bytes, or uncopied with what ZeroMQ knows of them."""
        frames: list[Any] = []
        while self.socket.getsockopt(zmq.RCVMORE):
            frames.append(self.socket.recv(zmq.NOBLOCK, copy=copy))
        return frames

    def interrupt(self) -> None:
        """Let the receiver have b"" once, as soon as all that has come is received, or LONGEST_NOTICE_S later."""
        if self._interrupted is None:
            self._interrupted = time.perf_counter()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def send(self, frames: Sequence[Any]) -> None:
        """Queue a message."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        finally:  # also when it is refused, the socket has looked
            if self._arrival is not None:
                self._look()

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close the socket and its context; queued messages get a second to leave. May be called again.

        ZeroMQ waits without a limit for its threads to let go of every connection, and a process that has to end must
        not rely on that: after twice the linger they are left to the end of the process.
        """
        if self.socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        self.socket.close(linger_ms)
        end = threading.Thread(target=self.context.term, name="end of a ZeroMQ context", daemon=True)
        end.start()
        end.join(2 * linger_ms / 1e3)

    def _look(self) -> None:
        come = int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        if come and self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class _OneWorkerKey:
    """Lets in exactly one CURVE public key."""

    def __init__(self, public_key: str) -> None:
        self._allowed = public_key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq with the key in Z85."""
        return key == self._allowed


class ZmqControllerChannel:
    """ROUTER socket with authentication; make it inside the loop that will use it."""

    def __init__(self, host: str, port: int, *, controller_keys: CurveKeys, worker_public_key: str) -> None:
        """Bind.

        Raises:
            UserError: the port is taken, or the host is not an address of this machine.
        """
        self._codec = Codec()
        self._socket = _LoopSocket(zmq.ROUTER)
        self._authenticator = AsyncioAuthenticator(self._socket.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=_OneWorkerKey(worker_public_key))
        router = self._socket.socket
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.curve_server = True
        router.curve_secretkey = controller_keys.secret.encode()
        router.curve_publickey = controller_keys.public.encode()
        self._watch = PeerWatch(router, self._is_connected, self._socket.interrupt)
        try:
            router.bind(f"tcp://{host}:{port if port else '*'}")
        except zmq.ZMQError as error:
            self.close()
            taken = error.errno == zmq.EADDRINUSE
            raise UserError(
                f"controller.{'port' if taken else 'host'}: cannot listen on {host}:{port}: {error.strerror}. "
                + ("Set controller.port to a free one, or to 0 to have one chosen" if taken else "Set controller.host")
            ) from error
        self.address = str(router.getsockopt_string(zmq.LAST_ENDPOINT))

    async def receive(self) -> tuple[bytes, Any]:
        """Next (peer, message), or (peer, PeerClosed)."""
        while True:
            peer = await self._socket.first_frame()
            if peer in self._watch.descriptors:
                return peer, self._codec.decode(self._socket.rest())
            if peer:
                return peer, self._codec.decode(self._watch.learn(peer, self._socket.rest(copy=False)))
            gone = self._watch.take_gone()
            if gone is not None:
                self._socket.interrupt()  # there may be others
                return gone, PeerClosed(reason="its connection closed")

    async def send(self, peer: bytes, message: object) -> None:
        """Queue a message for a peer. Raises PeerGone if it is not connected."""
        try:
            self._socket.send([peer, *self._codec.encode(message)])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._watch.refused(peer)
                raise PeerGone(f"{peer.decode(errors='replace')} is not connected") from error
            raise

    def _is_connected(self, peer: bytes) -> bool:
        """Send the peer a message of nothing, which its channel drops."""
        self._socket.socket.getsockopt(zmq.EVENTS)  # else a send looks for closed connections now and then only
        try:
            self._socket.send([peer, b""])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self) -> None:
        """Close the socket; queued messages get a second to leave."""
        if not self._socket.socket.closed:
            self._watch.close()
        self._authenticator.stop()
        self._socket.close()


class ZmqWorkerChannel:
    """DEALER socket; reconnects by itself while the worker lives. Make it inside the loop that will use it."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._codec = Codec()
        self._socket = _LoopSocket(zmq.DEALER)
        dealer = self._socket.socket
        # Unique, and stable over reconnects: the controller keeps knowing the worker by it.
        identity = f"{name}@{socket.gethostname()}:{os.getpid()}"
        dealer.setsockopt(zmq.IDENTITY, identity.encode()[:255])
        dealer.curve_serverkey = connection.controller_public_key.encode()
        dealer.curve_publickey = connection.worker_public_key.encode()
        dealer.curve_secretkey = connection.worker_secret_key.encode()
        dealer.connect(connection.address)

    async def receive(self) -> Any:
        """Next message from the controller."""
        while True:
            first = await self._socket.first_frame()
            rest = self._socket.rest()
            if first:  # else it is a probe, whether this end is there
                return self._codec.decode([first, *rest])

    async def send(self, message: object) -> None:
        """Queue a message for the controller."""
        self._socket.send(self._codec.encode(message))

    def close(self) -> None:
        """Close the socket; queued messages get a second to leave."""
        self._socket.close()

    def drop(self) -> None:
        """Close the socket without waiting, and with all that is queued: its controller is gone."""
        self._socket.close(linger_ms=0)
