import numpy as np
import pytest

from laminar.protocol import messages
from laminar.simulation.models.hardware import gpu
from laminar.simulation.models.language_models import language_model
from laminar.simulation.models.trainer_model import TrainerModel
from laminar.simulation.workers.modelled_worker import Life
from laminar.simulation.workers.trainer_worker import ModelledTrainer, TrainerTimes
from laminar.simulation.workers.weight_stores import WeightTimes
from tests.simulation.worker_bench import Desk, in_virtual_time

TIMES = TrainerTimes(
    model=TrainerModel(language_model("Qwen2.5-7B"), gpu("H800"), 8),
    nbytes=1000,
    recomputes_logprobs=False,
    publish_s=2.0,
)

WEIGHT_TIMES = WeightTimes(nbytes=1000, latency_s=0.0, bandwidth=1000.0, pull_s=0.0)


async def trainer(desk, ranks=1):
    started = []
    for index in range(ranks):
        started.append(
            ModelledTrainer(
                desk.network,
                Life(index=index),
                times=TIMES,
                stores=desk.stores,
                ranks=started,
                weight_times=WEIGHT_TIMES,
                carriers=desk.carriers,
                keep_versions=2,
            )
        )
    await desk.welcome(*started)
    return started


def step_message(*, order=1, step=1, part=0, publish_version=1, responses=(100, 300, 200, 400), mini_batches=2):
    count = len(responses)
    return messages.TrainStep(
        order=order,
        step=step,
        part=part,
        mini_batches=mini_batches,
        publish_version=publish_version,
        group_ids=np.arange(count, dtype=np.int64) // 2,
        rewards=np.ones(count, np.float32),
        prompt_lengths=np.full(count, 10, np.int32),
        response_lengths=np.array(responses, np.int32),
        token_ids=np.zeros(10 * count + sum(responses), np.int32),
        loss_mask=np.ones(sum(responses), np.uint8),
        engine_logprobs=np.zeros(sum(responses), np.float32),
        staleness=np.zeros(count, np.int32),
    )


@in_virtual_time
async def test_a_step_takes_the_models_seconds_and_then_publishes():
    desk = Desk()
    (rank,) = await trainer(desk)
    started = desk.loop.time()
    await desk.tell(rank, step_message())
    await desk.listen(100)
    expected = TIMES.model.step_seconds([np.array([110, 310]), np.array([210, 410])])
    expected -= TIMES.model.logprob_seconds(np.array([110, 310, 210, 410]))  # TIMES is of a step without it
    (trained_at, _, trained), (published_at, _, published) = desk.said
    assert trained == messages.StepTrained(step=1, part=0, seconds=pytest.approx(expected), metrics=trained.metrics)
    assert trained_at - started == pytest.approx(expected)
    assert published == messages.WeightsPublished(policy_version=1, publish_stall_s=2.0, nbytes=1000)
    assert published_at - trained_at == pytest.approx(2.0)
    assert desk.stores.held("relay-0") == [1]


def test_recomputed_logprobs_and_switches_cost_time():
    lengths = np.array([1000, 2000])
    least = TIMES.step_s(lengths, 1)
    more = TrainerTimes(model=TIMES.model, nbytes=1, recomputes_logprobs=True, publish_s=0.0, switch_s=3.0)
    assert more.step_s(lengths, 1) == pytest.approx(least + TIMES.model.logprob_seconds(lengths) + 3.0)


@in_virtual_time
async def test_orders_are_done_one_after_another():
    desk = Desk()
    (rank,) = await trainer(desk)
    await desk.tell(rank, step_message(part=0, publish_version=None))
    await desk.tell(rank, step_message(order=2, part=1, publish_version=1))
    await desk.tell(rank, messages.SaveCheckpoint(order=3, step=1, policy_version=1, path="p", state="{}"))
    await desk.tell(rank, messages.LoadCheckpoint(order=4, step=1, path="p"))
    kinds = [type(message) for message in await desk.listen(1000)]
    assert kinds == [
        messages.StepTrained,
        messages.StepTrained,
        messages.WeightsPublished,
        messages.CheckpointSaved,
        messages.CheckpointLoaded,
    ]
    assert rank.trained == [(1, 0), (1, 1)]


@in_virtual_time
async def test_all_ranks_answer_and_the_first_publishes():
    desk = Desk()
    ranks = await trainer(desk, 3)
    for rank in ranks:
        await desk.tell(rank, step_message())
    await desk.listen(100)
    assert sorted(peer for _, peer, m in desk.said if isinstance(m, messages.StepTrained)) == [
        "trainer-0#1",
        "trainer-1#1",
        "trainer-2#1",
    ]
    assert [peer for _, peer, m in desk.said if isinstance(m, messages.WeightsPublished)] == ["trainer-0#1"]


@in_virtual_time
async def test_the_others_wait_for_a_lost_rank():
    desk = Desk()
    ranks = await trainer(desk, 2)
    for rank in ranks:
        await desk.tell(rank, step_message())
    ranks[1].kill()
    assert await desk.listen(1000) == []
    assert desk.stores.held("relay-0") == []


@in_virtual_time
async def test_a_checkpoint_can_fail():
    desk = Desk()
    (rank,) = await trainer(desk)
    rank.checkpoint_error = lambda step: "no space" if step == 2 else ""
    for step in (1, 2):
        await desk.tell(rank, messages.SaveCheckpoint(order=step, step=step, policy_version=step, path="p", state="{}"))
    first, second = await desk.listen(1000)
    assert (first.error, second.error) == ("", "no space")
