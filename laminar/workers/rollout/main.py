"""`python -m laminar.workers.rollout.main --connect RUN_DIR --index I`: one rollout replica.

Invariants: deltas go out at most `rollout.delta_interval_s` after their tokens were made, and at once when a trajectory
finishes; every delta states the version that the engine served; weights are loaded only while nothing is generated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from laminar.config.schema import ExperimentConfig
from laminar.data.tokenize import load_tokenizer
from laminar.environments.registry import stop_texts
from laminar.errors import UserError
from laminar.protocol import messages
from laminar.weights.store import WeightStore
from laminar.workers.rollout.delta_batch import DeltaBatch
from laminar.workers.rollout.engine import EngineDelta, EngineSettings, GenerationRequest, RolloutEngine
from laminar.workers.rollout.engines import choose_engine
from laminar.workers.rollout.stop_texts import StopTexts
from laminar.workers.rollout.stop_tokens import stop_token_ids
from laminar.workers.worker import WorkerSession, run_worker


class RolloutWorker:
    """Joins one engine to the controller: requests in, batches of deltas out."""

    def __init__(
        self,
        session: WorkerSession,
        engine: RolloutEngine,
        stop_tokens: tuple[int, ...],
        stop_texts: StopTexts | None = None,
    ) -> None:
        self._session = session
        self._engine = engine
        self._stop_tokens = stop_tokens if stop_texts is None else (*stop_tokens, *stop_texts.token_ids)
        self._stop_texts = stop_texts
        self._sampling = session.config.rollout
        self._batch = DeltaBatch()
        self._due = asyncio.Event()  # something to send now
        self._leases: dict[str, int] = {}  # open streams
        self._aborted: set[str] = set()  # request ids of those that were told to end

    async def run(self) -> None:
        """Serve the controller until it says `Shutdown`. What a stream raises ends the worker."""
        sender: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as streams:
                sender = streams.create_task(self._send_forever(), name="send deltas")
                async for message in self._session.messages():
                    await self._handle(message, streams)
                for trajectory_id in self._leases:
                    await self._abort(trajectory_id)
                sender.cancel()
        except* asyncio.CancelledError:
            raise asyncio.CancelledError from None
        except* Exception as failures:
            raise failures.exceptions[0] from None

    async def _handle(self, message: Any, streams: asyncio.TaskGroup) -> None:
        if isinstance(message, messages.Generate):
            for assignment in message.assignments:
                self._leases[assignment.trajectory_id] = assignment.lease
                streams.create_task(self._stream(assignment), name=f"stream {assignment.trajectory_id}")
        elif isinstance(message, messages.AbortTrajectories):
            for trajectory_id in message.trajectory_ids:
                await self._abort(trajectory_id)
        elif isinstance(message, messages.ReportLoad):
            await self._session.send(self._load())
        elif isinstance(message, messages.PullWeights):
            await self._pull(message)
        else:
            raise RuntimeError(f"a rollout does not take {type(message).__name__}")

    async def _abort(self, trajectory_id: str) -> None:
        lease = self._leases.get(trajectory_id)
        if lease is not None:  # else it has just ended
            request_id = _request_id(trajectory_id, lease)
            self._aborted.add(request_id)  # its stream may not have begun
            await self._engine.abort(request_id)

    async def _stream(self, assignment: messages.TrajectoryAssignment) -> None:
        lease, request_id = assignment.lease, _request_id(assignment.trajectory_id, assignment.lease)
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=assignment.prompt_token_ids,
            token_ids=assignment.token_ids,
            max_new_tokens=assignment.max_new_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            stop_token_ids=self._stop_tokens,
            seed=assignment.seed,
        )
        start = len(assignment.token_ids)
        try:
            if request_id in self._aborted:
                self._batch.add(assignment.trajectory_id, lease, start, _nothing(assignment.policy_version))
                self._due.set()
                return
            async for delta in self._turn(request):
                if delta.policy_version != assignment.policy_version:
                    raise RuntimeError(
                        f"trajectory {assignment.trajectory_id} belongs to version {assignment.policy_version}, the "
                        f"engine served {delta.policy_version}"
                    )
                self._batch.add(assignment.trajectory_id, lease, start, delta)
                start += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._due.set()
        finally:
            self._aborted.discard(request_id)
            if self._leases.get(assignment.trajectory_id) == lease:
                del self._leases[assignment.trajectory_id]

    async def _turn(self, request: GenerationRequest) -> AsyncIterator[EngineDelta]:
        """What the engine generates, up to the first stop text."""
        deltas = self._engine.generate(request)
        if self._stop_texts is None:
            async for delta in deltas:
                yield delta
            return
        watch, end = self._stop_texts.watch(request.token_ids), None
        async for delta in deltas:
            if end is not None:  # the engine makes a few tokens more before it stops
                continue
            kept = watch.tokens_to_keep(delta.token_ids)
            if kept is None:
                yield delta
                continue
            end = EngineDelta(
                token_ids=delta.token_ids[:kept],
                logprobs=delta.logprobs[:kept],
                policy_version=delta.policy_version,
                finish_reason="stop",
            )
            if delta.finish_reason is None:
                await self._engine.abort(request.request_id)
        if end is not None:  # only now: whoever hears of it may have weights loaded at once
            yield end

    async def _send_forever(self) -> None:
        """Send what has been collected, twice a second or as soon as a trajectory has finished."""
        busy = False
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), self._sampling.delta_interval_s)
            self._due.clear()
            load = self._load()
            message = self._batch.take(load)
            if message is not None:
                await self._session.send(message)
            elif busy:  # the last figures of a rollout that has drained
                await self._session.send(load)
            busy = bool(self._leases)

    def _load(self) -> messages.RolloutLoad:
        load = self._engine.load()
        return messages.RolloutLoad(running=load.running, waiting=load.waiting, kv_utilization=load.kv_utilization)

    async def _pull(self, message: messages.PullWeights) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        store = WeightStore(self._session.welcome.run_id, message.store)
        newest = store.newest()
        version = message.policy_version if message.exact or newest is None else newest
        path = store.path(version)
        if version < message.policy_version or not path.exists():
            error = f"store {message.store} does not hold it (its newest is {newest})"
            await self._session.send(messages.PullFailed(policy_version=message.policy_version, error=error))
            return
        try:
            await self._engine.load_weights(str(path), version)
        except ValueError as error:  # another model's weights: every version would fail like this one
            raise UserError(f"version {version} cannot be loaded: {error}") from error
        await self._session.send(
            messages.WeightsPulled(
                policy_version=version,
                seconds=loop.time() - started,
                nbytes=path.stat().st_size if path.exists() else 0,
            )
        )


def _request_id(trajectory_id: str, lease: int) -> str:
    """Unique even when a stopped trajectory comes back to the same rollout."""
    return f"{trajectory_id}/{lease}"


def _nothing(policy_version: int) -> EngineDelta:
    """The last delta of a stream that was told to end before it had begun."""
    empty = np.empty(0, np.int32), np.empty(0, np.float32)
    return EngineDelta(token_ids=empty[0], logprobs=empty[1], policy_version=policy_version, finish_reason="abort")


def engine_settings(config: ExperimentConfig, index: int) -> EngineSettings:
    """What an engine needs to know of the experiment."""
    return EngineSettings(
        model_path=config.model.path,
        dtype=config.model.dtype,
        context_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        max_running=config.rollout.max_running,
        kv_cache_bytes=config.rollout.kv_cache_mib << 20,
        tensor_parallel=config.rollout.degree(index),
        threads=config.rollout.threads,
        seed=config.seed * 1000 + index,
    )


async def serve(session: WorkerSession) -> None:
    """One rollout replica: an inference engine that pulls weights from the relay on its host."""
    config = session.config
    engine, reason = choose_engine(config.rollout.engine, engine_settings(config, session.index))
    await session.progress(f"starting the {engine.name} engine ({reason})")
    try:
        await engine.start()
        await session.ready(f"{engine.name} engine: {reason}")
        texts = stop_texts(config.environment)
        stops = StopTexts(load_tokenizer(config.model.path), texts) if texts else None
        await RolloutWorker(session, engine, stop_token_ids(config.model.path), stops).run()
    finally:
        await engine.close()


if __name__ == "__main__":
    run_worker("rollout", serve)
