"""The learning rate of a step. Invariant: a pure function of the step, so a restart at any step continues exactly."""

from __future__ import annotations

import math

from laminar.config.optimizer_schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of `step` (from 1) in a run of `steps`.

    It rises over the first `warmup_steps` steps, the last of which has the peak; then it stays or falls. The first step
    after the warm-up has the peak too, and 0 is what would follow the last step: no step is made with a rate of 0.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = min(1.0, (step - 1 - config.warmup_steps) / max(1, steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = (1.0 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * factor
