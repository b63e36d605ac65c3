"""The config's algorithm as the trainer takes it, and functions of the user's own."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from laminar.config.algorithm_schema import AlgorithmConfig
from laminar.errors import RunFailed, UserError
from laminar.workers.trainer.algorithm import Algorithm, _trial_batch
from tests.algorithms.random_tokens import random_tokens
from tests.workers.trainer.batches import random_step

OWN = """
import numpy as np
import torch

def centred(batch):
    return batch.returns() - batch.returns().mean()

def per_token(batch):
    return np.where(batch.loss_mask, 2.0, 0.0)

def reinforce(tokens):
    return -tokens.advantages * tokens.logprobs

def short(batch):
    return batch.rewards[:-1]

def nans(batch):
    return batch.rewards * float("nan")

def raises(batch):
    raise KeyError("oh")

def detached(tokens):
    return -tokens.advantages

def total(tokens):
    return (tokens.advantages * tokens.logprobs).sum()

def number(tokens):
    return 1.0

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own in the working directory."""
    (tmp_path / "user_algorithm.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("user_algorithm", None)


def algorithm(**settings):
    return Algorithm(AlgorithmConfig.model_validate(settings))


def test_advantages_reach_every_token_of_their_trajectory():
    advantages, returns = algorithm(advantage="dr_grpo").advantages(_trial_batch())
    assert advantages.tolist() == [0.5, 0.5, -0.5, 0, 0, 0] and advantages.dtype == np.float32
    assert returns is None


def test_own_functions(own):
    ours = algorithm(advantage="user_algorithm:centred", loss="user_algorithm:reinforce")
    advantages, _ = ours.advantages(_trial_batch())
    assert advantages.tolist() == [0.5, 0.5, -0.5, 0, 0, 0]
    tokens = random_tokens(0).packed()
    losses = ours.loss(tokens)
    assert torch.equal(losses.values, -tokens.advantages * tokens.logprobs)
    assert not losses.clipped_high.any() and losses.ratio.max() > 1
    advantages, _ = algorithm(advantage="user_algorithm:per_token").advantages(_trial_batch())
    assert advantages.tolist() == [2, 2, 2, 2, 0, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"advantage": "user_algorithm:short"},
            r"algorithm.advantage: user_algorithm:short returned an array of shape \[3\]; expected one number per trajectory \(4\) or per response token \(6\)",
        ),
        ({"advantage": "user_algorithm:nans"}, "returned an advantage that is not finite: nan at 0"),
        (
            {"advantage": "user_algorithm:raises"},
            r"failed: KeyError: 'oh' \(.*user_algorithm\.py:\d+\)\. It was tried out on a small made-up batch",
        ),
        ({"advantage": "user_algorithm:NOT_A_FUNCTION"}, "is no function but int"),
        ({"advantage": "user_algorithm:centered"}, "user_algorithm has no 'centered'; its functions are: centred"),
        ({"advantage": "no_such_module:f"}, "importing no_such_module failed: ModuleNotFoundError"),
        ({"loss": "user_algorithm:detached"}, "losses without gradient; they must hang on tokens.logprobs"),
        (
            {"loss": "user_algorithm:total"},
            r"algorithm.loss: user_algorithm:total returned a tensor of shape \[\]; expected a tensor of shape \[4\]",
        ),
        ({"loss": "user_algorithm:number"}, "user_algorithm:number returned 1.0; expected a tensor"),
        ({"loss": "user_algorithm:raises"}, "failed: KeyError"),
    ],
)
def test_own_functions_that_do_not_work_are_refused_at_the_start(own, settings, message):
    with pytest.raises(UserError, match=message):
        algorithm(**settings)


def test_own_loss_trains(own, make_actor):
    metrics = make_actor(algorithm={"loss": "user_algorithm:reinforce"}).train_step(random_step())
    assert metrics["grad_norm"] > 0 and metrics["clip_fraction_high"] == 0


def test_own_function_that_fails_later_ends_the_run_with_its_name(own, make_actor):
    actor = make_actor(algorithm={"loss": "user_algorithm:reinforce"})
    sys.modules["user_algorithm"].reinforce.__code__ = (lambda tokens: tokens.nothing).__code__
    with pytest.raises(RunFailed, match="algorithm.loss: user_algorithm:reinforce failed: AttributeError"):
        actor.train_step(random_step())
