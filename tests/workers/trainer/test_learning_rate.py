from __future__ import annotations

import pytest

from laminar.config.optimizer_schema import OptimizerConfig
from laminar.workers.trainer.learning_rate import learning_rate


def rates(schedule, warmup_steps, steps):
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_steps=warmup_steps)
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "steps", "expected"),
    [
        ("constant", 0, 3, [2, 2, 2]),
        ("constant", 4, 6, [0.5, 1, 1.5, 2, 2, 2]),
        ("linear", 0, 4, [2, 1.5, 1, 0.5]),
        ("linear", 2, 6, [1, 2, 2, 1.5, 1, 0.5]),
        ("cosine", 0, 3, [2, 1.5, 0.5]),
        ("linear", 5, 3, [0.4, 0.8, 1.2]),
    ],
)
def test_rates(schedule, warmup_steps, steps, expected):
    assert rates(schedule, warmup_steps, steps) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_ends_at_zero_with_the_last_step(schedule):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule)
    assert learning_rate(config, 100, 100) > 0
    assert learning_rate(config, 101, 100) == pytest.approx(0)
