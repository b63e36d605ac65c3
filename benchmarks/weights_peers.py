"""Other ways to bring the same bytes to the same processes, each in its best form, to hold the relays' chain against.

The job (peer_job.py): one process holds so many MiB in its memory, and `length - 1` others on this machine are to hold them in theirs.
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
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from peer_job import LIMIT_S, MIB, Place, Transfer, Way, Words, measure

from laminar.config.machine import has_module
from laminar.errors import UserError

CHUNK_BYTES = MIB  # for zeromq and redis: faster than 4, 16 and 64 MiB, for it stays in the caches
ZEROMQ_AHEAD = 4  # chunks on the way over one hop
START_LIMIT_S = 10.0


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
            length: min(measure(name, way, length, mib, repeats, folder) for way in PEERS[name]) for length in lengths
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
