"""The rollout worker between controller and engine, where trajectories move with their KV. The engine is not real."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from laminar.protocol import messages
from laminar.workers.rollout.engine import EngineDelta, EngineLoad, KvExported, KvImported
from laminar.workers.rollout.kv_courier import KvCourier
from laminar.workers.rollout.kv_file import shard_path
from laminar.workers.rollout.kv_folder import KvFolder
from laminar.workers.rollout.main import RolloutWorker
from laminar.workers.rollout.step_times import StepTimes
from tests.run_parts import a_config
from tests.workers.rollout.kv_files import write_kv

KEY = b"k" * 32


class Engine:
    """Gives one token, then waits for the abort; exports a file of KV, and imports what it can open."""

    def __init__(self):
        self.ends = {}
        self.imported = []  # contents of files
        self.step_times = StepTimes()

    async def generate(self, request):
        end = self.ends[request.request_id] = asyncio.get_running_loop().create_future()
        imported = None
        if request.kv is not None:
            self.imported.append(shard_path(request.kv, 0).read_bytes())
            imported = KvImported(tokens=9, nbytes=100, seconds=0.5, error="")
        yield delta([5], imported=imported)
        export = await end
        exported = None
        if export is not None:
            write_kv(export)
            exported = KvExported(tokens=10, nbytes=1000, shards=1, seconds=0.1)
        yield delta([], finish_reason="abort", exported=exported)

    async def abort(self, request_id, export=None):
        if request_id in self.ends:
            self.ends.pop(request_id).set_result(export)

    def load(self):
        return EngineLoad(running=1, waiting=0, kv_utilization=0.5, prefill_s_per_token=0.25, kv_move_s_per_token=0.125)


def delta(tokens, **changes):
    values = {"policy_version": 3, "finish_reason": None} | changes
    logprobs = np.full(len(tokens), -1.0, np.float32)
    return EngineDelta(token_ids=np.array(tokens, np.int32), logprobs=logprobs, **values)


class Rollout:
    """A worker, what it is told, and what it says."""

    def __init__(self, index, base, *, moves=True):
        self.said = asyncio.Queue()
        self.told = asyncio.Queue()
        config = a_config(rollout={"engine": "torch", "max_running": 8, "delta_interval_s": 0.01})
        session = SimpleNamespace(
            config=config,
            name=f"rollout-{index}",
            send=self.said.put,
            messages=self.messages,
            welcome=None,
            attached=True,
        )
        self.folder = KvFolder("r", base)
        self.courier = KvCourier(session.name, self.folder, "127.0.0.1", KEY) if moves else None
        self.engine = Engine()
        self.task = asyncio.create_task(RolloutWorker(session, self.engine, (), courier=self.courier).run())

    async def messages(self):
        while (message := await self.told.get()) is not None:
            yield message

    async def next(self, kind):
        async with asyncio.timeout(10):
            while not isinstance(message := await self.said.get(), kind):
                pass
        return message

    async def ended(self, trajectory_id):
        """Its last delta, and what was said before it."""
        before = []
        async with asyncio.timeout(10):
            while True:
                message = await self.said.get()
                if isinstance(message, messages.TrajectoryDeltas) and "abort" in message.finish_reasons:
                    assert message.trajectory_ids == (trajectory_id,)
                    return message, before
                before.append(message)

    async def close(self):
        self.told.put_nowait(None)
        await self.task
        if self.courier is not None:
            await self.courier.close()

    def files(self):
        return [path.name for path in self.folder.directory.iterdir()]


def generate(lease, *, kv=None, trajectory_id="7.1"):
    assignment = messages.TrajectoryAssignment(
        trajectory_id=trajectory_id,
        lease=lease,
        policy_version=3,
        prompt_token_ids=np.arange(9, dtype=np.int32),
        token_ids=np.array([9], np.int32),
        max_new_tokens=20,
        seed=1,
        kv=kv,
    )
    return messages.Generate(assignments=(assignment,))


STOP = messages.AbortTrajectories(trajectory_ids=("7.1",), export_kv=True)


@pytest.fixture
def bases(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    return tmp_path


async def exported_by(source):
    source.told.put_nowait(generate(1))
    await source.next(messages.TrajectoryDeltas)
    source.told.put_nowait(STOP)
    last, _ = await source.ended("7.1")
    (reference,) = last.exported_kv
    return reference


@pytest.mark.parametrize("host", ["one", "other"])
async def test_a_stopped_trajectory_goes_on_with_its_kv_on_either_host(bases, host):
    source, target = Rollout(0, bases / "one"), Rollout(1, bases / host)
    reference = await exported_by(source)
    assert (reference.lease, reference.exporter, reference.policy_version) == (1, "rollout-0", 3)
    assert source.files() == [f"{reference.name}.0"]
    written = (source.folder.directory / f"{reference.name}.0").read_bytes()
    target.told.put_nowait(generate(2, kv=reference))
    taken = await target.next(messages.KvTaken | messages.TrajectoryDeltas)  # before any token
    assert (taken.trajectory_id, taken.lease, taken.name) == ("7.1", 2, reference.name)
    assert (taken.tokens, taken.nbytes, taken.seconds, taken.error) == (9, 100, 0.5, "")
    assert target.engine.imported == [written]
    assert target.files() == []
    load = (await target.next(messages.TrajectoryDeltas)).load
    assert (load.prefill_s_per_token, load.kv_move_s_per_token) == (0.25, 0.125)
    await source.close()
    await target.close()
    assert source.files() == target.files() == []


async def test_kv_that_is_gone_is_prefilled_and_said(bases):
    source, target = Rollout(0, bases / "one"), Rollout(1, bases / "other")
    reference = await exported_by(source)
    source.told.put_nowait(messages.DropKv(names=(reference.name,)))
    await source.close()
    target.told.put_nowait(generate(2, kv=reference))
    taken = await target.next(messages.KvTaken)
    assert taken.tokens == 0 and "could not be fetched" in taken.error
    assert (await target.next(messages.TrajectoryDeltas)).token_ids.tolist() == [5]
    assert target.engine.imported == []
    await target.close()


async def test_one_that_is_stopped_again_before_its_import_leaves_no_file(bases):
    source, target = Rollout(0, bases / "one"), Rollout(1, bases / "one")
    reference = await exported_by(source)
    target.told.put_nowait(generate(2, kv=reference))
    target.told.put_nowait(STOP)  # before its stream has begun
    last, before = await target.ended("7.1")
    (taken,) = [message for message in before if isinstance(message, messages.KvTaken)]
    assert taken.error == "stopped before it was imported"
    assert last.exported_kv == () and last.token_ids.tolist() == []
    assert source.files() == []
    await source.close()
    await target.close()


async def test_a_rollout_that_does_not_move_kv_says_so_and_exports_none(bases):
    source, target = Rollout(0, bases / "one"), Rollout(1, bases / "one", moves=False)
    reference = await exported_by(source)
    target.told.put_nowait(generate(2, kv=reference))
    assert (await target.next(messages.KvTaken)).error == "this rollout does not move KV"
    target.told.put_nowait(STOP)
    last, _ = await target.ended("7.1")
    assert last.exported_kv == ()
    await source.close()
    await target.close()


async def test_a_neighbour_removes_what_a_lost_rollout_has_left(bases):
    source, neighbour = Rollout(0, bases / "one"), Rollout(1, bases / "one")
    reference = await exported_by(source)
    assert neighbour.files() == [f"{reference.name}.0"]
    neighbour.told.put_nowait(messages.DropKv(names=(), exporters=("rollout-0",)))
    neighbour.told.put_nowait(messages.ReportLoad())
    load = await neighbour.next(messages.RolloutLoad)
    assert load.steps is not None  # the answer to a poll says what decode steps took
    assert neighbour.files() == []
    await source.close()
    await neighbour.close()


async def test_trajectories_that_are_stopped_together_wait_for_the_same_step(bases):
    source = Rollout(0, bases / "one")
    ids = ("7.1", "7.2", "7.3")
    asked, all_asked, step = [], asyncio.Event(), asyncio.Event()
    end = source.engine.abort

    async def abort(request_id, export=None):
        asked.append(request_id.rpartition("/")[0])
        if len(asked) == len(ids):
            all_asked.set()
        await step.wait()
        await end(request_id, export)

    source.engine.abort = abort
    for trajectory_id in ids:
        source.told.put_nowait(generate(1, trajectory_id=trajectory_id))
    source.told.put_nowait(messages.AbortTrajectories(trajectory_ids=ids, export_kv=True))
    async with asyncio.timeout(10):
        await all_asked.wait()
    assert tuple(asked) == ids
    step.set()
    await source.close()
