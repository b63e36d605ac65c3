"""The critic: a value model that is trained beside the actor, on the same micro-batches.

Invariant: values and updates do not depend on the number of ranks nor on how the step is cut into micro-batches.
"""

from __future__ import annotations

import torch

from laminar.algorithms.value_loss import ValueMetrics, value_loss
from laminar.config.algorithm_schema import CriticConfig
from laminar.config.schema import ExperimentConfig
from laminar.workers.trainer.batch import MicroBatch
from laminar.workers.trainer.learning_rate import learning_rate
from laminar.workers.trainer.model_loading import load_model
from laminar.workers.trainer.parallel import distribute
from laminar.workers.trainer.ranks import Ranks
from laminar.workers.trainer.update import Update, adamw, set_rate, update
from laminar.workers.trainer.value_model import ValueModel


class Critic:
    """One rank's part of the critic."""

    def __init__(self, config: ExperimentConfig, critic: CriticConfig, ranks: Ranks) -> None:
        """Load its trunk and lay it out over the ranks, as the actor.

        Raises:
            UserError: the model folder is missing or does not hold a causal language model.
        """
        path, key = critic.path, "algorithm.critic.path"
        if path is None:
            path, key = config.model.path, "model.path"
        language_model = load_model(path, key)
        if config.trainer.gradient_checkpointing:
            language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        language_model.train()
        self.model = ValueModel(language_model)
        self.module = distribute(self.model, ranks, config.trainer.strategy, trained=True)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = adamw(self.parameters, critic.optimizer)
        self._config = critic
        self._steps = config.trainer.steps
        self._ranks = ranks

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:  # float32 [N]
        """Before each token of a micro-batch on the device, with gradient."""
        return self.module(micro_batch.token_ids, micro_batch.positions)  # type: ignore[no-any-return]

    def update(
        self,
        step: int,
        micro_batches: list[MicroBatch],
        old_values: torch.Tensor,  # float32 [T]: before the step's first update
        returns: torch.Tensor,  # float32 [T]
        weights: torch.Tensor,  # float32 [T]: of the tokens in the loss
    ) -> tuple[Update, ValueMetrics]:
        """One optimizer update on a mini-batch, and this rank's metrics. A collective call.

        Raises:
            RunFailed: the loss or the gradient norm is not finite.
        """
        collected: list[ValueMetrics] = []

        def loss_of(micro_batch: MicroBatch) -> torch.Tensor:
            places, mask = micro_batch.places, micro_batch.loss_mask
            values = self.values(micro_batch)
            losses, metrics = value_loss(values, old_values[places], returns[places], mask, clip=self._config.clip)
            collected.append(metrics)
            return torch.where(mask, losses * weights[places], 0.0).sum()

        set_rate(self.optimizer, learning_rate(self._config.optimizer, step, self._steps))
        made = update(
            self.module,
            self.parameters,
            self.optimizer,
            micro_batches,
            loss_of,
            self._ranks,
            max_grad_norm=self._config.optimizer.max_grad_norm,
            where=f"step {step}",
            names=("value_loss", "critic_grad_norm"),
            rate_key="algorithm.critic.optimizer.learning_rate",
        )
        total = collected[0]
        for metrics in collected[1:]:
            total = total + metrics
        return made, total


def named_state(critic: Critic) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the trunk and the head by name: the critic's own tensors."""
    state: dict[str, torch.Tensor] = critic.model.state_dict(keep_vars=True)
    return state
