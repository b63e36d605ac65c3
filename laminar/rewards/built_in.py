"""The built-in rewards, each loaded with its options; what a reward needs is imported only when it is loaded."""

from __future__ import annotations

import re
from typing import Any

from laminar.config.data_schema import ReasoningGymSource
from laminar.config.reward_params import (
    CodeParams,
    LengthPenaltyParams,
    MathVerifyParams,
    RegexParams,
    RewardModelParams,
    read_params,
)
from laminar.config.reward_schema import RewardPart
from laminar.config.schema import ExperimentConfig
from laminar.environments.sandbox import SandboxLimits
from laminar.errors import UserError
from laminar.rewards.exact import exact_reward
from laminar.rewards.length_penalty import LengthPenalty
from laminar.rewards.numeric import numeric_reward
from laminar.rewards.regex_reward import RegexReward
from laminar.rewards.reward import RewardFunction

ASYNC = frozenset(
    {"code", "reward_model"}
)  # run in the worker itself, many calls at once; all others in a process per call
ZERO_OVERTIME = frozenset({"math_verify", "regex", "code"})  # it is the response that takes so long: a wrong answer


def load_built_in(config: ExperimentConfig, part: RewardPart, key: str) -> RewardFunction:
    """The function of a part whose options have been checked.

    Args:
        config: the experiment.
        part: the part.
        key: its dotted key, for messages.

    Raises:
        UserError: what it needs is not there, or options contradict each other.
    """
    if part.function == "exact":
        return exact_reward
    if part.function == "numeric":
        return numeric_reward
    if part.function == "reasoning_gym":
        return _reasoning_gym(config)
    match read_params(part):
        case MathVerifyParams() as params:
            from laminar.rewards.math_verify_reward import MathVerifyReward

            return MathVerifyReward(boxed_only=params.boxed_only)
        case RegexParams() as params:
            try:
                return RegexReward(pattern=params.pattern, full=params.match == "full")
            except re.error as error:
                raise UserError(f"{key}.params.pattern: not a regular expression: {error}") from error
        case CodeParams() as params:
            from laminar.rewards.code_reward import CodeReward

            limits = SandboxLimits(time_s=params.time_s, memory_bytes=params.memory_mib << 20)
            return CodeReward(tests_field=params.tests_field, partial=params.partial, limits=limits)
        case RewardModelParams() as params:
            from laminar.rewards.reward_model import RewardModel

            return RewardModel(params, key=f"{key}.params")
        case LengthPenaltyParams() as params:
            return LengthPenalty(
                free=params.free_tokens,
                longest=params.max_tokens or config.rollout.max_response_tokens,
                key=f"{key}.params.free_tokens",
            )
    raise RuntimeError(f"no built-in reward {part.function}")


def _reasoning_gym(config: ExperimentConfig) -> Any:
    from laminar.rewards.reasoning_gym_reward import ReasoningGymReward

    for key, source in config.data.single_sources():
        if isinstance(source, ReasoningGymSource):
            return ReasoningGymReward(source, key)
    raise RuntimeError("the reward reasoning_gym without a source of that type")  # checked before
