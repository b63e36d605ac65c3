"""What a config's `algorithm` resolves to, and what is wrong with its keys taken together. Imports no torch.

Invariant: a key that would change nothing is refused, as is one under which nothing could be learned.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Literal

from laminar.config.algorithm_schema import AlgorithmConfig, CorrectionConfig, CriticConfig
from laminar.config.schema import ExperimentConfig
from laminar.config.user_function import DOTTED_PATH

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo")  # they compare the members of a group
ADVANTAGES = (*GROUP_ADVANTAGES, "reinforce++", "gae")
# loss -> (clip_low, clip_high) where the config gives none
CLIPS = {
    "ppo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "decoupled_ppo": (0.2, 0.2),
}
LOSSES = tuple(CLIPS)


def clips(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """(clip_low, clip_high) of a built-in loss."""
    low, high = CLIPS[algorithm.loss]
    return (
        low if algorithm.clip_low is None else algorithm.clip_low,
        high if algorithm.clip_high is None else algorithm.clip_high,
    )


def aggregation(algorithm: AlgorithmConfig) -> Literal["token", "trajectory", "constant"]:
    """What weighs the same in a mini-batch."""
    return algorithm.aggregation or ("trajectory" if algorithm.loss == "gspo" else "token")


def correction(algorithm: AlgorithmConfig) -> Literal["tis", "mis", "none"]:
    """The correction between engine and trainer."""
    return algorithm.correction.method or ("none" if _corrects_itself(algorithm) else "tis")


def critic(algorithm: AlgorithmConfig) -> CriticConfig | None:
    """The critic, where there is one."""
    return (algorithm.critic or CriticConfig()) if algorithm.advantage == "gae" else None


def algorithm_problems(config: ExperimentConfig) -> Iterator[str]:
    """Contradictions, one line each."""
    algorithm = config.algorithm
    yield from _name("algorithm.advantage", algorithm.advantage, ADVANTAGES)
    yield from _name("algorithm.loss", algorithm.loss, LOSSES)
    yield from _groups(config)
    yield from _critic(algorithm)
    yield from _clips(algorithm)
    yield from _corrections(algorithm)
    overlong = algorithm.overlong.buffer_tokens
    if overlong > config.rollout.max_response_tokens:
        yield (
            f"algorithm.overlong.buffer_tokens: {overlong}; expected at most rollout.max_response_tokens "
            f"({config.rollout.max_response_tokens}), from which it counts back; lower it"
        )


def _name(key: str, name: str, built_in: Sequence[str]) -> Iterator[str]:
    if name not in built_in and not DOTTED_PATH.fullmatch(name):
        near = difflib.get_close_matches(name, built_in, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "a colon stands between module and function"
        yield f'{key}: "{name}"; expected {", ".join(built_in)} or package.module:function; {hint}'


def _groups(config: ExperimentConfig) -> Iterator[str]:
    algorithm, size = config.algorithm, config.trainer.group_size
    if size > 1:
        return
    if algorithm.advantage in GROUP_ADVANTAGES:
        yield (
            f"trainer.group_size: {size}; algorithm.advantage {algorithm.advantage} compares the trajectories of a group, "
            "and with one of them every advantage is 0: expected at least 2; raise it, or use algorithm.advantage: "
            "reinforce++ or gae"
        )
    if algorithm.dynamic_sampling.enabled:
        yield (
            f"algorithm.dynamic_sampling.enabled: true; with trainer.group_size {size} the rewards of every group are all "
            "equal, and none would be trained: expected false, or groups of at least 2"
        )


def _critic(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantage = algorithm.advantage
    if algorithm.critic is not None and advantage != "gae":
        yield (
            f"algorithm.critic: given, but algorithm.advantage is {advantage}, which needs no values: nothing would use "
            "the critic; set algorithm.advantage to gae, or remove algorithm.critic"
        )
    if algorithm.gae_lambda != 1.0 and advantage != "gae":
        yield f"algorithm.gae_lambda: {algorithm.gae_lambda:g}; only `gae` has one, algorithm.advantage is {advantage}; remove it"
    if algorithm.gamma != 1.0 and advantage not in ("gae", "reinforce++"):
        yield (
            f"algorithm.gamma: {algorithm.gamma:g}; only `gae` and `reinforce++` discount, algorithm.advantage is {advantage}; "
            "remove it"
        )


def _clips(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss = algorithm.loss
    for key, value, of in (
        ("clip_low", algorithm.clip_low, LOSSES),
        ("clip_high", algorithm.clip_high, LOSSES),
        ("dual_clip", algorithm.dual_clip, ("ppo",)),
        ("behavior_cap", algorithm.behavior_cap, ("decoupled_ppo",)),
    ):
        if value is not None and loss not in of:
            yield f"algorithm.{key}: {value:g}; algorithm.loss {loss} has none, only {', '.join(of)}; remove it"
    if algorithm.dual_clip is not None and loss == "ppo" and algorithm.dual_clip <= 1 + clips(algorithm)[1]:
        yield (
            f"algorithm.dual_clip: {algorithm.dual_clip:g}; expected above 1 + clip_high ({1 + clips(algorithm)[1]:g}); "
            "3 is usual"
        )


def _corrections(algorithm: AlgorithmConfig) -> Iterator[str]:
    given, method = algorithm.correction, correction(algorithm)
    if algorithm.loss == "decoupled_ppo" and algorithm.old_policy == "behavior":
        yield (
            "algorithm.old_policy: behavior; decoupled_ppo takes its ratio against the proximal policy and weighs tokens "
            "against the behavior policy: expected proximal"
        )
    elif method != "none" and _corrects_itself(algorithm):
        what = "decoupled_ppo" if algorithm.loss == "decoupled_ppo" else "a ratio against the behavior policy"
        yield (
            f"algorithm.correction.method: {method}; {what} corrects for the engine already, and doing it twice is wrong: "
            "expected none, or null"
        )
    defaults = CorrectionConfig()
    if method == "none" and (given.level, given.cap, given.floor) != (defaults.level, defaults.cap, defaults.floor):
        yield "algorithm.correction: level, cap or floor is given, but no correction is made (method none); remove them"
    if method == "tis" and given.floor:
        yield f"algorithm.correction.floor: {given.floor:g}; only `mis` has one; set algorithm.correction.method: mis"
    if method == "mis" and given.floor >= given.cap:
        yield f"algorithm.correction.floor: {given.floor:g}; expected below algorithm.correction.cap ({given.cap:g}); lower it"


def _corrects_itself(algorithm: AlgorithmConfig) -> bool:
    return algorithm.loss == "decoupled_ppo" or algorithm.old_policy == "behavior"
