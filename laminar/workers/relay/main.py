"""A relay: `mpirun -n N ... python -m laminar.workers.relay.main --connect RUN_DIR`, or alone with `--index I`.

Keeps the newest weight versions in its host's shared memory and carries them down the chain. It never touches a GPU and
imports no torch. Invariant: it takes part only with a store that is sound and has room, and never outlives the mpirun
that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
from dataclasses import replace
from pathlib import Path

from laminar.config.store_room import check_store_room
from laminar.errors import RunFailed, UserError
from laminar.protocol.messages import BroadcastEnded, Carry, RelayJoined
from laminar.weights.store import WeightStore
from laminar.workers.own_address import own_address
from laminar.workers.relay.carrier import Carrier
from laminar.workers.relay.carrier_session import CarrierSession
from laminar.workers.relay.hop_opener import World
from laminar.workers.relay.tcp_door import TcpDoor
from laminar.workers.worker import WorkerSession, run_worker

RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"
LOCAL_SIZE_VARIABLE = "OMPI_COMM_WORLD_LOCAL_SIZE"
JOIN_LIMIT_S = 60.0  # mpirun starts a world in 2 to 3 s, now and then in 12

log = logging.getLogger("laminar.relay")


async def serve(session: WorkerSession, *, connect: Path, mpirun: int | None) -> None:
    """Carry weight versions from relay to relay (with mpirun one per host, or one alone)."""
    config = session.config.relay
    store = WeightStore(session.welcome.run_id, session.welcome.store)
    for gone in store.recover():
        log.warning("removed what an earlier relay had left: %s", gone)
    check_store_room(store.directory, session.welcome.version_bytes, config.keep_versions, config.keep_mib)
    host = own_address(connect)
    door = TcpDoor(host, session.welcome.hop_key)
    with_mpi = mpirun is not None and config.transport == "auto"
    carrying = CarrierSession(
        session, store, world_factory=_join_world if with_mpi else None, door=door, own_core=_has_own_core()
    )
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(carrying.report_forever(), name="reports")]
            if mpirun is not None:
                tasks.append(group.create_task(_watch_mpirun(mpirun), name="watch mpirun"))
            await session.progress("waiting for the MPI world" if with_mpi else "joining without MPI")
            world = await _joined(carrying.carrier)
            joined = RelayJoined(
                versions=tuple(store.versions()),
                address=door.address(host),
                world="" if world is None else world.name,
                world_rank=-1 if world is None else world.rank,
                library="" if world is None else world.library,
            )
            session.on_rejoin = lambda: ([replace(joined, versions=tuple(store.versions()))], [])
            await session.send(joined)
            place = "without MPI" if world is None else f"{world.rank} of {world.size}, {world.library}"
            await session.ready(f"relay {place}, at {joined.address}, store {store.directory}")
            async for message in session.messages():
                if not isinstance(message, Carry | BroadcastEnded):
                    raise RuntimeError(f"a relay has no use for {type(message).__name__}")
                carrying.take(message)
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the others follow from it
    finally:
        carrying.carrier.close()


def _has_own_core() -> bool:
    """Whether there are as many cores as relays that mpirun has started on this host."""
    return len(os.sched_getaffinity(0)) >= int(os.environ.get(LOCAL_SIZE_VARIABLE, 1))


def _join_world() -> World:
    from laminar.workers.relay.mpi_hop import MpiWorld

    return MpiWorld()


async def _joined(carrier: Carrier) -> World | None:
    """The world, as soon as all relays are in it.

    Raises:
        UserError: there is no MPI library, or not all relays came within JOIN_LIMIT_S.
    """
    try:
        async with asyncio.timeout(JOIN_LIMIT_S):
            return await asyncio.wrap_future(carrier.world)
    except TimeoutError:
        raise UserError(
            f"the MPI world is not complete after {JOIN_LIMIT_S:.0f} s: a relay did not start; see the other relays' logs"
        ) from None


async def _watch_mpirun(parent: int) -> None:
    """Return never; raise RunFailed when the process that started this relay (mpirun, or its daemon) is gone.

    Open MPI itself would end an orphaned relay only when it next calls MPI. `parent` was the parent when this process
    began: asked only now, it would already be another one if mpirun has ended meanwhile.
    """
    ended = RunFailed("mpirun, or its daemon on this host, has ended")
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        raise ended from None
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if gone.done() else gone.set_result(None))
    try:
        if os.getppid() == parent:
            await gone
        raise ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def main() -> None:
    """Run one relay; its index is its rank, which mpirun has put into the environment, or `--index`."""
    parent = os.getppid()
    rank = os.environ.get(RANK_VARIABLE)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--connect", type=Path, default=Path())
    connect = parser.parse_known_args()[0].connect
    here = functools.partial(serve, connect=connect, mpirun=None if rank is None else parent)
    run_worker("relay", functools.update_wrapper(here, serve), index=None if rank is None else int(rank))


if __name__ == "__main__":
    main()
