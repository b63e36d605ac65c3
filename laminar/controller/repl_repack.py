"""The REPL's `repack` pages: what would be moved where, and for each other rollout why it is not emptied."""

from __future__ import annotations

from typing import Any

from laminar.controller.repack_planner import Move
from laminar.controller.repl_answer import Answer, rows_as_text
from laminar.controller.run_view import RunView
from laminar.observability.plain_text import Cell, duration, fields, short_number


def repack_now(view: RunView) -> Answer:
    """Asks all rollouts for their load; the plan that follows is carried out."""
    asked = view.repacker.repack_now()
    text = (
        f"asked {asked} rollouts for their load; moves what the plan that follows says (events.jsonl tells each move)"
    )
    return Answer(text=text, data={"asked": asked})


def repack_plan(view: RunView) -> Answer:
    """By the newest load of each rollout; nothing is moved."""
    planned, bounds = view.repacker.plan(), view.repacker.inputs.bounds()
    moves = {move.source: move for move in planned.moves}
    rows: list[dict[str, Cell]] = [
        {
            "rollout": name,
            "version": replica.policy_version,
            "in flight": len(replica.in_flight),
            "moves to": moves[name].target if name in moves else None,
            "why": _gain(moves[name]) if name in moves else planned.reasons.get(name, ""),
        }
        for name, replica in view.rollouts.replicas.items()
    ]
    cost = bounds.move_s_per_token
    head = fields(
        [
            (
                "repack",
                "on" if view.config.repack.enabled else "off (repack.enabled); `repack` moves once all the same",
            ),
            ("batch bound", f"{bounds.batch_bound} trajectories ({_origin(view)})"),
            ("KV ceiling", f"{bounds.kv_ceiling:g}"),
            ("a move costs", f"{duration(1000 * cost)} per 1000 tokens of context" if cost else "not measured yet"),
            ("worth freeing", f"{bounds.wanted} rollouts" if bounds.wanted else bounds.why_no_more),
        ]
    )
    data: dict[str, Any] = {
        "batch_bound": bounds.batch_bound,
        "kv_ceiling": bounds.kv_ceiling,
        "move_s_per_token": cost,
        "wanted": bounds.wanted,
        "moves": [{"source": move.source, "target": move.target} for move in planned.moves],
        "reasons": planned.reasons,
    }
    return Answer(text="\n\n".join(part for part in (head, rows_as_text(rows)) if part), data=data)


def _origin(view: RunView) -> str:
    return "fitted" if view.config.repack.batch_bound == "auto" else "repack.batch_bound"


def _gain(move: Move) -> str:
    text = f"with {short_number(move.context_tokens)} tokens of context"
    if move.frees_s is not None:
        text += f", frees it for some {duration(move.frees_s)}"
    if move.costs_s is not None:
        text += f", costs the target {duration(move.costs_s)}"
    return text
