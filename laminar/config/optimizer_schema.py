"""The section `optimizer` of whatever is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.section import Section


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; `linear` and `cosine` end at 0 with the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Adam's moment decay rates."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
