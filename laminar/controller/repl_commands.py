"""The commands of the REPL: a table from a name to a function of the live run. They return text, and the same as data.

They only read, except `pause`, `resume` and `stop`, which go through `RunControl`, `repack`, `evaluate`, and those of `repl_fleet.py`.
None of them waits.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from laminar.controller.recent_results import RecentResults
from laminar.controller.repl_answer import Answer, CommandError
from laminar.controller.repl_fleet import add_rollouts, drain_rollout, remove_rollout
from laminar.controller.repl_repack import repack_now, repack_plan
from laminar.controller.repl_trajectory import trajectories, trajectory
from laminar.controller.repl_views import accounts, buffer, fleet, relays, rollouts, status, trainer
from laminar.controller.run_view import RunView
from laminar.observability.plain_text import fields

PARTS = ("generation", "training")


@dataclass(kw_only=True, slots=True, frozen=True)
class Command:
    """One entry of the table."""

    arguments: str  # as the help shows them
    help: str
    function: Callable[[RunView, RecentResults, Sequence[str]], Answer]


def execute(line: str, view: RunView, recent: RecentResults) -> Answer:
    """Run one command line.

    Raises:
        CommandError: no such command, or wrong arguments.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise CommandError(f"cannot be read: {error}") from None
    if not words:
        raise CommandError(f"no command was given; known are {', '.join(COMMANDS)}")
    name, arguments = words[0], words[1:]
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMANDS)}"
        raise CommandError(f"unknown command {name!r}; {hint}")
    if len(arguments) > (1 if command.arguments else 0):
        raise CommandError(f"too many arguments; expected: {usage(name)}")
    return command.function(view, recent, arguments)


def usage(name: str) -> str:
    """A command with its arguments."""
    return f"{name} {COMMANDS[name].arguments}".rstrip()


def _trajectory(view: RunView, recent: RecentResults, arguments: Sequence[str]) -> Answer:
    if not arguments:
        return trajectories(view)
    answer = trajectory(view, recent, arguments[0])
    if answer is None:
        raise CommandError(
            f"no trajectory {arguments[0]!r} is known (the oldest are forgotten); `trajectory` lists some"
        )
    return answer


def _parts(arguments: Sequence[str], name: str) -> tuple[str, ...]:
    if not arguments:
        return PARTS
    if arguments[0] not in PARTS:
        raise CommandError(f"unknown part {arguments[0]!r}; expected: {usage(name)}")
    return (arguments[0],)


def _pause(view: RunView, recent: RecentResults, arguments: Sequence[str]) -> Answer:
    parts = _parts(arguments, "pause")
    view.control.pause(generation="generation" in parts, training="training" in parts)
    return Answer(text=f"paused {' and '.join(parts)}; what is running is finished first", data=_paused(view))


def _resume(view: RunView, recent: RecentResults, arguments: Sequence[str]) -> Answer:
    parts = _parts(arguments, "resume")
    view.control.resume(generation="generation" in parts, training="training" in parts)
    return Answer(text=f"resumed {' and '.join(parts)}", data=_paused(view))


def _paused(view: RunView) -> dict[str, bool]:
    return {"generation": view.control.generation_paused, "training": not view.control.training_allowed.is_set()}


def _repack(view: RunView, recent: RecentResults, arguments: Sequence[str]) -> Answer:
    if view.config.schedule.name != "laminar":
        raise CommandError(f"under schedule.name: {view.config.schedule.name} no rollout is emptied into another")
    if not arguments:
        return repack_now(view)
    if arguments[0] != "plan":
        raise CommandError(f"unknown argument {arguments[0]!r}; expected: {usage('repack')}")
    return repack_plan(view)


def _stop(view: RunView, recent: RecentResults, arguments: Sequence[str]) -> Answer:
    view.control.stop()
    step = view.trainer.step
    if view.trainer.clock.state in ("training", "publishing"):
        step += 1
        text = f"the run ends after step {step} with a checkpoint"
    else:
        text = (
            f"the run ends now, after step {step}, with a checkpoint" if step else "the run ends now, before any step"
        )
    return Answer(text=text, data={"last_step": step})


def _evaluate(view: RunView, recent: RecentResults, arguments: Sequence[str]) -> Answer:
    evaluator = view.evaluator
    if not evaluator.enabled:
        raise CommandError("the experiment has no held-out prompts; give its config a section `evaluation`")
    version = evaluator.ask()
    text = f"held-out prompts are evaluated with version {version} or a newer one"
    if running := evaluator.running:
        far = f"{running.scored} of {len(running.trajectories)} responses are scored"
        text += f", after evaluation {running.number}, of which {far}"
    return Answer(text=text, data={"least_version": version})


def _help(view: RunView, recent: RecentResults, arguments: Sequence[str]) -> Answer:
    data: list[dict[str, Any]] = [
        {"name": name, "arguments": command.arguments, "help": command.help} for name, command in COMMANDS.items()
    ]
    return Answer(text=fields((usage(name), command.help) for name, command in COMMANDS.items()), data=data)


COMMANDS: dict[str, Command] = {
    "status": Command(
        arguments="", help="where the run stands", function=lambda view, recent, _: status(view, recent.metrics)
    ),
    "rollouts": Command(
        arguments="", help="every rollout, its load and what it waits for", function=lambda view, *_: rollouts(view)
    ),
    "fleet": Command(
        arguments="",
        help="how every rollout fares, those included that have left",
        function=lambda view, *_: fleet(view),
    ),
    "relays": Command(
        arguments="", help="the chain and which weights each relay holds", function=lambda view, *_: relays(view)
    ),
    "trainer": Command(
        arguments="", help="the trainer's ranks and where its time went", function=lambda view, *_: trainer(view)
    ),
    "buffer": Command(
        arguments="", help="groups on their way and ready to be trained", function=lambda view, *_: buffer(view)
    ),
    "trajectory": Command(
        arguments="[ID]", help="one trajectory with its texts; without an ID the newest ones", function=_trajectory
    ),
    "pause": Command(arguments="[generation|training]", help="start no new prompts and/or steps", function=_pause),
    "resume": Command(arguments="[generation|training]", help="undo pause", function=_resume),
    "add": Command(
        arguments="[COUNT]", help="start more rollouts", function=lambda view, _, words: add_rollouts(view, words)
    ),
    "drain": Command(
        arguments="ROLLOUT",
        help="a rollout gets nothing new and leaves when it has finished what it has",
        function=lambda view, _, words: drain_rollout(view, words),
    ),
    "remove": Command(
        arguments="ROLLOUT",
        help="a rollout leaves now; what it has goes on elsewhere",
        function=lambda view, _, words: remove_rollout(view, words),
    ),
    "accounts": Command(
        arguments="", help="what became of every prompt so far", function=lambda view, *_: accounts(view)
    ),
    "repack": Command(
        arguments="[plan]",
        help="empty rollouts that hold only stragglers now; or show what would be moved, and why not more",
        function=_repack,
    ),
    "evaluate": Command(arguments="", help="evaluate held-out prompts with the newest version", function=_evaluate),
    "stop": Command(arguments="", help="end the run after the current step, with a checkpoint", function=_stop),
    "help": Command(arguments="", help="this list", function=_help),
}
