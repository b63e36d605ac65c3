"""A real `laminar train` for the tests: its lines as they come, its processes, what it leaves behind."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import yaml

from laminar.protocol.connection import RUN_ID_VARIABLE

SHARED_MEMORY = Path("/dev/shm")


def write_config(folder, model, **overrides):
    """An experiment on `model` that reverses strings of digits, on the torch engine; dotted keys by `__`."""
    data = folder / "data.jsonl"
    words = [str(7**k)[:5] for k in range(3, 203)]
    data.write_text("".join(json.dumps({"prompt": word, "answer": word[::-1]}) + "\n" for word in words))
    tree = {
        "name": f"test-{os.getpid()}-{folder.name}",
        "model": {"path": str(model)},
        "data": {"source": {"type": "jsonl", "path": str(data)}, "max_prompt_tokens": 16, "epochs": 1000},
        "reward": {"function": "exact"},
        "rollout": {"engine": "torch", "max_running": 16, "max_response_tokens": 12, "kv_cache_mib": 16},
        "trainer": {"steps": 3, "groups_per_step": 4, "group_size": 2, "optimizer": {"learning_rate": 1e-4}},
        "controller": {"start_timeout_s": 240},
    }
    for key, value in overrides.items():
        *path, last = key.split("__")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path, tree["name"]


class LiveRun:
    """`laminar train` as a child process."""

    def __init__(self, config, run_dir, name, *options):
        self.run_dir = run_dir
        self.name = name
        self.output = ""
        self._command = [sys.executable, "-m", "laminar", "train", str(config), "--run-dir", str(run_dir), *options]

    async def start(self, **environment):
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{os.getcwd()}{os.pathsep}{Path(__file__).parent}", **environment},
        )
        return self

    async def attach(self, line):
        """What `laminar attach RUN_DIR -c LINE` answers, as text; the command must be taken."""
        command = (sys.executable, "-m", "laminar", "attach", str(self.run_dir), "-c", line)
        attach = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        text, _ = await asyncio.wait_for(attach.communicate(), 60)
        assert attach.returncode == 0, line
        return text.decode()

    async def line(self, pattern, limit_s=240):
        """Read on until a line matches."""
        async with asyncio.timeout(limit_s):
            while line := (await self.process.stdout.readline()).decode():
                self.output += line
                if re.search(pattern, line):
                    return line
        raise AssertionError(f"no line matched {pattern!r}:\n{self.output}")

    async def end(self, limit_s=240):
        """Exit status."""
        async with asyncio.timeout(limit_s):
            self.output += (await self.process.stdout.read()).decode()
            return await self.process.wait()

    async def kill_what_is_left(self):
        """For the end of a test that failed."""
        for pid in [self.process.pid, *self.processes()]:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        for name in self.shared_memory():
            shutil.rmtree(SHARED_MEMORY / name)

    def processes(self):
        """Processes whose environment names this run, except the controller."""
        marker = f"{RUN_ID_VARIABLE}={self.name}-".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environ = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if marker in environ:
                    found.append(int(entry.name))
        return found

    def process_of(self, worker):
        """Process number of a worker that has said that it is ready: its newest."""
        return int(re.findall(rf"{worker} is ready \(.*?process (\d+)", self.output)[-1])

    async def all_end(self, limit_s):
        """Wait until the run has no process left, those included that are started meanwhile."""
        async with asyncio.timeout(limit_s):
            while pids := self.processes():
                await asyncio.gather(*(_end_of(pid) for pid in pids))

    def listening(self):
        """TCP sockets on which its processes listen, the controller's included: (port, inode)."""
        inodes = set()
        for pid in [self.process.pid, *self.processes()]:
            with contextlib.suppress(OSError):
                links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
                inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
        return {(port, inode) for port, inode in all_listening() if inode in inodes}

    def shared_memory(self):
        """What this run has in shared memory."""
        return [path.name for path in SHARED_MEMORY.iterdir() if self.name in path.name]

    def lines(self, name):
        """A JSON Lines file of the run directory."""
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]


def all_listening():
    """TCP sockets on which anybody on this machine listens: (port, inode). Another's may have a port that was used before."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if row[3] == "0A"}


def pid_of(line):
    """The process that a line of the output names."""
    return int(re.search(r"process (\d+)", line)[1])


def all_trained_once(run):
    """Every step has trained its 4 groups of 2, each trajectory once and of one version; returns those trajectories' lines."""
    steps = len(run.lines("metrics.jsonl"))
    trained = [line for line in run.lines("trajectories.jsonl") if line["step"] is not None]
    times = Counter(line["id"] for line in trained)
    assert len(times) == len(trained) == steps * 4 * 2, f"{steps} steps, {len(trained)} trained, {times.most_common(3)}"
    mixed = [line["id"] for line in trained if len(line["versions"]) != 1]
    assert not mixed, f"of several versions: {mixed}"
    return trained


def nothing_left(run):
    """After its end there is no process, nothing in shared memory, and nothing to connect to."""
    doors = [name for name in ("connection.json", "repl.sock") if (run.run_dir / name).exists()]
    left = [*run.processes(), *run.shared_memory(), *doors]
    assert left == [], f"left of the run: {left}"


async def _end_of(pid):
    """Wait until a process has ended that is not our child."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = loop.create_future()
    loop.add_reader(fd, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)
