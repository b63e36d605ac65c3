"""What an evaluation found: each scored response, and the figures that follow from them.

Invariant: figures are functions of the responses alone; a response without a reward (its reward function failed) counts
as wrong in pass@k, is counted by itself, and is left out of the mean reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar.trajectory import part_means


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluatedResponse:
    """One response to a held-out prompt."""

    evaluation: int  # number of the evaluation in its run
    policy_version: int
    prompt_id: int  # position in the source
    sample: int  # from 0
    source: str
    prompt: str
    answer: str
    response: str
    response_tokens: int
    finish_reason: str
    reward: float | None  # None where error is set
    reward_parts: dict[str, float]  # before weighting, by name
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationResult:
    """An evaluation in figures."""

    evaluation: int  # number in its run
    step: int  # whose weights these are; 0: the model before training
    policy_version: int
    prompts: int
    samples: int  # per prompt
    pass_at: dict[int, float]  # k -> pass@k, for k = 1, 2, 4, ... and the samples per prompt
    pass_at_1_stderr: float  # standard error over the prompts
    reward_mean: float | None  # None where every reward failed
    reward_parts: dict[str, float]  # mean of each part, before weighting, over the responses that it applies to
    response_tokens_mean: float
    response_tokens_max: int
    finish_length_fraction: float  # cut off at the longest response
    errors: int  # responses without a reward
    prompts_rejected: int  # too long for data.max_prompt_tokens
    started_over: int  # times that all was generated anew because no rollout had the version any more
    seconds: float

    def figures(self) -> dict[str, float | int | dict[str, float] | None]:
        """Flat, for `metrics.jsonl`."""
        return {
            "evaluation": self.evaluation,
            **{f"evaluation_pass_at_{k}": value for k, value in self.pass_at.items()},
            "evaluation_pass_at_1_stderr": self.pass_at_1_stderr,
            "evaluation_reward_mean": self.reward_mean,
            "evaluation_reward_parts": self.reward_parts,
            "evaluation_response_tokens_mean": self.response_tokens_mean,
            "evaluation_response_tokens_max": self.response_tokens_max,
            "evaluation_finish_length_fraction": self.finish_length_fraction,
            "evaluation_prompts": self.prompts,
            "evaluation_samples": self.samples,
            "evaluation_errors": self.errors,
            "evaluation_s": self.seconds,
        }


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k responses is right, estimated from `samples` of which `right` are.

    Unbiased: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code",
    arXiv 2107.03374, equation 1).

    Raises:
        ValueError: not 1 <= k <= samples and 0 <= right <= samples.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def reported_ks(samples: int) -> list[int]:
    """The k of pass@k that are reported: powers of 2, and the number of samples itself."""
    return [*(1 << power for power in range(samples.bit_length()) if 1 << power < samples), samples]


def summarize(
    responses: Sequence[EvaluatedResponse],
    *,
    evaluation: int,
    step: int,
    policy_version: int,
    samples: int,
    pass_reward: float,
    prompts_rejected: int,
    started_over: int,
    seconds: float,
) -> EvaluationResult:
    """The figures of a complete evaluation: the same number of responses to each prompt, at least one in all.

    Raises:
        ValueError: a prompt has another number of responses, or one is of another version.
    """
    right: dict[int, list[bool]] = {}
    for response in responses:
        if response.policy_version != policy_version:
            raise ValueError(
                f"evaluation {evaluation} of version {policy_version}: the response to prompt {response.prompt_id} is of "
                f"version {response.policy_version}"
            )
        passed = response.reward is not None and response.reward >= pass_reward
        right.setdefault(response.prompt_id, []).append(passed)
    if wrong := {prompt_id: len(passed) for prompt_id, passed in right.items() if len(passed) != samples}:
        raise ValueError(f"evaluation {evaluation}: prompts with another number of responses than {samples}: {wrong}")
    counts = [sum(passed) for passed in right.values()]
    rewards = [response.reward for response in responses if response.reward is not None]
    lengths = np.array([response.response_tokens for response in responses])
    rates = np.array(counts) / samples
    return EvaluationResult(
        evaluation=evaluation,
        step=step,
        policy_version=policy_version,
        prompts=len(right),
        samples=samples,
        pass_at={k: float(np.mean([pass_at_k(samples, c, k) for c in counts])) for k in reported_ks(samples)},
        pass_at_1_stderr=float(rates.std(ddof=1) / math.sqrt(len(rates))) if len(rates) > 1 else 0.0,
        reward_mean=float(np.mean(rewards)) if rewards else None,
        reward_parts=part_means(response.reward_parts for response in responses),
        response_tokens_mean=float(lengths.mean()),
        response_tokens_max=int(lengths.max()),
        finish_length_fraction=float(np.mean([response.finish_reason == "length" for response in responses])),
        errors=sum(response.reward is None for response in responses),
        prompts_rejected=prompts_rejected,
        started_over=started_over,
        seconds=seconds,
    )
