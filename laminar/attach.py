"""`laminar attach RUN_DIR`: the REPL's client. At a terminal with history and completion, else line by line.

Invariant: leaving never ends the run; only the command `stop` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.errors import RunFailed, UserError
from laminar.observability.plain_text import printable

if TYPE_CHECKING:  # 0.4 s to import: only where somebody types
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History

SOCKET_FILE = "repl.sock"  # these two as in laminar/controller/repl_server.py
PATH_FILE = "repl.path"
ANSWER_LIMIT_S = 30.0
MAX_ANSWER_BYTES = 1 << 26


class RunEnded(Exception):
    """The controller closed the connection."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Reply:
    """One answer of the server's."""

    ok: bool
    text: str
    data: Any


def socket_path(run_dir: Path) -> Path:
    """Where the run in this folder listens, if it is live. Raises UserError if there is no such folder."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; expected the run directory that `laminar train` named")
    pointer = run_dir / PATH_FILE
    return Path(pointer.read_text(encoding="utf-8")) if pointer.is_file() else run_dir / SOCKET_FILE


class ReplConnection:
    """A connection to a live run. Use `connect`, and `close` in the same loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended = asyncio.Event()
        self._writer = writer
        self._turn = asyncio.Lock()
        self._owed = 0  # answers to come; more than one after somebody stopped waiting for his
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._receiver = asyncio.create_task(self._receive(reader), name="REPL answers")

    @classmethod
    async def connect(cls, run_dir: Path) -> ReplConnection:
        """Connect to the run that lives in this folder. Raises UserError if there is none."""
        path = socket_path(run_dir)
        try:
            return cls(*await asyncio.open_unix_connection(str(path), limit=MAX_ANSWER_BYTES))
        except PermissionError:
            raise UserError(f"{path}: the run belongs to another user; only its owner can attach") from None
        except OSError:
            raise UserError(f"{run_dir}: no run is live there; start one with `laminar train`") from None

    async def ask(self, command: str) -> Reply:
        """Send a command and return its answer.

        Raises:
            RunEnded: the run has ended.
            RunFailed: there was no answer within the limit.
        """
        async with self._turn:
            if self.ended.is_set():
                raise RunEnded
            self._owed += 1
            with contextlib.suppress(ConnectionError):  # then the receiver sees the end too
                self._writer.write(json.dumps({"command": command}).encode() + b"\n")
                await self._writer.drain()
            try:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    answer = await self._own_answer()
            except TimeoutError:
                raise RunFailed(f"the controller has not answered {command!r} within {ANSWER_LIMIT_S:.0f} s") from None
            if not answer:
                raise RunEnded
            return Reply(**json.loads(answer))

    async def _own_answer(self) -> bytes:
        while True:
            answer = await self._answers.get()
            self._owed -= 1
            if not self._owed or not answer:
                return answer

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._answers.put_nowait(line)
        self.ended.set()
        self._answers.put_nowait(b"")


def attach(run_dir: Path, line: str | None = None) -> int:
    """Run the command `line`, or what standard input says, on the live run in `run_dir`.

    Returns the exit status: 0, also when the run ends meanwhile; 1 if a command was refused (not at a terminal).

    Raises:
        UserError: no run is live there.
        RunFailed: the controller does not answer.
    """
    return asyncio.run(_attach(run_dir, line))


async def _attach(run_dir: Path, line: str | None) -> int:
    connection = await ReplConnection.connect(run_dir)
    try:
        if line is not None:
            return await _run(connection, line)
        if not sys.stdin.isatty():
            status = 0
            for read in sys.stdin:
                if read.strip():
                    status |= await _run(connection, read.strip())
            return status
        return await _prompt(connection, run_dir)
    except RunEnded:
        print(f"the run in {run_dir} has ended")
        return 0
    finally:
        await connection.close()


async def _run(connection: ReplConnection, command: str) -> int:
    reply = await connection.ask(command)
    print(printable(reply.text), file=sys.stdout if reply.ok else sys.stderr, flush=True)
    return 0 if reply.ok else 1


async def _prompt(connection: ReplConnection, run_dir: Path) -> int:
    """Ask and answer at a terminal, until Ctrl-D or until the run ends (then raises RunEnded)."""
    from prompt_toolkit import PromptSession

    names = [entry["name"] for entry in (await connection.ask("help")).data]
    session: PromptSession[str] = PromptSession(
        history=_history(), completer=_completer(connection, names), complete_while_typing=False
    )
    print(f"attached to the run in {run_dir}; help lists the commands, Ctrl-D leaves and lets the run go on")
    while True:
        try:
            line = await _next_line(session, f"{run_dir.name}> ", connection)
        except EOFError:
            return 0
        if line in ("exit", "quit"):
            return 0
        if line:
            print(printable((await connection.ask(line)).text))


async def _next_line(session: PromptSession[str], prompt: str, connection: ReplConnection) -> str:
    """What the person types next, "" after Ctrl-C. Raises EOFError on Ctrl-D, RunEnded when the run ends before."""

    async def typed() -> str:
        try:
            return (await session.prompt_async(prompt)).strip()
        except KeyboardInterrupt:  # of the key; let out of a task it would end the loop
            return ""

    typing = asyncio.create_task(typed(), name="REPL prompt")
    ended = asyncio.create_task(connection.ended.wait(), name="REPL end")
    try:
        await asyncio.wait([typing, ended], return_when=asyncio.FIRST_COMPLETED)
        if not typing.done():
            raise RunEnded
        return typing.result()
    finally:
        for task in (typing, ended):
            task.cancel()
        await asyncio.gather(typing, ended, return_exceptions=True)  # the prompt puts the terminal back in order


def _history() -> History:
    """Typed lines of earlier sessions; in memory only where no file can be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = os.environ.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "laminar"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "repl_history").touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(folder / "repl_history"))


def _completer(connection: ReplConnection, names: list[str]) -> Completer:
    """Completes commands, the parts that can be paused, and the ids of recent trajectories."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class ReplCompleter(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> list[Completion]:
            return []

        async def get_completions_async(
            self, document: Document, complete_event: CompleteEvent
        ) -> AsyncGenerator[Completion, None]:
            for word in await completions(connection, names, document.text_before_cursor):
                yield Completion(word, start_position=-len(document.text_before_cursor.rpartition(" ")[2]))

    return ReplCompleter()


async def completions(connection: ReplConnection, names: list[str], typed: str) -> list[str]:
    """What the last word of a line may become."""
    before, _, word = typed.lstrip().rpartition(" ")
    if not before:
        candidates = names
    elif before in ("pause", "resume"):
        candidates = ["generation", "training"]
    elif before in ("drain", "remove"):
        try:
            candidates = [entry["rollout"] for entry in (await connection.ask("rollouts")).data]
        except (RunEnded, RunFailed):
            candidates = []
    elif before == "trajectory":
        try:
            candidates = [entry["trajectory"] for entry in (await connection.ask("trajectory")).data]
        except (RunEnded, RunFailed):
            candidates = []
    else:
        candidates = []
    return [candidate for candidate in candidates if candidate.startswith(word)]
