"""A continuous-batching inference engine that advances in closed form from event to event, never token by token.

All running trajectories gain one token per decode step, so between two events a batch's progress is one number, and the time of
n steps is a quadratic in n (`step_time.py`, `engine_batch.py`). What comes in between two step borders takes effect at the
next one. `docs/simulation-models.md` lists the assumptions. Invariant: the same calls give the same floats.
"""

from __future__ import annotations

import math

from laminar.simulation.models.engine_batch import EngineBatch
from laminar.simulation.models.engine_statistics import EngineStatistics
from laminar.simulation.models.resident import PAUSED, REMOVED, RUNNING, Finished, Pauses, Resident

__all__ = ["EngineStatistics", "Finished", "Pauses", "RooflineEngine"]

USUAL_CONTEXT = 4096  # tokens


class RooflineEngine(EngineBatch):
    """One replica. Times are seconds on the caller's clock and never go back from call to call."""

    # ------------------------------------------------------------------------------------------------ what comes in

    def add(
        self,
        now: float,
        trajectory_id: str,
        *,
        prompt_tokens: int,
        remaining_tokens: int,
        done_tokens: int = 0,
        pauses: Pauses = (),
        prefix_key: str | None = None,
        imports_kv: bool = False,
    ) -> None:
        """Queue a trajectory that starts, or goes on behind `done_tokens` response tokens.

        Args:
            pauses: tool calls of the whole response; those at or before `done_tokens` are over.
            prefix_key: trajectories with the same key have the same prompt; its KV is computed and held once.
            imports_kv: the KV of its tokens so far comes with it, and is copied rather than computed.

        Raises:
            ValueError: it is here already, has nothing to generate, or could never fit.
        """
        total = done_tokens + remaining_tokens
        if trajectory_id in self._all:
            raise ValueError(f"trajectory {trajectory_id} is in this engine already")
        if prompt_tokens < 1 or remaining_tokens < 1 or done_tokens < 0:
            raise ValueError(f"trajectory {trajectory_id}: {prompt_tokens=}, {done_tokens=}, {remaining_tokens=}")
        if prompt_tokens + total > self.kv_capacity:
            raise ValueError(
                f"trajectory {trajectory_id}: {prompt_tokens} + {total} tokens, the KV cache has {self.kv_capacity}"
            )
        self._process(now, including_now=False)
        trajectory = Resident(trajectory_id, prompt_tokens, done_tokens, total, pauses, prefix_key, imports_kv)
        self._all[trajectory_id] = trajectory
        self._waiting.append(trajectory)
        self._num_waiting += 1
        if self._num_waiting == 1 and self._head_fits():  # else the head of the queue is held up, or has cut already
            self._cut(now)

    def remove(self, now: float, trajectory_id: str) -> int | None:
        """Abort a trajectory: response tokens that it had by now, or None if it has finished (or never was here)."""
        self._process(now)
        trajectory = self._all.pop(trajectory_id, None)
        if trajectory is None:
            return None
        tokens = self._tokens(trajectory, now)
        if trajectory.state in (RUNNING, PAUSED):
            if trajectory.state == RUNNING:
                del self._running[trajectory_id]
            else:
                self._num_paused -= 1
            self._leaving.append((trajectory, trajectory.state, tokens))
            self._cut(now)
        else:
            self._num_waiting -= 1
        trajectory.state = REMOVED
        if self._head_fits():
            self._cut(now)
        return tokens

    def kv_tokens(self, now: float, trajectory_id: str) -> int:
        """Tokens whose KV is in the cache for this trajectory: 0 if it waits (or is not here)."""
        self._process(now)
        trajectory = self._all.get(trajectory_id)
        if trajectory is None or trajectory.state not in (RUNNING, PAUSED):
            return 0
        return trajectory.prompt + self._tokens(trajectory, now)

    def stop(self, now: float) -> None:
        """Freeze decoding and prefill where they are, as while weights are loaded; pauses go on running out."""
        self._process(now)
        if self._stopped_at is None:
            self._stopped_at = now
            if not self._batch:
                self._account(now, 0, self._statistics)
                self._start = now

    def resume(self, now: float) -> None:
        """Go on from where `stop` froze it."""
        if self._stopped_at is None:
            return
        shift = now - self._stopped_at
        self._statistics.stopped_seconds += shift
        self._statistics.kv_token_seconds += shift * self._kv_tokens(now)
        begun = self._steps.steps_to_reach(self._stopped_at - self._decode_start)
        self._stopped_at = None
        self._start += shift
        if self._batch:
            self._decode_start += shift
            self._end_time = self._decode_start + self._steps.seconds(self._end_step)
            self._end_by_pause_end(begun)
        elif self._end_time < now:
            self._end_time = now

    # ------------------------------------------------------------------------------------------------ what comes out

    def advance(self, now: float) -> list[Finished]:
        """What finished up to now, in order, since the last call."""
        self._process(now)
        finished, self._finished = self._finished, []
        return finished

    def next_event(self, now: float) -> float | None:
        """When the batch next changes (finish, pause, its end, admission, KV overflow); None: never, unless asked to."""
        self._process(now)
        if self._finished:
            return self._finished[0].time
        if self._stopped_at is not None or self._end_time == math.inf:
            return None
        return self._end_time

    def progress(self, now: float, trajectory_id: str) -> int:
        """Response tokens of a trajectory that is here.

        Raises:
            KeyError: it is not (any more).
        """
        self._process(now)
        return self._tokens(self._all[trajectory_id], now)

    def progress_all(self, now: float) -> dict[str, int]:
        """Response tokens of all trajectories that are here, in the order in which they were added."""
        self._process(now)
        step = self._step + self._whole_steps(now)
        return {
            id: trajectory.base + step - trajectory.joined_step if trajectory.state == RUNNING else trajectory.base
            for id, trajectory in self._all.items()
        }

    def load(self, now: float) -> tuple[int, int, float]:
        """Running (those in a tool call included: they keep their KV), waiting, and KV utilization from 0 to 1."""
        self._process(now)
        return len(self._running) + self._num_paused, self._num_waiting, self._kv_tokens(now) / self.kv_capacity

    def decode_step(self, now: float) -> tuple[int, float, float] | None:
        """Trajectories, seconds and KV utilization of a decode step at this moment; None where nothing is decoded."""
        self._process(now)
        running = len(self._running)
        if not running:
            return None
        attended = self._attended + self._batch * self._whole_steps(now)
        return running, self._costs.steps(running, attended).seconds(1), self._kv_tokens(now) / self.kv_capacity

    def prefill_s_per_token(self) -> float:
        """Seconds of prefill per token of context, for a context of usual length."""
        return self._costs.prefill_seconds(USUAL_CONTEXT, 0) / USUAL_CONTEXT

    def kv_move_s_per_token(self) -> float:
        """Seconds to take in the KV of a token."""
        return self._costs.kv_import_seconds(USUAL_CONTEXT) / USUAL_CONTEXT

    def statistics(self, now: float) -> EngineStatistics:
        """Where the time went, up to now."""
        self._process(now)
        seen = now if self._stopped_at is None else self._stopped_at
        result = self._statistics.copy()
        self._account(seen, self._whole_steps(now), result)
        if self._stopped_at is not None:
            result.stopped_seconds += now - seen
            result.kv_token_seconds += (now - seen) * self._kv_tokens(now)
        return result
