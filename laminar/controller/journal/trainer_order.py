"""What the trainer was last told to do: a controller that takes another's place says it again, in the same words.

Invariant: an order's number grows over all controllers of a run, so that a rank obeys each order once and answers it as often as
it is given.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerOrder:
    """One order to all ranks that has not been answered by all."""

    number: int
    kind: Literal["publish", "train", "save", "load"]
    step: int
    part: int = 0
    policy_version: int | None = None  # that it publishes; None: none
    group_ids: tuple[int, ...] = ()

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainerOrder:
        """What `to_json` was asked for."""
        fields = json.loads(text)
        return cls(**{**fields, "group_ids": tuple(fields["group_ids"])})
