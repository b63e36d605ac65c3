from __future__ import annotations

import numpy as np
import pytest

from laminar.errors import UserError
from laminar.simulation.models.hardware import gpu
from laminar.simulation.models.language_models import language_model
from laminar.simulation.models.trainer_model import TrainerModel

H800 = gpu("H800")


def trainer(name="Qwen2.5-7B", gpus=64):
    return TrainerModel(language_model(name), H800, gpus)


def test_a_mini_batch_by_hand():
    # 2048 sequences of 4,096 tokens, four forwards: 4 (2 P' L + 2 layers heads head_dim L^2), P' without the input embedding.
    lengths = np.full(2048, 4096)
    flops = 2048 * 4 * (2 * (7_615_616_512 - 152_064 * 3584) * 4096 + 2 * 28 * 28 * 128 * 4096**2)
    assert trainer().gradient_seconds(lengths) == pytest.approx(flops / (64 * 989.4e12 * 0.45))
    assert trainer().logprob_seconds(lengths) == pytest.approx(trainer().gradient_seconds(lengths) / 4)


def test_long_sequences_cost_more_than_the_same_tokens_in_short_ones():
    assert trainer().gradient_seconds(np.array([16_000])) > 1.2 * trainer().gradient_seconds(np.full(16, 1000))


def test_logprobs_are_recomputed_only_for_several_mini_batches():
    whole, halves = np.full(64, 4096), [np.full(32, 4096)] * 2
    one, two = trainer(), trainer()
    assert one.step_seconds([whole]) == pytest.approx(one.gradient_seconds(whole) + one.optimizer_seconds())
    assert two.step_seconds(halves) == pytest.approx(
        one.step_seconds([whole]) + one.optimizer_seconds() + one.logprob_seconds(whole)
    )


def test_twice_the_gpus_half_the_time():
    lengths = np.full(100, 3000)
    assert trainer(gpus=64).gradient_seconds(lengths) == pytest.approx(2 * trainer(gpus=128).gradient_seconds(lengths))


@pytest.mark.parametrize(("name", "gpus", "paper"), [("Qwen2.5-32B", 64, 0.64), ("Qwen2.5-72B", 128, 1.40)])
def test_publish_stall_is_near_the_paper(name, gpus, paper):
    assert trainer(name, gpus).publish_stall_seconds() == pytest.approx(paper, rel=0.05)


def test_checkpoint_is_shared_by_the_hosts():
    assert trainer(gpus=8).checkpoint_seconds() == pytest.approx(14 * 7_615_616_512 / 4e9)
    assert trainer(gpus=64).checkpoint_seconds() == pytest.approx(trainer(gpus=8).checkpoint_seconds() / 8)


def test_a_model_that_does_not_fit_is_refused_with_the_smallest_number():
    with pytest.raises(UserError, match=r"8 x H800 have 479 GB .* Qwen2.5-72B; expected 1309 GB, 22 GPUs or more"):
        trainer("Qwen2.5-72B", 8)
    trainer("Qwen2.5-72B", 22)
    with pytest.raises(UserError, match="trainer gpus: 0"):
        trainer(gpus=0)
