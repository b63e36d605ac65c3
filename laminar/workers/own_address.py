"""Where other hosts reach this one."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

from laminar.errors import UserError
from laminar.protocol.connection import CONNECTION_FILE, Connection


def own_address(connect: Path) -> str:
    """The numeric address of this host on the way to the controller: neighbours reach it there. Nothing is sent.

    Raises:
        UserError: there is no way to the controller.
    """
    path = connect / CONNECTION_FILE if connect.is_dir() else connect
    controller = urlsplit(Connection.read(path).address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            controller.hostname, controller.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"{path}: no way to the controller at {controller.geturl()}: {error}") from error
