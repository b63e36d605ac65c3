"""Serves the REPL on a Unix socket in the run directory: one JSON line asked, one JSON line answered.

  {"command": "rollouts"}  ->  {"ok": true, "text": "...", "data": [...]}

Invariants: only the run's owner can connect (mode 0600); no client can stop or stall the run: a command that fails
is answered and told, a line has a limit, and a client that does not read is let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

from laminar.controller.recent_results import RecentResults
from laminar.controller.repl_answer import CommandError
from laminar.controller.repl_commands import execute
from laminar.controller.run_view import RunView
from laminar.observability.events import Notice
from laminar.observability.json_lines import plain

SOCKET_FILE = "repl.sock"
PATH_FILE = "repl.path"  # holds the socket's path where it could not be made in the run directory
MAX_LINE_BYTES = 1 << 16
WRITE_LIMIT_S = 10.0  # for a client to read an answer


class ReplServer:
    """One task per client, all owned by `serve_forever`."""

    def __init__(self, view: RunView) -> None:
        self.listening = asyncio.Event()
        self._view = view
        self._recent = RecentResults(view.events)

    async def serve_forever(self) -> None:
        """Listen until cancelled; then close every connection and remove the socket.

        Returns at once, with a warning, where no socket can be made: the run is worth more than the look inside.
        """
        try:
            listener, path = bind(self._view.run_dir)
        except OSError as error:
            text = f"laminar attach will not work: no Unix socket can be made in {self._view.run_dir} ({error})"
            self._view.events.emit(Notice(level="warning", text=text))
            return
        try:
            async with asyncio.TaskGroup() as clients:

                def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    clients.create_task(self._serve(reader, writer), name="REPL client")

                server = await asyncio.start_unix_server(accept, sock=listener, limit=MAX_LINE_BYTES)
                try:
                    self.listening.set()
                    await asyncio.get_running_loop().create_future()
                finally:
                    server.close()
        finally:
            listener.close()
            unbind(self._view.run_dir, path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await self._read(reader, writer):
                await self._write(writer, self._answer(line))
        except (ConnectionError, TimeoutError):
            pass  # the client has gone, or does not read
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            return await reader.readline()
        except ValueError:  # longer than the limit; what follows cannot be told from the line's rest
            await self._write(writer, _failure(f"a line may have {MAX_LINE_BYTES} bytes"))
            return b""

    async def _write(self, writer: asyncio.StreamWriter, answer: dict[str, object]) -> None:
        writer.write(json.dumps(plain(answer)).encode() + b"\n")
        async with asyncio.timeout(WRITE_LIMIT_S):
            await writer.drain()

    def _answer(self, line: bytes) -> dict[str, object]:
        try:
            request = json.loads(line)
        except ValueError as error:
            return _failure(f"not a line of JSON: {error}")
        command = request.get("command") if isinstance(request, dict) else None
        if not isinstance(command, str):
            return _failure('expected {"command": "..."}')
        try:
            answer = execute(command, self._view, self._recent)
        except CommandError as error:
            return _failure(str(error))
        except Exception as error:  # a bug in a page must not end a run that somebody only looks at
            text = f"REPL command {command!r} failed: {type(error).__name__}: {error}"
            self._view.events.emit(Notice(level="warning", text=text))
            return _failure(text)
        return {"ok": True, "text": answer.text, "data": answer.data}


def _failure(text: str) -> dict[str, object]:
    return {"ok": False, "text": text, "data": None}


def bind(run_dir: Path) -> tuple[socket.socket, Path]:
    """A socket with mode 0600 in the run directory; where its path is too long for a Unix socket (107 bytes) or the file
    system has none, in a folder of mode 0700 that `repl.path` names."""
    path = run_dir / SOCKET_FILE
    unbind(run_dir, path)  # of a run that ended badly
    try:
        return _bind(path), path
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="laminar-")) / SOCKET_FILE
        try:
            (run_dir / PATH_FILE).write_text(str(path), encoding="utf-8")
            return _bind(path), path
        except OSError:
            unbind(run_dir, path)
            raise


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # nobody else may connect, not even between bind and chmod
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def unbind(run_dir: Path, path: Path) -> None:
    """Remove the socket and what points to it."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    if path.parent != run_dir:
        shutil.rmtree(path.parent, ignore_errors=True)
    with contextlib.suppress(OSError):
        (run_dir / PATH_FILE).unlink(missing_ok=True)
