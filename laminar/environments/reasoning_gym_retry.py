"""`reasoning_gym_retry`: an answer that the reward does not find right gets another try, after a word about it.

It asks the run's own reward, so it goes with every reward that scores one response; the last try is what is scored in the end.
"""

from __future__ import annotations

from laminar.environments.environment import EnvironmentPrompt, Score, Step


class ReasoningGymRetry:
    """Says that an answer is wrong."""

    def __init__(
        self,
        *,
        score: Score,
        solved_at: float = 1.0,
        feedback: str = "\nThat is not right. Try again.\n",
        try_cost: float = 0.0,
    ) -> None:
        """
        Args:
            score: the run's reward.
            solved_at: a reward from which on an answer counts as right.
            feedback: what the model reads after a wrong one; a user message of its own under `data.chat`.
            try_cost: taken from the trajectory's reward for each wrong answer.
        """
        self._score = score
        self._solved_at = solved_at
        self._feedback = feedback
        self._try_cost = try_cost
        self._prompt: EnvironmentPrompt | None = None

    async def reset(self, prompt: EnvironmentPrompt) -> str | None:
        """There is nothing to say before the first try."""
        self._prompt = prompt
        return None

    async def step(self, response: str) -> Step:
        """Judge a try."""
        assert self._prompt is not None  # `reset` came before
        if await self._score(self._prompt, response) >= self._solved_at:
            return Step(done=True)
        return Step(observation=self._feedback, as_message=True, reward=-self._try_cost)

    async def close(self) -> None:
        """Nothing is held."""
