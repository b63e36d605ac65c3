"""`reasoning_gym_retry`: wrong answers get another try."""

from laminar.environments.environment import EnvironmentPrompt
from laminar.environments.reasoning_gym_retry import ReasoningGymRetry

PROMPT = EnvironmentPrompt(text="2 + 2?", answer="4", metadata={}, source="test")


async def score(prompt, response):
    return 1.0 if response.strip() == prompt.answer else 0.25


async def test_a_wrong_answer_gets_a_word_and_another_try():
    retry = ReasoningGymRetry(score=score, try_cost=0.1)
    assert await retry.reset(PROMPT) is None
    wrong = await retry.step("5")
    assert (wrong.done, wrong.as_message, wrong.reward) == (False, True, -0.1)
    assert "not right" in wrong.observation
    right = await retry.step(" 4")
    assert (right.done, right.reward) == (True, 0.0)


async def test_what_counts_as_right_can_be_set():
    retry = ReasoningGymRetry(score=score, solved_at=0.2)
    await retry.reset(PROMPT)
    assert (await retry.step("5")).done
