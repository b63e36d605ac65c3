"""The functions that a config's `algorithm` combines. Invariant: a user's own function has been tried out when the run starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laminar.algorithms import advantages, importance_sampling, policy_losses
from laminar.algorithms.advantages import Floats, RewardedBatch
from laminar.algorithms.importance_sampling import ImportanceWeights
from laminar.algorithms.policy_losses import PolicyTokens, TokenLosses
from laminar.config.algorithm import ADVANTAGES, LOSSES, clips, correction
from laminar.config.algorithm_schema import AlgorithmConfig
from laminar.config.user_function import in_one_line, load_function
from laminar.errors import RunFailed, UserError

ADVANTAGE, LOSS = "algorithm.advantage", "algorithm.loss"


class Algorithm:
    """Advantages, policy loss and correction as the config names them."""

    def __init__(self, config: AlgorithmConfig) -> None:
        """Load and try out the user's own functions.

        Raises:
            UserError: one of them cannot be imported, or does not give what it should; names the key.
        """
        self._config = config
        self._clips = clips(config) if config.loss in LOSSES else (0.0, 0.0)
        self._correction = correction(config)
        self._own_advantage: Callable[..., Any] | None = None
        self._own_loss: Callable[..., Any] | None = None
        try:
            if config.advantage not in ADVANTAGES:
                self._own_advantage = load_function(ADVANTAGE, config.advantage)
                self.advantages(_trial_batch())
            if config.loss not in LOSSES:
                self._own_loss = load_function(LOSS, config.loss)
                self._try_loss()
        except RunFailed as error:
            raise UserError(f"{error}. It was tried out on a small made-up batch; mend it") from error

    def advantages(
        self, batch: RewardedBatch
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:  # float32 [T], float32 [T]
        """Advantages of the response tokens, and with `gae` the returns that the critic learns.

        Raises:
            RunFailed: the user's own function failed, or gave something else than finite numbers [B] or [T].
        """
        returns: Floats | None = None
        match self._config.advantage:
            case "grpo":
                result = advantages.grpo(batch)
            case "dr_grpo":
                result = advantages.dr_grpo(batch)
            case "rloo":
                result = advantages.rloo(batch)
            case "reinforce++":
                result = advantages.reinforce_plus_plus(batch, gamma=self._config.gamma)
            case "gae":
                result, returns = advantages.gae(batch, gamma=self._config.gamma, gae_lambda=self._config.gae_lambda)
                result = advantages.normalized(result, batch.loss_mask)
            case _:
                result = self._call_advantage(batch)
        if result.shape == batch.rewards.shape:
            result = result[batch.trajectory_of()]
        return result.astype(np.float32), None if returns is None else returns.astype(np.float32)

    def loss(self, tokens: PolicyTokens) -> TokenLosses:
        """The policy loss, token by token.

        Raises:
            RunFailed: the user's own function failed, or gave something else than a tensor [N] with gradient.
        """
        low, high = self._clips
        match self._config.loss:
            case "ppo":
                return policy_losses.ppo(tokens, clip_low=low, clip_high=high, dual_clip=self._config.dual_clip)
            case "dapo":
                return policy_losses.dapo(tokens, clip_low=low, clip_high=high)
            case "gspo":
                return policy_losses.gspo(tokens, clip_low=low, clip_high=high)
            case "cispo":
                return policy_losses.cispo(tokens, clip_low=low, clip_high=high)
            case "decoupled_ppo":
                cap = self._config.behavior_cap
                return policy_losses.decoupled_ppo(tokens, clip_low=low, clip_high=high, behavior_cap=cap)
            case _:
                nothing = torch.zeros_like(tokens.loss_mask)
                return TokenLosses(
                    values=self._call_loss(tokens),
                    ratio=policy_losses.plain_ratio(tokens),
                    clipped_low=nothing,
                    clipped_high=nothing,
                )

    def correction(
        self,
        proximal_logprobs: torch.Tensor,  # float32 [N]
        engine_logprobs: torch.Tensor,  # float32 [N]
        loss_mask: torch.Tensor,  # bool [N]
        trajectories: torch.Tensor,  # int64 [N]
    ) -> ImportanceWeights | None:
        """Weights of the tokens; None for no correction."""
        settings = self._config.correction
        arguments = (proximal_logprobs, engine_logprobs, loss_mask, trajectories)
        match self._correction:
            case "tis":
                return importance_sampling.truncated_weights(*arguments, level=settings.level, cap=settings.cap)
            case "mis":
                return importance_sampling.masked_weights(
                    *arguments, level=settings.level, floor=settings.floor, cap=settings.cap
                )
            case "none":
                return None

    def _call_advantage(self, batch: RewardedBatch) -> Floats:
        assert self._own_advantage is not None
        name = f"{ADVANTAGE}: {self._config.advantage}"
        sizes = (batch.rewards.shape, batch.loss_mask.shape)
        try:
            result = np.asarray(self._own_advantage(batch), np.float64)
        except Exception as error:  # the user's code raises what it likes
            raise RunFailed(f"{name} failed: {in_one_line(error)}") from error
        if result.shape not in sizes:
            raise RunFailed(
                f"{name} returned an array of shape {list(result.shape)}; expected one number per trajectory "
                f"({sizes[0][0]}) or per response token ({sizes[1][0]})"
            )
        if not np.isfinite(result).all():
            place = int(np.flatnonzero(~np.isfinite(result))[0])
            raise RunFailed(f"{name} returned an advantage that is not finite: {result[place]} at {place}")
        return result

    def _call_loss(self, tokens: PolicyTokens) -> torch.Tensor:
        assert self._own_loss is not None
        name = f"{LOSS}: {self._config.loss}"
        try:
            result = self._own_loss(tokens)
        except Exception as error:  # the user's code raises what it likes
            raise RunFailed(f"{name} failed: {in_one_line(error)}") from error
        if not isinstance(result, torch.Tensor) or result.shape != tokens.logprobs.shape:
            got = f"a tensor of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)[:80]
            raise RunFailed(
                f"{name} returned {got}; expected a tensor of shape {list(tokens.logprobs.shape)}, the loss of each token"
            )
        return result

    def _try_loss(self) -> None:
        logprobs = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)
        tokens = PolicyTokens(
            logprobs=logprobs,
            old_logprobs=torch.tensor([-1.1, -1.9, -0.5, -1.5]),
            engine_logprobs=torch.tensor([-1.2, -1.8, -0.6, -1.5]),
            advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
            loss_mask=torch.tensor([True, True, True, False]),
            trajectories=torch.tensor([0, 0, 1, 1]),
        )
        values = self._call_loss(tokens)
        own = values[tokens.loss_mask]
        name = f"{LOSS}: {self._config.loss}"
        if not values.requires_grad:
            raise RunFailed(f"{name} returned losses without gradient; they must hang on tokens.logprobs")
        if not torch.isfinite(own).all():
            raise RunFailed(f"{name} returned losses that are not finite: {own.tolist()}")


def _trial_batch() -> RewardedBatch:
    """Two groups of two, the last response empty."""
    return RewardedBatch(
        rewards=np.array([1.0, 0.0, 0.5, 0.5]),
        group_ids=np.array([3, 3, 7, 7]),
        response_lengths=np.array([2, 1, 3, 0]),
        loss_mask=np.array([True, True, True, True, False, True]),
        token_rewards=np.zeros(6),
        values=None,
    )
