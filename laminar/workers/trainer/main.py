"""One rank of the trainer: `torchrun --nproc-per-node R -m laminar.workers.trainer.main --connect RUN_DIR`.

Invariant: all torch work runs in one thread, in the order of the controller's messages. So the ranks' collectives stay
in step (every rank gets the same messages in the same order), and heartbeats go on while a step takes its time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from transformers.utils.logging import disable_progress_bar

from laminar.protocol.messages import (
    BroadcastEnded,
    Carry,
    CheckpointLoaded,
    LoadCheckpoint,
    PublishWeights,
    SaveCheckpoint,
    StepTrained,
    TrainStep,
    WeightsPublished,
)
from laminar.weights.store import WeightStore
from laminar.workers.relay.carrier_session import CarrierSession
from laminar.workers.trainer.actor import Actor
from laminar.workers.trainer.checkpoint import load_checkpoint, save_checkpoint
from laminar.workers.trainer.order_book import OrderBook
from laminar.workers.trainer.publish import Publisher
from laminar.workers.trainer.ranks import Ranks
from laminar.workers.worker import WorkerSession, run_worker

Result = TypeVar("Result")


async def serve(session: WorkerSession) -> None:
    """Train, publish and write checkpoints as one rank of the trainer."""
    disable_progress_bar()  # there is no terminal, only a log
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
    loop = asyncio.get_running_loop()

    async def in_thread(work: Callable[[], Result]) -> Result:
        return await loop.run_in_executor(executor, work)

    config, welcome = session.config, session.welcome
    await session.progress(f"waiting for {config.trainer.ranks} trainer rank(s) to join")
    ranks = await in_thread(lambda: Ranks(config))
    await session.progress(f"loading the model {config.model.path}")
    actor = await in_thread(lambda: Actor(config, ranks))
    store = WeightStore(welcome.run_id, welcome.store) if ranks.rank == 0 else None
    publisher = await in_thread(lambda: Publisher(actor, store, keep=config.relay.keep_versions))
    await session.ready(actor.describe())

    orders: OrderBook = OrderBook(session)

    async def publish(order: int, policy_version: int) -> None:
        published = await in_thread(lambda: publisher.publish(policy_version))
        if ranks.rank == 0:
            await orders.answer(
                order,
                WeightsPublished(
                    policy_version=policy_version, publish_stall_s=published.seconds, nbytes=published.nbytes
                ),
            )

    async def train(message: TrainStep) -> None:
        started = time.perf_counter()
        metrics = await in_thread(lambda: actor.train_step(message))
        seconds = time.perf_counter() - started
        trained = StepTrained(step=message.step, part=message.part, seconds=seconds, metrics=metrics)
        await orders.answer(message.order, trained)
        if message.publish_version is not None:
            await publish(message.order, message.publish_version)

    async def save(message: SaveCheckpoint) -> None:
        await orders.answer(message.order, await in_thread(lambda: save_checkpoint(actor, message)))

    async def load(message: LoadCheckpoint) -> None:
        started = time.perf_counter()
        await in_thread(lambda: load_checkpoint(actor, message.path))
        loaded = CheckpointLoaded(step=message.step, seconds=time.perf_counter() - started)
        await orders.answer(message.order, loaded)

    async def work_off() -> None:
        """One after another, until there is None. Waits for the controller to order something."""
        while (message := await orders.get()) is not None:
            match message:
                case TrainStep():
                    await train(message)
                case PublishWeights():
                    await publish(message.order, message.policy_version)
                case SaveCheckpoint():
                    await save(message)
                case LoadCheckpoint():
                    await load(message)
                case _:
                    raise RuntimeError(f"the trainer has no use for {type(message).__name__}")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(work_off(), name="orders")
            sending = None if store is None else CarrierSession(session, store, make_room=publisher.prepare)
            if sending is not None:
                sending.make_room()
                reporting = group.create_task(sending.report_forever(), name="reports of broadcasts")
            async for message in session.messages():
                if isinstance(message, Carry | BroadcastEnded) and sending is not None:  # goes on beside the training
                    sending.take(message)
                else:
                    await orders.take(message)
            orders.end()
            if sending is not None:
                reporting.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    await in_thread(ranks.close)


if __name__ == "__main__":
    run_worker("trainer", serve, index=int(os.environ.get("RANK", "0")))
