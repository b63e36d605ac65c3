"""Which keys may change when a run is resumed, and which must stay as they were.

Invariant: every key is in the table; what is not said to be safe is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from laminar.config.problems import raise_problems
from laminar.config.schema import ExperimentConfig

# Longest prefix wins. A reason: the key is refused; None: it may change.
RULES: dict[str, str | None] = {
    "": "it decides what has been generated and trained so far",
    "name": "it names the run",
    "seed": "it decides the order of the data, and what is sampled",
    "model": "the weights of the run are of this model",
    "data": "prompts are told by their position in this data",
    "data.epochs": None,
    "data.last_batch": None,
    "reward": "groups of one step would be scored by different rules",
    "reward.workers": None,
    "reward.calls_per_worker": None,
    "reward.retries": None,
    "reward.timeout_s": None,
    "reward.on_invalid": None,
    "rollout": "trajectories in progress were sampled with it",
    **{
        f"rollout.{key}": None
        for key in (
            *("engine", "replicas", "max_running", "kv_cache_mib", "delta_interval_s", "threads", "restarts"),
            *("host_failures", "suspect_after_s", "silence_limit_s", "drain_s", "on_lost_version"),
        )
    },
    "rollout.tensor_parallel": "the weights are laid out for it",
    "relay": None,
    "trainer": None,
    "trainer.group_size": "groups in progress have this size",
    "trainer.groups_per_step": "the groups in progress are as many as steps of this size can train in time",
    "trainer.mini_batches": "a step may be half made",
    "trainer.strategy": "checkpoints are laid out for it",
    "algorithm": None,
    "algorithm.advantage": "checkpoints hold what it needs, a critic or none",
    "algorithm.critic": "checkpoints hold it, or hold none",
    "algorithm.critic.optimizer": None,
    "algorithm.critic.clip": None,
    "algorithm.kl.reference_path": "the KL term is counted from this model",
    "environment": "turns in progress were answered by it",
    "environment.step_timeout_s": None,
    "environment.retries": None,
    "environment.on_error": None,
    "evaluation": "figures of before and after would be of different questions",
    "evaluation.every": None,
    "evaluation.at_start": None,
    "evaluation.share": None,
    "schedule": None,
    "schedule.name": "it decides whether trajectories may mix versions",
    "buffer": None,
    "repack": None,
    "controller": None,
    "launch": None,
}


# Keys that workers read, by the part of the run (`launch`) that they are.
READ_BY = {
    "trainer": ("trainer", "algorithm"),
    "relays": ("relay",),
    "rollouts": ("rollout", "repack", "evaluation"),
    "environments": ("reward", "environment", "evaluation"),
}


def rule(key: str) -> str | None:
    """Why a key must not change; None if it may."""
    while key not in RULES:
        key = key.rpartition(".")[0]
    return RULES[key]


def changes(before: ExperimentConfig, after: ExperimentConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of all that differ."""
    old, new = (dict(_leaves(config.model_dump(mode="json"))) for config in (before, after))
    return [(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def check_changes(before: ExperimentConfig, after: ExperimentConfig) -> list[tuple[str, Any, Any]]:
    """What changes, all of it allowed.

    Raises:
        UserError: keys that must not change, each with the reason and the remedy.
    """
    found = changes(before, after)
    problems = [
        f"{key}: {new!r}; a resumed run must keep {old!r}, for {why}. Leave it as it was, or start a new run"
        for key, old, new in found
        if (why := rule(key)) is not None
    ]
    if problems:
        raise_problems("--resume", problems)
    return found


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
