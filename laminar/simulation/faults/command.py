"""`laminar simulate --faults`: many seeds with a table, or one seed with its event log.

Invariant: exit status 1 if an invariant was violated, and then the command that replays it is printed.
"""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from laminar.errors import UserError
from laminar.simulation.faults.draw_schedule import draw_schedule
from laminar.simulation.faults.explore import ExploreResult, explore, replay, shortest_failure
from laminar.simulation.faults.run_schedule import FaultRun

REPAIRS = (
    *("RolloutLost", "TrajectoryOrphaned", "TrajectoryMoved", "TrajectoryRestarted", "RolloutsRepacked"),
    *("RolloutHealthChanged", "TrajectoriesRecovered"),
    *("TrainerRestarted", "GroupsReturned", "GroupDropped", "PromptRejected", "WorkerReplaced"),
    "EvaluationStartedOver",
)
SHRUNK = 3  # failing seeds that are shrunk; all are listed


def simulate_faults(seeds: int, first_seed: int = 0, seed: int | None = None, processes: int | None = None) -> int:
    """Explore `seeds` fault schedules from `first_seed` on, or replay one `seed`. Returns the exit status.

    Raises:
        UserError: a number that cannot be.
    """
    console = Console(highlight=False)
    if seed is not None:
        return _replay(console, _not_negative("--seed", seed))
    _not_negative("--first-seed", first_seed)
    for name, number in (("--seeds", seeds), ("--processes", processes)):
        if number is not None and number < 1:
            raise UserError(f"{name}: {number}; expected 1 or more")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("fault schedules", total=seeds)

        def progress(run: FaultRun) -> None:
            bar.advance(task)
            if run.violated:
                bar.console.print(Text(f"seed {run.seed}: {run.violated}; {_replay_command(run.seed)}"))
            done = int(bar.tasks[task].completed)
            if not console.is_terminal and done % max(1, seeds // 10) == 0:
                console.print(f"{done} of {seeds} done")

        result = explore(range(first_seed, first_seed + seeds), processes=processes, progress=progress)
    _print_summary(console, result)
    for run in result.violations[:SHRUNK]:
        _print_shortest(console, run)
    return 1 if result.violations else 0


def _not_negative(name: str, number: int) -> int:
    if number < 0:
        raise UserError(f"{name}: {number}; expected 0 or more")
    return number


def _replay_command(seed: int) -> str:
    return f"laminar simulate --faults --seed {seed}"


def _replay(console: Console, seed: int) -> int:
    run = replay(seed)
    print(draw_schedule(seed).to_json())
    print(run.log)
    console.print(Text(f"seed {seed}, {run.schedule_name}: {run.report}"))
    console.print(Text(f"{run.lines} lines, {run.virtual_s:.3f} virtual seconds, digest {run.digest}"))
    return 1 if run.violated else 0


def _print_summary(console: Console, result: ExploreResult) -> None:
    events = sum(result.happened.values())
    table = Table(title=f"{result.runs} fault schedules, {events} events, {result.virtual_s:.0f} virtual seconds")
    table.add_column("")
    table.add_column("count", justify="right")
    repairs = Counter({kind: result.happened[kind] for kind in REPAIRS})
    for title, counts in (
        ("schedule", result.schedules),
        ("fault", result.strikes),
        ("repair", repairs),
        ("ending", result.endings),
    ):
        for name in sorted(counts, key=lambda name: (-counts[name], name)):
            table.add_row(Text(f"{title}: {name}"), str(counts[name]))
        table.add_section()
    table.add_row(Text("violations"), str(len(result.violations)))
    console.print(table)


def _print_shortest(console: Console, run: FaultRun) -> None:
    console.print(Text(f"\nseed {run.seed} violates: {run.report}\nreplay: {_replay_command(run.seed)}"))
    schedule, shortest = shortest_failure(run)
    console.print(
        Text(f"the shortest schedule that fails has {len(schedule.faults)} faults and {shortest.lines} lines:")
    )
    print(schedule.to_json())
    print(shortest.log)
