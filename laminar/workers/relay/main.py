"""A relay: `mpirun -n N ... python -m laminar.workers.relay.main --connect RUN_DIR`.

Keeps the newest weight versions in its host's shared memory and carries them down the chain. It never touches a GPU and
imports no torch. Invariant: broadcasts are done one after another, in the order in which the controller asked.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys

from laminar.errors import RunFailed, UserError
from laminar.protocol.messages import Broadcast, BroadcastFailed, WeightsStored
from laminar.weights.store import WeightStore
from laminar.workers.relay.broadcast import carry_version
from laminar.workers.relay.chain import TransferError
from laminar.workers.relay.mpi_thread import MpiThread
from laminar.workers.relay.transport import HopError
from laminar.workers.worker import WorkerSession, run_worker

RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"
JOIN_LIMIT_S = 60.0  # mpirun starts a world in 2 to 3 s, now and then in 12

log = logging.getLogger("laminar.relay")


async def serve(session: WorkerSession) -> None:
    """Carry weight versions from relay to relay (start with mpirun, one per host)."""
    await session.progress("waiting for the MPI world")
    mpi = MpiThread()
    world = await mpi.join_world(JOIN_LIMIT_S)
    store = WeightStore(session.welcome.run_id, session.welcome.store)
    orders: asyncio.Queue[Broadcast] = asyncio.Queue()
    replies: asyncio.Queue[WeightsStored | BroadcastFailed] = asyncio.Queue()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_carry_orders(session, mpi, store, orders, replies), name="broadcasts"),
                group.create_task(_send_replies(session, replies), name="replies"),
                group.create_task(_watch_mpirun(), name="watch mpirun"),
            ]
            await session.ready(f"relay {world.rank} of {world.size}, {world.library}, store {store.directory}")
            async for message in session.messages():
                match message:
                    case Broadcast():
                        orders.put_nowait(message)
                    case _:
                        raise RuntimeError(f"a relay has no use for {type(message).__name__}")
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the others follow from it


async def _watch_mpirun() -> None:
    """Return never; raise RunFailed when the process that started this relay (mpirun, or its daemon) is gone.

    Open MPI itself would end an orphaned relay only when it next calls MPI.
    """
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    fd = os.pidfd_open(os.getppid())
    loop.add_reader(fd, lambda: None if gone.done() else gone.set_result(None))
    try:
        await gone
        raise RunFailed("mpirun, or its daemon on this host, has ended")
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def _carry_orders(
    session: WorkerSession,
    mpi: MpiThread,
    store: WeightStore,
    orders: asyncio.Queue[Broadcast],
    replies: asyncio.Queue[WeightsStored | BroadcastFailed],
) -> None:
    """Do broadcasts one after another. Waits for the controller to order one; a transfer has a limit of its own."""
    loop = asyncio.get_running_loop()

    def stored(report: WeightsStored) -> None:
        loop.call_soon_threadsafe(replies.put_nowait, report)

    while True:
        order = await orders.get()
        carry = functools.partial(
            carry_version, order, store=store, keep=session.config.relay.keep_versions, stored=stored
        )
        try:
            await mpi.run(carry)
        except (TransferError, HopError, UserError, OSError) as error:
            log.error("broadcast of version %d: %s", order.policy_version, error)
            replies.put_nowait(BroadcastFailed(policy_version=order.policy_version, error=str(error)))


async def _send_replies(session: WorkerSession, replies: asyncio.Queue[WeightsStored | BroadcastFailed]) -> None:
    """Tell the controller how broadcasts went, in the order in which it happened."""
    while True:
        reply = await replies.get()
        log.info("%s", reply)
        await session.send(reply)


def main() -> None:
    """Run one relay; its index is its rank, which mpirun has put into the environment."""
    rank = os.environ.get(RANK_VARIABLE)
    if rank is None:
        print("start relays with mpirun, which gives each its rank (see scripts/)", file=sys.stderr)
        raise SystemExit(2)
    run_worker("relay", serve, index=int(rank))


if __name__ == "__main__":
    main()
