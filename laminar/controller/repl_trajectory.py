"""The REPL's pages about trajectories: the newest ones, and one with its texts."""

from __future__ import annotations

from itertools import islice
from typing import Any

from laminar.controller.recent_results import RecentResults
from laminar.controller.repl_answer import Answer, rows_as_text
from laminar.controller.run_view import RunView
from laminar.observability.plain_text import Cell, fields, printable
from laminar.trajectory import Trajectory, Turn

SHOWN_TRAJECTORIES = 20
SHOWN_TOKENS = 24
SHOWN_CHARACTERS = 2000  # of a prompt or a response


def trajectories(view: RunView) -> Answer:
    """The newest trajectories, newest first."""
    rows: list[dict[str, Cell]] = [
        {
            "trajectory": entry.trajectory_id,
            "state": entry.state.value,
            "version": entry.policy_version,
            "rollout": entry.rollout,
            "tokens": entry.num_tokens,
            "reward": entry.reward,
            "finish": entry.finish_reason,
            "step": entry.step,
        }
        for entry in islice(reversed(list(view.history.values())), SHOWN_TRAJECTORIES)
    ]
    if not rows:
        return Answer(text="no trajectory has been started yet", data=[])
    return Answer(text=rows_as_text(rows), data=rows)


def trajectory(view: RunView, recent: RecentResults, trajectory_id: str) -> Answer | None:
    """All that is known of one trajectory; None if it is not known."""
    entry = view.pool.get(trajectory_id) or view.history.get(trajectory_id) or _in_buffer(view, trajectory_id)
    if entry is None:
        return None
    token_ids = entry.response_token_ids()[:SHOWN_TOKENS].tolist()
    text = recent.response_text(trajectory_id)
    data: dict[str, Any] = {
        "id": entry.trajectory_id,
        "group": entry.group_id,
        "prompt_id": entry.prompt.prompt_id,
        "source": entry.prompt.source,
        "state": entry.state.value,
        "policy_version": entry.policy_version,
        "lease": entry.lease,
        "rollout": entry.rollout,
        "prompt_tokens": len(entry.prompt.token_ids),
        "response_tokens": entry.num_tokens,
        "finish_reason": entry.finish_reason,
        "reward": entry.reward,
        "error": entry.error or entry.reward_error,
        "generation_s": _generation_s(view, entry),
        "step": entry.step,
    }
    pairs = [(name, printable(_value(value))) for name, value in data.items()]
    pairs.append(("token ids", f"{' '.join(map(str, token_ids))}{' ...' if entry.num_tokens > SHOWN_TOKENS else ''}"))
    parts = [fields(pairs)]
    if entry.turns:
        data["turns"] = turns = [_turn(number, turn) for number, turn in enumerate(entry.turns, start=1)]
        parts.append(f"turns:\n{rows_as_text(turns)}")
    parts += [f"prompt:\n{_excerpt(entry.prompt.text)}", f"answer:\n{_excerpt(entry.prompt.answer)}"]
    if text is not None:
        parts.append(f"response:\n{_excerpt(text)}")
    data |= {"token_ids": token_ids, "prompt": entry.prompt.text, "answer": entry.prompt.answer, "response": text}
    return Answer(text="\n\n".join(parts), data=data)


def _turn(number: int, turn: Turn) -> dict[str, Cell]:
    return {
        "turn": number,
        "first token": turn.start,
        "tokens": turn.end - turn.start,
        "observation": turn.observation_end - turn.end,
        "reward": turn.reward,
        "seconds": round(turn.seconds, 3),
    }


def _in_buffer(view: RunView, trajectory_id: str) -> Trajectory | None:
    members = (member for group in view.buffer for member in group.trajectories)
    return next((member for member in members if member.trajectory_id == trajectory_id), None)


def _generation_s(view: RunView, entry: Trajectory) -> float | None:
    if entry.started_at is None:
        return None
    end = view.now() if entry.finished_at is None else entry.finished_at
    return round(end - entry.started_at, 3)


def _value(value: object) -> str:
    return "-" if value is None else str(value)


def _excerpt(text: str) -> str:
    cut = printable(text[:SHOWN_CHARACTERS])
    return f"{cut}\n... ({len(text)} characters)" if len(text) > SHOWN_CHARACTERS else cut
