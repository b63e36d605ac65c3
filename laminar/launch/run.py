"""A run on this machine, as the controller's process makes it: what it starts, and how it ends.

Its workers are the supervisor's children: they outlive this process, and another that takes its place goes on with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from pathlib import Path

from laminar.config.schema import ExperimentConfig
from laminar.config.store_room import version_bytes
from laminar.controller.controller import Controller
from laminar.controller.journal.accounts import FILE as ACCOUNTS
from laminar.controller.journal.accounts import read_accounts
from laminar.controller.journal.journal import Journal
from laminar.controller.journal.restore import Restored
from laminar.controller.relay_keeper import TIER
from laminar.controller.repl_server import ReplServer
from laminar.controller.worker_registry import Worker
from laminar.errors import RunFailed, UserError, WorkerLost
from laminar.launch.commands import (
    MPIRUN,
    Command,
    common_environment,
    expected_workers,
    local_commands,
    mpi_directory,
    relay_command,
    rollout_command,
)
from laminar.launch.local import is_of_run
from laminar.launch.own_processes import OwnProcesses
from laminar.launch.records import Records, summary
from laminar.launch.supervised import SupervisedProcesses
from laminar.observability.evaluation_terminal import EvaluationTerminal
from laminar.observability.events import EventBus, Notice, ProcessStarted, WorkerJoined
from laminar.observability.terminal import Terminal
from laminar.protocol.connection import CONNECTION_FILE, Connection, CurveKeys
from laminar.protocol.zeromq import ZmqControllerChannel

END_LIMIT_S = 10.0  # for workers to end by themselves; then SIGTERM, then SIGKILL


class Interrupted(Exception):
    """The person asked twice to stop: now."""


class LocalRun:
    """The controller, and the processes that it starts on this machine."""

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        events: EventBus,
        terminal: Terminal | EvaluationTerminal,
        processes: SupervisedProcesses | OwnProcesses,
        records: Records | None,
        *,
        run_id: str,
        evaluate_only: int | None = None,
    ) -> None:
        """
        Args:
            records: None for a run that is begun anew, rather than gone on with, when its controller is killed.
            evaluate_only: as `Controller` takes it.
        """
        self._config = config
        self._launcher = processes
        self._records = records
        self._run_dir = run_dir
        self._terminal = terminal
        self._evaluate_only = evaluate_only
        self._run_id = run_id
        self._events = events
        self._commands: dict[str, Command] = {}
        self._said_hello: dict[str, int] = {}  # workers, since they were last started -> process
        events.subscribe(self._on_joined, WorkerJoined)
        self._ending = False
        self._hurry = asyncio.Event()  # the person asked twice: wait for nothing

    async def run(self) -> str:
        """Make the run; returns how it ended, as one line.

        Raises:
            UserError: before anything has started (a taken port), or a worker found the user's input at fault.
            RunFailed: the run could not go on.
            Interrupted: the second Ctrl-C.
        """
        controller_keys, worker_keys = CurveKeys.create(), CurveKeys.create()
        channel = ZmqControllerChannel(
            self._config.controller.host,
            self._config.controller.port,
            controller_keys=controller_keys,
            worker_public_key=worker_keys.public,
        )
        self._launcher.on_exit = self._on_exit
        self._launcher.adopt(self._all_commands())
        journal: Journal | None = None
        outcome = ""
        try:
            restored = self._restore()
            if self._records is not None:
                journal = self._records.open_journal(self._config, self._events)
            Connection.to_this_process(
                channel.address,
                self._run_id,
                controller=controller_keys,
                worker=worker_keys,
                launcher_pid=self._launcher.supervisor_pid,
            ).write(self._run_dir)
            self._controller = Controller(
                self._config,
                channel,
                self._events,
                run_id=self._run_id,
                run_dir=self._run_dir,
                expected_workers=expected_workers(self._config, evaluate_only=self._evaluate_only is not None),
                restart=self._restart,
                version_bytes=version_bytes(self._config),
                hop_key=None if self._records is None else self._records.hop_key,
                journal=journal,
                restored=restored,
                patience_s=self._patience_s,
                closed=self._closed,
                evaluate_only=self._evaluate_only,
            )
            await self._run_controller()
            outcome = self._outcome()
        finally:
            self._ending = True
            forced = await self._launcher.stop(END_LIMIT_S, self._hurry)
            for name in forced:
                self._events.emit(Notice(level="warning", text=f"{name} did not end by itself and was stopped"))
            channel.close()
            (self._run_dir / CONNECTION_FILE).unlink(missing_ok=True)
            if journal is not None:
                journal.close()
                self._write_accounts(say=not outcome)
        if self._records is not None:
            self._check_accounts()
        return outcome

    def _write_accounts(self, *, say: bool) -> None:
        """What became of every prompt so far, however the run ends. `say`: no summary will."""
        try:
            accounts = read_accounts(self._run_dir)
            accounts.write(self._run_dir)
        except (UserError, OSError) as error:
            self._events.emit(Notice(level="warning", text=f"{ACCOUNTS} cannot be written ({error})"))
            return
        if say and accounts.positions:
            self._events.emit(Notice(level="info", text=f"accounts: {accounts.text}"))

    def _check_accounts(self) -> None:
        """Add what became of every prompt to the summary.

        Raises:
            RunFailed: the sums are wrong.
        """
        accounts = read_accounts(self._run_dir)
        assert isinstance(self._terminal, Terminal)  # an evaluation has no journal to take accounts of
        self._terminal.add_row("accounts", accounts.text)
        buffer, problems = self._controller.buffer, list(accounts.problems)
        if accounts.trained != buffer.trained:
            problems.append(f"the controller counts {buffer.trained} trained prompts, the journal {accounts.trained}")
        if problems:
            raise RunFailed(
                f"the accounts of the run do not add up: {'; '.join(problems)} ({self._run_dir / ACCOUNTS})"
            )

    def _restore(self) -> Restored | None:
        """What an earlier controller of this run has left; None if this is the first."""
        restored = None if self._records is None else self._records.restore()
        if restored is None:
            return None
        if not self._launcher.living and self._config.launch.rollouts == self._config.launch.relays == "local":
            restored.forget_rollouts()
        new_trainer = "torchrun" not in self._launcher.living and self._config.launch.trainer == "local"
        self._events.emit(Notice(level="info", text=summary(restored, new_trainer=new_trainer)))
        return restored

    def _patience_s(self, name: str) -> float:
        """How long a worker that an earlier controller knew may take to come back."""
        command = next((c for c in self._all_commands() if name in c.workers), None)
        if command is not None and command.name in self._launcher.living:
            return self._config.controller.reattach_s
        return (
            self._config.controller.start_timeout_s
        )  # it is being started, or whoever started it by hand does that again

    def _all_commands(self) -> list[Command]:
        commands = local_commands(self._config, self._run_dir, self._run_id)
        environment = common_environment(self._run_dir, self._run_id)
        known = {command.name for command in commands}
        for name in self._launcher.living.keys() - known:  # that an earlier controller has added, or started alone
            kind, _, index = name.rpartition("-")
            if kind == "rollout":
                commands.append(rollout_command(self._config, self._run_dir, environment, int(index)))
            elif kind == "relay":
                commands.append(relay_command(self._run_dir, environment, int(index)))
        return commands

    async def _run_controller(self) -> None:
        services = [self._terminal.refresh_forever]
        if self._evaluate_only is None:
            services.append(ReplServer(self._controller).serve_forever)
        main = asyncio.create_task(self._controller.run(self._launch, services), name="controller")
        main.add_done_callback(self._on_end)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):  # stays to the very end: nothing may cut the clean-up short
            loop.add_signal_handler(number, self._on_interrupt, main)
        failures = [self._launcher.failure]
        if self._records is not None:
            failures.append(self._records.failure)
        await asyncio.wait([main, *failures], return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done():
                main.cancel()
                await asyncio.wait([main])
                failure.result()
        if main.cancelled():
            raise Interrupted
        main.result()

    def _outcome(self) -> str:
        made, wanted = self._controller.trainer.step, self._config.trainer.steps
        if made == wanted:
            return f"finished: {made} steps"
        why = "as asked" if self._controller.control.stop_requested.is_set() else "the data has ended"
        return f"ended after step {made} of {wanted}: {why}"

    async def _launch(self) -> None:
        for command in self._all_commands():
            self._commands[command.name] = command
            if command.name not in self._launcher.living:
                await self._start(command)

    def _on_joined(self, event: WorkerJoined) -> None:
        self._said_hello[event.worker] = event.pid if event.host == socket.gethostname() else 0

    async def _start(self, command: Command) -> None:
        for name in command.workers:
            self._said_hello.pop(name, None)
        pid = await self._launcher.start(command)
        self._events.emit(ProcessStarted(name=command.name, pid=pid, command=" ".join(command.argv)))

    def _on_end(self, _: asyncio.Task[None]) -> None:
        self._ending = True

    def _on_interrupt(self, main: asyncio.Task[None]) -> None:
        if self._ending or self._controller.control.stop_requested.is_set() or self._evaluate_only is not None:
            self._hurry.set()
            main.cancel()
            return
        text = "stopping after the current step, with a checkpoint; Ctrl-C again stops now"
        self._events.emit(Notice(level="warning", text=text))
        self._controller.control.stop()

    def _on_exit(self, command: Command, status: int) -> None:
        """A process ended that was not told to: the controller decides what its workers' loss means.

        Raises:
            WorkerLost: the run cannot go on without it.
        """
        if self._ending:
            return
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        reason = self._with_log(f"its process ended ({how})", command.name, *command.workers)
        registry = self._controller.registry
        if not any(registry.expects(name) for name in command.workers):
            return  # the run goes on without it
        if not any(name in self._said_hello for name in command.workers):
            registry.did_not_come(command.workers[0], reason)
        for name in command.workers:
            registry.lost(name, reason)
        if command.name == MPIRUN:
            self._controller.relay_keeper.tier_lost(reason)

    def _closed(self, worker: Worker, reason: str) -> str:
        """Why a worker's connection has closed; empty for a process started here, of whose end `_on_exit` tells."""
        return "" if self._launcher.owns(worker.pid) else self._with_log(reason, worker.name)

    def _with_log(self, reason: str, *names: str) -> str:
        tail = self._launcher.log_tail(names)
        return reason + (f"\n{tail}" if tail else "")

    def _end_relays(self) -> None:
        """Before all relays are started together again: none is left, nor what their Open MPI kept."""
        for rank in range(self._config.relay.count):
            self._kill(f"relay-{rank}")
            self._controller.registry.lost(f"relay-{rank}", "all relays are started anew together")
        directory = mpi_directory(self._run_id)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)

    async def _restart(self, name: str, reason: str) -> None:
        """Start a lost worker anew, or one that is added. Raises WorkerLost if it was started by hand."""
        if name == TIER:
            self._end_relays()
            name = MPIRUN
        elif name.startswith("relay-") and self._config.launch.relays == "local":
            environment = common_environment(self._run_dir, self._run_id)
            self._commands[name] = relay_command(self._run_dir, environment, int(name.removeprefix("relay-")))
        elif name.startswith("rollout-") and self._config.launch.rollouts == "local":
            environment = common_environment(self._run_dir, self._run_id)
            index = int(name.removeprefix("rollout-"))
            self._commands[name] = rollout_command(self._config, self._run_dir, environment, index)
        command = self._commands.get({"trainer": "torchrun"}.get(name, name))
        if command is None:
            raise WorkerLost(f"{name} was lost: {reason}. It was started by hand, so it is not restarted")
        for worker in command.workers:
            self._kill(worker)
        self._launcher.kill(command.name)
        await self._start(command)

    def _kill(self, worker: str) -> None:
        """What is left of a lost worker's process: it may hang, and must not go on beside its successor.

        Its launcher's end does not end it: torchrun's ranks have groups of their own, mpirun keeps the other relays.
        """
        self._launcher.kill(worker)
        pid = self._said_hello.get(worker, 0)
        if pid and is_of_run(pid, self._run_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
