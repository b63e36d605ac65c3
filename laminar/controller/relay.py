"""One relay as the controller knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.protocol.messages import RelayJoined, WeightsStored

MASTER = 0  # the relay whose store the trainer writes into, where it lives on the trainer's host
FOLDER = -1  # stands for the relay where there is none: rollouts serve the weights that lie in model.path


def store_name(rank: int) -> str:
    """Name of a relay's weight store in shared memory; empty for FOLDER."""
    return "" if rank == FOLDER else f"relay-{rank}"


@dataclass(kw_only=True, slots=True)
class Relay:
    """A relay, there or not: what its store holds stays in its host's shared memory while it is away."""

    rank: int
    keep: int  # versions that it keeps
    host: str = ""
    address: str = ""  # where it takes TCP hops
    world: str = ""  # its mpirun world; empty outside of one
    world_rank: int = -1
    library: str = ""  # its MPI; empty outside of a world
    versions: list[int] = field(default_factory=list)  # that its store holds complete, oldest first
    changes: int = 0  # versions that it has stored so far: tells news of it from what is older
    last: WeightsStored | None = None  # how it got the last version that came to it

    @property
    def name(self) -> str:
        """Its worker's name."""
        return f"relay-{self.rank}"

    @property
    def stored_version(self) -> int:
        """Newest version that it holds; -1 if none."""
        return self.versions[-1] if self.versions else -1

    def holds(self, version: int) -> bool:
        """Whether a rollout can still pull this version."""
        return version in self.versions

    def joined(self, message: RelayJoined) -> None:
        """It has started (again), and says what its store holds."""
        self.changes += 1
        self.versions = sorted(message.versions)
        self.address, self.library = message.address, message.library
        self.world, self.world_rank = message.world, message.world_rank

    def store(self, version: int) -> None:
        """It holds one more; the oldest beyond what it keeps are gone."""
        self.changes += 1
        if version not in self.versions:
            self.versions = sorted([*self.versions, version])[-self.keep :]

    def forget(self, version: int) -> None:
        """It turned out not to hold this version."""
        self.versions = [held for held in self.versions if held != version]
