"""The learning itself: model, reference model, critic, optimizers, and one step at a time.

Invariants: the update does not depend on the number of ranks nor on how the step is cut into micro-batches: what a token
weighs in the loss of its mini-batch is decided before the cut (`aggregation.py`), and advantages come from the whole step.
It does not depend on what was done before the parameters and the optimizers came to be as they are, either: a restart at
any step continues exactly.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass

import numpy as np
import torch

from laminar.algorithms.advantages import RewardedBatch
from laminar.algorithms.importance_sampling import importance_weight_metrics
from laminar.algorithms.kl import mismatch_kl, reference_kl
from laminar.algorithms.overlong import overlong_penalty
from laminar.algorithms.policy_losses import PolicyTokens, policy_loss_metrics
from laminar.config.algorithm import aggregation, critic
from laminar.config.schema import ExperimentConfig
from laminar.protocol.messages import TrainStep
from laminar.workers.trainer.algorithm import Algorithm
from laminar.workers.trainer.batch import MicroBatch, StepBatch
from laminar.workers.trainer.critic import Critic
from laminar.workers.trainer.learning_rate import learning_rate
from laminar.workers.trainer.lora import WithoutAdapters, add_adapters, dropout_off
from laminar.workers.trainer.model_loading import load_model, load_tokenizer
from laminar.workers.trainer.parallel import describe, distribute, reshard
from laminar.workers.trainer.ranks import Ranks
from laminar.workers.trainer.scoring_model import ScoringModel
from laminar.workers.trainer.step_metrics import EntropyMetrics, StepMetrics
from laminar.workers.trainer.update import Update, adamw, set_rate, update

# What starting a forward and backward pass costs, in tokens that could be computed meanwhile: a CPU is busy with a
# hundred; a GPU takes hardly more time for thousands than for one.
PASS_COST_TOKENS = {"cpu": 96, "gpu": 2048}

log = logging.getLogger("laminar.trainer")


@dataclass(kw_only=True, slots=True)
class StepTokens:
    """What is known of the step's T response tokens before its first update; all on the device."""

    advantages: torch.Tensor  # float32 [T]
    weights: torch.Tensor  # float32 [T]: in the loss of their mini-batch
    proximal: torch.Tensor | None  # float32 [T], this rank's: logprobs under the policy at the start of the step
    values: torch.Tensor | None = None  # float32 [T]: the critic's
    returns: torch.Tensor | None = None  # float32 [T]: what it learns


class Actor:
    """One rank's part of the policy that is trained."""

    def __init__(self, config: ExperimentConfig, ranks: Ranks) -> None:
        """Load the model (and a reference model and a critic, as the algorithm asks for) and lay it out over the ranks.

        Raises:
            UserError: a model folder is missing or does not hold a causal language model with its tokenizer; or a loss or
                advantage of the user's own does not work.
        """
        self.config = config
        self.ranks = ranks
        self._algorithm = Algorithm(config.algorithm)
        self.tokenizer = load_tokenizer(config.model.path, "model.path")
        self.published_dtype: torch.dtype = getattr(torch, config.model.dtype)
        # float32: the master parameters; frozen ones need no more than what is published
        held = torch.float32 if config.trainer.lora is None else self.published_dtype
        self.model = load_model(config.model.path, "model.path", held)
        if config.trainer.lora is not None:
            add_adapters(self.model, config.trainer.lora, config.model.path, seed=config.seed)
        if config.trainer.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        scoring = ScoringModel(
            self.model, config.rollout.temperature, entropy_gradient=config.algorithm.entropy_coefficient > 0
        )
        self._scoring = distribute(scoring, ranks, config.trainer.strategy, trained=True)
        self._reference = self._load_reference() if config.algorithm.kl.coefficient > 0 else None
        self._pass_cost = PASS_COST_TOKENS["cpu" if ranks.device.type == "cpu" else "gpu"]
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = adamw(self.parameters, config.trainer.optimizer)
        settings = critic(config.algorithm)
        self.critic = None if settings is None else Critic(config, settings, ranks)

    def _load_reference(self) -> torch.nn.Module:
        path, key = self.config.algorithm.kl.reference_path, "algorithm.kl.reference_path"
        if path is None and self.config.trainer.lora is not None:
            return WithoutAdapters(self._scoring, self.model)
        if path is None:
            path, key = self.config.model.path, "model.path"
        reference = load_model(path, key, self.published_dtype)
        reference.requires_grad_(False)
        scoring = ScoringModel(reference, self.config.rollout.temperature)
        return distribute(scoring, self.ranks, self.config.trainer.strategy, trained=False)

    def describe(self) -> str:
        """One line for a person: what runs where."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        trained = sum(parameter.numel() for parameter in self.parameters)
        trains = f" ({trained:,} of adapters are trained)" if self.config.trainer.lora is not None else ""
        precision = "float32" if self.published_dtype == torch.float32 else f"{self.config.model.dtype} autocast"
        beside = ", a critic beside it" if self.critic is not None else ""
        return (
            f"{type(self.model).__name__}, {count:,} parameters{trains}{beside}, {precision}, {self.ranks.device.type}, "
            f"{describe(self.ranks, self.config.trainer.strategy)}"
        )

    def train_step(self, message: TrainStep) -> dict[str, float]:
        """Make the optimizer updates of one step (or a part of one), and return its metrics, the same on every rank.

        Raises:
            RunFailed: a reward, an engine logprob, the loss or the gradient norm is not finite; names step and metric.
                The update in question is not applied.
        """
        # Dropout's draws: a function of the step, so there is no random state to restore.
        torch.manual_seed(zlib.crc32(f"{self.config.seed}/{message.step}/{message.part}/{self.ranks.rank}".encode()))
        batch = StepBatch(message)
        rate = learning_rate(self.config.trainer.optimizer, message.step, self.config.trainer.steps)
        set_rate(self.optimizer, rate)
        mini_batches = batch.mini_batches(message.mini_batches)
        passes = self._passes(batch, mini_batches)
        metrics = StepMetrics()
        tokens = self._before_updates(batch, mini_batches, passes, metrics)
        for rows, micro_batches in zip(mini_batches, passes, strict=True):
            if not batch.loss_tokens(rows).any():
                continue  # there is nothing to learn from, on any rank
            if self.critic is not None and tokens.values is not None and tokens.returns is not None:
                made, figures = self.critic.update(
                    message.step, micro_batches, tokens.values, tokens.returns, tokens.weights
                )
                metrics.critic_updates.append(made)
                metrics.add(figures)
            metrics.updates.append(self._update(message.step, micro_batches, tokens, metrics))
        return metrics.summary(batch, self.ranks, rate)

    def _passes(self, batch: StepBatch, mini_batches: list[list[int]]) -> list[list[MicroBatch]]:
        """This rank's micro-batches of every mini-batch: as many on each rank as the rank that wants most."""
        budget = self.config.trainer.max_tokens_per_micro_batch
        if batch.lengths.max() > budget:
            log.warning(
                "step %d: a trajectory of %d tokens is longer than trainer.max_tokens_per_micro_batch (%d); "
                "it sets the size of the micro-batches",
                batch.message.step,
                batch.lengths.max(),
                budget,
            )
        shares = [batch.share(rows, self.ranks.rank, self.ranks.size) for rows in mini_batches]
        wanted = torch.tensor([batch.best_number(rows, budget, self._pass_cost) for rows in shares])
        agreed = self.ranks.max(wanted).tolist()
        return [
            [batch.micro_batch(rows) for rows in batch.pack(share, budget, at_least=number)]
            for share, number in zip(shares, agreed, strict=True)
        ]

    def _before_updates(
        self, batch: StepBatch, mini_batches: list[list[int]], passes: list[list[MicroBatch]], metrics: StepMetrics
    ) -> StepTokens:
        """Score all that the updates hang on, before they change it. A collective call."""
        algorithm = self.config.algorithm
        in_reward = self._reference is not None and algorithm.kl.apply_to == "reward"
        several = len(mini_batches) > 1 and algorithm.old_policy == "proximal"
        size, flat = len(batch.in_loss), [micro_batch for own in passes for micro_batch in own]
        # With one mini-batch the first pass of its update gives the same.
        proximal = self._score(self._scoring, flat, size) if several or in_reward else None
        token_rewards = np.zeros(size)
        if in_reward and proximal is not None:
            assert self._reference is not None
            estimates = self._penalties(proximal, self._score(self._reference, flat, size), flat, metrics)
            token_rewards = -algorithm.kl.coefficient * self._of_all_ranks(estimates)
        values = None if self.critic is None else self._values(self.critic, flat, size)
        advantages, returns = self._algorithm.advantages(
            RewardedBatch(
                rewards=self._rewards(batch, metrics),
                group_ids=batch.message.group_ids,
                response_lengths=batch.response_lengths,
                loss_mask=batch.in_loss,
                token_rewards=token_rewards,
                values=None if values is None else self._of_all_ranks(values),
            )
        )
        metrics.advantages = advantages[batch.in_loss]
        weights = batch.token_weights(
            mini_batches,
            aggregation=aggregation(algorithm),
            max_response_tokens=self.config.rollout.max_response_tokens,
        )
        device = self.ranks.device
        return StepTokens(
            advantages=torch.from_numpy(advantages).to(device),
            weights=torch.from_numpy(weights).to(device),
            proximal=proximal,
            values=values,
            returns=None if returns is None else torch.from_numpy(returns).to(device),
        )

    def _rewards(self, batch: StepBatch, metrics: StepMetrics) -> np.ndarray:  # float64 [B]
        rewards = batch.message.rewards.astype(np.float64)
        overlong = self.config.algorithm.overlong
        if overlong.buffer_tokens:
            penalties = overlong_penalty(
                batch.response_lengths,
                max_response_tokens=self.config.rollout.max_response_tokens,
                buffer_tokens=overlong.buffer_tokens,
                penalty=overlong.penalty,
            )
            metrics.overlong_penalties = penalties
            rewards += penalties
        return rewards

    @torch.no_grad()
    def _score(self, module: torch.nn.Module, micro_batches: list[MicroBatch], size: int) -> torch.Tensor:
        """Logprobs of this rank's tokens as they stand now and are published, float32 [T]; 0 elsewhere."""
        result = torch.zeros(size, device=self.ranks.device)
        with dropout_off(self.model):
            for micro_batch in micro_batches:
                on_device = micro_batch.to(self.ranks.device)
                logprobs, _ = module(on_device.token_ids, on_device.positions, on_device.targets)
                _put(result, on_device, logprobs)
        reshard(module)
        return result

    @torch.no_grad()
    def _values(self, critic: Critic, micro_batches: list[MicroBatch], size: int) -> torch.Tensor:
        """Values of this rank's tokens, float32 [T]; 0 elsewhere."""
        result = torch.zeros(size, device=self.ranks.device)
        for micro_batch in micro_batches:
            on_device = micro_batch.to(self.ranks.device)
            _put(result, on_device, critic.values(on_device))
        reshard(critic.module)
        return result

    def _penalties(
        self, logprobs: torch.Tensor, reference: torch.Tensor, micro_batches: list[MicroBatch], metrics: StepMetrics
    ) -> torch.Tensor:
        """KL estimates of this rank's tokens, float32 [T]; 0 elsewhere. All arguments [T]."""
        mask = torch.zeros(len(logprobs), dtype=torch.bool, device=self.ranks.device)
        for micro_batch in micro_batches:
            on_device = micro_batch.to(self.ranks.device)
            _put(mask, on_device, on_device.loss_mask)
        estimates, figures = reference_kl(logprobs, reference, mask, estimator=self.config.algorithm.kl.estimator)
        metrics.add(figures)
        return estimates

    def _of_all_ranks(self, own: torch.Tensor) -> np.ndarray:  # float64 [T]
        """Put together what each rank has of its own tokens; a collective call."""
        return self.ranks.sum(own).cpu().numpy().astype(np.float64)

    def _update(self, step: int, micro_batches: list[MicroBatch], tokens: StepTokens, metrics: StepMetrics) -> Update:
        """One optimizer update on a mini-batch."""
        return update(
            self._scoring,
            self.parameters,
            self.optimizer,
            micro_batches,
            lambda micro_batch: self._loss(micro_batch, tokens, metrics),
            self.ranks,
            max_grad_norm=self.config.trainer.optimizer.max_grad_norm,
            where=f"step {step}",
        )

    def _loss(self, micro_batch: MicroBatch, tokens: StepTokens, metrics: StepMetrics) -> torch.Tensor:  # float32 []
        """This micro-batch's part of the mini-batch's loss."""
        algorithm = self.config.algorithm
        mask, places, engine = micro_batch.loss_mask, micro_batch.places, micro_batch.engine_logprobs
        reference = None
        if self._reference is not None and algorithm.kl.apply_to == "loss":
            with torch.no_grad():  # before the pass with gradient: it may go through the same modules
                reference, _ = self._reference(micro_batch.token_ids, micro_batch.positions, micro_batch.targets)
        logprobs, entropies = self._scoring(micro_batch.token_ids, micro_batch.positions, micro_batch.targets)
        proximal = logprobs.detach() if tokens.proximal is None else tokens.proximal[places]
        policy = PolicyTokens(
            logprobs=logprobs,
            old_logprobs=proximal if algorithm.old_policy == "proximal" else engine,
            engine_logprobs=engine,
            advantages=tokens.advantages[places],
            loss_mask=mask,
            trajectories=micro_batch.trajectories,
        )
        losses = self._algorithm.loss(policy)
        values = losses.values
        importance = self._algorithm.correction(proximal, engine, mask, micro_batch.trajectories)
        if importance is not None:
            values = values * importance.weights
            metrics.add(importance_weight_metrics(importance, mask))
        if reference is not None:
            estimates, figures = reference_kl(logprobs, reference, mask, estimator=algorithm.kl.estimator)
            values = values + algorithm.kl.coefficient * estimates
            metrics.add(figures)
        if algorithm.entropy_coefficient:
            values = values - algorithm.entropy_coefficient * entropies
        metrics.add_pass(micro_batch)
        metrics.add(policy_loss_metrics(losses, mask))
        metrics.add(mismatch_kl(engine, proximal, mask))
        metrics.add(EntropyMetrics.of(entropies.detach(), mask))
        return torch.where(mask, values * tokens.weights[places], 0.0).sum()


def _put(into: torch.Tensor, micro_batch: MicroBatch, values: torch.Tensor) -> None:
    """Values of a micro-batch's tokens to where these stand in the step, [N] into [T]."""
    mask = micro_batch.loss_mask
    into[micro_batch.places[mask]] = values[mask]
