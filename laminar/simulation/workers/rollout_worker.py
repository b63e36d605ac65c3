"""A modelled rollout: the messages of a real one, with a `RooflineEngine` inside that advances from event to event.

Invariants: a finish is sent at once, with every token of the trajectory that had not been sent; tokens are sent once and in
order; the ids of tokens are the version that made them, so that mixing shows. Where an environment is configured a tool call ends
the turn and goes through the controller; else it is a pause inside the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from laminar.protocol import messages
from laminar.simulation.channels.network import SimulatedNetwork
from laminar.simulation.models.engine_model import RooflineEngine
from laminar.simulation.models.turns import end_of_turn
from laminar.simulation.models.workload import Pauses, Workload
from laminar.simulation.workers.kv_shelf import KvShelf
from laminar.simulation.workers.modelled_worker import Life, ModelledWorker
from laminar.simulation.workers.token_arrays import TokenArrays
from laminar.simulation.workers.weight_stores import WeightStores, WeightTimes

KEEP_ENDED_S = 10.0


class _Leased:
    """A trajectory that is generated here."""

    __slots__ = ("finish_reason", "lease", "sent", "start")

    def __init__(self, lease: int, sent: int, finish_reason: str) -> None:
        self.lease = lease
        self.start = sent  # response tokens that it was leased with
        self.sent = sent  # response tokens that the controller has, or will have by what was sent
        self.finish_reason = finish_reason  # when all tokens are there


class _Ended(NamedTuple):
    """A trajectory's part that was made here."""

    lease: int
    version: int
    start: int  # response tokens before it
    end: int
    finish_reason: str | None
    at: float


class ModelledRollout(ModelledWorker):
    """One replica."""

    kind = "rollout"

    def __init__(
        self,
        network: SimulatedNetwork,
        life: Life,
        *,
        engine: RooflineEngine,
        workload: Workload,
        times: WeightTimes,
        stores: WeightStores,
        shelf: KvShelf,
        arrays: TokenArrays,
        delta_interval_s: float,
        multi_turn: bool = False,
    ) -> None:
        """
        Args:
            workload: lengths of the responses; a prompt's token ids are all its prompt_id (`ModelledEnvironment`).
            multi_turn: tool calls end turns.
        """
        self.engine = engine
        self.policy_version = -1
        self.generated_tokens = 0
        self.pulling = False
        self._workload = workload
        self._times = times
        self._stores = stores
        self._shelf = shelf
        self._arrays = arrays
        self._delta_interval_s = delta_interval_s
        self._multi_turn = multi_turn
        self._leased: dict[str, _Leased] = {}
        self._ended: dict[str, _Ended] = {}  # of late, in case that a controller dies before it has written them down
        self._leases: dict[str, int] = {}  # newest lease of each trajectory that was stopped here: an older one is late
        self._timer: asyncio.TimerHandle | None = None  # the engine's next event
        self._gains_timer: asyncio.TimerHandle | None = None
        super().__init__(network, life)
        shelf.clear(self.name)  # what an earlier process has left

    def handle(self, message: Any) -> None:
        """See `ModelledWorker`."""
        if isinstance(message, messages.ReportLoad):
            self.send(self._answer())
        elif isinstance(message, messages.Generate):
            self._generate(message)
        elif isinstance(message, messages.AbortTrajectories):
            self._abort(message)
        elif isinstance(message, messages.DropKv):
            self._drop_kv(message)
        elif isinstance(message, messages.PullWeights):
            self._pull(message)
        else:
            super().handle(message)

    # ------------------------------------------------------------ another controller

    def controller_back(self) -> None:
        """See `ModelledWorker`: not in the middle of a pull, when it could not say what it serves."""
        if self.pulling:
            self.after(self._times.pull_s, self.controller_back)
        else:
            super().controller_back()

    def before_ready_again(self) -> None:
        """See `ModelledWorker`."""
        self._on_engine_event()
        self._shelf.clear(self.name)  # the controller that knew of these exports is gone
        held = {id: ended.lease for id, ended in self._ended.items()}
        held.update({id: leased.lease for id, leased in self._leased.items()})
        self.send(
            messages.RolloutJoined(
                policy_version=self.policy_version, trajectory_ids=tuple(held), leases=tuple(held.values())
            )
        )

    def after_ready_again(self) -> None:
        """All tokens since the beginning of each lease, those of one version in one message."""
        again: dict[int, list[tuple[str, _Ended]]] = {}
        for id, ended in self._ended.items():
            again.setdefault(ended.version, []).append((id, ended))
        for id, leased in self._leased.items():
            entry = _Ended(leased.lease, self.policy_version, leased.start, leased.sent, None, 0.0)
            again.setdefault(self.policy_version, []).append((id, entry))
        for version, entries in again.items():
            counts = [entry.end - entry.start for _, entry in entries]
            self.send(
                messages.TrajectoryDeltas(
                    policy_version=version,
                    trajectory_ids=tuple(id for id, _ in entries),
                    leases=tuple(entry.lease for _, entry in entries),
                    starts=np.array([entry.start for _, entry in entries], np.int32),
                    token_counts=np.array(counts, np.int32),
                    token_ids=self._arrays.token_ids(version, sum(counts)),
                    logprobs=self._arrays.logprobs(sum(counts)),
                    finish_reasons=tuple(entry.finish_reason for _, entry in entries),
                    load=self._load(),
                )
            )

    # ------------------------------------------------------------ trajectories

    def _generate(self, message: messages.Generate) -> None:
        now = self.loop.time()
        complete: list[str] = []
        for assignment in message.assignments:
            trajectory_id, lease = assignment.trajectory_id, assignment.lease
            leased = self._leased.get(trajectory_id)
            if leased is not None or lease <= self._leases.get(trajectory_id, 0):
                continue  # said twice
            if assignment.policy_version != self.policy_version:
                raise RuntimeError(
                    f"{self.name} serves version {self.policy_version}, was asked to generate {trajectory_id} with "
                    f"version {assignment.policy_version}"
                )
            prompt_id, member = int(assignment.prompt_token_ids[0]), int(trajectory_id.rpartition(".")[2])
            done = len(assignment.token_ids)
            pauses: Pauses = ()
            if self._multi_turn:
                total, cut = end_of_turn(self._workload, prompt_id, member, done)
            else:
                total = self._workload.response_tokens(prompt_id, member)
                cut = self._workload.was_cut(prompt_id, member)
                pauses = self._workload.pauses(prompt_id, member)
            if total > done + assignment.max_new_tokens:
                total, cut = done + assignment.max_new_tokens, True
            self._leased[trajectory_id] = _Leased(lease, done, "length" if cut else "stop")
            self._leases[trajectory_id] = lease
            if total <= done:  # all its tokens came before its end was heard
                complete.append(trajectory_id)
                if assignment.kv is not None:
                    self._take_kv(assignment)
                continue
            self.engine.add(
                now,
                trajectory_id,
                prompt_tokens=len(assignment.prompt_token_ids),
                remaining_tokens=total - done,
                done_tokens=done,
                pauses=pauses,
                prefix_key=trajectory_id.rpartition(".")[0],
                imports_kv=assignment.kv is not None and self._take_kv(assignment),
            )
        if complete:
            self._send_ended([(id, self._leased[id].sent) for id in complete], None)
        self._set_timers()

    def _take_kv(self, assignment: messages.TrajectoryAssignment) -> bool:
        """Whether the KV is there to be imported; says so. Its seconds count when the trajectory joins the batch."""
        taken = self._shelf.take(assignment)
        self.send(taken)
        return not taken.error

    def _drop_kv(self, message: messages.DropKv) -> None:
        for name in message.names:
            self._shelf.remove(name)
        for exporter in message.exporters:
            self._shelf.clear(exporter)

    def _abort(self, message: messages.AbortTrajectories) -> None:
        now = self.loop.time()
        self._on_engine_event()
        ended: list[tuple[str, int]] = []
        exported: list[messages.KvReference] = []
        for trajectory_id in message.trajectory_ids:
            if trajectory_id in self._leased:
                kv_tokens = self.engine.kv_tokens(now, trajectory_id) if message.export_kv else 0
                tokens = self.engine.remove(now, trajectory_id)
                if tokens is not None:
                    ended.append((trajectory_id, tokens))
                    if kv_tokens:
                        lease = self._leased[trajectory_id].lease
                        exported.append(
                            self._shelf.put(self.name, trajectory_id, lease, self.policy_version, kv_tokens)
                        )
        if ended:
            self._send_ended(ended, "abort", exported)
        self._set_timers()

    def _on_engine_event(self) -> None:
        """Take out and send what has finished by now."""
        finished = self.engine.advance(self.loop.time())
        if finished:
            self._send_ended([(one.trajectory_id, one.tokens) for one in finished], None)
        self._set_timers()

    def _set_timers(self) -> None:
        next_event = self.engine.next_event(self.loop.time())
        timer = self._timer
        if timer is not None:
            if timer.when() == next_event:
                return
            timer.cancel()
        self._timer = None if next_event is None else self.at(next_event, self._timer_due)
        if self._gains_timer is None and self._leased:
            self._gains_timer = self.after(self._delta_interval_s, self._gains_due)

    def _timer_due(self) -> None:
        self._timer = None
        self._on_engine_event()

    def _gains_due(self) -> None:
        """Every `delta_interval_s`: what the running trajectories have gained."""
        self._gains_timer = None
        self._on_engine_event()
        gains = [
            (id, tokens)
            for id, tokens in self.engine.progress_all(self.loop.time()).items()
            if tokens > self._leased[id].sent
        ]
        if gains:
            self._send(gains, [None] * len(gains))
        self._set_timers()

    # ------------------------------------------------------------ what is sent

    def _send_ended(
        self, ended: list[tuple[str, int]], finish_reason: str | None, exported: Iterable[messages.KvReference] = ()
    ) -> None:
        """The last deltas of these (id, response tokens); no reason given: each its own."""
        self._send(ended, [finish_reason or self._leased[id].finish_reason for id, _ in ended], exported)
        self._remember(ended, finish_reason)
        for id, _ in ended:
            del self._leased[id]
        if finish_reason is None and not self._multi_turn:
            for id, _ in ended:
                del self._leases[id]  # its id never comes back

    def _remember(self, ended: list[tuple[str, int]], finish_reason: str | None) -> None:
        """For as long as the controller may need to write them down."""
        now = self.loop.time()
        while self._ended and now - self._ended[oldest := next(iter(self._ended))].at > KEEP_ENDED_S:
            del self._ended[oldest]
        for id, tokens in ended:
            leased = self._leased[id]
            reason = finish_reason or leased.finish_reason
            self._ended.pop(id, None)
            self._ended[id] = _Ended(leased.lease, self.policy_version, leased.start, tokens, reason, now)

    def _send(
        self,
        tokens: list[tuple[str, int]],
        finish_reasons: Iterable[str | None],
        exported: Iterable[messages.KvReference] = (),
    ) -> None:
        starts, counts, leases = [], [], []
        for id, now_has in tokens:
            leased = self._leased[id]
            starts.append(leased.sent)
            counts.append(now_has - leased.sent)
            leases.append(leased.lease)
            leased.sent = now_has
        total = sum(counts)
        self.generated_tokens += total
        self.send(
            messages.TrajectoryDeltas(
                policy_version=self.policy_version,
                trajectory_ids=tuple([id for id, _ in tokens]),
                leases=tuple(leases),
                starts=np.array(starts, np.int32),
                token_counts=np.array(counts, np.int32),
                token_ids=self._arrays.token_ids(self.policy_version, total),
                logprobs=self._arrays.logprobs(total),
                finish_reasons=tuple(finish_reasons),
                load=self._load(),
                exported_kv=tuple(exported),
            )
        )

    def _load(self) -> messages.RolloutLoad:
        running, waiting, kv_utilization = self.engine.load(self.loop.time())
        return messages.RolloutLoad(running=running, waiting=waiting, kv_utilization=kv_utilization)

    def _answer(self) -> messages.RolloutLoad:
        step = self.engine.decode_step(self.loop.time())
        running, seconds, kv_utilization = ([], [], []) if step is None else ([value] for value in step)
        steps = messages.DecodeSteps(
            running=np.array(running, np.int32),
            seconds=np.array(seconds, np.float32),
            kv_utilization=np.array(kv_utilization, np.float32),
        )
        engine = self.engine
        prefill_s, kv_move_s = engine.prefill_s_per_token(), engine.kv_move_s_per_token()
        return replace(self._load(), steps=steps, prefill_s_per_token=prefill_s, kv_move_s_per_token=kv_move_s)

    # ------------------------------------------------------------ weights

    def _pull(self, message: messages.PullWeights) -> None:
        held = self._stores.held(message.store)
        version = message.policy_version if message.exact or not held else held[-1]
        if version not in held or version < message.policy_version:
            newest = held[-1] if held else None
            error = f"store {message.store} does not hold it (its newest is {newest})"
            self.send(messages.PullFailed(policy_version=message.policy_version, error=error))
            return
        seconds = self._times.pull_s
        if seconds <= 0:
            self._pulled(version, 0.0)
            return
        self.pulling = True
        self.engine.stop(self.loop.time())
        self._set_timers()
        self.after(seconds, self._pulled, version, seconds)

    def _pulled(self, version: int, seconds: float) -> None:
        self.pulling = False
        self.policy_version = version
        self.engine.resume(self.loop.time())
        nbytes = self._times.nbytes
        self.send(messages.WeightsPulled(policy_version=version, seconds=seconds, nbytes=nbytes))
        self._set_timers()

    # ------------------------------------------------------------ faults

    def freeze(self) -> None:
        """See `ModelledWorker`: what was computed before has been seen by nobody, and stays."""
        self.engine.stop(self.loop.time())

    def thaw(self) -> None:
        """See `ModelledWorker`."""
        if not self.pulling:
            self.engine.resume(self.loop.time())
        self._set_timers()

    def ended(self) -> None:
        """See `ModelledWorker`."""
        for timer in (self._timer, self._gains_timer):
            if timer is not None:
                timer.cancel()
