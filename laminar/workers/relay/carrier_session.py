"""A carrier's line to the controller: its reports, and how far it is, go out from the worker's loop.

Progress is sent from the loop and not from the carrier's thread, so that one that hangs in foreign code is told apart by
counts that stand still.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from laminar.protocol.messages import BroadcastEnded, Carry
from laminar.weights.store import WeightStore
from laminar.workers.relay.carrier import Carrier, Event
from laminar.workers.relay.hop_opener import World
from laminar.workers.relay.tcp_door import TcpDoor
from laminar.workers.worker import WorkerSession

PROGRESS_INTERVAL_S = 0.25

log = logging.getLogger("laminar.relay")


class CarrierSession:
    """Starts a carrier for this worker; `report_forever` must run as long as it is used."""

    def __init__(
        self,
        session: WorkerSession,
        store: WeightStore,
        *,
        world_factory: Callable[[], World] | None = None,
        door: TcpDoor | None = None,
        own_core: bool = False,
        make_room: Callable[[], object] | None = None,
    ) -> None:
        """`make_room`: called in a thread when a broadcast is over; the carrier's own if not given."""
        config = session.config.relay
        loop = asyncio.get_running_loop()
        self._session = session
        self._events: asyncio.Queue[Event] = asyncio.Queue()

        def report(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self.carrier = Carrier(
            store,
            hop_key=session.welcome.hop_key,
            keep=config.keep_versions,
            keep_bytes=None if config.keep_mib is None else config.keep_mib << 20,
            world_factory=world_factory,
            door=door,
            own_core=own_core,
            report=report,
        )

        self._make_room = make_room or self.carrier.make_room
        self._room_due = asyncio.Event()

    def take(self, message: Carry | BroadcastEnded) -> None:
        """Obey the controller."""
        if isinstance(message, Carry):
            self.carrier.order(message)
        else:
            self.make_room()

    def make_room(self) -> None:
        """Have memory ready for the next version, soon."""
        self._room_due.set()

    async def report_forever(self) -> None:
        """Send what the carrier reports, and its progress a few times a second while a transfer is open.

        Raises:
            Exception: what ended the carrier's thread.
        """
        ended = asyncio.wrap_future(self.carrier.ended)
        events = asyncio.create_task(self._send_events(), name="reports of the carrier")
        progress = asyncio.create_task(self._send_progress(), name="progress of the carrier")
        room = asyncio.create_task(self._make_room_forever(), name="memory for the next version")
        try:
            done, _ = await asyncio.wait([ended, events, progress, room], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (events, progress, room):
                task.cancel()

    async def _send_events(self) -> None:
        while True:
            event = await self._events.get()
            log.info("%s", event)
            await self._session.send(event)

    async def _make_room_forever(self) -> None:
        while True:
            await self._room_due.wait()
            self._room_due.clear()
            await asyncio.to_thread(self._make_room)

    async def _send_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            progress = self.carrier.progress
            if progress is not None:
                await self._session.send(progress)
