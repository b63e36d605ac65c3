"""The section `algorithm`: advantages, policy loss, and what corrects or regularizes them.

Invariant: the defaults alone are a whole algorithm, GRPO with the corrections that asynchrony asks for. Names of losses and
advantages, and keys that do not go together, are checked in `algorithm.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from laminar.config.optimizer_schema import OptimizerConfig
from laminar.config.section import Section


class CorrectionConfig(Section):
    """Importance weights that correct for what lies between the engine that sampled and the policy at the start of the step: numerics and staleness."""

    method: Literal["tis", "mis", "none"] | None = None
    """`tis` cuts the weights to `cap`, `mis` leaves out what lies outside of `floor` to `cap`. null takes `tis`, or `none` where the loss corrects by itself (`decoupled_ppo`, and `old_policy: behavior`)."""
    level: Literal["token", "trajectory", "geometric"] = "token"
    """Whose ratio of probabilities the weight is: each token's, the whole trajectory's (a product over its tokens), or its mean token's."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """`mis`: smallest weight."""


class KLConfig(Section):
    """Penalty for leaving a reference model."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the penalty; 0 loads no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How KL is estimated on sampled tokens. In the reward `k1` is the unbiased one; in the loss it has no gradient on average."""
    apply_to: Literal["loss", "reward"] = "loss"
    """A term of the loss (as in GRPO), or a part of each token's reward (as in RLHF with PPO)."""
    reference_path: str | None = None
    """Folder of the reference model; the starting model if not given."""


class OverlongConfig(Section):
    """Overlong reward shaping (DAPO): rewards fall linearly over the last tokens before `rollout.max_response_tokens`."""

    buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens over which they fall; 0 turns it off."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """What a response of full length loses."""


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO): groups whose rewards are all equal teach nothing, so others are generated in their place."""

    enabled: bool = False
    """Leave such groups out of the experience buffer, counted as `groups_resampled`."""
    max_refills: Annotated[float, Field(gt=0)] = 10.0
    """Groups that are left out at most before the next step is made, in steps' worth; those that follow are trained all the same, with a notice."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW, for the critic."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate; usually higher than the actor's."""


class CriticConfig(Section):
    """The model that estimates values for `gae`: a language model's trunk with a value head, trained and checkpointed beside the actor."""

    path: str | None = None
    """Folder of the model that its trunk starts from; the starting model if not given."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """How far a value may move in one step before its loss is bounded; null for no bound."""


class AlgorithmConfig(Section):
    """Advantages, loss, and what corrects or regularizes them, freely combined; `docs/algorithms.md` has the papers and what other systems' recipes are called here."""

    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo` (each trajectory against its group), `reinforce++` (normalized over the batch), `gae` (PPO with a critic), or a dotted path `package.module:function`."""
    loss: str = "dapo"
    """`ppo`, `dapo` (clip-higher), `gspo` (ratio of the trajectory), `cispo` (bounded weights), `decoupled_ppo` (AReaL), or a dotted path `package.module:function`."""
    old_policy: Literal["proximal", "behavior"] = "proximal"
    """What the ratio is taken against: the trainer's policy at the start of the step, or the policy that sampled, as its engine reported it."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = None
    """The ratio is held above 1 - clip_low. null takes the loss's own: 0.2 for `ppo`, `dapo` and `decoupled_ppo`, 3e-4 for `gspo`, 1 (no bound) for `cispo`."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """The ratio is held below 1 + clip_high. null takes the loss's own: 0.2 for `ppo` and `decoupled_ppo`, 0.28 for `dapo`, 4e-4 for `gspo`, 4 for `cispo`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """`ppo`: where the advantage is negative, a ratio above this has no gradient (3 is usual); null for no bound."""
    behavior_cap: Annotated[float, Field(gt=0)] | None = None
    """`decoupled_ppo`: tokens whose weight (proximal over behavior policy) is above this are left out; null leaves out none."""
    aggregation: Literal["token", "trajectory", "constant"] | None = None
    """What weighs the same in a mini-batch: every token, every trajectory, or every token by a constant (trajectories x `rollout.max_response_tokens`, Dr. GRPO). null takes the loss's own: `trajectory` for `gspo`, else `token`."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """`reinforce++`, `gae`: discount from one token to the next."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """`gae`: 1 sums up all rewards to come, 0 trusts the critic's next value."""
    correction: CorrectionConfig = CorrectionConfig()
    kl: KLConfig = KLConfig()
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus in the loss."""
    overlong: OverlongConfig = OverlongConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    critic: CriticConfig | None = None
    """`gae`: the critic; null takes one with all defaults."""
