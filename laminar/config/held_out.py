"""The experiment as its evaluation sees it: the same model, templates and limits, other prompts and perhaps another reward.

Invariant: whatever reads `data` and `reward` of a config (checks, sources, rewards) serves evaluation as it is.
"""

from __future__ import annotations

import re

from laminar.config.schema import ExperimentConfig

_OWN_REWARD = re.compile(r"\breward(?=\.(function|params|parts)\b)")


def held_out(config: ExperimentConfig) -> ExperimentConfig:
    """The config with `evaluation.source` as `data.source`, one epoch of it, and the evaluation's reward.

    `config.evaluation` must be there.
    """
    evaluation = config.evaluation
    assert evaluation is not None
    reward = config.reward
    if (own := evaluation.reward) is not None:
        reward = reward.model_copy(update={"function": own.function, "params": own.params, "parts": own.parts})
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"source": evaluation.source, "epochs": 1}),
            "reward": reward,
            "evaluation": None,
        }
    )


def in_its_words(problem: str) -> str:
    """What was said against `held_out(config)`, with the keys that the user has written."""
    return _OWN_REWARD.sub("evaluation.reward", problem.replace("data.source", "evaluation.source"))


def max_evaluation_tokens(config: ExperimentConfig) -> int:
    """Longest response of an evaluation, in tokens; 0 where there is none."""
    if config.evaluation is None:
        return 0
    return config.evaluation.max_response_tokens or config.rollout.max_response_tokens


def longest_context(config: ExperimentConfig) -> int:
    """Tokens of the longest trajectory that a rollout may have to hold, prompt included."""
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, max_evaluation_tokens(config))
