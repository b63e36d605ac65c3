"""The relay tier as the controller sees it: which relay holds which versions, and the broadcast under way.

Only the newest version matters: one that was superseded before its broadcast began is never sent. Nobody waits for a
broadcast; when one fails, training and generation go on with the weights that they have. A relay that comes, late or
again, is given the newest version by one that holds it. The trainer is the source of last resort: it sends from the file
that it has written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from statistics import median
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.controller.chunk_size import MIB, best_chunk_bytes
from laminar.controller.journal.restore import Restored
from laminar.controller.relay import FOLDER, MASTER, Relay
from laminar.controller.relay_chain import Node, Numbers, Orders, RelayChain
from laminar.controller.worker_registry import Worker, WorkerRegistry
from laminar.errors import RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, WeightsBroadcast
from laminar.protocol.messages import (
    BroadcastEnded,
    Carry,
    CarryFailed,
    CarryProgress,
    HopFailed,
    RelayJoined,
    WeightsStored,
)

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0  # after a broadcast that left relays out; doubles
LOOKS_PER_LIMIT = 4  # at a broadcast under way, within relay.stall_limit_s
TRAINER = "trainer-0"  # the rank that publishes


class RelayManager:
    """Owns the chain: starts broadcasts one after another, and tells who listens when a relay has a version."""

    def __init__(
        self, registry: WorkerRegistry, events: EventBus, config: ExperimentConfig, *, restored: Restored | None = None
    ) -> None:
        """`restored`: where an earlier controller of this run has left off."""
        self.relays = {
            rank: Relay(rank=rank, keep=config.relay.keep_versions) for rank in range(config.relay.count)
        }  # by rank; more may come
        self.published_version = -1 if restored is None else restored.policy_version
        self.chain: RelayChain | None = None  # of the broadcast under way
        self.broadcasts = 0
        self.on_change: Callable[[Relay], None] = lambda relay: None  # it holds other versions, has come or gone
        self._registry = registry
        self._events = events
        self._config = config.relay
        self._numbers = Numbers(life=0 if restored is None else restored.life)
        for name, host in ({} if restored is None else restored.hosts).items():
            if name.startswith("relay-"):
                rank = int(name.removeprefix("relay-"))
                relay = self.relays.setdefault(rank, Relay(rank=rank, keep=config.relay.keep_versions))
                relay.host = host
        self._due = asyncio.Event()  # there may be something to broadcast
        self._stirred = asyncio.Event()  # something happened to the broadcast under way
        self._orders: Orders = []  # to be sent
        self._retry_s = FIRST_RETRY_S
        self._trainer_version = -1  # that the trainer can send itself
        self._nbytes = 0  # of a version
        self._folder: Relay | None = None
        for message_type, handler in (
            (RelayJoined, self._on_joined),
            (WeightsStored, self._on_stored),
            (CarryProgress, self._on_progress),
            (HopFailed, self._on_hop_failed),
            (CarryFailed, self._on_carry_failed),
        ):
            registry.handle(message_type, handler)
        registry.on_ready("relay", self._on_ready)

    # ------------------------------------------------------------ who is there

    def present(self) -> list[Relay]:
        """Relays that are there, by rank."""
        workers = self._registry.workers
        there = (r for r in self.relays.values() if (worker := workers.get(r.name)) is not None and worker.ready)
        return sorted(there, key=lambda relay: relay.rank)

    def order_of_chain(self) -> tuple[str, ...]:
        """Names in the order in which the weights travel, or would."""
        if self.chain is not None:
            return self.chain.members
        return tuple(relay.name for relay in self.present())

    @property
    def must_publish_again(self) -> bool:
        """Relays are there, but neither they nor the trainer hold the newest version any more."""
        version = self.published_version
        present = self.present()
        return (
            0 <= version != self._trainer_version
            and bool(present)
            and not any(relay.holds(version) for relay in present)
        )

    def serve_folder(self) -> None:
        """There is no trainer and no relay: rollouts serve the weights of model.path, as version 0."""
        self._folder = Relay(rank=FOLDER, keep=1, versions=[0])
        self.relays.clear()
        self.published_version = 0

    def relay_for(self, rollout: Worker) -> Relay:
        """The relay on a rollout's host; several on one host share its rollouts evenly.

        Raises:
            RunFailed: no relay lives on that host.
        """
        if self._folder is not None:
            return self._folder
        here = [relay for relay in self.relays.values() if relay.host == rollout.host]
        if not here:
            raise RunFailed(
                f"no relay runs on {rollout.host}, where {rollout.name} is: start one relay per rollout host "
                "(relay.count, scripts/launch/relays.sh)"
            )
        return here[rollout.index % len(here)]

    # ------------------------------------------------------------ broadcasts

    def published(self, version: int) -> None:
        """The trainer has put a version into the master relay's store, or its own where no relay shares its host."""
        self.published_version = self._trainer_version = version
        master = self.relays[MASTER]
        trainer = self._registry.workers.get(TRAINER)
        if trainer is not None and trainer.host == master.host:
            master.store(version)
            self.on_change(master)
        self._due.set()

    def trainer_holds(self, version: int) -> None:
        """The trainer has come back to a new controller, with this version, the newest, in the file that it has written."""
        self._trainer_version = version
        self._due.set()

    def anybody_holds(self, version: int) -> bool:
        """Whether a relay is known to hold this version."""
        return any(relay.holds(version) for relay in self.relays.values())

    def knows_host(self, host: str) -> bool:
        """Whether a relay lives there."""
        return any(relay.host == host for relay in self.relays.values())

    def trainer_lost(self) -> None:
        """The trainer can send nothing any more."""
        self._trainer_version = -1
        if self.chain is not None:
            self._order(self.chain.lost(self._now(), TRAINER, "the trainer was lost"))
        self._due.set()

    async def broadcast_forever(self) -> None:
        """Carry each published version to all relays, and to those that come later.

        Waits for `published` and for relays that get ready; unblocks the rollout drivers by `on_change`.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            version = self.published_version
            present = self.present()
            holders = [self._node(relay) for relay in present if relay.holds(version)]
            missing = [self._node(relay) for relay in present if not relay.holds(version)]
            if TRAINER in self._registry.workers and version == self._trainer_version:
                holders.append(Node(name=TRAINER))
            if version >= 0 and holders and missing:
                await self._broadcast(version, holders, missing)

    async def _broadcast(self, version: int, holders: list[Node], missing: list[Node]) -> None:
        started = self._now()
        self.broadcasts += 1
        chain = self.chain = RelayChain(
            policy_version=version,
            numbers=self._numbers,
            chunk_bytes=self._chunk_bytes(1 + len(missing)),
            encoding=self._config.encoding,
            deadline=started + self._config.broadcast_timeout_s,
            stall_limit_s=self._config.stall_limit_s,
        )
        self._order(chain.start(started, holders, missing))
        try:
            await self._until_done(chain)
        finally:
            self.chain = None
            self._orders.clear()  # what was not sent is about this chain
        self._report(chain, self._now() - started)
        for name in (TRAINER, *(relay.name for relay in self.present())):
            with contextlib.suppress(WorkerLost):  # the registry tells of the loss
                await self._registry.send(name, BroadcastEnded(policy_version=version))

    async def _until_done(self, chain: RelayChain) -> None:
        """Send the chain's orders, and look after it, until all have the version or the time is up."""
        interval = self._config.stall_limit_s / LOOKS_PER_LIMIT
        while True:
            while self._orders:
                name, order = self._orders.pop(0)
                await self._send(chain, name, order)
            if chain.done:
                return
            if self._now() >= chain.deadline:
                for name in chain.waiting_for():
                    chain.left_out[name] = (
                        f"not within {self._config.broadcast_timeout_s:g} s (relay.broadcast_timeout_s)"
                    )
                return
            self._stirred.clear()
            try:
                async with asyncio.timeout_at(min(self._now() + interval, chain.deadline)):
                    await self._stirred.wait()
            except TimeoutError:
                self._order(chain.look(self._now()))

    async def _send(self, chain: RelayChain, name: str, order: Carry) -> None:
        try:
            await self._registry.send(name, order)
        except WorkerLost as error:  # the registry tells of the loss too; this may be earlier
            self._order(chain.lost(self._now(), name, str(error)))

    def _report(self, chain: RelayChain, seconds: float) -> None:
        complete = not chain.left_out and not chain.no_source
        errors = [f"{name}: {reason}" for name, reason in chain.left_out.items()]
        if chain.no_source:
            errors.append("nobody holds it any more")
        if errors:
            text = f"version {chain.policy_version} is not everywhere: {'; '.join(errors)}; going on without"
            self._events.emit(Notice(level="warning", text=text))
            asyncio.get_running_loop().call_later(self._retry_s, self._due.set)
        self._retry_s = FIRST_RETRY_S if complete else min(2 * self._retry_s, LONGEST_RETRY_S)
        answers = [answer for answer in chain.answers.values() if answer.received_bytes]
        self._nbytes = max((answer.nbytes for answer in answers), default=self._nbytes)
        self._events.emit(
            WeightsBroadcast(
                policy_version=chain.policy_version,
                seconds=seconds,
                nbytes=self._nbytes,
                received_bytes=max((answer.received_bytes for answer in answers), default=0),
                relays=len(chain.answers),
                damaged=sum(answer.damaged for answer in answers),
                repairs=chain.repairs,
                error="; ".join(errors),
            )
        )

    def _chunk_bytes(self, relays: int) -> int:
        if self._config.chunk_mib != "auto":
            return int(self._config.chunk_mib * MIB)
        last = [relay.last for relay in self.relays.values() if relay.last is not None and relay.last.bytes_per_s > 0]
        if not last:
            return best_chunk_bytes(0, relays, 0.0, 0.0)
        return best_chunk_bytes(
            self._nbytes,
            relays,
            median(answer.latency_s for answer in last),
            median(answer.bytes_per_s for answer in last),
        )

    def _node(self, relay: Relay) -> Node:
        return Node(name=relay.name, address=relay.address, world=relay.world, world_rank=relay.world_rank)

    def _order(self, orders: Orders) -> None:
        self._orders += orders
        self._stirred.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ------------------------------------------------------------ what relays say

    def _on_joined(self, worker: Worker, message: RelayJoined) -> None:
        relay = self.relays.setdefault(worker.index, Relay(rank=worker.index, keep=self._config.keep_versions))
        relay.host = worker.host
        relay.joined(message)
        others = (one for one in self.relays.values() if one is not relay and one.world == relay.world != "")
        if (other := next((one for one in others if one.library != relay.library), None)) is not None:
            relay.world, relay.world_rank = "", -1  # nobody promises that two MPIs understand each other
            text = (
                f"{relay.name} on {relay.host} has {relay.library}, {other.name} on {other.host} {other.library}: weights go "
                f"to {relay.name} by TCP; install the same MPI on both hosts"
            )
            self._events.emit(Notice(level="warning", text=text))

    def _on_ready(self, worker: Worker) -> None:
        """It can be part of the chain: of the one under way, or of the next."""
        relay = self.relays[worker.index]
        if self.chain is not None:
            holds = relay.holds(self.chain.policy_version)
            self._order(self.chain.add(self._now(), self._node(relay), holds=holds))
        self._due.set()
        self.on_change(relay)

    def lost(self, worker: Worker, reason: str) -> None:
        """A relay is gone: the chain goes on without it. What its store holds can still be pulled on its host."""
        text = f"{worker.name} was lost: {reason}; the chain goes on without it"
        self._events.emit(Notice(level="warning", text=text))
        if self.chain is not None:
            self._order(self.chain.lost(self._now(), worker.name, "it was lost"))
        self.on_change(self.relays[worker.index])

    def _on_stored(self, worker: Worker, message: WeightsStored) -> None:
        relay = self.relays.get(worker.index) if worker.kind == "relay" else None
        if relay is not None:
            if message.received_bytes:
                relay.last = message
            if not relay.holds(message.policy_version):
                relay.store(message.policy_version)
                self.on_change(relay)
        if chain := self._chain_of(message):
            chain.stored(self._now(), worker.name, message)
            self._stirred.set()

    def _on_progress(self, worker: Worker, message: CarryProgress) -> None:
        if chain := self._chain_of(message):
            chain.progress(self._now(), worker.name, message)

    def _on_hop_failed(self, worker: Worker, message: HopFailed) -> None:
        text = f"{worker.name} has lost its hop to {message.peer}: {message.error}"
        self._events.emit(Notice(level="warning", text=text))
        if chain := self._chain_of(message):
            self._order(chain.hop_failed(self._now(), message))

    def _on_carry_failed(self, worker: Worker, message: CarryFailed) -> None:
        text = f"{worker.name} cannot carry version {message.policy_version}: {message.error}"
        self._events.emit(Notice(level="warning", text=text))
        chain = self._chain_of(message)
        if chain is None or not chain.obeys(worker.name, message.order):
            return
        if chain.holds(worker.name):
            if worker.kind == "relay":
                self.relays[worker.index].forget(message.policy_version)
            else:
                self._trainer_version = -1
                self.on_change(self.relays[MASTER])
        self._order(chain.carry_failed(self._now(), worker.name, message))

    def _chain_of(self, message: Any) -> RelayChain | None:
        """The chain under way, if it is this version's."""
        return self.chain if self.chain is not None and self.chain.policy_version == message.policy_version else None
