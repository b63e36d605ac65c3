"""The learning itself: model, reference model, optimizer, and one actor update at a time.

Invariants: the update does not depend on the number of ranks nor on how the step is cut into micro-batches: every
micro-batch divides its loss by the loss tokens of the whole mini-batch, over all ranks. It does not depend on what was done
before the parameters and the optimizer came to be as they are, either: a restart at any step continues exactly.
"""

from __future__ import annotations

import logging
import time
import zlib

import torch
from torch.distributed.tensor import DTensor

from laminar.algorithms.importance_sampling import importance_weight_metrics, truncated_importance_weights
from laminar.algorithms.kl import mismatch_kl, reference_kl
from laminar.algorithms.policy_loss import policy_loss
from laminar.config.schema import ExperimentConfig
from laminar.errors import RunFailed
from laminar.protocol.messages import TrainStep
from laminar.workers.trainer.batch import MicroBatch, StepBatch
from laminar.workers.trainer.learning_rate import learning_rate
from laminar.workers.trainer.model_loading import load_model, load_tokenizer
from laminar.workers.trainer.parallel import accumulating, describe, distribute, reshard
from laminar.workers.trainer.ranks import Ranks
from laminar.workers.trainer.scoring_model import ScoringModel
from laminar.workers.trainer.step_metrics import StepMetrics, Update

# What starting a forward and backward pass costs, in tokens that could be computed meanwhile: a CPU is busy with a
# hundred; a GPU takes hardly more time for thousands than for one.
PASS_COST_TOKENS = {"cpu": 96, "gpu": 2048}

log = logging.getLogger("laminar.trainer")


class Actor:
    """One rank's part of the policy that is trained."""

    def __init__(self, config: ExperimentConfig, ranks: Ranks) -> None:
        """Load the model (and the reference model, if the loss has a KL term) and lay it out over the ranks.

        Raises:
            UserError: a model folder is missing or does not hold a causal language model with its tokenizer.
        """
        self.config = config
        self.ranks = ranks
        self.tokenizer = load_tokenizer(config.model.path, "model.path")
        self.model = load_model(config.model.path, "model.path")  # float32: the master parameters
        self.published_dtype: torch.dtype = getattr(torch, config.model.dtype)
        if config.trainer.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        strategy = config.trainer.strategy
        temperature = config.rollout.temperature
        self._scoring = distribute(ScoringModel(self.model, temperature), ranks, strategy, trained=True)
        self._reference: torch.nn.Module | None = None
        if config.algorithm.kl_coefficient > 0:
            path, key = config.algorithm.reference_path, "algorithm.reference_path"
            if path is None:
                path, key = config.model.path, "model.path"
            reference = load_model(path, key, self.published_dtype)
            reference.requires_grad_(False)
            self._reference = distribute(ScoringModel(reference, temperature), ranks, strategy, trained=False)
        self._pass_cost = PASS_COST_TOKENS["cpu" if ranks.device.type == "cpu" else "gpu"]
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.trainer.optimizer.learning_rate,
            betas=config.trainer.optimizer.betas,
            weight_decay=config.trainer.optimizer.weight_decay,
            fused=True,  # one kernel over all parameters: 17 times faster than the default on CPU for a tiny model
        )

    def describe(self) -> str:
        """One line for a person: what runs where."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        precision = "float32" if self.published_dtype == torch.float32 else f"{self.config.model.dtype} autocast"
        return (
            f"{type(self.model).__name__}, {count:,} parameters, {precision}, {self.ranks.device.type}, "
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
        batch = StepBatch(message, normalize_std=self.config.algorithm.normalize_std)
        rate = learning_rate(self.config.trainer.optimizer, message.step, self.config.trainer.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        mini_batches = batch.mini_batches(message.mini_batches)
        passes = self._passes(batch, mini_batches)
        old: list[list[torch.Tensor]] | None = None
        if len(mini_batches) > 1:  # the ratio is taken against the policy before them, which an update destroys
            old = [[self._score(micro_batch) for micro_batch in micro_batches] for micro_batches in passes]
            reshard(self._scoring)
        metrics = StepMetrics()
        for index, rows in enumerate(mini_batches):
            normalizer = batch.loss_tokens(rows)
            if normalizer:  # else there is nothing to learn from, on any rank
                self._update(message.step, passes[index], old[index] if old else None, normalizer, metrics)
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

    @torch.no_grad()
    def _score(self, micro_batch: MicroBatch) -> torch.Tensor:  # float32 [N]
        """Logprobs under the current policy."""
        on_device = micro_batch.to(self.ranks.device)
        logprobs, _ = self._scoring(on_device.token_ids, on_device.positions, on_device.targets)
        return logprobs  # type: ignore[no-any-return]

    def _update(
        self,
        step: int,
        micro_batches: list[MicroBatch],
        old: list[torch.Tensor] | None,  # per micro-batch float32 [N]; None: the current policy is the old one
        normalizer: int,
        metrics: StepMetrics,
    ) -> None:
        """One optimizer update on a mini-batch."""
        started = time.perf_counter()
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for index, micro_batch in enumerate(micro_batches):
            with accumulating(self._scoring, self.ranks, last=index == len(micro_batches) - 1):
                loss = self._loss(micro_batch.to(self.ranks.device), old[index] if old else None, normalizer, metrics)
                # DDP and fully_shard average gradients over ranks; ours are to be summed.
                (loss * self.ranks.size).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        figures = {"loss": self.ranks.sum(total).item(), "grad_norm": norm.item()}
        trained = time.perf_counter()
        for name, value in figures.items():
            if not torch.isfinite(torch.tensor(value)):
                self.optimizer.zero_grad()
                raise RunFailed(
                    f"step {step}: {name} is not finite ({value}); this update was not applied. "
                    "A lower trainer.optimizer.learning_rate may help"
                )
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.trainer.optimizer.max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        metrics.updates.append(
            Update(**figures, forward_backward_s=trained - started, optimizer_s=time.perf_counter() - trained)
        )

    def _loss(
        self,
        micro_batch: MicroBatch,
        old: torch.Tensor | None,  # float32 [N]
        normalizer: int,
        metrics: StepMetrics,
    ) -> torch.Tensor:  # float32 []
        """This micro-batch's part of the mini-batch's loss."""
        algorithm = self.config.algorithm
        mask = micro_batch.loss_mask
        engine = micro_batch.engine_logprobs
        logprobs, entropies = self._scoring(micro_batch.token_ids, micro_batch.positions, micro_batch.targets)
        old = logprobs.detach() if old is None else old
        weights = importance = None
        if algorithm.importance_cap is not None:
            weights = truncated_importance_weights(old, engine, cap=algorithm.importance_cap)
            importance = importance_weight_metrics(weights, mask, cap=algorithm.importance_cap)
        loss, policy = policy_loss(
            logprobs,
            old,
            micro_batch.advantages,
            mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            importance_weights=weights,
            normalizer=normalizer,
        )
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = self._reference(
                    micro_batch.token_ids, micro_batch.positions, micro_batch.targets
                )
            kl_loss, reference = reference_kl(logprobs, reference_logprobs, mask, normalizer=normalizer)
            loss = loss + algorithm.kl_coefficient * kl_loss
        metrics.add_pass(micro_batch, policy, mismatch_kl(engine, old, mask), importance, reference, entropies)
        return loss
