"""Other ways to bring the same bytes to the same processes, each in its best form, to hold the relays' chain against.

The job: one process holds so many MiB in its memory, and `length - 1` others on this machine are to hold them in theirs.
Measured from the order (the moment when the last process is ready) to the moment when the last receiver holds all bytes. Every
round carries other bytes and every receiver checks all of them, after the clock has stopped; none of these ways has checksums
of its own. All waits block, so that nobody takes a core from those that work.

- gloo: one broadcast by torch.distributed.
- zeromq: a chain of PUSH and PULL sockets, each frame forwarded without a copy before it is copied into place; over ipc
  and over tcp, the faster one counts.
- redis: a server with a Unix socket and nothing saved to disk; the source sets chunk by chunk, the receivers get each as
  soon as it is there.
- files: a safetensors file, written to `folder` and loaded by each receiver.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import queue
import shutil
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Semaphore
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from laminar.config.machine import has_module
from laminar.errors import UserError

MIB = 1 << 20
CHUNK_BYTES = MIB  # for zeromq and redis: faster than 4, 16 and 64 MiB, for it stays in the caches
ZEROMQ_AHEAD = 4  # chunks on the way over one hop
LIMIT_S = 300.0  # for one length
START_LIMIT_S = 10.0

Words = NDArray[np.uint64]
Transfer = Callable[[], Words]
"""This process's part in one round; a receiver's returns the memory that holds the bytes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Place:
    """Where a process stands in the job; the source is 0."""

    index: int
    length: int  # processes, the source included
    folder: Path  # for sockets and files
    ready: tuple[Semaphore, ...]  # of each receiver: released by the source when there is something to fetch

    def tell_receivers(self) -> None:
        """Release all semaphores once."""
        for semaphore in self.ready:
            semaphore.release()

    def wait_for_source(self) -> None:
        """Block until the source has told once more. Raises TimeoutError."""
        if not self.ready[self.index - 1].acquire(timeout=LIMIT_S):
            raise TimeoutError(f"receiver {self.index}: nothing from the source within {LIMIT_S:g} s")


def absent(name: str) -> str:
    """Empty if this peer can be measured here, else what is missing and how to install it."""
    if name not in PEERS:
        raise ValueError(f"peer {name!r}; expected one of {', '.join(PEERS)}")
    if name == "gloo" and not has_module("torch"):
        return "gloo needs torch: pip install --no-deps -r requirements/cpu.lock"
    if name == "redis" and shutil.which("redis-server") is None:
        return "redis needs redis-server on PATH: apt-get install redis-server"
    if name == "files" and not has_module("safetensors"):
        return "files needs safetensors: pip install --no-deps -r requirements/cpu.lock"
    return ""


def measure_peer(
    name: str, lengths: Sequence[int], mib: int, repeats: int, folder: Path | None = None
) -> dict[int, float]:
    """Seconds from the order to the last receiver's last byte, median of `repeats` after one round that is not counted.

    Args:
        name: a key of PEERS.
        lengths: processes, the source included; at least 2 each.
        mib: size of what travels.
        repeats: rounds to measure.
        folder: for files, on the disk that they are to be measured on; a temporary folder by default.

    Raises:
        UserError: something is missing here (see `absent`).
        RuntimeError: one of the processes failed.
    """
    if reason := absent(name):
        raise UserError(reason)
    with contextlib.ExitStack() as ends:
        if folder is None:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="laminar-peers-")))
        if name == "redis":
            ends.enter_context(_redis_server(folder))
        return {
            length: min(_measure(name, way, length, mib, repeats, folder) for way in PEERS[name]) for length in lengths
        }


def measure_copy(mib: int, repeats: int) -> float:
    """Seconds of a copy of the same size within one process, median; source and target are in place beforehand."""
    source, target = np.ones(mib * MIB, np.uint8), np.ones(mib * MIB, np.uint8)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return median(times)


# ---------------------------------------------------------------- the job

Way = Callable[[Place, Words], Transfer]  # connects; the words are the source's bytes, or a receiver's memory for them


def _measure(name: str, way: Way, length: int, mib: int, repeats: int, folder: Path) -> float:
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(length)
    answers: Queue[tuple[int, float, float] | str] = context.Queue()
    ready = tuple(context.Semaphore(0) for _ in range(length - 1))
    processes: list[SpawnProcess] = []
    with tempfile.TemporaryDirectory(prefix=f"{length}-", dir=folder) as own:
        for index in range(length):
            place = Place(index=index, length=length, folder=Path(own), ready=ready)
            arguments = (name, way, place, mib, repeats, meeting, answers)
            processes.append(context.Process(target=_take_part, args=arguments, name=f"{name}-{index}", daemon=True))
        try:
            for process in processes:
                process.start()
            said = [_next(answers, processes) for _ in range(length * (repeats + 1))]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    rounds: list[list[tuple[float, float]]] = [[] for _ in range(repeats + 1)]
    for round_, arrived, ended in said:
        rounds[round_].append((arrived, ended))
    # The barrier opens when the last one arrives. The source has no end: -inf.
    return median(max(e for _, e in times) - max(a for a, _ in times) for times in rounds[1:])


def _next(answers: Queue[tuple[int, float, float] | str], processes: list[SpawnProcess]) -> tuple[int, float, float]:
    """The next answer. Raises RuntimeError when there will be none."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        dead = [
            process for process in processes if process.exitcode
        ]  # looked at first: its last words may be on the way
        try:
            answer = answers.get(timeout=1.0)
        except queue.Empty:
            if dead:
                raise RuntimeError(f"{dead[0].name} ended with {dead[0].exitcode}") from None
            if time.monotonic() > deadline:
                names = ", ".join(process.name for process in processes)
                raise RuntimeError(f"no word of {names} within {LIMIT_S:g} s") from None
            continue
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def _take_part(
    name: str,
    way: Way,
    place: Place,
    mib: int,
    repeats: int,
    meeting: Barrier,
    answers: Queue[tuple[int, float, float] | str],
) -> None:
    """One process of the job."""
    try:
        words: Words = np.zeros(mib * MIB // 8, np.uint64)
        words.fill(0)  # has every page in place
        transfer = way(place, words)
        for round_ in range(repeats + 1):
            if place.index == 0:
                for start, block in _expected(round_, len(words)):
                    words[start : start + len(block)] = block
            meeting.wait(LIMIT_S)  # the source's bytes are made up: nobody computes any more
            arrived = time.monotonic()
            meeting.wait(LIMIT_S)
            held = transfer()
            ended = time.monotonic() if place.index else float("-inf")
            if any((held[start : start + len(block)] != block).any() for start, block in _expected(round_, len(words))):
                raise RuntimeError(f"{name}-{place.index} does not hold the bytes of round {round_}")
            answers.put((round_, arrived, ended))
            meeting.wait(LIMIT_S)  # what still is on its way is not written over, and nobody leaves whom another needs
    except Exception:  # told to the parent, which ends all
        answers.put(f"{name}-{place.index}: {traceback.format_exc()}")
        raise


def _expected(round_: int, words: int) -> Iterator[tuple[int, Words]]:
    """The bytes of a round, block by block: word i is i + round."""
    for start in range(0, words, MIB):
        yield start, np.arange(start + round_, min(start + MIB, words) + round_, dtype=np.uint64)


# ---------------------------------------------------------------- the ways


def _gloo(place: Place, words: Words) -> Transfer:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = f"file://{place.folder / 'gloo'}"
    distributed.init_process_group("gloo", init_method=store, rank=place.index, world_size=place.length)
    tensor = torch.from_numpy(words.view(np.uint8))

    def transfer() -> Words:
        distributed.broadcast(tensor, 0)
        return words

    return transfer


def _zeromq(place: Place, words: Words, *, over: str) -> Transfer:
    import zmq

    context = zmq.Context()
    data = words.view(np.uint8)
    upstream = downstream = None
    if place.index:
        upstream = context.socket(zmq.PULL)
        upstream.setsockopt(zmq.RCVHWM, ZEROMQ_AHEAD)
        _address_file(place, place.index).write_text(_bind(upstream, place, over), encoding="utf-8")
        place.ready[place.index - 1].release()
    if place.index + 1 < place.length:
        if not place.ready[place.index].acquire(timeout=LIMIT_S):
            raise TimeoutError(f"no address of receiver {place.index + 1} within {LIMIT_S:g} s")
        downstream = context.socket(zmq.PUSH)
        downstream.setsockopt(zmq.SNDHWM, ZEROMQ_AHEAD)
        downstream.connect(_address_file(place, place.index + 1).read_text(encoding="utf-8"))

    def transfer() -> Words:
        for start in range(0, data.nbytes, CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            if upstream is None:
                assert downstream is not None
                downstream.send(chunk.data, copy=False)
                continue
            frame = upstream.recv(copy=False)
            if downstream is not None:
                downstream.send(frame, copy=False)
            np.copyto(chunk, np.frombuffer(frame.buffer, np.uint8))
        return words

    return transfer


def _address_file(place: Place, index: int) -> Path:
    return place.folder / f"address-{index}"


def _bind(upstream: object, place: Place, over: str) -> str:
    """Bind a ZeroMQ socket and return its address."""
    import zmq

    assert isinstance(upstream, zmq.Socket)
    upstream.bind(f"ipc://{place.folder / f'hop-{place.index}'}" if over == "ipc" else "tcp://127.0.0.1:*")
    return upstream.getsockopt_string(zmq.LAST_ENDPOINT)


def _redis(place: Place, words: Words) -> Transfer:
    """A client of our own, which sends from the buffer and receives into it: nothing is faster in Python."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(LIMIT_S)
    connection.connect(str(place.folder.parent / "redis.sock"))
    data = words.view(np.uint8).data

    def answer() -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            line += connection.recv(1)
        if line.startswith(b"-"):
            raise RuntimeError(f"redis: {line.decode().strip()}")
        return line

    def transfer() -> Words:
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            key = b"%d" % start
            if place.index == 0:
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(chunk))
                for part in (head, chunk, b"\r\n"):
                    connection.sendall(part)
                answer()
                place.tell_receivers()
            else:
                place.wait_for_source()
                connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                if answer() != b"$%d\r\n" % len(chunk):
                    raise RuntimeError(f"redis: another size than {len(chunk)} at {start}")
                while chunk:
                    chunk = chunk[connection.recv_into(chunk) :]
                answer()  # the end of the line
        return words

    return transfer


@contextlib.contextmanager
def _redis_server(folder: Path) -> Iterator[None]:
    path = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    log = folder / "redis.log"
    with log.open("wb") as file:
        server = subprocess.Popen([*command, "--dir", str(folder)], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not path.is_socket():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start: {log.read_text(encoding='utf-8', errors='replace')}")
            time.sleep(0.01)
        yield
    finally:
        server.kill()
        server.wait()
        for left in (path, log):
            left.unlink(missing_ok=True)


def _files(place: Place, words: Words) -> Transfer:
    from safetensors.numpy import load_file, save_file

    path = place.folder / "weights.safetensors"

    def transfer() -> Words:
        if place.index == 0:
            save_file({"w": words}, path)
            place.tell_receivers()
            return words
        place.wait_for_source()
        held: Words = load_file(path)["w"]
        return held

    return transfer


PEERS: dict[str, tuple[Way, ...]] = {  # of several ways the fastest counts
    "gloo": (_gloo,),
    "zeromq": (functools.partial(_zeromq, over="ipc"), functools.partial(_zeromq, over="tcp")),
    "redis": (_redis,),
    "files": (_files,),
}
