"""The channels over ZeroMQ: ROUTER at the controller, DEALER at each worker, CURVE on every connection.

Each socket belongs to the event loop that made it. A peer that does not know the run's worker key is refused during the
handshake and never reaches the controller's code.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from laminar.errors import UserError
from laminar.protocol.channel import PeerGone
from laminar.protocol.codec import Codec
from laminar.protocol.connection import Connection, CurveKeys

MAX_MESSAGE_BYTES = 1 << 30  # per frame; larger ones end the connection
LINGER_MS = 1000


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
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=_OneWorkerKey(worker_public_key))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.curve_server = True
        self._socket.curve_secretkey = controller_keys.secret.encode()
        self._socket.curve_publickey = controller_keys.public.encode()
        try:
            self._socket.bind(f"tcp://{host}:{port if port else '*'}")
        except zmq.ZMQError as error:
            self.close()
            taken = error.errno == zmq.EADDRINUSE
            raise UserError(
                f"controller.{'port' if taken else 'host'}: cannot listen on {host}:{port}: {error.strerror}. "
                + ("Set controller.port to a free one, or to 0 to have one chosen" if taken else "Set controller.host")
            ) from error
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def receive(self) -> tuple[bytes, Any]:
        """Next (peer, message)."""
        frames = await self._socket.recv_multipart()
        return frames[0], self._codec.decode(frames[1:])

    async def send(self, peer: bytes, message: object) -> None:
        """Queue a message for a peer. Raises PeerGone if it is not connected."""
        try:
            await self._socket.send_multipart([peer, *self._codec.encode(message)])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone(f"{peer.decode(errors='replace')} is not connected") from error
            raise

    def close(self) -> None:
        """Close the socket and the context; queued messages get a second to leave."""
        self._authenticator.stop()
        self._context.destroy(linger=LINGER_MS)


class ZmqWorkerChannel:
    """DEALER socket; reconnects by itself while the worker lives."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._codec = Codec()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # Unique, and stable over reconnects: the controller keeps knowing the worker by it.
        identity = f"{name}@{socket.gethostname()}:{os.getpid()}"
        self._socket.setsockopt(zmq.IDENTITY, identity.encode()[:255])
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.curve_serverkey = connection.controller_public_key.encode()
        self._socket.curve_publickey = connection.worker_public_key.encode()
        self._socket.curve_secretkey = connection.worker_secret_key.encode()
        self._socket.connect(connection.address)

    async def receive(self) -> Any:
        """Next message from the controller."""
        return self._codec.decode(await self._socket.recv_multipart())

    async def send(self, message: object) -> None:
        """Queue a message for the controller."""
        await self._socket.send_multipart(self._codec.encode(message))

    def close(self) -> None:
        """Close the socket and the context; queued messages get a second to leave."""
        self._context.destroy(linger=LINGER_MS)
