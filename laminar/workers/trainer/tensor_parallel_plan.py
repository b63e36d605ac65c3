"""Which weights rollouts split by columns, so that the trainer can lay out their shards contiguously.

It is read from transformers' own tensor-parallel plan of the model class. A wrong plan would cost speed only: a version
reads the same however it is laid out (`laminar.weights.sharded_matrix`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

log = logging.getLogger("laminar.trainer")

ROW_PARALLEL = "rowwise"  # the layer's rows of input are split: the columns of its weight


def column_shards(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], degree: int) -> dict[str, int]:
    """Into how many shards of columns to cut which weights.

    Args:
        model: tells its plan.
        weights: Hugging Face names to tensors.
        degree: the largest tensor parallel degree among the rollouts; the others divide it.

    Returns:
        name -> degree, for the matrices to cut. Those of an architecture without a plan, and those whose columns the
        degree does not divide, are not among them: they are laid out plainly.
    """
    if degree == 1:
        return {}
    plan: dict[str, str] = model.tp_plan
    found = {
        name: degree
        for name, tensor in weights.items()
        if _style(name, plan) == ROW_PARALLEL and tensor.ndim == 2 and tensor.shape[1] % degree == 0
    }
    if not found:
        log.info(
            "transformers has no tensor-parallel plan for %s that a degree of %d could use: all weights are laid out "
            "plainly, and rollouts slice them",
            type(model).__name__,
            degree,
        )
    return found


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """The plan's word for a weight; layer numbers are wildcards in a plan, whose keys name modules."""
    module, _, kind = re.sub(r"\.\d+(?=\.|$)", ".*", name).rpartition(".")
    return plan.get(module) if kind == "weight" else None
