"""How each rollout of the run fares, as a state machine without a clock, a task or a channel: time is told to it.

  STARTING -> HEALTHY <-> SUSPECT          a rollout that serves weights; its heartbeats are late, or come again
      ^          |           |
      |          +-----------+--> DRAINING -> LEFT        it was told to leave, or says that it must
      |          |           |
  RESTARTING <---+-----------+--> EVICTED                 it was lost: once more on the same devices, or too often

Invariants: only a HEALTHY rollout is given work; one that was lost is healthy again only when it serves weights; a host is
never evicted while no rollout is elsewhere; who leaves on request has not failed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

FAILURE_WINDOW_S = 3600.0  # what failed longer ago is forgiven


class Health(enum.Enum):
    """State of one rollout."""

    STARTING = "starting"  # its process starts, or it waits for its first weights
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # silent for `rollout.suspect_after_s`: it keeps what it has, and gets nothing new
    RESTARTING = "restarting"  # it was lost, and is started anew
    DRAINING = "draining"  # it leaves: nothing new; what it has is finished or moved
    LEFT = "left"  # it may come again
    EVICTED = "evicted"  # it failed too often, or its host did


THERE = (Health.STARTING, Health.HEALTHY, Health.SUSPECT, Health.DRAINING)
OVER = (Health.LEFT, Health.EVICTED)

_ALLOWED: dict[Health, tuple[Health, ...]] = {
    Health.STARTING: (Health.HEALTHY, Health.RESTARTING, Health.DRAINING, *OVER),
    Health.HEALTHY: (Health.SUSPECT, Health.RESTARTING, Health.DRAINING, *OVER),
    Health.SUSPECT: (Health.HEALTHY, Health.RESTARTING, Health.DRAINING, *OVER),
    Health.RESTARTING: (Health.STARTING, *OVER),
    Health.DRAINING: OVER,
    Health.LEFT: (Health.STARTING,),
    Health.EVICTED: (),
}


@dataclass(kw_only=True, slots=True)
class Member:
    """One rollout of the run, those included that have left."""

    name: str
    health: Health = Health.STARTING
    since: float = 0.0  # when it came into this state
    reason: str = ""  # of this state, for a person
    host: str = ""  # where it was last; empty before it came
    failures: list[float] = field(default_factory=list)  # when it was lost, or did not come back


class FleetHealth:
    """All rollouts by name, and the hosts that are evicted."""

    def __init__(
        self,
        *,
        restarts: int,
        host_failures: int,
        suspect_after_s: float,
        may_return: bool = True,
        on_change: Callable[[Member], None] = lambda member: None,
    ) -> None:
        """
        Args:
            restarts: failures of one rollout that are answered by a restart.
            host_failures: failures of all rollouts of a host after which it is evicted.
            suspect_after_s: silence that makes a rollout a suspect.
            may_return: who has left may come again by itself; else only when it is started again (`starts`).
            on_change: called when a rollout has come into another state.

        Failures count for FAILURE_WINDOW_S.
        """
        self.members: dict[str, Member] = {}
        self.evicted_hosts: dict[str, str] = {}  # host -> why
        self._restarts = restarts
        self._host_failures = host_failures
        self._suspect_after_s = suspect_after_s
        self._may_return = may_return
        self._on_change = on_change
        self._host_failed: dict[str, list[float]] = {}  # host -> when, oldest first

    def health(self, name: str) -> Health:
        """State of a rollout; one that nobody knows has left."""
        member = self.members.get(name)
        return Health.LEFT if member is None else member.health

    def takes_work(self, name: str) -> bool:
        """Whether it may be given trajectories."""
        return self.health(name) is Health.HEALTHY

    def refusal(self, name: str, host: str) -> str:
        """Why a rollout that comes from this host is not let in; empty if it is."""
        if host in self.evicted_hosts:
            return f"the host {host} is evicted: {self.evicted_hosts[host]}"
        if self.health(name) is Health.EVICTED:
            return f"{name} is evicted: {self.members[name].reason}"
        if self.health(name) is Health.LEFT and name in self.members and not self._may_return:
            return f"{name} has left this run: {self.members[name].reason}"
        return ""

    def free_index(self) -> int:
        """The lowest index that no rollout of the run has: whoever is added gets the devices of one that has left."""
        index = 0
        while self.health(f"rollout-{index}") is not Health.LEFT:
            index += 1
        return index

    def starts(self, name: str, now: float, reason: str = "") -> None:
        """Its process is started, for the first time or again."""
        member = self.members.setdefault(name, Member(name=name, since=now, reason=reason))
        if member.health is not Health.STARTING:
            self._enter(member, Health.STARTING, now, reason)

    def came(self, name: str, host: str, now: float) -> None:
        """It is there and can load weights."""
        self.starts(name, now)
        self.members[name].host = host

    def serves(self, name: str, now: float) -> None:
        """It has loaded weights."""
        member = self.members[name]
        if member.health is Health.STARTING:
            self._enter(member, Health.HEALTHY, now, "")

    def heard(self, name: str, at: float, now: float) -> bool:
        """It was last heard at this time; whether that changes its state."""
        member, late = self.members[name], now - at > self._suspect_after_s
        if late and member.health is Health.HEALTHY:
            self._enter(member, Health.SUSPECT, now, f"silent for {now - at:.1f} s")
        elif not late and member.health is Health.SUSPECT:
            self._enter(member, Health.HEALTHY, now, "")
        else:
            return False
        return True

    def leaves(self, name: str, now: float, reason: str) -> None:
        """It is to leave: it gets nothing new from now on."""
        if self.health(name) in THERE and self.health(name) is not Health.DRAINING:
            self._enter(self.members[name], Health.DRAINING, now, reason)

    def left(self, name: str, now: float, reason: str) -> None:
        """It is gone, and that is no failure."""
        if self.health(name) is not Health.LEFT:
            self._enter(self.members[name], Health.LEFT, now, reason)

    def lost(self, name: str, now: float, reason: str) -> Health:
        """It was lost, or has not come back. Returns what becomes of it: RESTARTING, EVICTED or, if it was leaving, LEFT."""
        member = self.members[name]
        if member.health is Health.DRAINING:
            self._enter(member, Health.LEFT, now, f"{member.reason}; {reason}")
            return member.health
        member.failures = [when for when in member.failures if now - when < FAILURE_WINDOW_S] + [now]
        if member.host:
            self._count_host(member.host, now)
        if member.host in self.evicted_hosts:
            self._enter(member, Health.EVICTED, now, f"its host is evicted: {self.evicted_hosts[member.host]}")
        elif len(member.failures) > self._restarts:
            self._enter(member, Health.EVICTED, now, f"{reason} (rollout.restarts is used up)")
        elif member.health is not Health.RESTARTING:
            self._enter(member, Health.RESTARTING, now, reason)
        return member.health

    def of_host(self, host: str) -> list[str]:
        """Rollouts that are there, or come back, on this host."""
        return [member.name for member in self.members.values() if member.host == host and member.health not in OVER]

    def _count_host(self, host: str, now: float) -> None:
        failed = [when for when in self._host_failed.get(host, ()) if now - when < FAILURE_WINDOW_S] + [now]
        self._host_failed[host] = failed
        elsewhere = any(member.host not in ("", host) and member.health in THERE for member in self.members.values())
        if len(failed) > self._host_failures and elsewhere and host not in self.evicted_hosts:
            self.evicted_hosts[host] = f"{len(failed)} losses of rollouts within an hour (rollout.host_failures)"

    def _enter(self, member: Member, health: Health, now: float, reason: str) -> None:
        if health not in _ALLOWED[member.health]:
            raise RuntimeError(f"{member.name}: {member.health.value} -> {health.value} is not allowed")
        member.health, member.since, member.reason = health, now, reason
        self._on_change(member)
