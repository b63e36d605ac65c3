"""What all workers share: joining, failing by name, and never outliving the controller."""

import asyncio
import os
import signal
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.protocol import messages
from laminar.protocol.connection import Connection, CurveKeys, process_started
from laminar.protocol.zeromq import ZmqControllerChannel
from tests.controller.fake_workers import experiment

WORKER = str(Path(__file__).with_name("obedient_worker.py"))
WELCOME = messages.Welcome(
    run_id="r", run_dir="", config=experiment().model_dump_json(), store="", hop_key=b"", version_bytes=0
)


class Host:
    """A controller's end without a controller, and a worker process that dials it."""

    def __init__(self, tmp_path):
        keys, worker_keys = CurveKeys.create(), CurveKeys.create()
        self.channel = ZmqControllerChannel("127.0.0.1", 0, controller_keys=keys, worker_public_key=worker_keys.public)
        self.run_dir = tmp_path
        self.connection = Connection.to_this_process(self.channel.address, "r", controller=keys, worker=worker_keys)

    async def start(self, **environment):
        self.connection.write(self.run_dir)
        command = [sys.executable, WORKER, "--connect", str(self.run_dir), "--index", "0"]
        self.process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})

    async def receive(self, kind):
        async with asyncio.timeout(30):
            while True:
                self.peer, message = await self.channel.receive()
                if isinstance(message, kind):
                    return message

    async def admit(self, welcome=WELCOME):
        hello = await self.receive(messages.Hello)
        await self.channel.send(self.peer, welcome)
        await self.receive(messages.Ready)
        return hello

    async def order(self, number):
        await self.channel.send(self.peer, messages.PublishWeights(order=number, policy_version=number))

    async def exit_status(self):
        return await asyncio.wait_for(self.process.wait(), 30)


@pytest.fixture
async def host(tmp_path):
    host = Host(tmp_path)
    yield host
    host.channel.close()
    if host.process.returncode is None:
        host.process.kill()
        await host.process.wait()


async def test_joins_works_and_ends_when_told(host):
    await host.start()
    hello = await host.admit()
    assert (hello.kind, hello.index, hello.pid) == ("trainer", 0, host.process.pid)
    await host.order(7)
    assert (await host.receive(messages.WeightsPublished)).policy_version == 7
    await host.receive(messages.Heartbeat)
    await host.channel.send(host.peer, messages.Shutdown(reason="enough"))
    assert await host.exit_status() == 0


@pytest.mark.parametrize(
    ("order", "status", "error"), [(1, 2, "model.path: no such folder"), (2, 1, "ZeroDivisionError: a bug")]
)
async def test_a_failure_reaches_the_controller_by_name(host, order, status, error):
    await host.start()
    await host.admit()
    await host.order(order)
    failed = await host.receive(messages.WorkerFailed)
    assert (failed.error, failed.user_error) == (error, status == 2)
    assert await host.exit_status() == status


async def test_a_worker_that_is_not_wanted_ends(host):
    await host.start()
    await host.receive(messages.Hello)
    await host.channel.send(host.peer, messages.Shutdown(reason="no room"))
    assert await host.exit_status() == 3


async def test_it_ends_when_told_while_it_is_still_starting(host):
    await host.start()
    await host.receive(messages.Hello)
    await host.channel.send(host.peer, replace(WELCOME, config=experiment(name="slow").model_dump_json()))
    await host.receive(messages.Progress)
    await host.channel.send(host.peer, messages.Shutdown(reason="enough"))
    assert await host.exit_status() == 3


async def test_a_signal_ends_it_even_with_a_thread_that_hangs(host):
    await host.start()
    await host.admit()
    await host.order(3)
    await host.receive(messages.WeightsPublished)
    host.process.send_signal(signal.SIGTERM)
    assert await host.exit_status() == 143


async def test_a_silent_controller_on_another_machine_counts_as_gone(host):
    host.connection = replace(host.connection, boot_id="another machine", controller_pid=1)
    await host.start()
    config = experiment(controller__silence_limit_s=0.5, controller__heartbeat_s=0.1, controller__grace_s=0.5)
    await host.admit(replace(WELCOME, config=config.model_dump_json()))
    assert await host.exit_status() == 3


async def test_its_output_goes_to_a_log_of_its_own_if_asked(host, tmp_path):
    await host.start(LAMINAR_LOG_DIR=str(tmp_path))
    await host.admit()
    await host.channel.send(host.peer, messages.Shutdown(reason="enough"))
    await host.exit_status()
    assert "shutdown: enough" in (tmp_path / "trainer-0.log").read_text()


def short_grace():
    return replace(WELCOME, config=experiment(controller__grace_s=0.3).model_dump_json())


async def test_it_ends_when_the_controllers_process_is_killed_and_no_other_comes(tmp_path):
    """The controller is a process of its own here, killed with SIGKILL while the worker has a thread that hangs."""
    code = f"""
        import asyncio, sys
        from pathlib import Path
        from tests.workers.test_worker import Host, short_grace
        from laminar.protocol import messages

        async def main():
            host = Host(Path({str(tmp_path)!r}))
            await host.start()
            await host.admit(short_grace())
            await host.order(3)
            await host.receive(messages.WeightsPublished)
            print(host.process.pid, flush=True)
            await host.receive(messages.Shutdown)  # which never comes

        asyncio.run(main())
    """
    controller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(code), stdout=asyncio.subprocess.PIPE
    )
    worker = os.pidfd_open(int(await asyncio.wait_for(controller.stdout.readline(), 30)))
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(worker, lambda: ended.done() or ended.set_result(None))
    controller.kill()
    await controller.wait()
    await asyncio.wait_for(ended, 10)
    asyncio.get_running_loop().remove_reader(worker)
    os.close(worker)


async def test_it_goes_on_with_the_controller_that_takes_the_lost_ones_place(host, tmp_path):
    """The connection file names another controller: as if the first had fallen silent, or had been killed."""
    await host.start()
    await host.admit(replace(WELCOME, config=experiment(controller__heartbeat_s=0.1).model_dump_json()))
    await host.order(7)
    await host.receive(messages.WeightsPublished)
    successor = Host(tmp_path)
    successor.process = host.process
    try:
        successor.connection.write(tmp_path)
        hello = await successor.admit()
        assert hello.pid == host.process.pid
        await successor.order(8)
        assert (await successor.receive(messages.WeightsPublished)).policy_version == 8
        await successor.channel.send(successor.peer, messages.Shutdown(reason="enough"))
        assert await host.exit_status() == 0
    finally:
        successor.channel.close()


async def test_it_ends_at_once_with_the_process_that_started_it(host):
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", "import signal; signal.pause()")
    host.connection = replace(
        host.connection, launcher_pid=launcher.pid, launcher_started=process_started(launcher.pid)
    )
    await host.start(LAMINAR_RUN_ID="r")
    await host.admit()
    launcher.kill()
    await launcher.wait()
    assert await host.exit_status() == 3
