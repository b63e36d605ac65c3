"""Processes of a run: watched while it lives, gone when it ends, however it ends."""

import asyncio
import os
import signal
import sys
import textwrap

import pytest

from laminar.launch.commands import Command
from laminar.launch.local import LocalLauncher, processes_of_run
from laminar.protocol.connection import RUN_ID_VARIABLE, process_started

RUN_ID = f"test-{os.getpid()}"


def python(name: str, code: str) -> Command:
    return Command(
        name=name,
        argv=(sys.executable, "-u", "-c", textwrap.dedent(code)),
        environment={RUN_ID_VARIABLE: RUN_ID},
        workers=(),
    )


@pytest.fixture
def log_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


async def gone(pid: int) -> None:
    """Wait until a process has ended (also one that is not our child)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(fd, lambda: ended.done() or ended.set_result(None))
    try:
        await asyncio.wait_for(ended, 15)
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


async def first_line(log) -> str:
    """First complete line of a log, as soon as it is there (inotify is not in the standard library: tail follows)."""
    tail = await asyncio.create_subprocess_exec(
        "tail", "-F", "-n", "+1", str(log), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        return (await asyncio.wait_for(tail.stdout.readline(), 20)).decode()
    finally:
        tail.kill()
        await tail.wait()


async def test_an_exit_is_reported_with_the_end_of_the_log(log_dir):
    exits = asyncio.Queue()
    launcher = LocalLauncher(log_dir, RUN_ID, lambda command, status: exits.put_nowait((command, status)))
    await launcher.start(python("broken", "print('what went wrong'); raise SystemExit(7)"))
    command, status = await asyncio.wait_for(exits.get(), 20)
    assert (command.name, status) == ("broken", 7)
    assert "what went wrong" in launcher.log_tail([command.name, *command.workers])
    assert await launcher.stop(5) == []


async def test_what_the_exit_handler_raises_becomes_the_launchers_failure(log_dir):
    def on_exit(command, status):
        raise ValueError(f"{command.name} ended")

    launcher = LocalLauncher(log_dir, RUN_ID, on_exit)
    await launcher.start(python("broken", ""))
    with pytest.raises(ValueError, match="broken ended"):
        await asyncio.wait_for(launcher.failure, 20)
    await launcher.stop(5)


async def test_stop_ends_stubborn_processes_and_their_children(log_dir):
    launcher = LocalLauncher(log_dir, RUN_ID, lambda command, status: None)
    stubborn = """
        import os, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        print(child.pid, flush=True)
        signal.pause()
    """
    pid = await launcher.start(python("stubborn", stubborn))
    child = int(await first_line(log_dir / "logs" / "stubborn.log"))
    assert set(processes_of_run(RUN_ID)) >= {pid, child}
    assert await launcher.stop(0.3) == ["stubborn"]
    await gone(pid)
    await gone(child)
    assert processes_of_run(RUN_ID) == []


async def test_a_child_dies_when_its_parent_is_killed():
    """The parent is killed with SIGKILL: it can clean nothing up itself."""
    code = """
        import os, signal, subprocess, sys
        child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
        subprocess.Popen([sys.executable, "-m", "laminar.launch.child", str(os.getpid()), "15", sys.executable, "-c", child])
        signal.pause()
    """
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(code), stdout=asyncio.subprocess.PIPE
    )
    child = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    assert process_started(child) is not None
    parent.send_signal(signal.SIGKILL)
    await asyncio.wait_for(parent.wait(), 10)
    await gone(child)


async def test_a_command_that_cannot_be_run_says_so(log_dir):
    exits = asyncio.Queue()
    launcher = LocalLauncher(log_dir, RUN_ID, lambda command, status: exits.put_nowait((command, status)))
    await launcher.start(Command(name="none", argv=("/no/such/program",), environment={}, workers=()))
    command, status = await asyncio.wait_for(exits.get(), 20)
    assert status == 127
    assert "cannot run /no/such/program: No such file or directory" in launcher.log_tail(
        [command.name, *command.workers]
    )
    await launcher.stop(5)
