"""The embedded inference engine: any Hugging Face causal language model, in a thread of this process.

Invariants: the model, its cache and the batch are touched by the engine's one thread only; streams are touched by the
event loop only. What passes between them are commands (into the thread, in order) and batches of gains (out of it).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from laminar.workers.rollout.admission import check_request, check_weights
from laminar.workers.rollout.decode_batch import DecodeBatch
from laminar.workers.rollout.decode_row import Row
from laminar.workers.rollout.engine import (
    EngineDelta,
    EngineLoad,
    EngineSettings,
    GenerationRequest,
    KvExported,
    KvImported,
)
from laminar.workers.rollout.step_times import StepTimes

FLUSH_SECONDS = 0.02  # tokens of unfinished trajectories are handed over this often; finished ones at once
CLOSE_SECONDS = 30.0  # how long `close` waits for the step in progress

T = TypeVar("T")
Command = Callable[[DecodeBatch], None]


@dataclass(kw_only=True, slots=True, eq=False)
class _Stream:
    """One open stream, on the event loop's side."""

    row: Row | None = None  # set and read by the engine's thread
    gains: list[_Gain]
    arrived: asyncio.Event


@dataclass(kw_only=True, slots=True, frozen=True)
class _Gain:
    """What a stream gained, on its way to the event loop."""

    token_ids: list[int]
    logprobs: list[float]
    policy_version: int
    finish_reason: str | None
    exported: KvExported | None
    imported: KvImported | None


class TorchEngine:
    """`RolloutEngine` on plain torch; see `laminar.workers.rollout.engine` for the contract."""

    name = "torch"

    def __init__(self, settings: EngineSettings) -> None:
        """Keep the settings; `start` loads the model."""
        self._settings = settings
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._running: dict[Row, _Stream] = {}  # the thread's own: who gets what a row gains
        self._load = EngineLoad(running=0, waiting=0, kv_utilization=0.0)
        self.step_times = StepTimes()
        self._vocabulary = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Load the model in the engine's thread.

        Raises:
            UserError: the model cannot be loaded or run by this engine, or the KV cache is too small.
        """
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[int] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="torch-engine", daemon=True)
        self._thread.start()
        self._vocabulary = await started

    def generate(self, request: GenerationRequest) -> AsyncIterator[EngineDelta]:
        """Stream one trajectory; it is queued when the iteration begins.

        Raises:
            ValueError: at once, if it cannot be generated or its id is in use.
            RuntimeError: while iterating, if the engine failed or was closed.
        """
        check_request(request, self._settings, self._vocabulary)
        if request.request_id in self._streams:
            raise ValueError(f"request {request.request_id!r}: a stream with this id is open")
        return self._stream(request)

    async def _stream(self, request: GenerationRequest) -> AsyncIterator[EngineDelta]:
        self._require_alive()
        if request.request_id in self._streams:
            raise ValueError(f"request {request.request_id!r}: a stream with this id is open")
        stream = _Stream(gains=[], arrived=asyncio.Event())
        self._streams[request.request_id] = stream
        self._commands.put(lambda batch: self._add(batch, request, stream))
        ended = False
        try:
            while not ended:
                await stream.arrived.wait()
                self._require_alive()
                stream.arrived.clear()
                gains, stream.gains = stream.gains, []
                ended = gains[-1].finish_reason is not None
                if ended:  # before the last delta is out, so that its receiver may load weights at once
                    del self._streams[request.request_id]
                yield EngineDelta(
                    token_ids=np.array([token for gain in gains for token in gain.token_ids], np.int32),
                    logprobs=np.array(
                        [logprob for gain in gains for logprob in gain.logprobs],
                        np.float32,
                    ),
                    policy_version=gains[-1].policy_version,
                    finish_reason=gains[-1].finish_reason,
                    exported=gains[-1].exported,
                    imported=gains[0].imported,
                )
        finally:
            if not ended and self._streams.pop(request.request_id, None) is not None:
                self._commands.put(lambda batch: self._abort(batch, stream))

    async def abort(self, request_id: str, export: Path | None = None) -> None:
        """End a stream after the step in progress, its KV written to `export`."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._commands.put(lambda batch: self._abort(batch, stream, export))

    async def load_weights(self, path: str, policy_version: int) -> None:
        """Copy the version's tensors into the model.

        Raises:
            RuntimeError: a stream is open, or the engine failed.
            FileNotFoundError: no such file (any more).
            ValueError: the file does not hold this version of this model; the engine keeps what it had.
        """
        if self._streams:
            raise RuntimeError(
                f"weights of version {policy_version} cannot be loaded while {len(self._streams)} streams are open"
            )
        check_weights(path, policy_version)
        await self._call(lambda batch: batch.load_weights(path, policy_version))

    async def serve_own_weights(self, policy_version: int) -> None:
        """See `RolloutEngine`."""
        await self._call(lambda batch: setattr(batch, "policy_version", policy_version))

    def load(self) -> EngineLoad:
        """Load after the last step."""
        return self._load

    async def close(self) -> None:
        """End the thread after the step in progress; open streams fail. Raises TimeoutError if it does not end."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._commands.put(None)
        await asyncio.to_thread(thread.join, CLOSE_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"the torch engine's step did not end within {CLOSE_SECONDS} s")
        self._fail(RuntimeError("the torch engine was closed"))

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the torch engine has ended: {self._failure}") from self._failure
        if self._thread is None:
            raise RuntimeError("the torch engine was not started")

    async def _call(self, function: Callable[[DecodeBatch], T]) -> T:
        """Run a function in the engine's thread between two steps."""
        self._require_alive()
        assert self._loop is not None
        loop, done = self._loop, self._loop.create_future()

        def command(batch: DecodeBatch) -> None:
            try:
                result = function(batch)
            except Exception as error:  # handed to the caller, who decides
                loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                loop.call_soon_threadsafe(_settle, done, result, None)

        self._commands.put(command)
        result: T = await done
        return result

    def _fail(self, error: BaseException) -> None:
        """On the loop: the engine is no more; wake everyone who waits for it."""
        self._failure = error
        self._load = EngineLoad(running=0, waiting=0, kv_utilization=0.0)
        for stream in self._streams.values():
            stream.arrived.set()

    # From here on: the engine's thread.

    def _run(self, started: asyncio.Future[int]) -> None:
        assert self._loop is not None
        try:
            batch = DecodeBatch(self._settings, self.step_times)
        except Exception as error:  # handed to `start`, which raises it
            self._loop.call_soon_threadsafe(_settle, started, None, error)
            return
        self._loop.call_soon_threadsafe(_settle, started, batch.model.vocabulary, None)
        try:
            self._serve(batch)
        except Exception as error:  # handed to every stream, which raises it
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._fail, error)

    def _serve(self, batch: DecodeBatch) -> None:
        flushed = time.perf_counter()
        while True:
            while batch.idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command(batch)
                self._load = batch.load()
            finished = batch.step()
            self._load = batch.load()
            now = time.perf_counter()
            if now - flushed >= FLUSH_SECONDS:
                flushed = now
                self._hand_over(list(self._running), batch.policy_version)
            elif finished:
                self._hand_over(finished, batch.policy_version)

    def _add(self, batch: DecodeBatch, request: GenerationRequest, stream: _Stream) -> None:
        stream.row = batch.add(request)
        self._running[stream.row] = stream

    def _abort(self, batch: DecodeBatch, stream: _Stream, export: Path | None = None) -> None:
        row = stream.row
        if row is not None and row in self._running:
            batch.abort(row, export)
            self._load = batch.load()  # before the last delta is out, so that its receiver sees it
            self._hand_over([row], batch.policy_version)

    def _hand_over(self, rows: list[Row], policy_version: int) -> None:
        """Send what rows gained to the event loop, in one call."""
        gains = []
        for row in rows:
            token_ids, logprobs = row.take()
            if not token_ids and row.finish_reason is None:
                continue
            gain = _Gain(
                token_ids=token_ids,
                logprobs=logprobs,
                policy_version=policy_version,
                finish_reason=row.finish_reason,
                exported=row.exported,
                imported=row.take_imported(),
            )
            gains.append((self._running[row], gain))
            if row.finish_reason is not None:
                del self._running[row]
        if gains:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_deliver, gains)


def _deliver(gains: list[tuple[_Stream, _Gain]]) -> None:
    for stream, gain in gains:
        stream.gains.append(gain)
        stream.arrived.set()


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    """Complete a future unless its waiter has gone."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
