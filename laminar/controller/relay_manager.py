"""The relay tier as the controller sees it: which relay holds which versions, and the broadcast under way.

Only the newest version matters: one that was superseded before its broadcast began is never sent. Nobody waits for a
broadcast; when one fails, training and generation go on with the weights that they have. A relay that comes back empty is
given the newest version by one that holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from laminar.config.schema import ExperimentConfig
from laminar.controller.waiting import discard, within
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, WeightsBroadcast
from laminar.protocol.messages import Broadcast, BroadcastFailed, WeightsStored

ANSWER_MARGIN_S = 5.0
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0  # after a failed broadcast; doubles
MASTER = 0  # rank of the master relay: the one on the trainer's host


@dataclass(kw_only=True, slots=True)
class Relay:
    """One relay."""

    rank: int
    keep: int  # versions that it keeps
    host: str = ""
    versions: list[int] = field(default_factory=list)  # that it holds complete, oldest first
    changes: int = 0  # versions that it has stored so far: tells news of it from what is older

    @property
    def stored_version(self) -> int:
        """Newest version that it holds; -1 if none."""
        return self.versions[-1] if self.versions else -1

    def holds(self, version: int) -> bool:
        """Whether a rollout can still pull this version."""
        return version in self.versions

    def store(self, version: int) -> None:
        """It holds one more; the oldest beyond what it keeps are gone."""
        self.changes += 1
        if version not in self.versions:
            self.versions = sorted([*self.versions, version])[-self.keep :]

    def forget(self, version: int) -> None:
        """It turned out not to hold this version."""
        self.versions = [held for held in self.versions if held != version]


def store_name(rank: int) -> str:
    """Name of a relay's weight store in shared memory."""
    return f"relay-{rank}"


class RelayManager:
    """Owns the chain: starts broadcasts one after another, and tells who listens when a relay has a version."""

    def __init__(self, registry: WorkerRegistry, events: EventBus, config: ExperimentConfig) -> None:
        self.relays = [Relay(rank=rank, keep=config.relay.keep_versions) for rank in range(config.relay.count)]
        self.published_version = -1
        self.broadcasting: int | None = None
        self.epoch = 0
        self.on_change: Callable[[Relay], None] = lambda relay: None  # it holds other versions, has come or gone
        self._registry = registry
        self._events = events
        self._chunk_bytes = int(config.relay.chunk_mib * (1 << 20))
        self._timeout_s = config.relay.broadcast_timeout_s
        self._due = asyncio.Event()
        self._retry_s = FIRST_RETRY_S
        self._answers: dict[int, asyncio.Future[WeightsStored | BroadcastFailed]] = {}  # by rank
        registry.handle(WeightsStored, self._on_answer)
        registry.handle(BroadcastFailed, self._on_answer)
        registry.on_ready("relay", self._on_ready)

    def present(self) -> list[Relay]:
        """Relays that are there, by rank."""
        workers = self._registry.workers
        return [r for r in self.relays if (worker := workers.get(f"relay-{r.rank}")) is not None and worker.ready]

    def chain(self) -> tuple[int, ...]:
        """Ranks in the order in which the weights travel, the master relay first."""
        return tuple(relay.rank for relay in self.present())

    @property
    def must_publish_again(self) -> bool:
        """The master relay is there, but no relay holds the newest version any more."""
        version = self.published_version
        return (
            version >= 0
            and not any(relay.holds(version) for relay in self.relays)
            and self.relays[MASTER] in self.present()
        )

    def published(self, version: int) -> None:
        """The trainer has put a version into the master relay's store."""
        self.published_version = version
        if self.relays[MASTER] in self.present():
            self.relays[MASTER].store(version)
        self._due.set()
        self.on_change(self.relays[MASTER])

    async def broadcast_forever(self) -> None:
        """Carry each published version to all relays, and to those that come later.

        Waits for `published` and for relays that get ready; unblocks the rollout drivers by `on_change`.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            version = self.published_version
            present = self.present()
            holders = [relay for relay in present if relay.holds(version)]
            missing = [relay for relay in present if not relay.holds(version)]
            if version >= 0 and holders and missing:
                await self._broadcast(version, (holders[0], *missing))

    async def _broadcast(self, version: int, chain: tuple[Relay, ...]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.epoch += 1
        self.broadcasting = version
        message = Broadcast(
            policy_version=version,
            chain=tuple(relay.rank for relay in chain),
            chunk_bytes=self._chunk_bytes,
            epoch=self.epoch,
            deadline_s=self._timeout_s,
        )
        outcomes = await asyncio.gather(*(self._one(relay, message) for relay in chain))
        self.broadcasting = None
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        nbytes = max((outcome.nbytes for outcome in outcomes if isinstance(outcome, WeightsStored)), default=0)
        if errors:
            text = f"broadcast of version {version} failed: {'; '.join(errors)}; going on with the weights at hand"
            self._events.emit(Notice(level="warning", text=text))
            loop.call_later(self._retry_s, self._due.set)
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S) if errors else FIRST_RETRY_S
        self._events.emit(
            WeightsBroadcast(
                policy_version=version, seconds=loop.time() - started, nbytes=nbytes, error="; ".join(errors)
            )
        )

    async def _one(self, relay: Relay, message: Broadcast) -> WeightsStored | str:
        """One relay's answer, or why there is none."""
        name = f"relay-{relay.rank}"
        answer = self._answers[relay.rank] = asyncio.get_running_loop().create_future()
        try:
            await self._registry.send(name, message)
            # The relay gives up by itself at the deadline; the margin is for its answer.
            outcome = await within(
                message.deadline_s + ANSWER_MARGIN_S, f"{name} to store version {message.policy_version}", answer
            )
        except (RunFailed, WorkerLost) as error:
            return str(error)
        finally:
            del self._answers[relay.rank]
            discard(answer)
        return outcome if isinstance(outcome, WeightsStored) else f"{name}: {outcome.error}"

    def tolerate_losses(self) -> None:
        """A lost relay is left out of the chain instead of ending the run: whoever started it brings it back."""
        self._registry.on_lost("relay", self._on_lost)

    def _on_ready(self, worker: Worker) -> None:
        """It starts with an empty store; the newest version, if there is one already, is brought to it."""
        self.relays[worker.index].host = worker.host
        self._due.set()
        self.on_change(self.relays[worker.index])

    def _on_lost(self, worker: Worker, reason: str) -> None:
        self.relays[worker.index].versions = []
        self._events.emit(
            Notice(level="warning", text=f"{worker.name} was lost: {reason}; the chain goes on without it")
        )
        answer = self._answers.get(worker.index)
        if answer is not None and not answer.done():
            answer.set_exception(WorkerLost(f"{worker.name} was lost: {reason}"))
        self.on_change(self.relays[worker.index])

    def _on_answer(self, worker: Worker, message: WeightsStored | BroadcastFailed) -> None:
        """A relay may send two answers for one version: it has stored it, and then could not forward it."""
        if isinstance(message, WeightsStored) and not self.relays[worker.index].holds(message.policy_version):
            self.relays[worker.index].store(message.policy_version)
            self.on_change(self.relays[worker.index])
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
        here = [relay for relay in self.relays if relay.host == rollout.host]
        if not here:
            raise RunFailed(
                f"no relay runs on {rollout.host}, where {rollout.name} is: start one relay per rollout host "
                "(relay.count, scripts/launch/relays.sh)"
            )
        return here[rollout.index % len(here)]
