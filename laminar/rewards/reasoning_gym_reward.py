"""The reward `reasoning_gym`: the score of the generator that made the prompt.

Invariant: the scorer sees the entry as its generator made it, rebuilt from what travelled with the trajectory.
"""

from __future__ import annotations

import logging
from typing import Any

from laminar.config.data_schema import ReasoningGymSource
from laminar.data.reasoning_gym_source import OPEN_ANSWER, component_labels, make_generator

log = logging.getLogger("laminar.reward")


class ReasoningGymReward:
    """Scores a response with `score_answer` of the data set that its prompt came from."""

    def __init__(self, config: ReasoningGymSource, key: str = "data.source") -> None:
        """Make one generator per component of the mixture; they only score, so seed and size do not matter.

        Args:
            config: the source.
            key: its dotted key, for messages.

        Raises:
            UserError: unknown data set, or parameters that its generator refuses.
        """
        labels = component_labels(config.datasets)
        self._scorers = {
            label: make_generator(component, f"{key}.datasets[{place}]", seed=0, size=1)
            for place, (label, component) in enumerate(zip(labels, config.datasets, strict=True))
        }
        self._complained: set[str] = set()

    def __call__(self, *, prompt: str, response: str, answer: str, metadata: dict[str, Any], source: str) -> float:
        """The generator's score of the response without white space at its ends.

        Several generators raise on text that is no answer of their form (a word where they want factors). That is a
        wrong answer: 0, logged once per data set. If the generator cannot score its own answer either, it raises.
        """
        scorer = self._scorers[source]
        expected = None if metadata.get(OPEN_ANSWER) else answer
        entry = {"question": prompt, "answer": expected, "metadata": metadata}
        try:
            return float(scorer.score_answer(response.strip(), entry))
        except Exception as error:  # foreign code raises what it likes
            if expected is not None:
                scorer.score_answer(expected, entry)
            if source not in self._complained:
                self._complained.add(source)
                log.warning("%s cannot score %r (%s: %s): 0", source, response[:80], type(error).__name__, error)
            return 0.0
