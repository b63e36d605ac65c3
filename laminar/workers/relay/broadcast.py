"""One broadcast as a job for the MPI thread: find the neighbours in the chain, drive the transfer, keep the limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from laminar.protocol.messages import Broadcast, WeightsStored
from laminar.weights.store import WeightStore
from laminar.workers.relay.chain import ChainTransfer, TransferError
from laminar.workers.relay.transport import Hop

# MPI moves data only while it is called. A few quick calls, then naps: 1 % CPU while a neighbour is slow, and wake-ups
# that cost less than a chunk.
_QUICK_TRIES = 20
_NAP_S = 50e-6


class World(Protocol):
    """What is needed of `MpiWorld`."""

    rank: int

    def hop(self, rank: int, epoch: int) -> Hop:
        """The way to a neighbour for one broadcast."""
        ...


def carry_version(
    order: Broadcast,
    world: World,
    *,
    store: WeightStore,
    keep: int,
    stored: Callable[[WeightsStored], None],
) -> None:
    """Do this relay's part of a broadcast; blocks until everything is received and forwarded.

    Args:
        order: what the controller asked for.
        world: gives the ways to the neighbours.
        store: this relay's weight store.
        keep: versions to retain afterwards.
        stored: called once: as soon as the version is in the store; at the head, when all of it is forwarded.

    Raises:
        TransferError, HopError, UserError, OSError: this relay's part cannot be completed; one message for a person. If
            `stored` was called before, the version is here all the same and only the forwarding failed.
    """
    began = time.monotonic()
    if world.rank not in order.chain:
        raise TransferError(f"relay {world.rank} is not in the chain {order.chain}")
    place = order.chain.index(world.rank)
    head, tail = place == 0, place == len(order.chain) - 1
    transfer = ChainTransfer(
        store=store,
        policy_version=order.policy_version,
        epoch=order.epoch,
        chunk_bytes=order.chunk_bytes,
        upstream=None if head else world.hop(order.chain[place - 1], order.epoch),
        downstream=None if tail else world.hop(order.chain[place + 1], order.epoch),
    )
    try:
        _drive(transfer, began + order.deadline_s, order, lambda: stored(_report(transfer, began)), head=head)
    finally:
        transfer.close()
    store.retain(keep)
    if not head and transfer.layout is not None:
        store.prepare(transfer.layout)  # the next version will find its memory in place


def _drive(
    transfer: ChainTransfer, deadline: float, order: Broadcast, stored: Callable[[], None], *, head: bool
) -> None:
    reported = False
    idle = 0
    while not transfer.done:
        idle = 0 if transfer.advance() else idle + 1
        if transfer.stored and not head and not reported:
            stored()
            reported = True
        if time.monotonic() > deadline:
            raise TransferError(
                f"version {order.policy_version} not carried within {order.deadline_s:g} s: {transfer.waiting_for()}"
            )
        if idle > _QUICK_TRIES:
            time.sleep(_NAP_S)
    if not reported:
        stored()


def _report(transfer: ChainTransfer, began: float) -> WeightsStored:
    return WeightsStored(
        policy_version=transfer.policy_version,
        seconds=time.monotonic() - began,
        nbytes=transfer.nbytes,
        chunks=len(transfer.spans),
    )
