import math

import numpy as np

from laminar.protocol import messages
from laminar.simulation.workers.environment_worker import ModelledEnvironment, RewardModel
from laminar.simulation.workers.modelled_worker import Life
from tests.simulation.small_cluster import experiment, workload
from tests.simulation.worker_bench import Desk, in_virtual_time

DATA = workload(experiment())


async def environment(desk, *, index=0, seed=0, **settings):
    worker = ModelledEnvironment(
        desk.network,
        Life(index=index),
        workload=DATA,
        rewards=RewardModel(latency_s=0.1, tail_s=0.2, accuracy=0.25),
        seed=seed,
        **settings,
    )
    await desk.welcome(worker)
    return worker


def score(trajectory_id):
    return messages.ScoreTrajectory(
        trajectory_id=trajectory_id,
        source="modelled",
        prompt_text="",
        answer="",
        metadata="{}",
        token_ids=np.zeros(3, np.int32),
        turn_start=0,
        turn_end=3,
    )


async def scores(desk, worker, count):
    """(reward, latency) of each trajectory, asked one after another."""
    answers = []
    for k in range(count):
        started = desk.loop.time()
        desk.said.clear()
        await desk.tell(worker, score(f"{k}.0"))
        await desk.listen(20)
        ((at, _, answer),) = desk.said
        assert answer.trajectory_id == f"{k}.0"
        answers.append((answer.reward, round(at - started, 9)))
    return answers


@in_virtual_time
async def test_prompts_have_the_workloads_lengths_and_carry_their_id():
    desk = Desk()
    worker = await environment(desk)
    await desk.tell(worker, messages.FetchPrompts(start=5, count=3))
    (fetched,) = await desk.listen(1)
    assert [prompt.prompt_id for prompt in fetched.prompts] == [5, 6, 7] and not fetched.exhausted
    for prompt in fetched.prompts:
        assert prompt.token_ids.tolist() == [prompt.prompt_id] * DATA.prompt_tokens(prompt.prompt_id)


@in_virtual_time
async def test_the_data_can_end():
    desk = Desk()
    worker = await environment(desk, prompts=6)
    await desk.tell(worker, messages.FetchPrompts(start=4, count=8))
    (fetched,) = await desk.listen(1)
    assert [prompt.prompt_id for prompt in fetched.prompts] == [4, 5] and fetched.exhausted


@in_virtual_time
async def test_rewards_and_latencies_depend_on_seed_and_trajectory_alone():
    desk = Desk()
    first = await scores(desk, await environment(desk), 200)
    again = await scores(desk, await environment(desk, index=1), 200)
    other = await scores(desk, await environment(desk, index=2, seed=1), 200)
    assert first == again != other
    rewards, latencies = zip(*first, strict=True)
    assert set(rewards) == {0.0, 1.0} and 0.15 < sum(rewards) / 200 < 0.35
    assert min(latencies) >= 0.1 and 0.2 < sum(latencies) / 200 < 0.4


@in_virtual_time
async def test_a_call_can_hang_fail_or_give_no_number():
    desk = Desk()
    worker = await environment(desk)
    worker.fault = {"0.0": "hang", "1.0": "nan", "2.0": "error"}.get
    for k in range(4):
        await desk.tell(worker, score(f"{k}.0"))
    answers = {answer.trajectory_id: answer for answer in await desk.listen(100)}
    assert set(answers) == {"1.0", "2.0", "3.0"}
    assert math.isnan(answers["1.0"].reward) and answers["1.0"].error == ""
    assert "2.0" in answers["2.0"].error
    assert answers["3.0"].reward in (0.0, 1.0)
