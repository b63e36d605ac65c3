"""One coroutine per rollout: fill it, let it drain once newer weights are there, let it pull, fill it again.

  rollout manager --assignments--> [ driver of rollout k ] --Generate, AbortTrajectories--> rollout k
  relay manager ----on_change----> [                     ] --PullWeights------------------> rollout k
                                   [                     ] <-TrajectoryDeltas, WeightsPulled--

Each driver looks at its own rollout only; nothing here waits for all of them, unless the schedule synchronizes. Invariants:
a rollout starts groups only while it serves the newest version that its relay holds; it pulls only when it has drained,
or has been stopped (schedule `partial`, repack).
"""

from __future__ import annotations

import asyncio

from laminar.controller.journal.journal import Journal, NoJournal
from laminar.controller.relay import store_name
from laminar.controller.replica import Replica
from laminar.controller.rollout_manager import RolloutManager
from laminar.controller.worker_registry import WorkerRegistry
from laminar.errors import JournalStuck, RunFailed, WorkerLost
from laminar.observability.events import EventBus, Notice, WeightsPulled
from laminar.protocol import messages

ELSEWHERE = ""  # where stopped trajectories go on that are for no rollout in particular
LONGEST_WATCH_S = 10.0  # between two looks; so much later than its limit silence is noticed at most


class RolloutDriver:
    """The life of a rollout, step by step."""

    def __init__(
        self,
        manager: RolloutManager,
        registry: WorkerRegistry,
        events: EventBus,
        journal: Journal | NoJournal,
        *,
        limit_s: float,
    ) -> None:
        """`limit_s`: longest time without a token, and for a pull or a stop; then the rollout counts as lost."""
        self._journal = journal
        self._manager = manager
        self._registry = registry
        self._events = events
        self._limit_s = limit_s

    async def drive(self, replica: Replica) -> None:
        """Ends when the rollout is lost, or by cancellation."""
        try:
            while True:
                await self._turn(replica)
        except WorkerLost:
            return  # the rollout manager knows, and has taken its trajectories back
        except JournalStuck:
            raise
        except RunFailed as error:
            if replica.name not in self._registry.workers:
                raise
            self._registry.lost(replica.name, str(error))

    async def watch_forever(self) -> None:
        """A rollout that has trajectories and has sent no token for the limit counts as lost."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._limit_s / 4, LONGEST_WATCH_S))
            for replica in list(self._manager.replicas.values()):
                silent = loop.time() - replica.last_token_at
                if replica.in_flight and silent >= self._limit_s:
                    reason = (
                        f"it has {len(replica.in_flight)} trajectories and has sent no token for {silent:.0f} s "
                        "(controller.step_timeout_s)"
                    )
                    self._registry.lost(replica.name, reason)

    async def _turn(self, replica: Replica) -> None:
        replica.wake.clear()
        if replica.to_abort:
            ids, replica.to_abort = tuple(replica.to_abort), []
            await self._registry.send(replica.name, messages.AbortTrajectories(trajectory_ids=ids))
        if replica.kv_to_drop or replica.exporters_gone:
            drop = messages.DropKv(names=tuple(replica.kv_to_drop), exporters=tuple(replica.exporters_gone))
            replica.kv_to_drop, replica.exporters_gone = [], []
            await self._registry.send(replica.name, drop)
        if replica.stopping_for is None:
            if replica.leaving:
                await self._leave(replica)
            elif not self._manager.fleet.is_suspect(replica) and await self._serve(replica):
                return  # a suspect gets nothing until it is heard again
        elif not replica.in_flight:  # all have been stopped
            replica.stopping_for = None
            replica.stopped.set()
            return
        replica.clock.enter(self._waits_for(replica))
        await replica.wake.wait()  # for something to do; `watch_forever` looks after rollouts that fall silent

    async def _serve(self, replica: Replica) -> bool:
        """Give it work, or have it pull; true when there may be more to do at once."""
        wanted = self._manager.wanted_version(replica)
        if wanted == replica.policy_version:
            if wanted >= 0:
                await self._fill(replica)
        elif not replica.in_flight:
            if self._manager.may_pull(replica, wanted):
                await self._pull(replica, wanted)
                return True
        elif self._manager.schedule.interrupts:
            await self.stop(replica, replica.name)
        return False

    async def _leave(self, replica: Replica) -> None:
        """Raises WorkerLost when it has left."""
        if not replica.in_flight:
            await self._manager.fleet.let_go(replica)
            raise WorkerLost(f"{replica.name} has left")
        if replica.moves_out:
            await self.stop(replica, ELSEWHERE)

    async def stop(self, replica: Replica, go_on_at: str, *, export_kv: bool = False) -> None:
        """Stop all its trajectories; as their last deltas come in, they wait to go on at that rollout.

        Args:
            export_kv: their KV is to be imported there, rather than prefilled.
        """
        replica.stopping_for = go_on_at
        for trajectory in self._manager.pool.in_environment(replica.name):
            self._manager.pool.rehome(trajectory, go_on_at)
        message = messages.AbortTrajectories(trajectory_ids=tuple(replica.in_flight), export_kv=export_kv)
        await self._registry.send(replica.name, message)

    def _waits_for(self, replica: Replica) -> str:
        if replica.in_flight:
            return "generating"
        manager = self._manager
        if manager.fleet.is_suspect(replica):
            return "suspect"
        if manager.pool.in_environment(replica.name):
            return "environment"
        if manager.control.generation_paused:
            return "paused"
        if manager.schedule.synchronizes and manager.pool.held:
            return "batch"  # the others' trajectories
        if replica.policy_version < max(0, manager.relays.published_version):
            return "weights"
        if not len(manager.prompts):
            return "prompts"
        return "admission"  # max_staleness: the trainer has to consume first

    async def _pull(self, replica: Replica, version: int) -> None:
        replica.clock.enter("pulling")
        relay = replica.relay
        exact = version < relay.stored_version
        message = messages.PullWeights(policy_version=version, store=store_name(relay.rank), exact=exact)
        changes = relay.changes
        answer = await self._registry.ask(
            replica.name,
            message,
            messages.WeightsPulled | messages.PullFailed,
            self._limit_s,
            matches=lambda pulled: pulled.policy_version == version or (not exact and pulled.policy_version > version),
        )
        if isinstance(answer, messages.PullFailed):
            if relay.changes == changes:  # else it has stored something since, perhaps this very version again
                relay.forget(answer.policy_version)
            text = f"{replica.name} could not pull version {answer.policy_version}: {answer.error}"
            self._events.emit(Notice(level="warning", text=text))
            return
        self._manager.pulled(replica, answer.policy_version)
        self._events.emit(
            WeightsPulled(rollout=replica.name, policy_version=answer.policy_version, seconds=answer.seconds)
        )

    async def _fill(self, replica: Replica) -> None:
        assignments = self._manager.assignments(replica)
        if assignments:
            replica.clock.enter("generating")
            replica.leasing = True
            await self._journal.written()
            replica.leasing = False
            await self._registry.send(replica.name, messages.Generate(assignments=assignments))
