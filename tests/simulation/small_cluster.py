"""A small experiment and cluster for tests: a handful of short trajectories on a few rollouts."""

from laminar.config.schema import ExperimentConfig
from laminar.simulation.cluster import RunOptions, SimulatedRun
from laminar.simulation.cluster_models import ClusterModels
from laminar.simulation.models.hardware import gpu
from laminar.simulation.models.language_models import language_model
from laminar.simulation.models.lengths import LogNormalLengths
from laminar.simulation.models.workload import Workload


def experiment(**overrides):
    """Overrides are dotted keys with `__` for the dot."""
    tree = {
        "name": "small",
        "model": {"path": "models/none"},
        "data": {"source": {"type": "jsonl", "path": "none.jsonl"}, "max_prompt_tokens": 64},
        "reward": {"function": "exact", "workers": 2},
        "rollout": {"replicas": 4, "max_running": 8, "max_response_tokens": 400, "delta_interval_s": 0.5},
        "relay": {"count": 2},
        "trainer": {"steps": 4, "groups_per_step": 4, "group_size": 2},
        "repack": {"interval_s": 0.3},
        "controller": {"heartbeat_s": 1, "silence_limit_s": 5, "start_timeout_s": 60, "step_timeout_s": 120},
    }
    for key, value in overrides.items():
        *path, last = key.split("__")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return ExperimentConfig.model_validate(tree)


def workload(config, seed=0, tools=None):
    return Workload(
        lengths=LogNormalLengths(median=100, p99=380, maximum=config.rollout.max_response_tokens),
        prompt_lengths=32,
        group_size=config.trainer.group_size,
        groups_per_step=config.trainer.groups_per_step,
        seed=seed,
        tools=tools,
    )


def models(config, **changes):
    settings = {
        "model": language_model("Qwen2.5-7B"),
        "gpu": gpu("H800"),
        "gpus": 8,
        "tensor_parallel": 1,
        "trainer_gpus": 4,
        "workload": workload(config),
        "weight_sync": "relays" if config.schedule.name == "laminar" else "global",
    }
    return ClusterModels(**{**settings, **changes})


class Recorded:
    """A run that keeps every event; `at` schedules what a test does to it."""

    def __init__(self, config, *, options=None, seed=0, **changes):
        self.run = SimulatedRun(
            config, models(config, **changes), seed=seed, options=options or RunOptions(), before=self._before
        )
        self.events = []
        self.plan = []
        self.checks = []

    def at(self, seconds, action):
        """Call action(run) at this time."""
        self.plan.append((seconds, action))
        return self

    def to_the_end(self, limit_s=10_000):
        self.record = self.run.run(limit_s)
        return self

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def _before(self, run):
        run.events.subscribe(self.events.append)
        for seconds, action in self.plan:
            run.loop.call_at(seconds, action, run)
        for check in self.checks:
            check(run)
