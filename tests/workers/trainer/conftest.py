from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from laminar.config.schema import ExperimentConfig
from laminar.workers.trainer.actor import Actor
from laminar.workers.trainer.ranks import Ranks
from tests.tiny_models import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny random Qwen3 with a tied head."""
    return make_model(tmp_path_factory.mktemp("models") / "tied", seed=0)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps its state in classes; each test gets its own."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


@pytest.fixture
def make_config(model_folder):
    def build(*, optimizer=None, algorithm=None, dtype="float32", path=None, temperature=1.0, **trainer):
        trainer = {"steps": 10, "groups_per_step": 4, "group_size": 4, **trainer}
        return ExperimentConfig.model_validate(
            {
                "name": "test",
                "model": {"path": str(path or model_folder), "dtype": dtype},
                "data": {"source": {"type": "jsonl", "path": "unused.jsonl"}},
                "rollout": {"temperature": temperature},
                "trainer": {**trainer, "optimizer": {"learning_rate": 1e-3, **(optimizer or {})}},
                "algorithm": algorithm or {},
            }
        )

    return build


@pytest.fixture
def make_actor(make_config):
    def build(**options):
        config = make_config(**options)
        return Actor(config, Ranks(config))

    return build
