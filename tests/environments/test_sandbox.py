"""What code in the sandbox can do, and all the ways out of it that we know, with and without namespaces."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.environments.sandbox import SandboxLimits, run_python
from laminar.environments.sandboxing.landlock import landlock_version

PREFIX = os.path.realpath(sys.prefix)


@pytest.fixture(params=["namespaces", "landlock"])
def limits(request):
    if request.param == "landlock" and not landlock_version():
        pytest.skip("this kernel has no Landlock")
    return SandboxLimits(time_s=30.0, use_namespaces=request.param == "namespaces")


async def run(code, limits, **more):
    return await run_python(textwrap.dedent(code), limits=limits, **more)


def is_running(marker):
    """Whether a process has this text in its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    return True
            except OSError:
                continue
    return False


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_few(number, expected, limits):
    """Without namespaces the kernel counts the user's other processes too, which come and go."""
    assert number == expected if limits.use_namespaces else number < 100


async def refused(code, limits, error):
    result = await run(code, limits)
    assert error in result.stderr and result.exit_code == 1, result


# ---------------------------------------------------------------- what it is for


async def test_it_returns_what_was_printed_and_how_it_ended(limits):
    result = await run("import sys\nprint(int(input()) * 7)\nprint('so', file=sys.stderr)", limits, stdin="6\n")
    assert (result.stdout, result.stderr, result.exit_code, result.ended_by) == ("42\n", "so\n", 0, "exit")
    assert result.ok


async def test_the_isolation_that_was_asked_for_is_in_force(limits):
    result = await run("pass", limits)
    assert result.isolation == ("namespaces" if limits.use_namespaces else "landlock")


async def test_an_error_is_shown_with_its_line(limits):
    result = await run("x = 0\nprint(1 / x)", limits)
    assert "line 2" in result.stderr and "ZeroDivisionError" in result.stderr
    assert not result.ok


async def test_exit_codes_and_signals_are_told(limits):
    assert (await run("raise SystemExit(3)", limits)).exit_code == 3
    assert (await run("import os\nos.abort()", limits)).exit_code in (128 + signal.SIGABRT, 128 + signal.SIGSEGV)


async def test_installed_packages_can_be_used(limits):
    """Those of this environment, not of the Python that it was made with."""
    code = "import numpy, sympy, sys\nprint(numpy.arange(3).sum(), sympy.Rational(2, 4), sys.prefix)"
    assert (await run(code, limits)).stdout == f"3 1/2 {PREFIX}\n"


async def test_it_may_write_into_its_scratch_folder_and_start_processes(limits):
    code = """
    import subprocess, tempfile
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("seen")
        file.flush()
        print(open(file.name).read(), subprocess.run(["echo", "too"], capture_output=True, text=True).stdout)
    """
    assert (await run(code, limits)).stdout == "seen too\n\n"


async def test_large_input_and_output_pass(limits):
    text = "x" * 500_000
    result = await run("print(len(input()))\nprint('y' * 60_000)", limits, stdin=text)
    assert result.stdout == "500000\n" + "y" * 60_000 + "\n"


async def test_many_run_at_once(limits):
    results = await asyncio.gather(*(run(f"print({number})", limits) for number in range(6)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(6)]


def test_it_runs_in_a_thread_with_a_loop_of_its_own(limits):
    results = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(run("print(1)", limits))))
    thread.start()
    thread.join()
    assert results[0].stdout == "1\n"


# ---------------------------------------------------------------- limits


async def test_an_endless_loop_is_ended(limits):
    result = await run("print('before')\nwhile True: pass", replace(limits, time_s=0.5))
    assert (result.ended_by, result.stdout) == ("time", "before\n")


async def test_it_cannot_ignore_being_ended(limits):
    code = """
    import signal, time
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True: time.sleep(1)
    """
    assert (await run(code, replace(limits, time_s=0.5))).ended_by == "time"


async def test_a_fork_bomb_stays_small(limits):
    code = """
    import os, time
    children = 0
    try:
        while True:
            if os.fork() == 0:
                time.sleep(60)
            children += 1
    except OSError as error:
        print(children, type(error).__name__)
    """
    result = await run(code, replace(limits, processes=12))
    children, error = result.stdout.split()
    assert error == "BlockingIOError"
    assert_few(int(children), 11, limits)


async def test_a_fork_bomb_that_goes_on_is_ended_and_nothing_is_left(limits):
    marker = f"bomb-{uuid.uuid4().hex}"
    code = f"""
    import os, subprocess
    subprocess.Popen(["python3", "-c", "import time; time.sleep(600)", "{marker}"])
    while True:
        try:
            os.fork()
        except OSError:
            pass
    """
    assert (await run(code, replace(limits, time_s=0.7))).ended_by == "time"
    assert not is_running(marker)


async def test_threads_are_limited_too(limits):
    code = """
    import threading
    event, started = threading.Event(), 1
    try:
        while True:
            threading.Thread(target=event.wait, daemon=True).start()
            started += 1
    except RuntimeError:
        print(started)
    """
    assert_few(int((await run(code, replace(limits, processes=9))).stdout), 9, limits)


async def test_one_process_cannot_take_more_memory_than_allowed(limits):
    await refused("x = bytearray(400 << 20)", replace(limits, memory_bytes=200 << 20), "MemoryError")


async def test_many_processes_cannot_take_more_memory_than_allowed_together(limits):
    code = """
    import os, time
    for _ in range(10):
        if os.fork() == 0:
            x = b"x" * (50 << 20)
            time.sleep(60)
    time.sleep(60)
    """
    assert (await run(code, replace(limits, memory_bytes=200 << 20))).ended_by == "memory"


async def test_a_gigabyte_of_output_is_cut_off(limits):
    result = await run("while True: print('x' * 100_000)", replace(limits, output_bytes=1000))
    assert (result.ended_by, len(result.stdout)) == ("output", 1000)


async def test_a_large_file_is_refused(limits):
    await refused("open('big', 'wb').write(b'x' * (2 << 20))", replace(limits, scratch_bytes=1 << 20), "OSError")


async def test_many_files_cannot_fill_the_machine(limits):
    if not limits.use_namespaces:
        pytest.skip("without namespaces only the size of each file is limited")
    code = "for n in range(100): open(str(n), 'wb').write(b'x' * (100 << 10))"
    await refused(code, replace(limits, scratch_bytes=1 << 20), "No space left on device")


# ---------------------------------------------------------------- ways out


async def test_it_cannot_read_the_run_directory(limits, tmp_path):
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    (run_directory / "keys").write_text("secret")
    for path in (run_directory, tmp_path, *tmp_path.parents):  # so that permissions alone would let it pass
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o755)
    result = await run(f"print(open('{run_directory}/keys').read())", limits)
    assert "secret" not in result.stdout
    assert "FileNotFoundError" in result.stderr or "PermissionError" in result.stderr


async def test_it_cannot_read_what_is_not_its_own(limits):
    paths = [
        "/home",
        "/etc/passwd",
        "/etc/shadow",
        "/sys/kernel",
        "/var",
        "/dev/mem",
        "/dev/shm/..",
        "/proc/1/fd",
        __file__,
    ]
    code = f"""
    import os
    for path in {paths}:
        try:
            print(path, os.listdir(path) if os.path.isdir(path) else open(path).read())
        except OSError:
            pass
    """
    result = await run(code, limits)
    # In namespaces /dev/shm is the scratch folder, and its parent the new root.
    seen = [line for line in result.stdout.splitlines() if not line.startswith("/dev/shm/..")]
    assert seen == [] and "laminar" not in result.stdout


async def test_it_cannot_write_outside_its_scratch_folder(limits):
    paths = ["/outside", "/usr/outside", "/etc/outside", "/proc/sys/kernel/hostname", f"{sys.prefix}/outside"]
    code = f"""
    for path in {paths}:
        try:
            open(path, "w").write("x")
            print(path)
        except OSError as error:
            pass
    """
    assert (await run(code, limits)).stdout == ""


async def test_it_cannot_open_a_socket(limits):
    code = """
    import socket
    for family in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
        try:
            socket.socket(getattr(socket, family), socket.SOCK_DGRAM)
            print(family)
        except PermissionError:
            pass
    """
    assert (await run(code, limits)).stdout == ""


async def test_a_server_of_this_machine_is_out_of_reach(limits):
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        await refused(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", limits, "PermissionError")


async def test_a_daemon_does_not_survive(limits):
    marker = f"daemon-{uuid.uuid4().hex}"
    code = f"""
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("python3", ["python3", "-c", "print('up', flush=True)\\nimport time; time.sleep(600)", "{marker}"])
        os._exit(0)
    os.wait()
    time.sleep(0.5)
    """
    result = await run(code, limits)
    assert (result.ended_by, result.stdout) == ("exit", "up\n")
    assert not is_running(marker)


async def test_it_cannot_kill_its_parent_or_anybody_else(limits):
    victim = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        code = f"""
        import os, signal
        for pid in (os.getppid(), 1, {victim.pid}, {os.getpid()}, -1):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        print("alive")
        """
        result = await run(code, limits)
        assert (result.ended_by, result.stdout) == ("exit", "alive\n")
        assert victim.returncode is None
    finally:
        victim.kill()
        await victim.wait()


async def test_it_cannot_look_into_other_processes(limits):
    code = f"""
    import os
    for path in ("/proc/{os.getpid()}/environ", "/proc/{os.getppid()}/cmdline", "/proc/1/mem"):
        try:
            print(open(path, "rb").read(100))
        except OSError:
            print("refused")
    """
    assert (await run(code, limits)).stdout == "refused\n" * 3


async def test_nothing_is_inherited(limits, monkeypatch):
    monkeypatch.setenv("LAMINAR_SECRET", "hush")
    code = """
    import os
    print("LAMINAR_SECRET" in os.environ)
    for number in range(3, 64):
        try:
            print(number, os.fstat(number))
        except OSError:
            pass
    """
    place = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(place, True)
    try:
        assert (await run(code, limits)).stdout == "False\n"
    finally:
        os.close(place)


async def test_calls_that_lead_out_are_refused(limits):
    code = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.mount(None, b"/scratch", None, 0, None), ctypes.get_errno())
    print(libc.unshare(0x10000000), ctypes.get_errno())
    print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno())
    print(libc.chroot(b"."), ctypes.get_errno())
    print(libc.memfd_create(b"x", 0), ctypes.get_errno())
    """
    assert (await run(code, limits)).stdout == "-1 1\n" * 5


async def test_it_has_no_rights(limits):
    code = """
    import os
    for attempt in (lambda: os.setuid(0), lambda: os.setgroups([0]), lambda: os.chown("main.py", 0, 0), lambda: os.nice(-5)):
        try:
            attempt()
            print("allowed")
        except OSError:
            print("refused")
    print(os.getuid() == 0)
    """
    assert (await run(code, limits)).stdout == "refused\n" * 4 + "False\n"


# ---------------------------------------------------------------- its end


async def test_when_it_is_cancelled_nothing_is_left(limits):
    marker = f"cancelled-{uuid.uuid4().hex}"
    code = f"import os\nos.execvp('python3', ['python3', '-c', 'import time; time.sleep(600)', '{marker}'])"
    task = asyncio.create_task(run(code, limits))
    await asyncio.to_thread(wait_until, lambda: is_running(f"time.sleep(600)\0{marker}"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(marker)


def test_when_the_worker_is_killed_nothing_is_left(limits):
    marker = f"orphan-{uuid.uuid4().hex}"
    code = f"import os\nos.execvp('python3', ['python3', '-c', 'import time; time.sleep(600)', '{marker}'])"
    worker = f"""
import asyncio
from laminar.environments.sandbox import SandboxLimits, run_python
asyncio.run(run_python({code!r}, limits=SandboxLimits(time_s=600, use_namespaces={limits.use_namespaces})))
"""
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", worker], env={**os.environ, "PYTHONPATH": str(root)})
    wait_until(lambda: is_running(f"import time; time.sleep(600)\0{marker}"))
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(marker))


async def test_no_folder_is_left(limits, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await run("import os\nopen('file', 'w').write('x')\nos.mkdir('folder')\nos.chmod('.', 0)", limits)
    await run("open('file', 'w').write('x')\nwhile True: pass", replace(limits, time_s=0.3))
    assert not os.listdir(tmp_path)
