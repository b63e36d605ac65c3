"""The tables of the journal, and how a journal is made, opened and found to be sound.

Invariant: a file that `open_journal` returns is a whole journal of this format. Every transaction is one consistent cut of
the controller's state.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from laminar.errors import UserError

JOURNAL = "journal.sqlite"
FORMAT = "laminar journal 1"
PAGE_BYTES = 8192  # of the database: a response's tokens take a few pages
LOG_PAGES = 4000  # of the write-ahead log, until they are moved into the database

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- Every group that was ever drawn. fate: NULL (outstanding), 'training', 'trained' or 'dropped'.
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, prompt_id INTEGER NOT NULL UNIQUE, policy_version INTEGER, completed INTEGER,
    fate TEXT, step INTEGER, part INTEGER, kind TEXT, reason TEXT);
CREATE TABLE rejected (prompt_id INTEGER PRIMARY KEY, source TEXT NOT NULL, reason TEXT NOT NULL);
-- What a group consists of: until it is dropped, or a checkpoint holds the step that trained it.
CREATE TABLE prompts (
    group_id INTEGER PRIMARY KEY, source TEXT NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL,
    answer TEXT NOT NULL, metadata TEXT NOT NULL);
CREATE TABLE trajectories (
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, lease INTEGER NOT NULL, rollout TEXT, versions TEXT NOT NULL,
    waits TEXT NOT NULL DEFAULT '', turns TEXT NOT NULL DEFAULT '[]', -- waits: '' (generated), 'environment' or 'rollout'
    finish_reason TEXT, reward REAL, started_at REAL, finished_at REAL, PRIMARY KEY (group_id, member)) WITHOUT ROWID;
CREATE TABLE tokens (
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL, token_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL, PRIMARY KEY (group_id, member, start));
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL, policy_version INTEGER NOT NULL);
CREATE TABLE rollouts (name TEXT PRIMARY KEY, health TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE hosts (worker TEXT PRIMARY KEY, host TEXT NOT NULL) WITHOUT ROWID;
"""


def create_tables(connection: sqlite3.Connection) -> None:
    """Make an empty journal of a fresh database."""
    connection.executescript(TABLES)
    with connection:
        connection.execute("INSERT INTO meta VALUES ('format', ?)", (FORMAT,))


def create_journal(path: Path) -> None:
    """A new, empty journal file, readable by its owner only. Raises OSError or sqlite3.Error."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    connection = connect(path)
    try:
        create_tables(connection)
    finally:
        connection.close()


def connect(path: Path) -> sqlite3.Connection:
    """A connection that writes ahead (WAL): readers never wait for the writer.

    A commit hands the transaction to the operating system, so it survives the end of the process; it is synced to the disk
    where `Journal.durable` asks for it (before a checkpoint is written, and at the end of the run).
    """
    connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def open_journal(path: Path) -> sqlite3.Connection:
    """Open a journal that another controller has left.

    Raises:
        UserError: it is missing, foreign or damaged.
    """
    if not path.is_file():
        raise UserError(
            f"{path}: no such file, so this is no run that can be resumed. Give --resume the directory of a run that has "
            "one, or start anew with `laminar train CONFIG`"
        )
    try:
        connection = connect(path)
        found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise UserError(_not_ours(path, str(error))) from error
    if found is None or found[0] != FORMAT:
        raise UserError(_not_ours(path, f"it is a {found[0]!r}, expected {FORMAT!r}" if found else "it has no format"))
    if damage != "ok":
        raise UserError(_not_ours(path, damage))
    return connection


def _not_ours(path: Path, why: str) -> str:
    return (
        f"{path}: damaged, or not a journal of this version of laminar ({why}). Put back a copy of the run directory from "
        "before the damage, or start a new run from a checkpoint's huggingface folder (model.path)"
    )
