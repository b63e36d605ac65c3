"""A move with its KV, step by step, with a death at every message boundary: nothing is lost, nothing made twice, nothing left.

The workers are not real (fake_workers.py). Token i of every response is 100 + i, and EOS comes at TOKENS - 1.
"""

import asyncio

import numpy as np
import pytest

from laminar.observability import events as event_types
from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.clock.virtual_time import run_in_virtual_time
from tests.controller import fake_workers as fakes
from tests.controller.test_controller import Run

TOKENS = 8
HELD = 2  # tokens that a trajectory has when it is stopped

SOURCE_BOUNDARIES = ("source told to stop", "source has stopped")
TARGET_BOUNDARIES = ("target told to go on", "target has taken the KV", "target has sent a token")


class Movable(fakes.FakeRollout):
    """Holds what rollout-0 gets first, exports it when it is stopped, and goes on with what others have exported."""

    def part(self, assignment, start, count, *, reason=None, kv=()):
        tokens = [100 + i for i in range(start, start + count)]
        if reason == "stop":
            tokens[-1] = fakes.EOS
        return messages.TrajectoryDeltas(
            policy_version=self.policy_version,
            trajectory_ids=(assignment.trajectory_id,),
            leases=(assignment.lease,),
            starts=np.array([start], np.int32),
            token_counts=np.array([count], np.int32),
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            finish_reasons=(reason,),
            load=messages.RolloutLoad(running=1, waiting=0, kv_utilization=0.5),
            exported_kv=kv,
        )

    async def answer(self, message):
        if isinstance(message, messages.Generate):
            for assignment in message.assignments:
                async for answer in self.generate(assignment):
                    yield answer
        elif isinstance(message, messages.AbortTrajectories):
            await self.scene.at("source told to stop", self)
            for assignment in [self.held.pop(id) for id in message.trajectory_ids if id in self.held]:
                yield self.part(assignment, HELD, 0, reason="abort", kv=self.export(assignment, message.export_kv))
            await self.scene.at("source has stopped", self)
        elif isinstance(message, messages.DropKv):
            self.scene.shelf -= set(message.names)
            for exporter in message.exporters:
                self.scene.clear(exporter)
        else:
            async for answer in super().answer(message):
                yield answer

    async def generate(self, assignment):
        start = len(assignment.token_ids)
        if self.name == "rollout-0" and self.pid == 1 and start == 0 and not self.scene.stopped:
            self.held[assignment.trajectory_id] = assignment
            yield self.part(assignment, 0, HELD)
            self.scene.holding.set()
            return
        if start:
            await self.scene.at("target told to go on", self)
        if assignment.kv is not None:
            error = "" if assignment.kv.name in self.scene.shelf else "gone"
            self.scene.shelf.discard(assignment.kv.name)
            yield messages.KvTaken(
                trajectory_id=assignment.trajectory_id,
                lease=assignment.lease,
                name=assignment.kv.name,
                tokens=0 if error else assignment.kv.tokens,
                nbytes=0 if error else assignment.kv.nbytes,
                seconds=0.0,
                error=error,
            )
            await self.scene.at("target has taken the KV", self)
        if start:
            yield self.part(assignment, start, 1)
            start += 1
            await self.scene.at("target has sent a token", self)
        yield self.part(assignment, start, TOKENS - start, reason="stop")

    def export(self, assignment, wanted):
        if not wanted:
            return ()
        name = f"{self.name}~{assignment.trajectory_id}~{assignment.lease}"
        self.scene.shelf.add(name)
        tokens = len(assignment.prompt_token_ids) + HELD - 1
        return (
            messages.KvReference(
                trajectory_id=assignment.trajectory_id,
                lease=assignment.lease,
                exporter=self.name,
                name=name,
                policy_version=self.policy_version,
                tokens=tokens,
                nbytes=8 * tokens,
                shards=1,
                address="",
                epoch=1,
            ),
        )


class Scene(Run):
    """A run in which rollout-0 is emptied into rollout-1 once, and workers die at the boundaries given."""

    def __init__(self, tmp_path, deaths=(), **overrides):
        class Here(Movable):
            scene = self

            def __init__(here, *arguments, **keywords):
                super().__init__(*arguments, **keywords)
                here.held = {}
                self.clear(here.name)  # as a rollout does when it starts

        self.shelf = set()
        self.deaths = set(deaths)
        self.stopped = False
        self.holding = asyncio.Event()
        super().__init__(
            fakes.experiment(rollout__max_response_tokens=TOKENS + 4, **overrides),
            tmp_path,
            SimulatedNetwork(latency=0.01, through_codec=True),
            rollout=Here,
        )
        self.successor = Here

    def clear(self, exporter):
        self.shelf -= {name for name in self.shelf if name.startswith(f"{exporter}~")}

    async def at(self, boundary, worker):
        """Die here, if it is asked for; what was sent before still arrives."""
        if boundary in self.deaths:
            self.deaths.discard(boundary)
            await asyncio.sleep(0.1)
            self.controller.registry.lost(worker.name, "its process ended (signal SIGKILL)")
            await asyncio.Event().wait()

    async def move(self):
        await self.holding.wait()
        replicas = self.controller.rollouts.replicas
        source, target = replicas["rollout-0"], replicas["rollout-1"]
        target.receiving += 1  # from now on it stays with this version
        await asyncio.sleep(0.1)
        assert source.policy_version == target.policy_version
        self.stopped = True
        await self.controller.driver.stop(source, target.name, export_kv=True)
        await source.stopped.wait()
        target.receiving -= 1
        target.wake.set()

    async def make(self):
        moving = asyncio.create_task(self.move())
        await self.to_the_end()
        await moving
        return self


def scene(tmp_path, *deaths, **overrides):
    async def make():
        return await Scene(tmp_path, deaths, **overrides).make()

    run = run_in_virtual_time(make(), limit_s=60)
    assert not run.deaths, "nobody died at the boundary"
    steps = run.of(event_types.StepFinished)
    assert [step.step for step in steps] == [1, 2, 3]
    trained = [trajectory for step in steps for group in step.groups for trajectory in group.trajectories]
    assert len({trajectory.trajectory_id for trajectory in trained}) == len(trained) == 12
    for trajectory in trained:
        assert trajectory.response_token_ids().tolist() == [*range(100, 100 + TOKENS - 1), fakes.EOS]
    assert not run.controller.rollouts.kv_exports
    assert not run.shelf, "KV is left behind"
    return run


def test_kv_goes_with_the_trajectories(tmp_path):
    run = scene(tmp_path)
    moves = run.of(event_types.KvMoved)
    assert moves and not any(move.error for move in moves)
    assert {move.rollout for move in moves} == {"rollout-1"}
    assert all(move.tokens == 3 + HELD - 1 and move.nbytes == 8 * move.tokens for move in moves)
    line = run.of(event_types.MetricsReported)[-1].line
    assert (line["kv_moves"], line["kv_refused"]) == (len(moves), 0)
    assert line["kv_moved_bytes"] == sum(move.nbytes for move in moves)


@pytest.mark.parametrize("boundary", [*SOURCE_BOUNDARIES, *TARGET_BOUNDARIES])
def test_a_death_at_any_boundary_loses_and_repeats_nothing(tmp_path, boundary):
    run = scene(tmp_path, boundary)
    lost = "rollout-0" if boundary in SOURCE_BOUNDARIES else "rollout-1"
    assert [event.rollout for event in run.of(event_types.RolloutLost)] == [lost]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (source, target)
        for source in SOURCE_BOUNDARIES
        for target in TARGET_BOUNDARIES
        if not (source == "source told to stop" and target == "target has taken the KV")  # there is none then
    ],
)
def test_both_may_die(tmp_path, source, target):
    scene(tmp_path, source, target)


@pytest.mark.parametrize("boundary", [*SOURCE_BOUNDARIES, *TARGET_BOUNDARIES])
def test_without_a_restart_the_neighbour_cleans_up(tmp_path, boundary):
    scene(tmp_path, boundary, rollout__restarts=0)


def test_kv_that_is_gone_is_counted_and_said(tmp_path):
    async def make():
        run = Scene(tmp_path)
        run.shelf = NothingStays()
        return await run.make()

    run = run_in_virtual_time(make(), limit_s=60)
    moves = run.of(event_types.KvMoved)
    assert moves and all(move.error == "gone" and move.tokens == 0 for move in moves)
    notices = [notice.text for notice in run.of(event_types.Notice) if "its KV was not taken: gone" in notice.text]
    assert len(notices) == len(moves) == run.of(event_types.MetricsReported)[-1].line["kv_refused"]


class NothingStays(set):
    def add(self, name):
        pass
