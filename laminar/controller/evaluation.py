"""One evaluation in the making: which of its trajectories wait, which are generated, which are scored.

Invariants: all its tokens are of one policy version, fixed when its first trajectory starts; a trajectory waits here, or is
in the partial response pool, or has finished, never two of them. A state machine without tasks and without a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from laminar.evaluation_result import EvaluatedResponse
from laminar.trajectory import Prompt, Trajectory, TrajectoryState


class Evaluation:
    """Made for a list of prompts; it takes whatever version, from `least_version` on, the first rollout to begin with it serves."""

    def __init__(self, number: int, prompts: Sequence[Prompt], samples: int, *, least_version: int) -> None:
        self.least_version = least_version
        self.policy_version: int | None = None  # None: it has not begun
        self.hosts: dict[str, None] = {}  # rollouts that stay with its version as long as it needs them
        self.started_over = 0
        self._prompts = prompts
        self._samples = samples
        self._texts: dict[str, str] = {}  # by trajectory
        self._make(number)

    def _make(self, number: int) -> None:
        self.number = number
        self.trajectories = [
            # One dot, before the member, as in the ids of trajectories that are trained.
            Trajectory(trajectory_id=f"e{number}-{place}.{sample}", group_id=place, prompt=prompt, evaluation=number)
            for place, prompt in enumerate(self._prompts)
            for sample in range(self._samples)
        ]
        self.waiting: deque[Trajectory] = deque(self.trajectories)
        self.in_progress: dict[str, Trajectory] = {}  # leased, and not finished
        self.scored = 0  # trajectories that are through

    @property
    def done(self) -> bool:
        """All of them are."""
        return self.scored == len(self.trajectories)

    def take(self, count: int) -> list[Trajectory]:
        """Up to `count` that wait; they are to be leased to a host."""
        taken = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        self.in_progress.update((trajectory.trajectory_id, trajectory) for trajectory in taken)
        return taken

    def orphaned(self, trajectory: Trajectory) -> None:
        """Its rollout is gone; another host goes on with it, all tokens included."""
        if self.in_progress.pop(trajectory.trajectory_id, None) is not None:
            self.waiting.appendleft(trajectory)

    def finished(self, trajectory: Trajectory) -> None:
        """All its tokens are there."""
        self.in_progress.pop(trajectory.trajectory_id, None)

    def note_text(self, trajectory: Trajectory, text: str) -> None:
        """What it says, as it was scored."""
        self._texts[trajectory.trajectory_id] = text

    def start_over(self, number: int) -> None:
        """No rollout has its version any more: all is generated anew, under another number, with a newer version."""
        assert self.policy_version is not None and not self.in_progress
        for trajectory in self.trajectories:
            if trajectory.state is not TrajectoryState.FAILED:
                trajectory.move_to(TrajectoryState.EVICTED)
        self.least_version = max(self.least_version, self.policy_version)
        self.policy_version = None
        self.started_over += 1
        self.hosts.clear()
        self._texts.clear()
        self._make(number)

    def responses(self) -> tuple[EvaluatedResponse, ...]:
        """What was found, in the order of the prompts."""
        return tuple(self._response(trajectory) for trajectory in self.trajectories)

    def _response(self, trajectory: Trajectory) -> EvaluatedResponse:
        prompt = trajectory.prompt
        assert trajectory.policy_version is not None and trajectory.finish_reason is not None
        return EvaluatedResponse(
            evaluation=self.number,
            policy_version=trajectory.policy_version,
            prompt_id=prompt.prompt_id,
            sample=int(trajectory.trajectory_id.rpartition(".")[2]),
            source=prompt.source,
            prompt=prompt.text,
            answer=prompt.answer,
            response=self._texts.get(trajectory.trajectory_id, ""),
            response_tokens=trajectory.num_tokens,
            finish_reason=trajectory.finish_reason,
            reward=trajectory.reward,
            reward_parts=trajectory.reward_parts or {},
            error=trajectory.error or "",
        )
