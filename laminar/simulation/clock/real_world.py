"""What a loop in virtual time refuses: whatever would wait for something outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from laminar.simulation.clock.virtual_time_errors import RealWorldRefused


class NoRealWorld:
    """Mixin for an event loop: its methods for threads, sockets, processes and signals raise RealWorldRefused."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: NoRealWorld, *args: object, **kwargs: object) -> NoReturn:
        raise RealWorldRefused(
            f"{name}: virtual time cannot wait for real threads, sockets, processes or signals; "
            "under simulation, give this code a stand-in that lives in the loop"
        )

    return refuse


for _name in (
    *("run_in_executor", "getaddrinfo", "getnameinfo", "start_tls", "sendfile"),
    *("create_connection", "create_server", "create_unix_connection", "create_unix_server"),
    *("create_datagram_endpoint", "connect_accepted_socket", "connect_read_pipe", "connect_write_pipe"),
    *("subprocess_shell", "subprocess_exec", "add_signal_handler", "remove_signal_handler"),
    *("add_reader", "remove_reader", "add_writer", "remove_writer"),
    *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto"),
    *("sock_connect", "sock_accept", "sock_sendfile"),
):
    setattr(NoRealWorld, _name, _refusal(_name))
