"""Python code that a model wrote, run where it can harm nothing: a process per call, killed with all that it started.

Invariant: when `run_python` returns or is cancelled nothing of the call is left, neither process nor file. What confines
the code, and what is missing where the machine allows less, is told in docs/sandbox.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from laminar.environments.sandboxing.request import Request, Verdict

STOP_LIMIT_S = 10.0  # for the warden to end everything; a machine may be busy
_ROOT = Path(__file__).parents[2]  # folder that holds the package
_START = "import sys; sys.path.insert(0, sys.argv[1]); from laminar.environments.sandboxing.warden import main; main()"

EndedBy = Literal["exit", "time", "memory", "processes", "output"]
Isolation = Literal["namespaces", "landlock", "limits"]


class SandboxError(Exception):
    """The code could not be run at all; it is not to blame."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxLimits:
    """What one call may use."""

    time_s: float = 5.0  # wall clock
    memory_bytes: int = 512 << 20  # of all its processes together; address space of each
    processes: int = 16  # threads included
    output_bytes: int = 64 << 10  # of standard output, and of standard error
    scratch_bytes: int = 16 << 20  # files that it may write
    use_namespaces: bool = True  # where there are; False is for tests of what is left then


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxResult:
    """What the code printed, and how it ended."""

    stdout: str  # at most `output_bytes` of it
    stderr: str
    exit_code: int  # 0: it ended well; 128 + n: signal n ended it
    ended_by: EndedBy  # "exit", or the limit that it went beyond
    isolation: Isolation  # what it was confined by, beside limits and the filter on system calls
    seconds: float  # starting and ending included

    @property
    def ok(self) -> bool:
        """It ran to its end, without an error."""
        return self.ended_by == "exit" and self.exit_code == 0


async def run_python(code: str, *, stdin: str = "", limits: SandboxLimits) -> SandboxResult:
    """Run a program in a new interpreter (this one's version and packages) and wait until it has ended.

    Raises:
        SandboxError: it could not be started, or its warden was killed.
    """
    began = time.monotonic()
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            warden = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", _START, str(_ROOT)),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd="/",
                env={"LANG": "C.UTF-8"},
                start_new_session=True,
            )
        try:
            output, verdict = await _converse(warden, ours, _request(code, stdin, limits), limits.output_bytes)
        finally:
            await _end(warden, ours)
    stdout, stderr = (text.decode(errors="replace") for text in output.texts)
    if verdict is None or verdict.ended_by == "failed":
        reason = stderr if verdict is None else verdict.error
        raise SandboxError(f"the sandbox could not run the code: {reason or 'its process was killed'}")
    return SandboxResult(
        stdout=stdout,
        stderr=stderr,
        exit_code=verdict.exit_code,
        ended_by="output" if output.too_much else verdict.ended_by,  # type: ignore[arg-type]
        isolation=verdict.isolation,  # type: ignore[arg-type]
        seconds=time.monotonic() - began,
    )


@dataclass(slots=True)
class _Output:
    texts: tuple[bytearray, bytearray]  # standard output and error
    too_much: bool = False


def _request(code: str, stdin: str, limits: SandboxLimits) -> bytes:
    prefixes = [os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    python = os.path.join(prefixes[0], "bin", os.path.basename(sys.executable))
    request = Request(
        code=code.encode(errors="surrogatepass"),
        stdin=stdin.encode(errors="surrogatepass"),
        folder=tempfile.gettempdir(),
        python=python,
        readable=tuple(dict.fromkeys(prefixes)),
        time_s=limits.time_s,
        memory_bytes=limits.memory_bytes,
        processes=limits.processes,
        scratch_bytes=limits.scratch_bytes,
        use_namespaces=limits.use_namespaces,
    )
    return request.pack()


async def _converse(
    warden: asyncio.subprocess.Process, door: socket.socket, request: bytes, output_bytes: int
) -> tuple[_Output, Verdict | None]:
    """Hand the request over, take in what the code prints, and then the verdict."""
    output = _Output((bytearray(), bytearray()))

    async def collect(stream: asyncio.StreamReader | None, text: bytearray) -> None:
        assert stream is not None
        while piece := await stream.read(1 << 16):  # to its end, even when there is too much: the pipe must not fill
            room = output_bytes - len(text)
            text += piece[:room]
            if len(piece) > room and not output.too_much:
                output.too_much = True
                _stop(door)

    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(door, request)
        await asyncio.gather(collect(warden.stdout, output.texts[0]), collect(warden.stderr, output.texts[1]))
        answer = b""
        while piece := await loop.sock_recv(door, 1 << 16):
            answer += piece
    except ConnectionError:
        return output, None
    return output, Verdict.unpack(answer) if answer else None


def _stop(door: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the warden has gone
        door.shutdown(socket.SHUT_WR)


async def _end(warden: asyncio.subprocess.Process, door: socket.socket) -> None:
    """Wait for the warden's end; it ends everything else first. Being cancelled does not interrupt that."""
    _stop(door)
    ended = asyncio.ensure_future(_ended(warden))
    while not ended.done():
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await asyncio.wait([ended])
            raise


async def _ended(warden: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(STOP_LIMIT_S):
            await warden.wait()
    except TimeoutError:
        warden.kill()
        await warden.wait()
