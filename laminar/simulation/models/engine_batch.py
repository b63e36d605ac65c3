"""The batch of a modelled inference engine, from step border to step border; `engine_model.py` is its interface.

A *segment* is a run of decode steps with an unchanged batch: the prefill of what was just admitted (`_start` to
`_decode_start`), then `_end_step` steps until `_end_time`. Only at its end, a step border, does the batch change: finishes,
pauses and their ends, admissions, preemptions. A counter of steps and a heap of the step at which each trajectory finishes or
pauses are all that this takes.

Invariants: the KV cache never holds more than `kv_capacity` tokens; waiting trajectories are admitted first in, first out; no
token is lost by a preemption.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush

from laminar.simulation.models.engine_statistics import EngineStatistics
from laminar.simulation.models.hardware import CONSTANTS, Constants, GpuSpec
from laminar.simulation.models.language_models import ModelSpec, kv_capacity
from laminar.simulation.models.resident import PAUSED, REMOVED, RUNNING, WAITING, Finished, Resident
from laminar.simulation.models.step_time import StepCosts


class EngineBatch:
    """State and borders of one replica's batch."""

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel: int,
        max_running: int,
        constants: Constants = CONSTANTS,
        *,
        kv_capacity_tokens: int | None = None,
    ) -> None:
        self.kv_capacity = kv_capacity_tokens or kv_capacity(model, gpu, tensor_parallel, constants)
        self._costs = StepCosts(model, gpu, tensor_parallel, constants)
        self._max_running = max_running
        self._all: dict[str, Resident] = {}  # in the order of `add`
        self._running: dict[str, Resident] = {}  # in the order of joining the batch: the last is the youngest
        self._waiting: deque[Resident] = deque()  # removed ones stay in it until they reach its head
        self._num_waiting = 0
        self._num_paused = 0
        self._leaving: list[tuple[Resident, int, int]] = []  # removed since the last border: its state and tokens then
        self._finished: list[Finished] = []  # not yet handed out by `advance`
        self._stops: list[tuple[int, int, Resident]] = []  # heap of (step of finish or pause, joined, trajectory)
        self._pause_ends: list[tuple[float, int, Resident]] = []  # heap
        self._prefixes: dict[str, int] = {}  # prefix key -> holders of KV
        self._joins = 0
        self._kv_used = 0  # tokens in the KV cache at the start of the segment, a shared prefix once
        self._attended = 0  # tokens that the batch attends to, a shared prefix once per trajectory
        self._step = 0  # decode steps up to the start of the segment
        self._batch = 0  # trajectories in the segment's steps
        self._start = self._decode_start = 0.0
        self._end_step = 0
        self._end_time = math.inf
        self._steps = self._costs.steps(0, 0)
        self._stopped_at: float | None = None
        self._statistics = EngineStatistics()

    def _process(self, now: float, *, including_now: bool = True) -> None:
        """Pass all step borders up to now."""
        if self._stopped_at is None:
            while self._end_time < now or (including_now and self._end_time == now):
                self._border()

    def _border(self) -> None:
        """End the segment, change the batch, begin the next segment."""
        time, steps = self._end_time, self._end_step
        self._account(time, steps, self._statistics)
        grown = self._batch * steps
        self._step += steps
        self._kv_used += grown
        self._attended += grown
        if self._leaving:
            self._drop_leaving()
        stops, step = self._stops, self._step
        while stops and stops[0][0] <= step:
            _, joined, resident = heappop(stops)
            if resident.joined == joined and resident.state == RUNNING:
                self._finish_or_pause(resident, time)
        pause_ends = self._pause_ends
        while pause_ends and pause_ends[0][0] <= time:
            _, joined, resident = heappop(pause_ends)
            if resident.joined == joined and resident.state == PAUSED:
                self._num_paused -= 1
                self._join(resident)
        prefill_s = self._admit() if self._waiting else 0.0
        while self._running and self._kv_used + len(self._running) > self.kv_capacity:
            self._preempt_youngest()
        self._begin_segment(time, prefill_s)

    def _drop_leaving(self) -> None:
        for resident, state, tokens in self._leaving:
            if state == RUNNING:
                resident.base += self._step - resident.joined_step
                self._attended -= resident.prompt + resident.base
                self._statistics.generated_tokens -= resident.base - tokens  # the step under way was in vain for it
            self._release(resident)
        self._leaving.clear()

    def _finish_or_pause(self, resident: Resident, time: float) -> None:
        resident.base += self._step - resident.joined_step
        self._attended -= resident.prompt + resident.base
        del self._running[resident.id]
        if resident.base >= resident.total:
            resident.state = REMOVED
            del self._all[resident.id]
            self._release(resident)
            self._finished.append(Finished(resident.id, resident.base, time))
            return
        resident.state = PAUSED
        self._num_paused += 1
        seconds = resident.pauses[resident.next_pause][1]
        resident.next_pause += 1
        heappush(self._pause_ends, (time + seconds, resident.joined, resident))

    def _join(self, resident: Resident) -> None:
        """Into the decode batch; its KV is there."""
        self._joins += 1
        resident.joined = self._joins
        resident.joined_step = self._step
        resident.state = RUNNING
        self._running[resident.id] = resident
        self._attended += resident.prompt + resident.base
        stop = resident.total
        if resident.next_pause < len(resident.pauses):
            stop = min(stop, resident.pauses[resident.next_pause][0])
        heappush(self._stops, (self._step + stop - resident.base, self._joins, resident))

    def _admit(self) -> float:
        """Take in from the head of the queue all that fits; seconds of its prefill."""
        seconds = 0.0
        while self._head_fits():
            resident = self._waiting.popleft()
            self._num_waiting -= 1
            new = self._new_kv(resident)
            if resident.prefix is not None:
                self._prefixes[resident.prefix] = self._prefixes.get(resident.prefix, 0) + 1
            self._kv_used += new
            if resident.imports:
                resident.imports = False  # a preemption throws it away
                self._statistics.imported_tokens += new
                seconds += self._costs.kv_import_seconds(new)
            else:
                self._statistics.prefilled_tokens += new
                seconds += self._costs.prefill_seconds(new, resident.prompt + resident.base - new)
            self._join(resident)
        return seconds

    def _head_fits(self) -> bool:
        """There is a head of the queue, and a place and KV for it and for a step of all."""
        waiting = self._waiting
        while waiting and waiting[0].state == REMOVED:
            waiting.popleft()
        if not waiting or len(self._running) + self._num_paused >= self._max_running:
            return False
        return self._kv_used + self._new_kv(waiting[0]) + len(self._running) + 1 <= self.kv_capacity

    def _new_kv(self, resident: Resident) -> int:
        return resident.base if resident.prefix in self._prefixes else resident.prompt + resident.base

    def _preempt_youngest(self) -> None:
        _, resident = self._running.popitem()
        resident.base += self._step - resident.joined_step
        self._attended -= resident.prompt + resident.base
        used = self._kv_used
        self._release(resident)
        resident.state = WAITING
        self._waiting.appendleft(resident)
        self._num_waiting += 1
        self._statistics.preemptions += 1
        self._statistics.preempted_tokens += used - self._kv_used

    def _release(self, resident: Resident) -> None:
        """Give its KV back; a shared prompt's with the last of its holders."""
        self._kv_used -= resident.base
        if resident.prefix is not None:
            holders = self._prefixes[resident.prefix] - 1
            if holders:
                self._prefixes[resident.prefix] = holders
                return
            del self._prefixes[resident.prefix]
        self._kv_used -= resident.prompt

    def _begin_segment(self, time: float, prefill_s: float) -> None:
        self._start = time
        self._decode_start = time + prefill_s
        self._batch = batch = len(self._running)
        if not batch:
            self._end_step = 0
            self._end_time = self._next_pause_end()
            return
        self._steps = self._costs.steps(batch, self._attended)
        stops = self._stops
        while stops[0][2].joined != stops[0][1] or stops[0][2].state != RUNNING:
            heappop(stops)
        self._end_step = min(stops[0][0] - self._step, (self.kv_capacity - self._kv_used) // batch)
        self._end_time = self._decode_start + self._steps.seconds(self._end_step)
        if self._pause_ends:
            self._end_by_pause_end(0)

    def _next_pause_end(self) -> float:
        ends = self._pause_ends
        while ends and (ends[0][2].joined != ends[0][1] or ends[0][2].state != PAUSED):
            heappop(ends)
        return ends[0][0] if ends else math.inf

    def _end_by_pause_end(self, begun: int) -> None:
        """End at the first border at which a pause is over, but not before the `begun` steps that have begun."""
        end = self._next_pause_end()
        if end < self._end_time:
            steps = self._steps.steps_to_reach(end - self._decode_start)
            self._end_after(max(steps, begun))

    def _end_after(self, steps: int) -> None:
        if steps < self._end_step:
            self._end_step = steps
            self._end_time = self._decode_start + self._steps.seconds(steps)

    def _cut(self, now: float) -> None:
        """End the segment with the step that is under way (or with the prefill that is)."""
        seen = self._engine_time(now)
        if seen >= self._end_time:
            return
        if self._batch:
            self._end_after(self._steps.steps_to_reach(seen - self._decode_start))
        else:
            self._end_time = seen

    def _engine_time(self, now: float) -> float:
        return now if self._stopped_at is None else self._stopped_at

    def _whole_steps(self, now: float) -> int:
        """Steps of the segment done by now."""
        seen = self._engine_time(now)
        if seen >= self._end_time:
            return self._end_step
        return self._steps.whole_steps(seen - self._decode_start) if self._batch else 0

    def _kv_tokens(self, now: float) -> int:
        """Tokens in the KV cache now."""
        return self._kv_used + self._batch * self._whole_steps(now)

    def _tokens(self, resident: Resident, now: float) -> int:
        """Its response tokens by now."""
        if resident.state != RUNNING:
            return resident.base
        return resident.base + self._step + self._whole_steps(now) - resident.joined_step

    def _account(self, until: float, steps: int, statistics: EngineStatistics) -> None:
        """Add the segment up to a time within it, at which this many of its steps are done."""
        if until == self._start:
            return
        used = self._kv_used
        if not self._batch:
            seconds = until - self._start
            if used:
                statistics.environment_seconds += seconds
            else:
                statistics.idle_seconds += seconds
            statistics.kv_token_seconds += used * seconds
            return
        prefill = min(until, self._decode_start) - self._start
        decode = max(0.0, until - self._decode_start)
        unfinished = decode - self._steps.seconds(steps)
        statistics.prefill_seconds += prefill
        statistics.decode_seconds += decode
        statistics.generated_tokens += self._batch * steps
        statistics.kv_token_seconds += (
            used * prefill + self._steps.integral(steps, used, self._batch) + unfinished * (used + self._batch * steps)
        )
