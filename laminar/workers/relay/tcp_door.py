"""Where a process takes TCP hops: it is listening before its address is published, so who dials is let in at once.

Invariants:
- Nothing blocks and nothing has a thread: the door is looked after by the hops that wait at it.
- Only a connection whose preamble proves the run's secret and names an epoch that is not over becomes a hop. One that
  comes before its epoch is expected waits; a stranger who says nothing is closed after a limit and holds up nobody.
"""

from __future__ import annotations

import hmac
import logging
import select
import socket
import time
from dataclasses import dataclass, field

from laminar.workers.relay.hop import Place
from laminar.workers.relay.tcp_hop import PREAMBLE, TcpHop, preamble

STRANGER_LIMIT_S = 5.0  # for a new connection to send its preamble
EARLY_LIMIT_S = 30.0  # for the order to arrive that makes this end expect a neighbour who has dialled already
MAX_STRANGERS = 64  # of each kind; the oldest makes room
ACCEPTS = 16  # at most, in one `advance`

log = logging.getLogger("laminar.relay")


@dataclass(kw_only=True, slots=True)
class _Stranger:
    """A connection that has not become a hop yet."""

    connection: socket.socket
    until: float  # time.monotonic(); closed then
    data: bytearray = field(default_factory=bytearray)  # of its preamble


class TcpDoor:
    """Where a process takes TCP hops."""

    def __init__(self, host: str, hop_key: bytes) -> None:
        """Listen on a port that the system chooses.

        Args:
            host: numeric address to listen at; 0.0.0.0 or :: for all.
            hop_key: secret of the run, at most 64 bytes.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._hop_key = hop_key
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._expected: dict[int, TcpHop] = {}  # by epoch
        self._newest = -1  # epoch ever expected
        self._strangers: dict[int, _Stranger] = {}  # by file descriptor, oldest first
        self._early: dict[int, _Stranger] = {}  # by epoch, oldest first: proven, but not expected yet
        self.refused = 0  # connections that did not become a hop

    def address(self, host: str) -> str:
        """What the neighbour is to dial, if `host` (numeric) leads to this process."""
        port = self._listener.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def fileno(self) -> int:
        """Readable when `advance` has something to do."""
        return self._epoll.fileno()

    def hop(self, epoch: int, peer: str, place: Place) -> TcpHop:
        """The downstream end of a hop: its neighbour dials, or has done so already. Epochs grow."""
        hop = TcpHop(peer, place, None, self)
        self._newest = max(self._newest, epoch)
        early = self._early.pop(epoch, None)
        if early is not None:
            hop.take(early.connection)
        else:
            self._expected[epoch] = hop
        return hop

    def forget(self, hop: TcpHop) -> None:
        """The hop is given up before its neighbour came."""
        self._expected = {epoch: other for epoch, other in self._expected.items() if other is not hop}

    def advance(self) -> None:
        """Let in whoever is at the door, without waiting."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._strangers:
                self._listen_to(fd, self._strangers[fd])
        now = time.monotonic()
        for fd, stranger in tuple(self._strangers.items()):
            if now > stranger.until or len(self._strangers) > MAX_STRANGERS:
                del self._strangers[fd]
                self._refuse(stranger, f"no preamble within {STRANGER_LIMIT_S:g} s, or too many like it")
        for epoch, stranger in tuple(self._early.items()):
            if now > stranger.until or len(self._early) > MAX_STRANGERS or epoch <= self._newest:
                del self._early[epoch]
                self._refuse(stranger, f"nobody here expects epoch {epoch}")

    def close(self) -> None:
        """Stop listening; hops that have their connection go on."""
        self._epoll.close()
        self._listener.close()
        for stranger in (*self._strangers.values(), *self._early.values()):
            stranger.connection.close()
        self._strangers.clear()
        self._early.clear()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody there any more, or no descriptor left: the next advance tries again
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._epoll.register(connection, select.EPOLLIN)
            stranger = _Stranger(connection=connection, until=time.monotonic() + STRANGER_LIMIT_S)
            self._strangers[connection.fileno()] = stranger
            self._listen_to(connection.fileno(), stranger)

    def _listen_to(self, fd: int, stranger: _Stranger) -> None:
        try:
            data = stranger.connection.recv(PREAMBLE.size - len(stranger.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.data += data
        if data and len(stranger.data) < PREAMBLE.size:
            return
        del self._strangers[fd]
        self._epoll.unregister(fd)
        self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        """Make a hop of a connection whose preamble is complete, or close it."""
        said = bytes(stranger.data)
        epoch = PREAMBLE.unpack(said)[1] if len(said) == PREAMBLE.size else -1
        if epoch < 0 or not hmac.compare_digest(said, preamble(epoch, self._hop_key)):
            self._refuse(stranger, "it does not know the key of this run")
        elif epoch in self._expected:
            self._expected.pop(epoch).take(stranger.connection)
        elif epoch > self._newest and epoch not in self._early:
            stranger.until = time.monotonic() + EARLY_LIMIT_S
            self._early[epoch] = stranger
        else:
            self._refuse(stranger, f"nobody here expects epoch {epoch}")

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        stranger.connection.close()
        self.refused += 1
        log.warning("a connection for a TCP hop is refused: %s", reason)
