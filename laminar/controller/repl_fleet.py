"""The REPL's commands by which rollouts join and leave a live run. None of them waits: `fleet` shows how far it is."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from laminar.controller.fleet_health import THERE, Health
from laminar.controller.repl_answer import Answer, CommandError
from laminar.controller.run_view import RunView

MOST_AT_ONCE = 256


def add_rollouts(view: RunView, words: Sequence[str]) -> Answer:
    """Start more rollouts (`add 2`). Raises CommandError."""
    count = words[0] if words else "1"
    if not count.isdecimal() or not 1 <= int(count) <= MOST_AT_ONCE:
        raise CommandError(f"{count!r} is no number of rollouts; expected: add [COUNT], 1 to {MOST_AT_ONCE}")
    if view.fleet.by_hand:
        first = view.fleet.health.free_index()
        raise CommandError(
            "launch.rollouts is manual: start them on their hosts, they join by themselves: "
            f"scripts/launch/rollouts.sh {view.run_dir} {count} {first} (and a relay, where none is: "
            f"scripts/launch/relays.sh {view.run_dir} --index {max(view.relays.relays, default=-1) + 1})"
        )
    if not view.fleet.begun:
        raise CommandError("the run has not begun: not all of its workers are ready; `status` names them")
    names = view.fleet.add(int(count))
    return Answer(text=f"starting {', '.join(names)}; `fleet` shows how far it is", data=names)


def drain_rollout(view: RunView, words: Sequence[str]) -> Answer:
    """A rollout leaves when it has finished what it has (`drain 3`). Raises CommandError."""
    name = _rollout(view, words, "drain")
    view.fleet.leave(name, "drained by a person", moves_after_s=None)
    return _leaving(view, name, "finishes")


def remove_rollout(view: RunView, words: Sequence[str]) -> Answer:
    """A rollout leaves now (`remove 3`). Raises CommandError."""
    name = _rollout(view, words, "remove")
    view.fleet.leave(name, "removed by a person", moves_after_s=0)
    return _leaving(view, name, "hands over")


def _leaving(view: RunView, name: str, does: str) -> Answer:
    replica = view.rollouts.replicas.get(name)
    held = len(replica.in_flight) if replica is not None else 0
    return Answer(text=f"{name} {does} {held} trajectories and leaves", data={"rollout": name, "trajectories": held})


def _rollout(view: RunView, words: Sequence[str], command: str) -> str:
    """The rollout that is meant, if it can leave."""
    members = view.fleet.health.members
    known = [name for name, member in members.items() if member.health not in (Health.LEFT, Health.EVICTED)]
    if not words:
        raise CommandError(f"which one? expected: {command} ROLLOUT, one of {', '.join(known)}")
    name = f"rollout-{words[0]}" if words[0].isdecimal() else words[0]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise CommandError(f"no rollout {words[0]!r} is in this run{f'; did you mean {near[0]}?' if near else ''}")
    if not view.fleet.begun:
        raise CommandError("the run has not begun: not all of its workers are ready; `status` names them")
    others = [one for one, member in members.items() if member.health in THERE and member.health is not Health.DRAINING]
    if others == [name]:
        raise CommandError(f"{name} is the only rollout that is left: add another first, or `stop` the run")
    return name
