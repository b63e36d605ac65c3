"""What became of every prompt: the report of accounts, and the check that its sums are right.

Invariant: every position of the data order up to the cursor is one prompt, and ended (or is) in exactly one way.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from laminar.controller.journal.fates import EVICTED, FAILED, FILTERED, LEFT
from laminar.controller.journal.tables import JOURNAL, connect
from laminar.errors import UserError

FILE = "accounts.json"


@dataclass(kw_only=True, slots=True, frozen=True)
class Accounts:
    """Numbers of prompts."""

    positions: int  # of the data order that were used
    rejected: int  # too long for the model, or empty: never generated
    trained: int
    filtered: int  # by dynamic sampling
    evicted: int  # by the rules of the buffer or the schedule
    failed: int  # a member has no valid reward
    left: int  # at the end of the data, too few for a step
    in_flight: int  # generated, scored, or waiting to be trained
    steps: Mapping[int, int]  # step -> prompts that it has trained
    reasons: Mapping[str, int]  # why prompts were not trained -> how many
    problems: tuple[str, ...]  # sums that are wrong; empty if the accounts add up

    @property
    def text(self) -> str:
        """One line."""
        ends = ("trained", "filtered", "evicted", "failed", "left", "rejected", "in_flight")
        parts = [f"{getattr(self, name)} {name.replace('_', ' ')}" for name in ends]
        sums = "; ".join(f"WRONG: {problem}" for problem in self.problems) or "the sums are right"
        return f"{self.positions} prompts: {', '.join(parts)} ({sums})"

    def write(self, run_dir: Path) -> None:
        """As `accounts.json`. Raises OSError."""
        (run_dir / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_accounts(run_dir: Path) -> Accounts:
    """Of a run, live or ended. Raises UserError if its journal is missing or cannot be read."""
    path = run_dir / JOURNAL
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected the journal of a run")
    connection = connect(path)
    try:
        return accounts(connection)
    except sqlite3.Error as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    finally:
        connection.close()


def accounts(connection: sqlite3.Connection) -> Accounts:
    """From the journal's newest transaction."""
    connection.execute("BEGIN")  # one state for all that follows
    try:
        return _accounts(connection)
    finally:
        connection.execute("ROLLBACK")


def _accounts(connection: sqlite3.Connection) -> Accounts:
    def number(sql: str, *values: object) -> int:
        return int(connection.execute(sql, values).fetchone()[0] or 0)

    positions = number("SELECT max(prompt_id) + 1 FROM groups")
    rejected = number("SELECT count(*) FROM rejected WHERE prompt_id < ?", positions)
    fates = dict(connection.execute("SELECT coalesce(fate, 'outstanding'), count(*) FROM groups GROUP BY 1"))
    kinds = dict(connection.execute("SELECT kind, count(*) FROM groups WHERE fate = 'dropped' GROUP BY kind"))
    steps = dict(
        connection.execute("SELECT step, count(*) FROM groups WHERE fate = 'trained' GROUP BY step ORDER BY step")
    )
    reasons = dict(connection.execute("SELECT reason, count(*) FROM groups WHERE fate = 'dropped' GROUP BY reason"))
    reasons.update(
        connection.execute("SELECT reason, count(*) FROM rejected WHERE prompt_id < ? GROUP BY reason", (positions,))
    )
    groups = number("SELECT count(*) FROM groups")
    both = number("SELECT count(*) FROM groups JOIN rejected USING (prompt_id)")
    at_step = int(dict(connection.execute("SELECT key, value FROM meta WHERE key = 'step'")).get("step", "0"))
    ended = {kind: kinds.get(kind, 0) for kind in (FILTERED, EVICTED, FAILED, LEFT)}
    in_flight = fates.get("outstanding", 0) + fates.get("training", 0)
    checks = {
        f"{positions} positions, {groups} drawn and {rejected} rejected": positions == groups + rejected,
        f"{both} prompts are both drawn and rejected": both == 0,
        f"{groups} drawn, {sum(fates.values())} with a fate": groups
        == fates.get("trained", 0) + sum(ended.values()) + in_flight,
        f"trained in steps {sorted(step for step in steps if step is None or not 1 <= step <= at_step)}, "
        f"the trainer is at step {at_step}": all(step is not None and 1 <= step <= at_step for step in steps),
        f"{len(steps)} of {at_step} steps have trained prompts": len(steps) == at_step,
    }
    return Accounts(
        positions=positions,
        rejected=rejected,
        trained=fates.get("trained", 0),
        **ended,
        in_flight=in_flight,
        steps=steps,
        reasons=reasons,
        problems=tuple(text for text, right in checks.items() if not right),
    )
