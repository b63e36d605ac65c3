"""A worker counts as lost only for a reason: its process ended, or it was not heard for its limit of silence.

An outage that is shorter passes unnoticed. Looks at every call of the registry's `lost`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.controller.controller import Controller
from laminar.controller.environment_manager import score_limit_s
from laminar.protocol.messages import Hello
from laminar.simulation.faults import fault as faults
from laminar.simulation.faults.injector import Strike
from laminar.simulation.faults.invariants.invariant import Invariant, Observed

DELAY_S = 0.5  # latency of messages and of the notice that a process has ended


class LossesHaveCauses(Invariant):
    """See the module's text."""

    name = "a worker is lost only for a cause"

    def __init__(self, run: Observed, strikes: list[Strike], now: Callable[[], float]) -> None:
        super().__init__(run)
        self._strikes = strikes
        self._now = now
        self._joined_at: dict[str, float] = {}  # newest process of each worker

    def watch(self, controller: Controller) -> None:
        """See `Invariant`."""
        registry = controller.registry
        lost = registry.lost

        def watched(name: str, reason: str) -> None:
            if name in registry.workers and not self.run.made.controller_lost.is_set():
                self._check(name, reason)
            lost(name, reason)

        registry.lost = watched  # type: ignore[method-assign]

    def message_handlers(self) -> dict[type, Callable[[str, bool, Any], None]]:
        """See `Invariant`."""
        return {Hello: self._on_hello}

    def _on_hello(self, peer: str, to_worker: bool, message: Hello) -> None:
        self._joined_at[peer.partition("#")[0]] = self._now()

    def _check(self, name: str, reason: str) -> None:
        if reason == "the trainer is started anew":
            return  # with a rank that was lost
        if reason.startswith("its process ended (told to end"):
            self.fail(f"{name} was told to end, and then counts as lost: {reason}")
        if self.cause(name) is None:
            self.fail(f"{name} counts as lost ({reason}); nothing had struck it that explains it")

    def cause(self, name: str) -> Strike | None:
        """What explains that a worker is gone or silent: a kill, or outages that add up to the limit; None if nothing does."""
        config = self.run.config.controller
        outage = config.heartbeat_s + DELAY_S + self.run_latency_s
        newest: Strike | None = None
        for strike in self._strikes:
            if strike.worker != name:
                continue
            match strike.fault:
                case faults.Kill() | faults.Fail() | faults.RelayTierLost() | faults.HostLost() | faults.SpotNotice():
                    return strike
                case faults.Hang() | faults.Partition():
                    outage += strike.fault.seconds
                    newest = strike
                case faults.SlowLink():
                    outage += strike.fault.extra_s
                    newest = strike
        limit_s = config.silence_limit_s
        if name.startswith("rollout"):
            limit_s = min(limit_s, self.run.config.rollout.silence_limit_s)
        if newest is not None and outage >= limit_s:
            return newest
        return self._reward_cause(name)

    run_latency_s = 0.0

    def _reward_cause(self, name: str) -> Strike | None:
        """A reward that does not come back ends its environment worker; an outage may cost the same."""
        if not name.startswith("environment-"):
            return None
        limit_s = min(score_limit_s(self.run.config), self.run.config.environment.step_timeout_s)
        for strike in self._strikes:
            match strike.fault:
                case faults.BadReward(how="hang") | faults.BadTurn(how="hang"):
                    return strike
                case faults.Hang() | faults.Partition() if strike.worker == name and strike.fault.seconds > limit_s - 2:
                    return strike
                case faults.SlowLink() if strike.worker == name and 2 * strike.fault.extra_s > limit_s - 2:
                    return strike
        return None
