"""Workers that are not real: they answer the controller's messages at once, in the same event loop.

Models of behaviour only (what is sent when), used by the controller's tests; real workers have their own tests.
"""

import asyncio

import numpy as np

import laminar
from laminar.config.schema import ExperimentConfig
from laminar.protocol import messages

EOS = 2


def experiment(**overrides) -> ExperimentConfig:
    """A small experiment; overrides are dotted keys with `__` for the dot."""
    tree = {
        "name": "fake",
        "model": {"path": "models/none"},
        "data": {"source": {"type": "jsonl", "path": "none.jsonl"}, "max_prompt_tokens": 8},
        "reward": {"function": "exact"},
        "rollout": {"replicas": 2, "max_running": 8, "max_response_tokens": 4},
        "relay": {"count": 2},
        "trainer": {"steps": 3, "groups_per_step": 2, "group_size": 2},
        "controller": {"start_timeout_s": 10, "step_timeout_s": 10},
    }
    for key, value in overrides.items():
        *path, last = key.split("__")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return ExperimentConfig.model_validate(tree)


class FakeWorker:
    """Says hello, then answers every message by `answer`, an async generator."""

    def __init__(self, network, kind, index, pid=1):
        self.kind, self.index, self.pid = kind, index, pid
        self.name = f"{kind}-{index}"
        self.channel = network.worker(f"{self.name}@test:{pid}")
        self.received = []

    async def run(self):
        await self.channel.send(
            messages.Hello(kind=self.kind, index=self.index, pid=self.pid, host="here", version=laminar.__version__)
        )
        welcome = await self.channel.receive()
        if isinstance(welcome, messages.Shutdown):
            return
        for message in self.before_ready():
            await self.channel.send(message)
        await self.channel.send(messages.Ready(detail="fake"))
        while True:
            message = await self.channel.receive()
            self.received.append(message)
            if isinstance(message, messages.Shutdown):
                return
            async for answer in self.answer(message):
                await self.channel.send(answer)

    def before_ready(self):
        return ()

    async def answer(self, message):
        return
        yield


class FakeRelay(FakeWorker):
    """Whatever its neighbours do, it has a version as soon as it is told to carry it."""

    def before_ready(self):
        address = f"127.0.0.1:{7000 + self.index}"
        return (messages.RelayJoined(versions=(), address=address, world="", world_rank=-1, library=""),)

    async def answer(self, message):
        if isinstance(message, messages.Carry):
            yield messages.WeightsStored(
                policy_version=message.policy_version,
                seconds=0.0,
                nbytes=4,
                received_bytes=0 if message.upstream is None else 4,
                chunks=1,
                damaged=0,
                latency_s=0.0,
                bytes_per_s=0.0,
            )


class FakeTrainer(FakeWorker):
    steps = ()

    async def answer(self, message):
        if isinstance(message, messages.PublishWeights):
            yield messages.WeightsPublished(policy_version=message.policy_version, publish_stall_s=0.0, nbytes=4)
        elif isinstance(message, messages.TrainStep):
            self.steps = (*self.steps, message)
            yield messages.StepTrained(
                step=message.step, part=message.part, seconds=0.0, metrics={"loss": 0.5, "mismatch_kl": 0.0}
            )
            if self.index == 0 and message.publish_version is not None:
                yield messages.WeightsPublished(policy_version=message.publish_version, publish_stall_s=0.0, nbytes=4)
        elif isinstance(message, messages.SaveCheckpoint):
            yield messages.CheckpointSaved(step=message.step, path=message.path, seconds=0.0, nbytes=4, error="")


class FakeRollout(FakeWorker):
    """Answers a prompt with one token, the version that it serves, and the end of sequence."""

    policy_version = -1
    hold = frozenset()  # trajectories that never finish

    async def answer(self, message):
        if isinstance(message, messages.PullWeights):
            self.policy_version = message.policy_version
            yield messages.WeightsPulled(policy_version=message.policy_version, seconds=0.0, nbytes=4)
        elif isinstance(message, messages.Generate):
            for assignment in message.assignments:
                held = assignment.trajectory_id in self.hold
                tokens = [self.policy_version] if held else [self.policy_version, EOS]
                yield messages.TrajectoryDeltas(
                    policy_version=self.policy_version,
                    trajectory_ids=(assignment.trajectory_id,),
                    leases=(assignment.lease,),
                    starts=np.array([len(assignment.token_ids)], np.int32),
                    token_counts=np.array([len(tokens)], np.int32),
                    token_ids=np.array(tokens, np.int32),
                    logprobs=np.full(len(tokens), -1.0, np.float32),
                    finish_reasons=(None if held else "stop",),
                    load=messages.RolloutLoad(running=1, waiting=0, kv_utilization=0.5),
                )


class FakeEnvironment(FakeWorker):
    """Prompts of `lengths` tokens each (the data ends after the last); the reward is 1 for even members."""

    lengths = (3,) * 1000

    async def answer(self, message):
        if isinstance(message, messages.FetchPrompts):
            records = [
                messages.PromptRecord(
                    prompt_id=k,
                    source="fake",
                    text=str(k),
                    token_ids=np.full(self.lengths[k], k, np.int32),
                    answer="",
                    metadata="{}",
                )
                for k in range(message.start, min(message.start + message.count, len(self.lengths)))
            ]
            ended = message.start + message.count >= len(self.lengths)
            yield messages.PromptsFetched(
                start=message.start, prompts=tuple(records), exhausted=ended, evaluation=message.evaluation
            )
        elif isinstance(message, messages.ScoreTrajectory):
            yield self.score(message)

    def score(self, message):
        reward = 1.0 - int(message.trajectory_id.rpartition(".")[2]) % 2
        return messages.TrajectoryScored(trajectory_id=message.trajectory_id, reward=reward, response_text="", error="")


def make_workers(network, config, *, rollout=FakeRollout, trainer=FakeTrainer, environment=FakeEnvironment):
    """All workers of a config."""
    return [
        *(FakeRelay(network, "relay", k) for k in range(config.relay.count)),
        *(trainer(network, "trainer", k) for k in range(config.trainer.ranks)),
        *(rollout(network, "rollout", k) for k in range(config.rollout.replicas)),
        *(environment(network, "environment", k) for k in range(config.reward.workers)),
    ]


async def run_workers(workers):
    """Run them until the controller tells them to end."""
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker.run())
