"""What the controller and a trainer's rank say to each other: steps, publishes, checkpoints.

Orders are numbered, and the numbers grow over all controllers of a run. A rank obeys each once; one that it is given
again (by a controller that took another's place) it answers again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerJoined:
    """Where a rank stands, when the controller is a new one; sent before `Ready`."""

    order: int  # newest that it was given; 0: none


@dataclass(kw_only=True, slots=True, frozen=True)
class PublishWeights:
    """Write the current weights into the master relay's store as this version (at the start of a run)."""

    order: int
    policy_version: int


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainStep:
    """Optimizer updates on N trajectories, and the publish if they end the step. Every rank gets all and takes its share.

    Trajectories of a group stand together; mini-batches are cut at group borders. A step comes as one message, or in
    parts of one mini-batch each when its schedule trains what has finished first.
    """

    order: int
    step: int
    part: int  # 0 for the first
    mini_batches: int  # optimizer updates to make of these trajectories
    publish_version: int | None  # None: more parts of the step follow
    group_ids: np.ndarray  # int64 [N]
    rewards: np.ndarray  # float32 [N]
    prompt_lengths: np.ndarray  # int32 [N]
    response_lengths: np.ndarray  # int32 [N]
    token_ids: np.ndarray  # int32 [sum of prompt and response lengths]: prompt, response, prompt, response, ...
    loss_mask: np.ndarray  # uint8 [sum of response lengths]: 0 where the policy did not write the token
    engine_logprobs: np.ndarray  # float32 [sum of response lengths]
    staleness: np.ndarray  # int32 [N]: version of the trainer less that of each trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTrained:
    """A rank finished the optimizer updates of a step or a part; metrics are already averaged over ranks."""

    step: int
    part: int
    seconds: float
    metrics: dict[str, float]


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsPublished:
    """Rank 0 has put a version into the master relay's store, and goes on."""

    policy_version: int
    publish_stall_s: float  # time for which training stood still
    nbytes: int


@dataclass(kw_only=True, slots=True, frozen=True)
class SaveCheckpoint:
    """Write trainer state and a Hugging Face export into the folder; complete only with its marker."""

    order: int
    step: int
    policy_version: int
    path: str
    state: str  # JSON that the controller wants back with this checkpoint


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointSaved:
    """Outcome of a checkpoint; `error` is empty when it is complete and durable."""

    step: int
    path: str
    seconds: float
    nbytes: int
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadCheckpoint:
    """Go back to this complete checkpoint: weights, optimizer, random state."""

    order: int
    step: int
    path: str


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointLoaded:
    """The rank stands where the checkpoint was written; or it does not, for the checkpoint is damaged, as `damage` says."""

    step: int
    seconds: float
    damage: str = ""
