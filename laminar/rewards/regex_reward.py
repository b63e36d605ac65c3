"""The reward `regex`: a format that the response keeps, or an answer that is found in it by a pattern."""

from __future__ import annotations

import re
from collections import deque

from laminar.rewards.exact import exact_reward

ANSWER_GROUP = "answer"


class RegexReward:
    """Matches a pattern, and compares its group `answer` with the answer where it has one."""

    def __init__(self, *, pattern: str, full: bool) -> None:
        """`full`: the response as a whole has to match, white space at its ends aside.

        Raises:
            re.error: no regular expression.
        """
        self._pattern = re.compile(pattern, re.DOTALL)
        self._full = full
        self._compares = ANSWER_GROUP in self._pattern.groupindex

    def __call__(self, *, response: str, answer: str) -> float:
        """1 or 0."""
        if self._full:
            found = self._pattern.fullmatch(response.strip())
        else:
            matches = deque(self._pattern.finditer(response), maxlen=1)
            found = matches[0] if matches else None
        if found is None:
            return 0.0
        if not self._compares:
            return 1.0
        text = found[ANSWER_GROUP]
        return 0.0 if text is None else exact_reward(response=text, answer=answer)
