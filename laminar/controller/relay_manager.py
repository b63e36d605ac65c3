"""The relay tier as the controller sees it: which relay holds which version, and the broadcast under way.

Only the newest version matters: one that was superseded before its broadcast began is never sent. Nobody waits for a
broadcast; when one fails, training and generation go on with the weights that they have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from laminar.config.schema import ExperimentConfig
from laminar.controller.waiting import within
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, WeightsBroadcast
from laminar.protocol.messages import Broadcast, BroadcastFailed, WeightsStored

ANSWER_MARGIN_S = 5.0
MASTER = 0  # rank of the master relay: the one on the trainer's host


@dataclass(kw_only=True, slots=True)
class Relay:
    """One relay."""

    rank: int
    stored_version: int = -1  # newest version that it holds complete


def store_name(rank: int) -> str:
    """Name of a relay's weight store in shared memory."""
    return f"relay-{rank}"


class RelayManager:
    """Owns the chain: starts broadcasts one after another, and tells who listens when a relay has a version."""

    def __init__(self, registry: WorkerRegistry, events: EventBus, config: ExperimentConfig) -> None:
        self.relays = [Relay(rank=rank) for rank in range(config.relay.count)]
        self.published_version = -1
        self.broadcasting: int | None = None
        self.epoch = 0
        self.on_stored: Callable[[], None] = lambda: None
        self._registry = registry
        self._events = events
        self._chunk_bytes = int(config.relay.chunk_mib * (1 << 20))
        self._timeout_s = config.relay.broadcast_timeout_s
        self._published = asyncio.Event()
        self._answers: dict[int, asyncio.Future[WeightsStored | BroadcastFailed]] = {}  # by rank
        registry.handle(WeightsStored, self._on_answer)
        registry.handle(BroadcastFailed, self._on_answer)

    def chain(self) -> tuple[int, ...]:
        """Ranks in the order in which the weights travel, the master relay first."""
        return tuple(relay.rank for relay in self.relays)

    def published(self, version: int) -> None:
        """The trainer has put a version into the master relay's store."""
        self.published_version = version
        self.relays[MASTER].stored_version = version
        self._published.set()
        self.on_stored()

    async def broadcast_forever(self) -> None:
        """Carry each published version to all relays.

        Waits for `published`, unblocks the rollout drivers by `on_stored`.
        """
        last = -1
        while True:
            await self._published.wait()
            self._published.clear()
            if self.published_version > last:
                last = self.published_version
                await self._broadcast(last)

    async def _broadcast(self, version: int) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.epoch += 1
        self.broadcasting = version
        message = Broadcast(
            policy_version=version,
            chain=self.chain(),
            chunk_bytes=self._chunk_bytes,
            epoch=self.epoch,
            deadline_s=self._timeout_s,
        )
        outcomes = await asyncio.gather(*(self._one(relay, message) for relay in self.relays))
        self.broadcasting = None
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        nbytes = max((outcome.nbytes for outcome in outcomes if isinstance(outcome, WeightsStored)), default=0)
        if errors:
            text = f"broadcast of version {version} failed: {'; '.join(errors)}; going on with the weights at hand"
            self._events.emit(Notice(level="warning", text=text))
        self._events.emit(
            WeightsBroadcast(
                policy_version=version, seconds=loop.time() - started, nbytes=nbytes, error="; ".join(errors)
            )
        )

    async def _one(self, relay: Relay, message: Broadcast) -> WeightsStored | str:
        """One relay's answer, or why there is none."""
        name = f"relay-{relay.rank}"
        answer = self._answers[relay.rank] = asyncio.get_running_loop().create_future()
        await self._registry.send(name, message)
        try:
            # The relay gives up by itself at the deadline; the margin is for its answer.
            outcome = await within(
                message.deadline_s + ANSWER_MARGIN_S, f"{name} to store version {message.policy_version}", answer
            )
        except WorkerLost:
            raise
        except RunFailed as error:
            return str(error)
        finally:
            del self._answers[relay.rank]
        return outcome if isinstance(outcome, WeightsStored) else f"{name}: {outcome.error}"

    def _on_answer(self, worker: Worker, message: WeightsStored | BroadcastFailed) -> None:
        """A relay may send two answers for one version: it has stored it, and then could not forward it."""
        relay = self.relays[worker.index]
        if isinstance(message, WeightsStored) and message.policy_version > relay.stored_version:
            relay.stored_version = message.policy_version
            self.on_stored()
        waiting = self._answers.get(worker.index)
        if waiting is not None and not waiting.done() and message.policy_version == self.broadcasting:
            waiting.set_result(message)
        elif isinstance(message, BroadcastFailed):
            text = f"{worker.name}, version {message.policy_version}: {message.error}"
            self._events.emit(Notice(level="warning", text=text))

    def relay_for(self, rollout: Worker) -> Relay:
        """The relay on a rollout's host; several on one host share its rollouts evenly.

        Raises:
            RunFailed: no relay lives on that host.
        """
        here = [
            relay
            for relay in self.relays
            if (worker := self._registry.workers.get(f"relay-{relay.rank}")) and worker.host == rollout.host
        ]
        if not here:
            raise RunFailed(
                f"no relay runs on {rollout.host}, where {rollout.name} is: start one relay per rollout host "
                "(relay.count, scripts/launch/relays.sh)"
            )
        return here[rollout.index % len(here)]
