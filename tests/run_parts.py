"""Parts of a run made by hand, for tests of what only looks at one: a config, groups, and a controller's view."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from laminar.config.algorithm_schema import DynamicSamplingConfig
from laminar.config.schema import BufferConfig, ExperimentConfig
from laminar.controller.checkpoints import Checkpoints
from laminar.controller.dynamic_sampling import DynamicSampling
from laminar.controller.experience_buffer import ExperienceBuffer
from laminar.controller.fleet_health import FleetHealth
from laminar.controller.partial_response_pool import PartialResponsePool
from laminar.controller.prompt_pool import PromptPool
from laminar.controller.relay import Relay
from laminar.controller.relay_chain import Numbers, RelayChain
from laminar.controller.repack_planner import Move, RepackBounds, RepackPlan
from laminar.controller.replica import Replica
from laminar.controller.run_control import RunControl
from laminar.controller.state_clock import StateClock
from laminar.controller.worker_registry import Worker
from laminar.observability.events import EventBus
from laminar.protocol.messages import RolloutLoad
from laminar.trajectory import Group, Prompt, Trajectory, TrajectoryState


def a_config(**changes: Any) -> ExperimentConfig:
    """A small valid experiment: 4 steps of 2 groups of 2, 2 rollouts, 2 relays, 1 trainer rank, 1 environment worker."""
    entries: dict[str, Any] = {
        "name": "small",
        "model": {"path": "no/such/model"},
        "data": {"source": {"type": "reasoning_gym", "datasets": [{"name": "spell_backward"}]}},
        "rollout": {"engine": "torch", "max_running": 8},
        "trainer": {"steps": 4, "groups_per_step": 2, "group_size": 2},
    }
    return ExperimentConfig.model_validate(entries | changes)


class HandClock:
    """A clock that a test moves."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def a_group(
    group_id: int = 0,
    *,
    version: int = 0,
    rewards: tuple[float, ...] = (1.0, 0.0),
    tokens: int = 3,
    trainer: int | None = None,
) -> Group:
    """A group whose members are generated and scored, on rollout-0; taken by a trainer of that version, if given."""
    prompt = Prompt(
        prompt_id=10 + group_id,
        source="spell_backward",
        text=f"spell {group_id} backward",
        token_ids=np.arange(5, dtype=np.int32),
        answer=str(group_id),
        metadata="{}",
    )
    members = []
    for k, reward in enumerate(rewards):
        member = Trajectory(trajectory_id=f"{group_id}.{k}", group_id=group_id, prompt=prompt, policy_version=version)
        member.append(np.arange(7, 7 + tokens, dtype=np.int32), np.zeros(tokens, np.float32))
        member.state = TrajectoryState.SCORED
        member.lease, member.rollout, member.finish_reason, member.reward = 1, "rollout-0", "stop", reward
        member.started_at, member.finished_at = 100.0, 101.5
        member.versions = [(version, 0)]
        member.staleness = None if trainer is None else trainer - version
        members.append(member)
    return Group(group_id=group_id, prompt=prompt, trajectories=members, policy_version=version)


def a_metrics_line(step: int, **changes: Any) -> dict[str, Any]:
    """A line as `StepMetrics` reports it."""
    return {
        "step": step,
        "policy_version": step,
        "time_s": 2.0 * step,
        "step_s": 2.0,
        "reward_mean": 0.25 * step,
        "reward_std": 0.5,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "mismatch_kl": 1.5e-4,
        "generated_tokens_per_s": 12_345.0,
        "trained_tokens_per_s": 20_000.0,
        "kv_utilization_mean": 0.42,
        "trainer_idle_fraction": 0.25,
        "rollout_idle_fraction": 0.1,
        "trainer_seconds": {"training": 1.5, "trajectories": 0.4, "paused": 0.1},
        "rollout_seconds": {"generating": 3.6, "pulling": 0.4},
        "buffer_groups": 3,
        "groups_in_progress": 5,
        "learning_rate": 1e-4,
    } | changes


@dataclass(slots=True)
class HandRegistry:
    """Workers without a channel."""

    workers: dict[str, Worker] = field(default_factory=dict)
    waiting_for: list[str] = field(default_factory=list)

    def add(self, kind: Any, index: int, pid: int) -> None:
        name = f"{kind}-{index}"
        self.workers[name] = Worker(
            name=name, kind=kind, index=index, peer=b"", pid=pid, host="host-a", last_heard=0.0, ready=True, detail="up"
        )

    def names(self, kind: str) -> list[str]:
        return [name for name, worker in self.workers.items() if worker.kind == kind]

    def missing(self) -> list[str]:
        return self.waiting_for


@dataclass(slots=True)
class HandRelays:
    relays: dict[int, Relay]
    published_version: int = 3
    broadcasts: int = 4
    chain: RelayChain | None = field(
        default_factory=lambda: RelayChain(
            policy_version=3, numbers=Numbers(), chunk_bytes=4096, encoding="full", deadline=60.0, stall_limit_s=5.0
        )
    )

    def order_of_chain(self) -> tuple[str, ...]:
        return ("relay-0", "relay-1")


@dataclass(slots=True)
class HandRollouts:
    replicas: dict[str, Replica] = field(default_factory=dict)


class HandRepackInputs:
    def batch_bound(self) -> int:
        return 7

    def bounds(self) -> RepackBounds:
        return RepackBounds(kv_ceiling=0.9, batch_bound=7, move_s_per_token=0.002, wanted=2, why_no_more="enough")


class HandRepacker:
    """Would move the only trajectory of rollout-1 to rollout-0."""

    def __init__(self) -> None:
        self.inputs = HandRepackInputs()
        self.asked = 0

    def repack_now(self) -> int:
        self.asked += 1
        return 2

    def plan(self) -> RepackPlan:
        move = Move(source="rollout-1", target="rollout-0", context_tokens=1500, frees_s=40.0, costs_s=3.0)
        return RepackPlan(moves=(move,), reasons={"rollout-0": "it takes in others"})


@dataclass(slots=True)
class HandFleet:
    health: FleetHealth
    by_hand: bool = False
    begun: bool = True
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, count: int) -> list[str]:
        self.asked.append(("add", count))
        return [f"rollout-{2 + number}" for number in range(count)]

    def leave(self, name: str, reason: str, *, moves_after_s: float | None) -> None:
        self.asked.append((name, moves_after_s))


@dataclass(slots=True)
class HandTrainer:
    clock: StateClock
    step: int = 3
    policy_version: int = 3
    checkpoints: Checkpoints = field(
        default_factory=lambda: Checkpoints(None, None, Path("none"), run_id="r", limit_s=1.0)
    )


class HandView:
    """A `RunView` in the middle of a run: two rollouts, one group ready, one trajectory in progress."""

    def __init__(self, run_dir: Path) -> None:
        self.config = a_config()
        self.run_dir = run_dir
        self.events = EventBus()
        self.now = HandClock()
        self.started_at = 40.0
        self.registry = HandRegistry()
        for kind, index, pid in (("trainer", 0, 11), ("relay", 0, 21), ("relay", 1, 22), ("rollout", 0, 31)):
            self.registry.add(kind, index, pid)
        self.relays = HandRelays(
            relays={0: Relay(rank=0, keep=2, versions=[2, 3]), 1: Relay(rank=1, keep=2, versions=[2])}
        )
        self.rollouts = HandRollouts()
        self.fleet = HandFleet(FleetHealth(restarts=3, host_failures=6, suspect_after_s=5.0))
        self.repacker = HandRepacker()
        self.trainer = HandTrainer(clock=StateClock("trajectories", self.now))
        self.buffer = ExperienceBuffer(
            self.events, BufferConfig(), DynamicSampling(DynamicSamplingConfig(), groups_per_step=4), steps=4
        )
        self.pool = PartialResponsePool()
        self.prompts = PromptPool(_no_prompts, self.events, max_prompt_tokens=64, low_water=4)
        self.control = RunControl()
        self.history: dict[str, Trajectory] = {}
        self._fill()

    def _fill(self) -> None:
        for index, version in ((0, 3), (1, 2)):
            clock = StateClock("generating", self.now)
            replica = Replica(name=f"rollout-{index}", host="here", relay=self.relays.relays[index], clock=clock)
            replica.policy_version = version
            self.fleet.health.came(replica.name, "host-a", 50.0)
            self.fleet.health.serves(replica.name, 60.0)
            replica.load = RolloutLoad(running=1, waiting=index, kv_utilization=0.5)
            replica.generated_tokens = 600
            self.rollouts.replicas[replica.name] = replica
        ready, half = a_group(4, version=2), a_group(5, version=3)
        for group in (ready, half):
            self.buffer.admit(group)
            self.history |= {member.trajectory_id: member for member in group.trajectories}
        self.buffer.complete(ready, published_version=3)
        running = half.trajectories[1]
        running.state, running.reward, running.finish_reason = TrajectoryState.QUEUED, None, None
        running.finished_at = None
        self.pool.lease(running, rollout="rollout-1", policy_version=3, now=100.0)
        self.rollouts.replicas["rollout-1"].in_flight[running.trajectory_id] = running
        self.now.now = 106.0


async def _no_prompts(start: int, count: int) -> Any:
    raise AssertionError("nobody fetches prompts here")
