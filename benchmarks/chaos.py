"""Random processes of a real run are killed, or stand still, at random moments: is anything lost, and how soon does it go on?

    python benchmarks/chaos.py [--rounds 100] [--seed 0] [--kinds rollout,relay,trainer,controller] [--json]

A run at quickstart scale (torch engine, 3 rollouts, 3 relays, 2 trainer ranks). In each round one process gets SIGKILL, or one
time in four SIGSTOP; the next round begins when all workers are well again and a step has been made. Afterwards the run goes
on until its data has ended, and its own files are counted: every prompt is trained by exactly one step, with every trajectory
of one version. A second run, undisturbed, has the reward to compare with. Recovery times count from the signal:

  rollout     all its trajectories have gone on elsewhere
  relay       its loss is noticed and, if a version was under way, all other relays have it (killed ones only)
  trainer     all ranks stand at the newest checkpoint, and have published
  controller  it is back, and every worker with it

A process that stands still is noticed by its silence first: that time is a figure of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from chaos_accounts import Accounts, accounts
from chaos_run import ChaosRun, event_of, notice_of
from rich.console import Console
from rich.table import Table

KINDS = ("rollout", "relay", "controller", "trainer")
LIMIT_S = 600.0  # for the start, and for a recovery
STOPPED_SHARE = 0.25
LONGEST_REST_S = 1.5  # from all being well to the next signal
BUSY_SHARE = (
    0.7  # of the signals to rollouts come soon after they took weights: on few cores they are idle most of the time
)
LONGEST_BUSY_S = 0.5  # after that moment


@dataclass(kw_only=True, slots=True, frozen=True)
class Scale:
    """Size of the run."""

    config: Path = Path("configs/quickstart.yaml")
    rollouts: int = 3
    relays: int = 3
    ranks: int = 2
    groups_per_step: int = 32
    group_size: int = 8
    prompts_key: str | None = "data.source.prompts"  # sets where the data ends; None: the config has just as many
    settings: tuple[str, ...] = ()  # more of them


@dataclass(kw_only=True, slots=True, frozen=True)
class Round:
    """One signal, and what came of it."""

    kind: str
    worker: str
    signal: str
    noticed_s: float
    recovered_s: float | None  # None: nothing had to be recovered (a rollout without trajectories)


def settings(scale: Scale, steps: int) -> tuple[str, ...]:
    """Of both runs: every limit on failures is out of the way, silence is noticed in seconds, and the data ends."""
    return (
        f"rollout.replicas={scale.rollouts}",
        f"relay.count={scale.relays}",
        f"trainer.ranks={scale.ranks}",
        f"trainer.groups_per_step={scale.groups_per_step}",
        f"trainer.group_size={scale.group_size}",
        f"trainer.steps={steps + 1000}",
        "trainer.checkpoint_every=2",
        "controller.restarts=1000",
        "trainer.restarts=1000",
        "trainer.optimizer.schedule=constant",
        "schedule.on_stale=train",
        "rollout.engine=torch",
        "rollout.restarts=100000",
        "rollout.suspect_after_s=2",
        "rollout.silence_limit_s=5",
        "relay.restarts=1000",
        "relay.stall_limit_s=2",
        "controller.heartbeat_s=0.5",
        "controller.silence_limit_s=10",
        *scale.settings,
    )


async def measure_chaos(
    rounds: int,
    seed: int,
    kinds: tuple[str, ...],
    scale: Scale,
    folder: Path,
    steps: int | None = None,
    *,
    compare: bool = True,
) -> dict[str, Any]:
    """Make both runs, or without `compare` the struck one; `steps` is how many the data lasts for."""
    steps = 7 * rounds + 20 if steps is None else steps
    prompts = steps * scale.groups_per_step
    chosen = settings(scale, steps)
    if scale.prompts_key is not None:
        chosen = (f"{scale.prompts_key}={prompts}", *chosen)
    chance = random.Random(seed)
    made: list[Round] = []
    async with ChaosRun(config=scale.config, run_dir=folder / "struck", settings=chosen) as run:
        await run.until(lambda: run.publishes >= 2, LIMIT_S, "the first step")
        while len(made) < rounds and not run.ended():
            one = await _round(run, chance, kinds, scale)
            if one is not None:
                made.append(one)
                print(f"round {len(made)}: {one}", file=sys.stderr, flush=True)
        status = await run.end(3600.0)
        if status:
            raise RuntimeError(f"the struck run failed with status {status}:\n{run.output()[-4000:]}")
    count = {"prompts": prompts, "groups_per_step": scale.groups_per_step, "group_size": scale.group_size}
    struck = accounts(folder / "struck", **count)
    if not compare:
        return _figures(made, struck, None)
    async with ChaosRun(config=scale.config, run_dir=folder / "undisturbed", settings=chosen) as run:
        if await run.end(3600.0):
            raise RuntimeError(f"the undisturbed run failed:\n{run.output()[-4000:]}")
    return _figures(made, struck, accounts(folder / "undisturbed", **count))


async def _round(run: ChaosRun, chance: random.Random, kinds: tuple[str, ...], scale: Scale) -> Round | None:
    """Strike one process and wait until all is well again; None if the run ended before."""
    before = run.publishes
    workers = scale.rollouts + scale.relays + scale.ranks + 1
    await run.until(
        lambda: run.publishes > before and sum(run.well.values()) >= workers,
        LIMIT_S,
        "all workers to be well, and a step",
    )
    await asyncio.sleep(chance.uniform(0.0, LONGEST_REST_S))
    if run.ended():
        return None
    kind = chance.choice(kinds)
    number = signal.SIGSTOP if chance.random() < STOPPED_SHARE and kind != "controller" else signal.SIGKILL
    counts = {"rollout": scale.rollouts, "relay": scale.relays, "trainer": scale.ranks}
    worker = kind if kind == "controller" else f"{kind}-{chance.randrange(counts[kind])}"
    if kind == "rollout" and chance.random() < BUSY_SHARE:
        await _just_filled(run, worker, chance.uniform(0.0, LONGEST_BUSY_S))
    pid = run.controller_pid if kind == "controller" else run.pids[worker]
    under_way = _broadcast_under_way(run)
    if kind != "controller":
        run.well[worker] = False
    struck = run.strike(pid, number)
    noticed = await _noticed(run, kind, worker, pid, struck)
    recovered = await _recovered(run, kind, worker, struck, under_way)
    if kind == "relay" and number == signal.SIGSTOP:
        recovered = None  # the chain went on without it as soon as it did not answer, and was whole before it was lost
    if run.ended():
        return None
    begins = noticed if number == signal.SIGSTOP else struck
    return Round(
        kind=kind,
        worker=worker,
        signal=number.name,
        noticed_s=noticed - struck,
        recovered_s=None if recovered is None else max(0.0, recovered - begins),
    )


async def _just_filled(run: ChaosRun, rollout: str, seconds: float) -> None:
    """Until this rollout has taken weights, and so long after."""
    since = time.perf_counter()
    pulled = event_of("WeightsPulled", rollout=rollout)
    await run.until(lambda: run.first(since, pulled) is not None, LIMIT_S, f"{rollout} to take weights")
    await asyncio.sleep(seconds)


async def _noticed(run: ChaosRun, kind: str, worker: str, pid: int, struck: float) -> float:
    """When the run has told that the process is gone."""
    if kind == "controller":
        return await run.until(lambda: run.controller_pid != pid, LIMIT_S, "another controller")
    matches = notice_of("starting the trainer anew") if kind == "trainer" else notice_of(f"{worker} was lost")
    await run.until(lambda: run.first(struck, matches) is not None, LIMIT_S, f"a word that {worker} is lost")
    seen = run.first(struck, matches)
    return time.perf_counter() if seen is None else seen.at


async def _recovered(run: ChaosRun, kind: str, worker: str, struck: float, under_way: int | None) -> float | None:
    """When what the process did goes on without it, or anew."""
    match kind:
        case "controller":
            back = dict.fromkeys(run.pids, False)

            def all_back() -> bool:
                return all(run.first(struck, event_of("WorkerReady", worker=name)) for name in back)

            when = await run.until(all_back, LIMIT_S, "all workers with the controller")
            run.well.update(dict.fromkeys(back, True))  # rollouts have kept their weights
            return when
        case "trainer":
            matches = event_of("TrainerRestarted")
        case "rollout":
            lost = run.first(struck, event_of("RolloutLost", rollout=worker))
            if lost is None or not lost.line["trajectories"]:
                return None
            matches = event_of("TrajectoriesRecovered", rollout=worker)
        case _:
            matches = notice_of(f"{worker} was lost")
            if under_way is not None:
                matches = event_of("WeightsBroadcast", policy_version=under_way)
    await run.until(lambda: run.first(struck, matches) is not None, LIMIT_S, f"what {worker} did to go on")
    seen = run.first(struck, matches)
    return None if seen is None else seen.at


def _broadcast_under_way(run: ChaosRun) -> int | None:
    """The version that is on its way to the relays, if one is."""
    published = [seen.line["policy_version"] for seen in run.seen if seen.line["event"] == "WeightsPublished"]
    carried = {seen.line["policy_version"] for seen in run.seen if seen.line["event"] == "WeightsBroadcast"}
    return published[-1] if published and published[-1] not in carried else None


def _figures(made: list[Round], struck: Accounts, undisturbed: Accounts | None) -> dict[str, Any]:
    recovered = {
        kind: [one.recovered_s for one in made if one.kind == kind and one.recovered_s is not None] for kind in KINDS
    }
    silent = [one.noticed_s for one in made if one.signal == "SIGSTOP"]
    killed = [one.noticed_s for one in made if one.signal == "SIGKILL"]
    return {
        "rounds": len(made),
        "strikes": {kind: sum(one.kind == kind for one in made) for kind in KINDS},
        "stopped": len(silent),
        "lost": struck.lost,
        "duplicated": struck.duplicated,
        "mixed_versions": struck.mixed_versions,
        "dropped": struck.dropped,
        "prompts": struck.prompts,
        "steps": struck.steps,
        "lost_steps": struck.lost_steps,
        "recovery_s_max": {kind: max(times) if times else None for kind, times in recovered.items()},
        "recovery_s_median": {kind: median(times) if times else None for kind, times in recovered.items()},
        "recoveries": {kind: len(times) for kind, times in recovered.items()},
        "killed_noticed_s_max": max(killed) if killed else None,
        "stopped_noticed_s_max": max(silent) if silent else None,
        "reward_final": struck.reward_final,
        "reward_undisturbed": None if undisturbed is None else undisturbed.reward_final,
    }


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table(title=f"{figures['rounds']} rounds, {figures['prompts']} prompts, {figures['steps']} steps")
    for column in ("what", "figure"):
        table.add_column(column)
    for name in ("lost", "duplicated", "mixed_versions", "dropped", "lost_steps", "stopped"):
        table.add_row(name.replace("_", " "), str(figures[name]))
    for kind in KINDS:
        longest, middle = figures["recovery_s_max"][kind], figures["recovery_s_median"][kind]
        if longest is not None:
            count = figures["recoveries"][kind]
            table.add_row(f"recovery, {kind} ({count})", f"median {middle:.2f} s, longest {longest:.2f} s")
    for name in ("killed_noticed_s_max", "stopped_noticed_s_max"):
        if figures[name] is not None:
            table.add_row(name.removesuffix("_s_max").replace("_", ", ") + ", longest", f"{figures[name]:.2f} s")
    table.add_row("reward, final", f"{figures['reward_final']:.4f}")
    table.add_row("reward, undisturbed", f"{figures['reward_undisturbed']:.4f}")
    Console().print(table)


def main() -> int:
    """Measure and print; status 1 if anything was lost, duplicated or mixed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which processes are struck, with commas")
    parser.add_argument("--steps", type=int, help="steps that the data lasts for (7 per round, and 20)")
    parser.add_argument("--folder", type=Path, help="where the two run directories are kept; else they are removed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}; expected some of {', '.join(KINDS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the run is ended too
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = options.folder or Path(temporary)
        figures = asyncio.run(measure_chaos(options.rounds, options.seed, kinds, Scale(), folder, options.steps))
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)
    return 1 if figures["lost"] or figures["duplicated"] or figures["mixed_versions"] else 0


if __name__ == "__main__":
    sys.exit(main())
