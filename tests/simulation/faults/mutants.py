"""Controllers with a fault of their own: patched by a test, run under fault schedules until an invariant notices."""

from laminar.simulation.faults.draw_schedule import draw_schedule
from laminar.simulation.faults.run_schedule import run_schedule


def first_violation(seeds, *, wanted=lambda schedule: True):
    """The first run that violates something, of the seeds whose schedule is wanted. None: nothing noticed."""
    for seed in seeds:
        schedule = draw_schedule(seed)
        if wanted(schedule):
            run = run_schedule(schedule)
            if run.violated:
                return run
    return None


def with_rollout_faults(schedule):
    """Some rollout is struck, and there is more than one."""
    struck = any(getattr(fault, "worker", "").startswith("rollout") for fault in schedule.faults)
    return struck and schedule.config.rollout.replicas > 1


def with_trainer_faults(schedule):
    """The trainer is struck, and can be started anew."""
    struck = any(getattr(fault, "worker", "").startswith("trainer") for fault in schedule.faults)
    return struck and schedule.config.trainer.checkpoint_every > 0
