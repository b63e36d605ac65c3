"""What the worker asks of the warden, and what it hears: fields in lines, then texts by their lengths.

Both ends import this, and the warden starts for every call: hence no dataclass and no JSON, whose imports take longer than the code.
"""

from __future__ import annotations

import os

DOOR = 3  # file of the socket to the worker, in the warden


class Request:
    """What to run, and under which limits."""

    __slots__ = (
        *("code", "folder", "memory_bytes", "processes", "python", "readable"),
        *("scratch_bytes", "stdin", "time_s", "use_namespaces"),
    )

    def __init__(
        self,
        *,
        python: str,
        readable: tuple[str, ...],
        folder: str,
        time_s: float,
        memory_bytes: int,
        processes: int,
        scratch_bytes: int,
        use_namespaces: bool,
        code: bytes,
        stdin: bytes,
    ) -> None:
        """
        Args:
            python: interpreter.
            readable: folders that it needs beside those of the system.
            folder: where to make the scratch folder.
            code: of the program.
            stdin: what it reads.
        """
        self.python = python
        self.readable = readable
        self.folder = folder
        self.time_s = time_s
        self.memory_bytes = memory_bytes
        self.processes = processes
        self.scratch_bytes = scratch_bytes
        self.use_namespaces = use_namespaces
        self.code = code
        self.stdin = stdin

    def pack(self) -> bytes:
        """As bytes, with their number in front."""
        limits = (self.time_s, self.memory_bytes, self.processes, self.scratch_bytes, int(self.use_namespaces))
        fields = [*limits, len(self.code), len(self.stdin), self.python, self.folder, *self.readable]
        head = os.fsencode("\0".join(map(str, fields)))
        return b"%d %d\n" % (len(head), len(self.code) + len(self.stdin)) + head + self.code + self.stdin


def read_request(place: int) -> Request | None:
    """The request that comes on a socket; None if its other end has gone."""
    data = b""
    while b"\n" not in data:
        if not (piece := os.read(place, 1 << 16)):
            return None
        data += piece
    sizes, _, data = data.partition(b"\n")
    head, texts = map(int, sizes.split())
    pieces, missing = [data], head + texts - len(data)
    while missing:
        if not (piece := os.read(place, missing)):
            return None
        pieces.append(piece)
        missing -= len(piece)
    data = b"".join(pieces)
    time_s, memory, processes, scratch, use, code, stdin, python, folder, *readable = os.fsdecode(data[:head]).split(
        "\0"
    )
    end = head + int(code)
    return Request(
        python=python,
        readable=tuple(readable),
        folder=folder,
        time_s=float(time_s),
        memory_bytes=int(memory),
        processes=int(processes),
        scratch_bytes=int(scratch),
        use_namespaces=use == "1",
        code=data[head:end],
        stdin=data[end : end + int(stdin)],
    )


class Verdict:
    """How it ended."""

    __slots__ = ("ended_by", "error", "exit_code", "isolation")

    def __init__(self, *, ended_by: str, exit_code: int, isolation: str, error: str = "") -> None:
        """
        Args:
            ended_by: "exit", "time", "memory", "processes", "stopped"; "failed": it could not be started.
            exit_code: 128 + n if signal n ended it.
            isolation: "namespaces", "landlock", "limits".
            error: why it could not be started.
        """
        self.ended_by = ended_by
        self.exit_code = exit_code
        self.isolation = isolation
        self.error = error

    def pack(self) -> bytes:
        """As bytes."""
        return "\0".join((self.ended_by, str(self.exit_code), self.isolation, self.error)).encode(errors="replace")

    @classmethod
    def unpack(cls, data: bytes) -> Verdict:
        """From bytes."""
        ended_by, exit_code, isolation, error = data.decode().split("\0", 3)
        return cls(ended_by=ended_by, exit_code=int(exit_code), isolation=isolation, error=error)
