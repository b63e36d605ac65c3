"""Where the GPU time went: seconds per state of trainer and rollouts, weighted by their GPUs, idle time with its cause.

Invariant: nothing is counted twice, also where trainer and rollouts take turns on the same GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laminar.observability.states import TRAINER_BUSY
from laminar.simulation.records.record import ACTIVITIES
from laminar.simulation.records.rollout_activity import ActivitySeconds


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordedCluster:
    """What the recorder has to know of the simulated cluster and run."""

    gpus: int
    trainer_gpus: int  # together with the rollouts' more than `gpus`: they take turns on the same GPUs
    gpus_per_rollout: int
    rollouts: Sequence[str]  # names
    steps: int
    warm_up_steps: int
    cool_down_steps: int


def gpu_seconds(
    cluster: RecordedCluster,
    trainer_s: Mapping[str, float],
    rollout_s: Mapping[str, float],
    activity: ActivitySeconds,
) -> dict[str, float]:
    """GPU seconds per activity (`ACTIVITIES`), from the seconds per state of the trainer and of all rollouts together."""
    rollouts, trainer = dict(rollout_s), dict(trainer_s)
    admission, generating = rollouts.pop("admission", 0.0), rollouts.pop("generating", 0.0)
    rollouts["trainer"] = min(admission, activity.idle_while_training)
    rollouts["batch"] = rollouts.get("batch", 0.0) + admission - rollouts["trainer"]
    rollouts["long_tail"] = min(generating, activity.long_tail)
    rollouts["generating"] = generating - rollouts["long_tail"]
    if cluster.trainer_gpus + cluster.gpus_per_rollout * len(cluster.rollouts) > cluster.gpus:
        # They take turns on the same GPUs: where one is busy, the other does not wait for it on a GPU of its own.
        trainer = {state: trainer.get(state, 0.0) for state in TRAINER_BUSY}
        rollouts.pop("trainer")
    total: dict[str, float] = {}
    for weight, seconds in ((cluster.gpus_per_rollout, rollouts), (cluster.trainer_gpus, trainer)):
        for state, value in seconds.items():
            total[state] = total.get(state, 0.0) + weight * value
    order = [*ACTIVITIES, *sorted(set(total) - set(ACTIVITIES))]
    return {state: round(total[state], 1) for state in order if total.get(state, 0.0) > 0}
