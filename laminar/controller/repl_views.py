"""The REPL's pages: each shows one part of the picture in `controller.py` as text, and as data for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from laminar.controller.journal.accounts import read_accounts
from laminar.controller.repl_answer import Answer, CommandError, rows_as_text
from laminar.controller.replica import Replica
from laminar.controller.run_view import RunView
from laminar.errors import UserError
from laminar.observability.plain_text import Cell, duration, fields, percent
from laminar.trajectory import Group, TrajectoryState

SHOWN_GROUPS = 20

# States of a trajectory whose rollout is through with it, and that is not lost.
GENERATED = (TrajectoryState.FINISHED, TrajectoryState.SCORED, TrajectoryState.BUFFERED, TrajectoryState.TRAINING)


def status(view: RunView, metrics: Mapping[str, Any]) -> Answer:
    """The run on one page; `metrics` is the newest metrics line, empty before the first step."""
    steps, control = view.config.trainer.steps, view.control
    missing = view.registry.missing()
    paused = [
        name
        for name, is_paused in (
            ("generation", control.generation_paused),
            ("training", not control.training_allowed.is_set()),
        )
        if is_paused
    ]
    data: dict[str, Any] = {
        "name": view.config.name,
        "run_dir": str(view.run_dir),
        "elapsed_s": view.now() - view.started_at,
        "step": view.trainer.step,
        "steps": steps,
        "policy_version": view.trainer.policy_version,
        "trainer": view.trainer.clock.state,
        "paused": paused,
        "stopping": control.stop_requested.is_set(),
        "workers_missing": missing,
        "trajectories_in_flight": len(view.pool),
        "groups_in_progress": view.buffer.in_progress,
        "groups_ready": len(view.buffer),
        "prompts_at_hand": len(view.prompts),
        "prompts_rejected": view.prompts.rejected,
        "metrics": dict(metrics),
    }
    state = "stopping after this step" if data["stopping"] else f"paused: {', '.join(paused)}" if paused else "running"
    if missing:
        state += f"; waiting for {', '.join(missing)}"
    pairs = [
        ("run", f"{view.config.name} in {view.run_dir}, {duration(data['elapsed_s'])}"),
        ("state", state),
        ("step", f"{view.trainer.step} of {steps}, policy version {view.trainer.policy_version}"),
        ("trainer", _trainer_state(view)),
        ("rollouts", f"{len(view.rollouts.replicas)}, {len(view.pool)} trajectories in flight"),
        ("groups", f"{view.buffer.in_progress} in progress, {len(view.buffer)} ready, {view.buffer.trained} trained"),
        ("prompts", f"{len(view.prompts)} at hand, {view.prompts.rejected} rejected"),
    ]
    if metrics:
        pairs.append(
            (
                "last step",
                f"reward {metrics['reward_mean']:.4f}, staleness {metrics['staleness_mean']:.2f}, "
                f"{metrics['generated_tokens_per_s']:.0f} tokens/s generated, {duration(metrics['step_s'])}",
            )
        )
    return Answer(text=fields(pairs), data=data)


def rollouts(view: RunView) -> Answer:
    """Every rollout."""
    bound = view.repacker.inputs.batch_bound() if view.config.schedule.name == "laminar" else None
    rows = [_rollout(view, replica, bound) for replica in view.rollouts.replicas.values()]
    if not rows:
        return Answer(text=f"no rollout is ready yet; {_missing(view)}", data=[])
    return Answer(text=rows_as_text(rows), data=rows)


def _rollout(view: RunView, replica: Replica, batch_bound: int | None) -> dict[str, Cell]:
    worker = view.registry.workers.get(replica.name)
    seconds = replica.clock.totals()
    generating = seconds.get("generating", 0.0)
    return {
        "rollout": replica.name,
        "version": replica.policy_version,
        "health": view.fleet.health.health(replica.name).value,
        "state": replica.clock.state,
        "in flight": len(replica.in_flight),
        "running": replica.load.running,
        "waiting": replica.load.waiting,
        "B": batch_bound,
        "KV": percent(replica.load.kv_utilization),
        "tokens": replica.generated_tokens,
        "tokens/s": round(replica.generated_tokens / generating, 1) if generating > 0 else None,
        "busy": percent(generating / sum(seconds.values())) if sum(seconds.values()) > 0 else None,
        "relay": replica.relay.rank,
        "host": worker.host if worker else None,
        "process": worker.pid if worker else None,
    }


def fleet(view: RunView) -> Answer:
    """How every rollout of the run fares, those included that have left."""
    now = view.now()
    rows: list[dict[str, Cell]] = []
    for member in view.fleet.health.members.values():
        worker = view.registry.workers.get(member.name)
        rows.append(
            {
                "rollout": member.name,
                "health": member.health.value,
                "for": duration(now - member.since),
                "heard": f"{now - worker.last_heard:.1f} s ago" if worker else None,
                "failures": len(member.failures),
                "host": member.host or None,
                "why": member.reason or None,
            }
        )
    text = rows_as_text(rows)
    if hosts := view.fleet.health.evicted_hosts:
        text += "\n\n" + fields((f"evicted host {host}", why) for host, why in hosts.items())
    return Answer(text=text, data={"rollouts": rows, "evicted_hosts": dict(hosts)})


def relays(view: RunView) -> Answer:
    """The chain."""
    manager = view.relays
    rows: list[dict[str, Cell]] = []
    order = manager.order_of_chain()
    for relay in sorted(manager.relays.values(), key=lambda relay: relay.rank):
        worker = view.registry.workers.get(relay.name)
        there = worker is not None and worker.ready
        place = order.index(relay.name) if relay.name in order else None
        last = relay.last
        rows.append(
            {
                "relay": relay.name,
                "role": "gone"
                if not there
                else "waits"
                if place is None
                else "master"
                if place == 0
                else f"hop {place}",
                "way": "mpi" if relay.world else "tcp",
                "version": relay.stored_version,
                "behind": max(0, manager.published_version - relay.stored_version),
                "received": percent(last.received_bytes / last.nbytes) if last is not None and last.nbytes else None,
                "damaged chunks": last.damaged if last is not None else None,
                "host": worker.host if worker else None,
                "process": worker.pid if worker else None,
            }
        )
    under_way = "none" if manager.chain is None else f"version {manager.chain.policy_version}"
    head = f"published version {manager.published_version}, broadcast under way: {under_way}, broadcasts: {manager.broadcasts}"
    data = {
        "published_version": manager.published_version,
        "broadcasting": None if manager.chain is None else manager.chain.policy_version,
        "relays": rows,
    }
    return Answer(text=f"{head}\n\n{rows_as_text(rows)}", data=data)


def trainer(view: RunView) -> Answer:
    """The trainer's ranks and its time."""
    driver = view.trainer
    seconds = {state: value for state, value in driver.clock.totals().items() if value > 0}
    total = sum(seconds.values())
    workers = [view.registry.workers[name] for name in view.registry.names("trainer")]
    newest = driver.checkpoints.newest
    checkpoint = newest.path if newest is not None else None
    ranks: list[dict[str, Cell]] = [
        {"rank": worker.name, "host": worker.host, "process": worker.pid, "says": worker.detail} for worker in workers
    ]
    times: list[dict[str, Cell]] = [
        {"state": state, "seconds": round(value, 2), "share": percent(value / total)}
        for state, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    head = fields(
        [
            ("step", f"{driver.step} of {view.config.trainer.steps}"),
            ("version", str(driver.policy_version)),
            ("state", _trainer_state(view)),
            ("checkpoint", checkpoint or "none yet"),
            *([("failed", driver.checkpoints.failed)] if driver.checkpoints.failed else []),
        ]
    )
    data = {
        "step": driver.step,
        "policy_version": driver.policy_version,
        "state": driver.clock.state,
        "checkpoint": checkpoint,
        "seconds": seconds,
        "ranks": ranks,
    }
    parts = [head, rows_as_text(times), rows_as_text(ranks) if ranks else "no rank is connected"]
    return Answer(text="\n\n".join(part for part in parts if part), data=data)


def buffer(view: RunView) -> Answer:
    """Groups that are admitted and not trained, the oldest first."""
    groups = list(view.buffer)
    ready = {group.group_id for group in view.buffer.ready_groups()}
    versions = Counter(group.policy_version for group in groups)
    counts = ", ".join(f"version {version}: {count}" for version, count in sorted(versions.items(), key=str))
    head = fields(
        [
            ("ready", f"{len(ready)} groups, {_needed(view)}"),
            ("in progress", f"{view.buffer.in_progress} groups, {len(view.pool)} trajectories still generating"),
            ("by version", counts or "-"),
            ("so far", f"{view.buffer.trained} groups trained, {view.buffer.dropped} dropped"),
        ]
    )
    rows = [_group(group, group.group_id in ready) for group in islice(groups, SHOWN_GROUPS)]
    text = f"{head}\n\n{rows_as_text(rows)}" if rows else head
    if len(groups) > SHOWN_GROUPS:
        text += f"\n... and {len(groups) - SHOWN_GROUPS} more"
    data = {
        "ready": len(ready),
        "in_progress": view.buffer.in_progress,
        "trained": view.buffer.trained,
        "dropped": view.buffer.dropped,
        "by_version": {str(version): count for version, count in versions.items()},
        "groups": rows,
    }
    return Answer(text=text, data=data)


def _group(group: Group, is_ready: bool) -> dict[str, Cell]:
    rewards = [member.reward for member in group.trajectories if member.reward is not None]
    generated = sum(member.state in GENERATED for member in group.trajectories)
    return {
        "group": group.group_id,
        "version": group.policy_version,
        "state": "ready" if is_ready else "in progress",
        "generated": f"{generated}/{len(group.trajectories)}",
        "scored": f"{len(rewards)}/{len(group.trajectories)}",
        "tokens": group.num_tokens,
        "reward": round(sum(rewards) / len(rewards), 4) if rewards else None,
        "source": group.prompt.source,
    }


def _trainer_state(view: RunView) -> str:
    state = view.trainer.clock.state
    return f"waiting for trajectories ({_needed(view)})" if state == "trajectories" else state


def _needed(view: RunView) -> str:
    return f"a step takes {view.config.trainer.groups_per_step} groups"


def _missing(view: RunView) -> str:
    missing = view.registry.missing()
    return f"waiting for {', '.join(missing)}" if missing else "all workers are ready"


def accounts(view: RunView) -> Answer:
    """What became of every prompt, by the journal."""
    try:
        found = read_accounts(view.run_dir)
    except UserError as error:
        raise CommandError(str(error)) from error
    rows = [(name.replace("_", " "), str(value)) for name, value in asdict(found).items() if isinstance(value, int)]
    rows += [(reason, str(count)) for reason, count in found.reasons.items()]
    return Answer(
        text=fields([*rows, ("sums", "right" if not found.problems else "; ".join(found.problems))]), data=asdict(found)
    )
