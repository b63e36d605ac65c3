from __future__ import annotations

from laminar.rewards.regex_reward import RegexReward


def test_a_format() -> None:
    reward = RegexReward(pattern=r"<think>.*</think>\s*<answer>.*</answer>", full=True)
    assert reward(response=" <think>a\nb</think>\n<answer>1</answer>\n", answer="") == 1.0
    assert reward(response="Well: <think>a</think><answer>1</answer>", answer="") == 0.0
    assert RegexReward(pattern="<answer>", full=False)(response="Well: <answer>", answer="") == 1.0


def test_an_answer_in_a_group_is_compared_and_the_last_match_counts() -> None:
    reward = RegexReward(pattern=r"<answer>(?P<answer>.*?)</answer>", full=False)
    assert reward(response="<answer>1</answer> no, <answer> 2\n3 </answer>", answer="2 3") == 1.0
    assert reward(response="<answer>2 3</answer> no, <answer>1</answer>", answer="2 3") == 0.0
    assert reward(response="2 3", answer="2 3") == 0.0
    optional = RegexReward(pattern=r"answer(: (?P<answer>\d+))?", full=False)
    assert optional(response="answer", answer="") == 0.0
