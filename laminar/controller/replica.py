"""One rollout as the controller sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from laminar.controller.relay import Relay
from laminar.controller.state_clock import StateClock
from laminar.protocol.messages import RolloutLoad
from laminar.trajectory import Trajectory

NO_LOAD = RolloutLoad(running=0, waiting=0, kv_utilization=0.0)


@dataclass(kw_only=True, slots=True)
class Replica:
    """Owned by the rollout manager; changed by its driver and by a repack."""

    name: str
    host: str
    relay: Relay
    clock: StateClock
    policy_version: int = -1
    in_flight: dict[str, Trajectory] = field(default_factory=dict)  # leased to it, in the order of their leases
    to_abort: list[str] = field(default_factory=list)  # trajectories that nobody wants any more
    kv_to_drop: list[str] = field(default_factory=list)  # exports in its host's memory that nobody will import
    exporters_gone: list[str] = field(default_factory=list)  # rollouts of its host that do not come back
    leasing: bool = False  # it is about to be told of trajectories that are leased to it
    stopping_for: str | None = None  # it was told to stop all; they go on at this rollout (itself under `partial`)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # set when all have stopped, or it was lost
    leaving: bool = False  # it gets nothing new, and goes when it has nothing left
    moves_out: bool = False  # what it still has goes on elsewhere
    receiving: int = 0  # rollouts that are being emptied into this one
    load: RolloutLoad = NO_LOAD  # newest
    observed: RolloutLoad | None = None  # at the newest poll
    observed_before: RolloutLoad | None = None  # at the poll before, with the same weights
    is_fresh: bool = False  # no plan has used the newest poll yet
    poll: asyncio.Event = field(default_factory=asyncio.Event)  # set to poll it now
    generated_tokens: int = 0
    last_token_at: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def observe(self, load: RolloutLoad) -> None:
        """The answer to a poll."""
        self.load = load
        self.observed_before, self.observed = self.observed, load
        self.is_fresh = True

    def forget_observations(self) -> None:
        """It serves other weights now: its load before says nothing about its load since."""
        self.observed = self.observed_before = None
        self.is_fresh = False
