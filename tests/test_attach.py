from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from laminar import attach as attach_module
from laminar.attach import ReplConnection, RunEnded, attach, completions
from laminar.controller import repl_server
from laminar.controller.repl_server import ReplServer
from laminar.errors import UserError
from tests.run_parts import HandView

ROOT = Path(__file__).parents[1]


@pytest.fixture
async def run(tmp_path):
    """A run with a REPL; `end` ends it."""

    class Run:
        def __init__(self):
            self.view = HandView(tmp_path)
            server = ReplServer(self.view)
            self.task = asyncio.create_task(server.serve_forever())
            self.listening = server.listening.wait()

        async def end(self):
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    run = Run()
    async with asyncio.timeout(10):
        await run.listening
    yield run
    await run.end()


async def in_thread(function, *arguments):
    """A client as it runs in reality: in a loop of its own."""
    async with asyncio.timeout(30):
        return await asyncio.to_thread(function, *arguments)


def test_both_sides_name_the_same_files():
    assert attach_module.SOCKET_FILE == repl_server.SOCKET_FILE
    assert attach_module.PATH_FILE == repl_server.PATH_FILE


async def test_a_command_from_the_command_line(run, capsys):
    assert await in_thread(attach, run.view.run_dir, "status") == 0
    assert "policy version 3" in capsys.readouterr().out


async def test_a_refused_command_fails(run, capsys):
    assert await in_thread(attach, run.view.run_dir, "statsu") == 1
    assert "did you mean status?" in capsys.readouterr().err


async def test_commands_from_standard_input(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("nonsense\n\npause training\n"))
    assert await in_thread(attach, run.view.run_dir) == 1  # for the first line; the others are run all the same
    assert "paused training" in capsys.readouterr().out
    assert not run.view.control.training_allowed.is_set()


def test_no_run_is_live(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        attach(tmp_path / "none", "status")
    with pytest.raises(UserError, match="no run is live there"):
        attach(tmp_path, "status")


async def test_a_socket_that_a_dead_run_left(run):
    kept = run.view.run_dir / "kept"
    (run.view.run_dir / "repl.sock").rename(kept)
    await run.end()
    kept.rename(run.view.run_dir / "repl.sock")
    with pytest.raises(UserError, match="no run is live there"):
        await in_thread(attach, run.view.run_dir, "status")


async def test_a_run_directory_with_a_long_path(tmp_path, capsys):
    run_dir = tmp_path / ("long" * 30)
    run_dir.mkdir()
    server = ReplServer(HandView(run_dir))
    task = asyncio.create_task(server.serve_forever())
    await server.listening.wait()
    assert await in_thread(attach, run_dir, "status") == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_run_ends_meanwhile(run, capsys):
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Stdin:
        """Standard input that asks once, then again after the run's end."""

        def isatty(self):
            return False

        def __iter__(self):
            yield "status\n"
            loop.call_soon_threadsafe(asked.set)
            ended.result(timeout=20)
            yield "status\n"

    async def end_when_asked():
        await asked.wait()
        await run.end()

    ended = asyncio.run_coroutine_threadsafe(end_when_asked(), loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", Stdin())
        assert await in_thread(attach, run.view.run_dir) == 0
    assert capsys.readouterr().out.endswith(f"the run in {run.view.run_dir} has ended\n")


async def test_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_the_next(run):
    connection = await ReplConnection.connect(run.view.run_dir)
    given_up = asyncio.create_task(connection.ask("help"))
    while not connection._owed:
        await asyncio.wait([given_up], timeout=0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert "policy version" in (await connection.ask("status")).text
    await connection.close()


async def test_completions(run):
    connection = await ReplConnection.connect(run.view.run_dir)
    names = ["status", "stop", "trajectory"]
    assert await completions(connection, names, "st") == ["status", "stop"]
    assert await completions(connection, names, "pause t") == ["training"]
    assert await completions(connection, names, "trajectory 5.") == ["5.1", "5.0"]
    assert await completions(connection, names, "status x") == []
    await run.end()
    assert await completions(connection, names, "trajectory 5.") == []
    with pytest.raises(RunEnded):
        await connection.ask("status")
    await connection.close()


@contextlib.contextmanager
def typing(monkeypatch, state):
    """A terminal that the test types on."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


async def test_prompt_answers_until_ctrl_d_and_keeps_history(run, tmp_path, capsys, monkeypatch):
    connection = await ReplConnection.connect(run.view.run_dir)
    with typing(monkeypatch, tmp_path / "state") as keys:
        keys.send_text("stat\x03relays\r\x04")  # Ctrl-C drops the line, Ctrl-D leaves
        async with asyncio.timeout(20):
            assert await attach_module._prompt(connection, run.view.run_dir) == 0
    assert "published version 3" in capsys.readouterr().out
    assert not run.view.control.stop_requested.is_set()
    assert "+relays" in (tmp_path / "state" / "laminar" / "repl_history").read_text()
    await connection.close()


async def test_prompt_ends_with_the_run_while_nobody_types(run, tmp_path, capsys, monkeypatch):
    connection = await ReplConnection.connect(run.view.run_dir)
    prompted, next_line = asyncio.Event(), attach_module._next_line

    async def told_next_line(*arguments):
        prompted.set()
        return await next_line(*arguments)

    monkeypatch.setattr(attach_module, "_next_line", told_next_line)
    with typing(monkeypatch, tmp_path / "state"):
        prompt = asyncio.create_task(attach_module._prompt(connection, run.view.run_dir))
        async with asyncio.timeout(20):
            await prompted.wait()
        await run.end()
        async with asyncio.timeout(20):
            with pytest.raises(RunEnded):
                await prompt
    await connection.close()


def test_imports_stay_light():
    """The client is ready to ask before prompt_toolkit or anything of the controller's is imported."""
    script = (
        "import sys, laminar.attach\n"
        "heavy = {'torch', 'prompt_toolkit', 'zmq', 'laminar.controller', 'transformers'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr.decode()
