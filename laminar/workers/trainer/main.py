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

from laminar.errors import DamagedCheckpoint
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


class TorchThread:
    """The one thread of all torch work."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns, after all that was given before it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class Orders:
    """Obeys the controller's orders, one after another, and answers them."""

    def __init__(self, book: OrderBook, thread: TorchThread, ranks: Ranks, actor: Actor, publisher: Publisher) -> None:
        self._book = book
        self._thread = thread
        self._ranks = ranks
        self._actor = actor
        self._publisher = publisher

    async def work_off(self) -> None:
        """One after another, until there is None. Waits for the controller to order something."""
        while (message := await self._book.get()) is not None:
            match message:
                case TrainStep():
                    await self._train(message)
                case PublishWeights():
                    await self._publish(message.order, message.policy_version)
                case SaveCheckpoint():
                    await self._save(message)
                case LoadCheckpoint():
                    await self._load(message)
                case _:
                    raise RuntimeError(f"the trainer has no use for {type(message).__name__}")

    async def _train(self, message: TrainStep) -> None:
        started = time.perf_counter()
        metrics = await self._thread.run(lambda: self._actor.train_step(message))
        seconds = time.perf_counter() - started
        trained = StepTrained(step=message.step, part=message.part, seconds=seconds, metrics=metrics)
        await self._book.answer(message.order, trained)
        if message.publish_version is not None:
            await self._publish(message.order, message.publish_version)

    async def _publish(self, order: int, policy_version: int) -> None:
        published = await self._thread.run(lambda: self._publisher.publish(policy_version))
        if self._ranks.rank == 0:
            await self._book.answer(
                order,
                WeightsPublished(
                    policy_version=policy_version, publish_stall_s=published.seconds, nbytes=published.nbytes
                ),
            )

    async def _save(self, message: SaveCheckpoint) -> None:
        await self._book.answer(message.order, await self._thread.run(lambda: save_checkpoint(self._actor, message)))

    async def _load(self, message: LoadCheckpoint) -> None:
        started = time.perf_counter()
        damage = ""
        try:
            await self._thread.run(lambda: load_checkpoint(self._actor, message.path))
        except DamagedCheckpoint as error:
            damage = str(error)
        loaded = CheckpointLoaded(step=message.step, seconds=time.perf_counter() - started, damage=damage)
        await self._book.answer(message.order, loaded)


async def serve(session: WorkerSession) -> None:
    """Train, publish and write checkpoints as one rank of the trainer."""
    disable_progress_bar()  # there is no terminal, only a log
    thread = TorchThread()
    config, welcome = session.config, session.welcome
    await session.progress(f"waiting for {config.trainer.ranks} trainer rank(s) to join")
    ranks = await thread.run(lambda: Ranks(config))
    await session.progress(f"loading the model {config.model.path}")
    actor = await thread.run(lambda: Actor(config, ranks))
    store = WeightStore(welcome.run_id, welcome.store) if ranks.rank == 0 else None
    publisher = await thread.run(lambda: Publisher(actor, store, keep=config.relay.keep_versions))
    await session.ready(actor.describe())

    book = OrderBook(session)
    orders = Orders(book, thread, ranks, actor, publisher)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(orders.work_off(), name="orders")
            sending = None if store is None else CarrierSession(session, store, make_room=publisher.prepare)
            if sending is not None:
                sending.make_room()
                reporting = group.create_task(sending.report_forever(), name="reports of broadcasts")
            async for message in session.messages():
                if isinstance(message, Carry | BroadcastEnded) and sending is not None:  # goes on beside the training
                    sending.take(message)
                else:
                    await book.take(message)
            book.end()
            if sending is not None:
                reporting.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    await thread.run(ranks.close)


if __name__ == "__main__":
    run_worker("trainer", serve, index=int(os.environ.get("RANK", "0")))
