"""A trajectory in a modelled inference engine."""

from __future__ import annotations

from dataclasses import dataclass

Pauses = tuple[tuple[int, float], ...]  # (after this many response tokens, seconds), ascending

WAITING, RUNNING, PAUSED, REMOVED = range(4)


@dataclass(slots=True, frozen=True)
class Finished:
    """A trajectory that has all its tokens."""

    trajectory_id: str
    tokens: int  # response tokens, those that it came with included
    time: float


class Resident:
    """A trajectory in this engine."""

    __slots__ = (
        *(
            "base",
            "id",
            "imports",
            "joined",
            "joined_step",
            "next_pause",
            "pauses",
            "prefix",
            "prompt",
            "state",
            "total",
        ),
    )

    def __init__(
        self, id: str, prompt: int, done: int, total: int, pauses: Pauses, prefix: str | None, imports: bool
    ) -> None:
        self.id = id
        self.prompt = prompt  # tokens
        self.base = done  # response tokens when it last joined the batch, or now if it is not in it
        self.total = total  # response tokens when finished
        self.pauses = pauses
        self.next_pause = sum(after <= done for after, _ in pauses) if pauses else 0
        self.prefix = prefix
        self.imports = imports  # its KV came with it; not yet in the cache
        self.state = WAITING
        self.joined = 0  # serial number of its last joining the batch; tells stale heap entries from live ones
        self.joined_step = 0
