"""A worker for the tests of worker.py: does what the reasons of `Shutdown`-like orders say."""

import asyncio
import time

from laminar.errors import UserError
from laminar.protocol import messages
from laminar.workers.worker import run_worker


async def serve(session):
    """Fail, hang or go on, as told by the step number of `PublishWeights`."""
    if session.config.name == "slow":  # loads for as long as the test lasts, deaf to messages
        await session.progress("loading")
        await asyncio.Event().wait()
    await session.ready("obedient")
    async for message in session.messages():
        order = message.policy_version
        if order == 1:
            raise UserError("model.path: no such folder")
        if order == 2:
            raise ZeroDivisionError("a bug")
        if order == 3:  # foreign code that never returns
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
        await session.send(messages.WeightsPublished(policy_version=order, publish_stall_s=0.0, nbytes=0))


if __name__ == "__main__":
    run_worker("trainer", serve)
