"""`python -m laminar.workers.rollout.main --connect RUN_DIR --index I`: one rollout replica.

At SIGTERM it says that it is leaving and goes on, until the controller lets it go or `rollout.drain_s` has passed.

Invariants: deltas go out at most `rollout.delta_interval_s` after their tokens were made, and at once when a trajectory
finishes; every delta states the version that the engine served; weights are loaded only while nothing is generated; KV that
came with an assignment is answered by one `KvTaken` before the trajectory's last delta, and its files are gone by then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from laminar.data.tokenize import load_tokenizer
from laminar.environments.registry import stop_texts
from laminar.errors import UserError
from laminar.protocol import messages
from laminar.weights.store import WeightStore
from laminar.workers.own_address import own_address
from laminar.workers.rollout.delta_batch import DeltaBatch
from laminar.workers.rollout.engine import EngineDelta, GenerationRequest, KvImported, RolloutEngine
from laminar.workers.rollout.engine_settings import engine_settings, moves_kv
from laminar.workers.rollout.engines import choose_engine
from laminar.workers.rollout.held_tokens import HeldTokens
from laminar.workers.rollout.kv_courier import KvCourier
from laminar.workers.rollout.kv_folder import KvFolder
from laminar.workers.rollout.stop_texts import StopTexts
from laminar.workers.rollout.stop_tokens import stop_token_ids
from laminar.workers.worker import WorkerSession, run_worker

STOPPED_BEFORE = "stopped before it was imported"


class RolloutWorker:
    """Joins one engine to the controller: requests in, batches of deltas out."""

    def __init__(
        self,
        session: WorkerSession,
        engine: RolloutEngine,
        stop_tokens: tuple[int, ...],
        *,
        courier: KvCourier | None = None,
        stop_texts: StopTexts | None = None,
    ) -> None:
        """
        Args:
            courier: for the KV of trajectories that move; None: it does not move.
            stop_texts: that end a turn, as stop tokens do; None: there are none.
        """
        self._session = session
        self._courier = courier
        self._engine = engine
        self._stop_tokens = stop_tokens if stop_texts is None else (*stop_tokens, *stop_texts.token_ids)
        self._stop_texts = stop_texts
        self._sampling = session.config.rollout
        self._batch = DeltaBatch()
        self._held = HeldTokens()
        self._due = asyncio.Event()  # something to send now
        self._leases: dict[str, int] = {}  # open streams
        self._notice = asyncio.Event()  # SIGTERM has come
        self._served = -1  # version that the engine serves
        self._aborted: set[str] = set()  # request ids of those that were told to end

    async def run(self) -> None:
        """Serve the controller until it says `Shutdown`. What a stream raises ends the worker."""
        self._session.on_notice = self._notice.set
        self._session.on_rejoin = self._rejoin
        try:
            async with asyncio.TaskGroup() as streams:
                sender = streams.create_task(self._send_forever(), name="send deltas")
                leaving = streams.create_task(self._leave_in_time(), name="leave")
                async for message in self._session.messages():
                    await self._handle(message, streams)
                self._session.on_notice = None  # nothing is left to hand over
                leaving.cancel()
                await self._abort(self._leases, export_kv=False)
                sender.cancel()
        except* asyncio.CancelledError:
            raise asyncio.CancelledError from None
        except* Exception as failures:
            raise failures.exceptions[0] from None

    async def _leave_in_time(self) -> None:
        """Raises RuntimeError when a notice has come, and the time that it gave has passed."""
        await self._notice.wait()
        await self._session.send(messages.Leaving(seconds=self._sampling.drain_s))
        await asyncio.sleep(self._sampling.drain_s)
        raise RuntimeError(f"got SIGTERM, and was not let go within {self._sampling.drain_s:g} s (rollout.drain_s)")

    def _rejoin(self) -> tuple[list[object], list[object]]:
        """What another controller must know: what is here, and all its tokens, in place of what is collected to be sent.

        KV that waits to be imported elsewhere is dropped: the controller that knew of it is gone.
        """
        self._batch.take(self._load())
        if self._courier is not None:
            self._courier.drop_all_of(self._session.name)
        return [self._held.joined(self._served)], list(self._held.deltas(self._load()))

    async def _handle(self, message: Any, streams: asyncio.TaskGroup) -> None:
        if isinstance(message, messages.Generate):
            for assignment in message.assignments:
                self._leases[assignment.trajectory_id] = assignment.lease
                self._held.begin(assignment)
                streams.create_task(self._stream(assignment), name=f"stream {assignment.trajectory_id}")
        elif isinstance(message, messages.AbortTrajectories):
            await self._abort(message.trajectory_ids, export_kv=message.export_kv)
        elif isinstance(message, messages.DropKv):
            self._drop_kv(message)
        elif isinstance(message, messages.ReportLoad):
            await self._session.send(replace(self._load(), steps=self._engine.step_times.take()))
        elif isinstance(message, messages.PullWeights):
            await self._pull(message)
        else:
            raise RuntimeError(f"a rollout does not take {type(message).__name__}")

    async def _abort(self, trajectory_ids: Iterable[str], *, export_kv: bool) -> None:
        """Together: the engine may answer after a step only, and that should be the same one for all."""
        aborts = []
        for trajectory_id in trajectory_ids:
            lease = self._leases.get(trajectory_id)
            if lease is not None:  # else it has just ended
                request_id = _request_id(trajectory_id, lease)
                self._aborted.add(request_id)  # its stream may not have begun
                export = self._courier.export_path(trajectory_id, lease) if export_kv and self._courier else None
                aborts.append(self._engine.abort(request_id, export))
        await asyncio.gather(*aborts)

    def _drop_kv(self, message: messages.DropKv) -> None:
        if self._courier is not None:
            for name in message.names:
                self._courier.drop(name)
            for exporter in message.exporters:
                self._courier.drop_all_of(exporter)

    async def _stream(self, assignment: messages.TrajectoryAssignment) -> None:
        lease, request_id = assignment.lease, _request_id(assignment.trajectory_id, assignment.lease)
        start = len(assignment.token_ids)
        try:
            kv = await self._bring_kv(assignment)
            unanswered = kv is not None
            if request_id in self._aborted:
                if unanswered:
                    await self._kv_taken(assignment, kv, _not_imported(STOPPED_BEFORE))
                nothing = _nothing(assignment.policy_version)
                self._batch.add(assignment.trajectory_id, lease, start, nothing)
                self._held.add(assignment, nothing)
                self._due.set()
                return
            async for delta in self._turn(assignment, self._request(assignment, kv)):
                if delta.policy_version != assignment.policy_version:
                    raise RuntimeError(
                        f"trajectory {assignment.trajectory_id} belongs to version {assignment.policy_version}, the "
                        f"engine served {delta.policy_version}"
                    )
                if unanswered and (delta.imported is not None or delta.finish_reason is not None):
                    await self._kv_taken(assignment, kv, delta.imported or _not_imported(STOPPED_BEFORE))
                    unanswered = False
                self._batch.add(assignment.trajectory_id, lease, start, delta, self._exported(assignment, delta))
                self._held.add(assignment, delta)
                start += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._due.set()
        finally:
            self._aborted.discard(request_id)
            if self._leases.get(assignment.trajectory_id) == lease:
                del self._leases[assignment.trajectory_id]

    def _request(self, assignment: messages.TrajectoryAssignment, kv: Path | None) -> GenerationRequest:
        return GenerationRequest(
            request_id=_request_id(assignment.trajectory_id, assignment.lease),
            prompt_token_ids=assignment.prompt_token_ids,
            token_ids=assignment.token_ids,
            max_new_tokens=assignment.max_new_tokens,
            temperature=self._sampling.temperature if assignment.temperature is None else assignment.temperature,
            top_p=self._sampling.top_p,
            stop_token_ids=self._stop_tokens,
            seed=assignment.seed,
            kv=kv,
        )

    # ------------------------------------------------------------ KV of trajectories that move

    async def _bring_kv(self, assignment: messages.TrajectoryAssignment) -> Path | None:
        """The KV that comes with an assignment, in this host's memory; None, and that is said, if it cannot be had."""
        if assignment.kv is None:
            return None
        path, error = None, "this rollout does not move KV"
        if self._courier is not None:
            path, error = await self._courier.bring(assignment.kv, assignment.lease)
        if path is None:
            await self._kv_taken(assignment, None, _not_imported(error))
        return path

    async def _kv_taken(
        self, assignment: messages.TrajectoryAssignment, path: Path | None, imported: KvImported
    ) -> None:
        assert assignment.kv is not None
        if path is not None and self._courier is not None:
            self._courier.drop(path.name)
        await self._session.send(
            messages.KvTaken(
                trajectory_id=assignment.trajectory_id,
                lease=assignment.lease,
                name=assignment.kv.name,
                tokens=imported.tokens,
                nbytes=imported.nbytes,
                seconds=imported.seconds,
                error=imported.error,
            )
        )

    def _exported(self, assignment: messages.TrajectoryAssignment, delta: EngineDelta) -> messages.KvReference | None:
        if delta.exported is None or self._courier is None:
            return None
        return self._courier.exported(assignment.trajectory_id, assignment.lease, delta.policy_version, delta.exported)

    async def _turn(
        self, assignment: messages.TrajectoryAssignment, request: GenerationRequest
    ) -> AsyncIterator[EngineDelta]:
        """What the engine generates, up to the first stop text."""
        deltas = self._engine.generate(request)
        if self._stop_texts is None:
            async for delta in deltas:
                yield delta
            return
        watch, end = self._stop_texts.watch(request.token_ids), None
        async for delta in deltas:
            kept = watch.tokens_to_keep(delta.token_ids) if end is None else None
            if end is None and kept is None:
                yield delta
                continue
            if delta.exported is not None and self._courier is not None:  # nobody goes on with a turn that has ended
                self._courier.drop(self._courier.export_path(assignment.trajectory_id, assignment.lease).name)
            if end is not None:  # the engine makes a few tokens more before it stops
                continue
            end = EngineDelta(
                token_ids=delta.token_ids[:kept],
                logprobs=delta.logprobs[:kept],
                policy_version=delta.policy_version,
                finish_reason="stop",
                imported=delta.imported,
            )
            if delta.finish_reason is None:
                await self._engine.abort(request.request_id)
        if end is not None:  # only now: whoever hears of it may have weights loaded at once
            yield end

    async def _send_forever(self) -> None:
        """Send what has been collected, twice a second or as soon as a trajectory has finished."""
        busy = False
        while True:
            with contextlib.suppress(TimeoutError):  # `wait_for` would lose a cancellation that comes with the event
                async with asyncio.timeout(self._sampling.delta_interval_s):
                    await self._due.wait()
            self._due.clear()
            load = self._load()
            message = self._batch.take(load)
            if self._session.attached:
                self._held.forget_old()
            if message is not None:
                await self._session.send(message)
            elif busy:  # the last figures of a rollout that has drained
                await self._session.send(load)
            busy = bool(self._leases)

    def _load(self) -> messages.RolloutLoad:
        load = self._engine.load()
        return messages.RolloutLoad(
            running=load.running,
            waiting=load.waiting,
            kv_utilization=load.kv_utilization,
            prefill_s_per_token=load.prefill_s_per_token,
            kv_move_s_per_token=load.kv_move_s_per_token,
        )

    async def _pull(self, message: messages.PullWeights) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        if not message.store:
            await self._engine.serve_own_weights(message.policy_version)
            pulled = messages.WeightsPulled(policy_version=message.policy_version, seconds=0.0, nbytes=0)
            await self._session.send(pulled)
            return
        store = WeightStore(self._session.welcome.run_id, message.store)
        with contextlib.ExitStack() as held:
            version, path = _hold(store, message, held)
            if path is None:
                error = f"store {message.store} does not hold it (its newest is {store.newest()})"
                await self._session.send(messages.PullFailed(policy_version=message.policy_version, error=error))
                return
            try:
                await self._engine.load_weights(path, version)
            except ValueError as error:  # another model's weights: every version would fail like this one
                raise UserError(f"version {version} cannot be loaded: {error}") from error
            nbytes = os.stat(path).st_size
        self._served = version
        await self._session.send(
            messages.WeightsPulled(policy_version=version, seconds=loop.time() - started, nbytes=nbytes)
        )


def _hold(store: WeightStore, pull: messages.PullWeights, held: contextlib.ExitStack) -> tuple[int, str | None]:
    """The version to load, and its file, which retention does not take away from now on; None: it is not there."""
    while True:
        newest = store.newest()
        version = pull.policy_version if pull.exact or newest is None else newest
        if version < pull.policy_version:
            return version, None
        try:
            return version, held.enter_context(store.hold(version))
        except FileNotFoundError:
            if pull.exact or store.newest() == newest:
                return version, None  # else a newer one has come, and taken its place


def _request_id(trajectory_id: str, lease: int) -> str:
    """Unique even when a stopped trajectory comes back to the same rollout."""
    return f"{trajectory_id}/{lease}"


def _nothing(policy_version: int) -> EngineDelta:
    """The last delta of a stream that was told to end before it had begun."""
    empty = np.empty(0, np.int32), np.empty(0, np.float32)
    return EngineDelta(token_ids=empty[0], logprobs=empty[1], policy_version=policy_version, finish_reason="abort")


def _not_imported(error: str) -> KvImported:
    return KvImported(tokens=0, nbytes=0, seconds=0.0, error=error)


async def serve(session: WorkerSession, *, connect: Path) -> None:
    """One rollout replica: an inference engine that pulls weights from the relay on its host."""
    config, welcome = session.config, session.welcome
    engine, reason = choose_engine(config.rollout.engine, engine_settings(config, session.index))
    await session.progress(f"starting the {engine.name} engine ({reason})")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        await engine.start()
        courier = None
        if moves_kv(config):
            folder = KvFolder(welcome.run_id)
            courier = KvCourier(session.name, folder, own_address(connect), welcome.hop_key)
            stack.push_async_callback(courier.close)
        await session.ready(f"{engine.name} engine: {reason}")
        texts = stop_texts(config.environment)
        stops = StopTexts(load_tokenizer(config.model.path), texts) if texts else None
        tokens = stop_token_ids(config.model.path)
        await RolloutWorker(session, engine, tokens, courier=courier, stop_texts=stops).run()


def main() -> None:
    """Run one rollout."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--connect", type=Path, default=Path())
    here = functools.partial(serve, connect=parser.parse_known_args()[0].connect)
    run_worker("rollout", functools.update_wrapper(here, serve))


if __name__ == "__main__":
    main()
