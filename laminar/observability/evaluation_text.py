"""An evaluation's figures in words: the line of a run, and the table of `laminar eval`."""

from __future__ import annotations

from collections.abc import Iterator

from laminar.evaluation_result import EvaluationResult
from laminar.observability.plain_text import duration, percent


def evaluation_line(result: EvaluationResult) -> str:
    """One line for the terminal of a run."""
    passes = ", ".join(f"pass@{k} {value:.4f}" for k, value in result.pass_at.items() if k in (1, result.samples))
    responses = result.prompts * result.samples
    errors = f", {result.errors} without a reward" if result.errors else ""
    return (
        f"evaluation of step {result.step} (version {result.policy_version}): {passes}, reward {_reward(result)}, "
        f"{result.response_tokens_mean:.1f} tokens, {responses} responses in {duration(result.seconds)}{errors}"
    )


def evaluation_rows(result: EvaluationResult) -> Iterator[tuple[str, str]]:
    """(what, how much), for a table."""
    for k, value in result.pass_at.items():
        yield f"pass@{k}", f"{value:.4f}" + (f" +- {result.pass_at_1_stderr:.4f}" if k == 1 else "")
    yield "reward", _reward(result)
    if len(result.reward_parts) > 1:
        yield from ((f"reward, {name}", f"{mean:.4f}") for name, mean in result.reward_parts.items())
    yield "response tokens", f"mean {result.response_tokens_mean:.1f}, longest {result.response_tokens_max}"
    yield "cut off", percent(result.finish_length_fraction)
    yield "prompts", f"{result.prompts}, {result.samples} responses each"
    if result.prompts_rejected:
        yield "rejected prompts", str(result.prompts_rejected)
    if result.errors:
        yield "without a reward", str(result.errors)
    yield "time", duration(result.seconds)


def _reward(result: EvaluationResult) -> str:
    return "none" if result.reward_mean is None else f"{result.reward_mean:.4f}"
