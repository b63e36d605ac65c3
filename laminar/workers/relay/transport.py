"""One hop of the chain, seen from one of its ends: bytes go to, or come from, one neighbour, in order.

The chain (`chain.py`) knows no more of its neighbours than this. `MpiHop` stands for relays of one mpirun world; a relay
that is not of the world will be reached by plain TCP behind the same two protocols, chosen per hop by the controller.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8] | NDArray[np.uint64]  # contiguous; stays as it is until the request is complete


class HopError(Exception):
    """The neighbour, or the way to it, is lost."""


class HopRequest(Protocol):
    """One send or receive under way."""

    def test(self) -> bool:
        """Whether it is complete; drives the transfer on. Raises HopError if the neighbour is lost."""
        ...


class Hop(Protocol):
    """The way to or from one neighbour.

    The n-th receive takes what the neighbour's n-th send sent; both sides know the sizes. Nothing here blocks.
    """

    peer: str  # for messages to a person, e.g. "relay 2"

    def send(self, data: Bytes) -> HopRequest:
        """Start to send. Raises HopError if the neighbour is lost."""
        ...

    def receive(self, into: Bytes) -> HopRequest:
        """Post a receive. Raises HopError if the neighbour is lost."""
        ...

    def abandon(self) -> None:
        """Give up whatever is under way; the memory involved is kept until the transport no longer touches it."""
        ...
