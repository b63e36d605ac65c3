"""The queue of calls alone: workers are tasks that answer when the test says so, on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import numpy as np

from laminar.controller.environment_manager import EnvironmentManager
from laminar.controller.worker_registry import Worker
from laminar.observability.events import EventBus
from laminar.protocol import messages
from laminar.simulation.clock.virtual_time import run_in_virtual_time
from laminar.trajectory import Prompt, Trajectory, TrajectoryState
from tests.controller import fake_workers as fakes

LIMIT_S = 10.0 + 5.0  # of the reward, and the slack


class Desks:
    """Stands for the registry: `behave(name, trajectory_id)` is seconds to an answer, "hang" or "die"."""

    def __init__(self, names, behave):
        self.workers = dict.fromkeys(names)
        self.at_once = dict.fromkeys(names, 0)
        self.most_at_once = 0
        self.given = []
        self._behave = behave
        self._handlers = {}
        self._tasks = []

    def handle(self, kind, handler):
        self._handlers[kind] = handler

    def on_lost(self, kind, callback):
        self._on_lost = callback

    def names(self, kind):
        return list(self.workers)

    async def send(self, name, message):
        self.given.append((name, message.trajectory_id))
        self._tasks.append(asyncio.create_task(self._answer(name, message.trajectory_id)))

    async def _answer(self, name, trajectory_id):
        life = self.workers[name]
        self.at_once[name] += 1
        self.most_at_once = max(self.most_at_once, self.at_once[name])
        how = self._behave(name, trajectory_id)
        if how == "hang":
            return
        await asyncio.sleep(how if isinstance(how, float) else 0.5)
        if name not in self.workers or self.workers[name] is not life:
            return  # its process has ended meanwhile
        if how == "die":
            self.lost(name, "its process ended")
            return
        self.at_once[name] -= 1
        answer = messages.TrajectoryScored(trajectory_id=trajectory_id, reward=1.0, response_text="", error="")
        self._handlers[messages.TrajectoryScored](worker(name), answer)

    def lost(self, name, reason):
        del self.workers[name]
        self._on_lost(worker(name), reason)

    async def wait_until_ready(self, limit_s, names):
        await asyncio.sleep(2.0)
        for name in names:
            self.workers[name] = object()
            self.at_once[name] = 0


def worker(name):
    return Worker(name=name, kind="environment", index=0, peer=b"", pid=1, host="here", last_heard=0.0)


def finished(number):
    prompt = Prompt(prompt_id=number, source="s", text="", token_ids=np.zeros(1, np.int32), answer="", metadata="{}")
    trajectory = Trajectory(trajectory_id=f"{number}.0", group_id=number, prompt=prompt)
    trajectory.state = TrajectoryState.FINISHED
    return trajectory


def score(count, behave, *, workers=1, slots=4):
    """(scored after seconds by trajectory, errors by trajectory, registry)."""

    async def run():
        config = fakes.experiment(reward__timeout_s=10.0, reward__calls_per_worker=slots)
        registry = Desks([f"environment-{k}" for k in range(workers)], behave)
        trajectories = [finished(number) for number in range(count)]
        now = asyncio.get_running_loop().time
        started, scored, errors, all_done = now(), {}, {}, asyncio.Event()

        def on_scored(trajectory):
            into = errors if trajectory.error else scored
            into[trajectory.trajectory_id] = trajectory.error or round(now() - started, 3)
            if len(scored) + len(errors) == count:
                all_done.set()

        async def restart(name, reason):
            await asyncio.sleep(0)

        manager = EnvironmentManager(registry, EventBus(), config, on_scored=on_scored, restart=restart)
        tasks = [asyncio.create_task(manager.serve_forever()), asyncio.create_task(manager.watch_forever())]
        await asyncio.sleep(0)
        for trajectory in trajectories:
            manager.submit(trajectory)
        await all_done.wait()
        for task in [*tasks, *registry._tasks]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert (manager.pending_scores, manager.invalid_rewards) == (0, len(errors))
        return scored, errors, registry

    return run_in_virtual_time(run(), limit_s=600)


def test_several_calls_at_a_time_and_no_more_than_asked_for():
    scored, errors, registry = score(8, lambda name, trajectory_id: 1.0, workers=2, slots=2)
    assert not errors
    assert sorted(scored.values()) == [1.0] * 4 + [2.0] * 4
    assert registry.most_at_once == 2
    assert [name for name, _ in registry.given[:4]] == ["environment-0", "environment-1"] * 2


def test_a_slow_reward_delays_no_other():
    scored, errors, _ = score(9, lambda name, trajectory_id: 9.0 if trajectory_id == "0.0" else 0.5, slots=4)
    assert not errors
    assert scored.pop("0.0") == 9.0
    assert max(scored.values()) <= 1.5


def test_what_ends_its_worker_is_found_and_costs_no_other_trajectory():
    def behave(name, trajectory_id):
        return "die" if trajectory_id == "1.0" else 1.0

    scored, errors, registry = score(6, behave, slots=4)
    assert sorted(scored) == ["0.0", "2.0", "3.0", "4.0", "5.0"]
    assert errors == {"1.0": "no reward for trajectory 1.0: its process ended (no attempt left) (reward.timeout_s)"}
    assert [given for _, given in registry.given].count("1.0") == 2  # with others, then alone


def test_two_that_end_their_worker():
    def behave(name, trajectory_id):
        return "die" if trajectory_id in ("1.0", "2.0") else 1.0

    scored, errors, _ = score(12, behave, workers=2, slots=4)
    assert sorted(errors) == ["1.0", "2.0"]
    assert len(scored) == 10


def test_one_that_hangs_while_its_worker_goes_on_fails_alone():
    def behave(name, trajectory_id):
        return "hang" if trajectory_id == "0.0" else 1.0

    scored, errors, registry = score(80, behave, slots=4)
    assert errors == {"0.0": f"no reward for trajectory 0.0: waited {LIMIT_S:g} s for TrajectoryScored from environment-0 "
                      "(reward.timeout_s)"}  # fmt: skip
    assert len(scored) == 79
    assert [given for _, given in registry.given].count("0.0") == 1


def test_one_that_blocks_its_worker_is_told_from_those_that_it_blocked():
    asked = Counter()

    def behave(name, trajectory_id):
        asked[trajectory_id] += 1
        return "hang" if trajectory_id == "2.0" or asked[trajectory_id] == 1 else 1.0  # it blocks all that came with it

    scored, errors, _ = score(4, behave, slots=4)
    assert sorted(errors) == ["2.0"]
    assert sorted(scored) == ["0.0", "1.0", "3.0"]
    assert set(asked.values()) == {2}
