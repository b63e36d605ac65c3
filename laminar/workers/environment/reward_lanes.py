"""Plain reward functions in processes of their own, one call at a time in each: the worker's side of `reward_host.py`.

Invariant: a call that exceeds its limit, or whose process dies, costs that process and nothing else; every call has an
outcome. A lane is forked when a call finds no idle one, so there are as many as ever ran at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import signal
import socket
import sys
from typing import Any

from laminar.config.schema import ExperimentConfig
from laminar.data.metadata import encode_metadata
from laminar.errors import UserError
from laminar.rewards.conventions import RewardInput
from laminar.rewards.reward import Outcome

LARGEST_LINE = 1 << 24  # bytes of an outcome
HOST = "laminar.workers.environment.reward_host"


class Overtime(Exception):
    """The call exceeded its limit."""


class LaneDied(Exception):
    """The process ended; the message says how."""


class _Lane:
    """A forked process, and the line to it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.reader = reader
        self.writer = writer

    async def ask(self, call: bytes) -> Outcome:
        """The outcome of a call. Raises ConnectionError if the process ends first."""
        self.writer.write(call)
        await self.writer.drain()
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("no answer")
        answer = json.loads(line)
        return Outcome(reward=math.nan if answer["reward"] is None else answer["reward"], error=answer["error"])


class RewardLanes:
    """The host's process, and the lanes that it has forked."""

    def __init__(self) -> None:
        self._control: socket.socket
        self._process: asyncio.subprocess.Process | None = None
        self._order = asyncio.Lock()  # one order at a time is under way
        self._idle: list[_Lane] = []

    async def start(self, config: ExperimentConfig) -> None:
        """Start the host; it loads the parts while others do something else."""
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", HOST, str(theirs.fileno()), str(os.getpid())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
            )
        self._control.sendall(json.dumps(config.model_dump_json()).encode() + b"\n")

    async def loaded(self) -> list[int]:
        """Wait until the host has loaded every part: the places of those that are coroutine functions, not for lanes.

        Raises:
            UserError: a part cannot be loaded.
            RuntimeError: the host's process ended.
        """
        answer = await self._ask(b"")
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        in_loop: list[int] = answer["in_loop"]
        return in_loop

    async def call(self, place: int, request: RewardInput, limit_s: float) -> Outcome:
        """Have a part score a response.

        Raises:
            Overtime: it took longer than `limit_s` seconds.
            LaneDied: its process ended.
        """
        given = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
        given["metadata"] = encode_metadata(request.metadata)
        call = json.dumps({"place": place, "request": given}).encode() + b"\n"
        lane = self._idle.pop() if self._idle else await self._fork()
        try:
            async with asyncio.timeout(limit_s):
                outcome = await lane.ask(call)
        except TimeoutError:
            await self._end(lane)
            raise Overtime from None
        except (ConnectionError, ValueError) as error:  # ended, or a line that is none
            status = await self._end(lane)
            raise LaneDied(describe_end(status)) from error
        except asyncio.CancelledError:
            lane.writer.close()
            raise  # the worker is ending, and the kernel ends all lanes with the host
        self._idle.append(lane)
        return outcome

    async def stop(self) -> None:
        """End the host, and with it all lanes."""
        if self._process is None:
            return
        self._control.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _fork(self) -> _Lane:
        ours, theirs = socket.socketpair()
        with theirs:
            pid = await self._ask(b"fork", theirs.fileno())
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LARGEST_LINE)
        return _Lane(pid, reader, writer)

    async def _end(self, lane: _Lane) -> int:
        lane.writer.close()
        status: int = await self._ask(f"kill {lane.pid}".encode())
        return status

    async def _ask(self, order: bytes, fd: int | None = None) -> Any:
        async with self._order:
            return await asyncio.to_thread(self._exchange, order, fd)

    def _exchange(self, order: bytes, fd: int | None) -> Any:
        """Send an order and wait for the answer, a line of JSON; an empty one only waits for it."""
        try:
            if fd is None and order:
                self._control.sendall(order)
            elif fd is not None:
                socket.send_fds(self._control, [order], [fd])
            answer = b""
            while not answer.endswith(b"\n"):
                piece = self._control.recv(1 << 16)
                if not piece:
                    raise ConnectionResetError("closed")
                answer += piece
        except OSError as error:
            raise RuntimeError(f"the process that holds the reward functions has ended ({error})") from error
        return json.loads(answer)


def describe_end(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
