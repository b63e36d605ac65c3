"""What the tests of one modelled worker share: a virtual clock, and the controller's end of the network."""

import asyncio
import functools

from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.clock.virtual_time import run_in_virtual_time
from laminar.simulation.workers.weight_stores import WeightStores


def in_virtual_time(scenario):
    """Run a test's coroutine on a virtual clock."""

    @functools.wraps(scenario)
    def test():
        run_in_virtual_time(scenario(), limit_s=1e6)

    del test.__wrapped__  # pytest would see a coroutine
    return test


class Desk:
    """The controller's place, with nothing of the controller: tells workers things and hears what they say, and when."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.network = SimulatedNetwork(through_codec=True, tell_closed=False)
        self.stores = WeightStores()
        self.carriers = {}
        self.said = []  # (seconds, peer, message)

    async def tell(self, worker, message):
        await self.network.controller.send(worker.peer.encode(), message)

    async def welcome(self, *workers):
        await self.welcome_and_hear(*workers)
        self.said.clear()

    async def welcome_and_hear(self, *workers):
        for worker in workers:
            await self.tell(
                worker, messages.Welcome(run_id="r", run_dir="", config="", store="", hop_key=b"", version_bytes=0)
            )
        await self.listen(1)

    async def listen(self, seconds):
        """All messages of this time."""
        heard = []
        end = self.loop.time() + seconds
        while (left := end - self.loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    peer, message = await self.network.controller.receive()
            except TimeoutError:
                break
            heard.append(message)
            self.said.append((self.loop.time(), peer.decode(), message))
        return heard
