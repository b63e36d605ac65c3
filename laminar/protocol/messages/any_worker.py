"""What any worker and the controller say to each other: who comes, who can take work, who lives, who is to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkerKind = Literal["rollout", "relay", "trainer", "environment"]

# ---------------------------------------------------------------- any worker -> controller


@dataclass(kw_only=True, slots=True, frozen=True)
class Hello:
    """First message of a worker: who it is. The controller answers with `Welcome` or `Shutdown`."""

    kind: WorkerKind
    index: int  # replica index, relay index, trainer rank, environment worker index
    pid: int
    host: str
    version: str  # laminar's version; must equal the controller's


@dataclass(kw_only=True, slots=True, frozen=True)
class Progress:
    """What a worker is doing while it warms up, as one line for a person to read."""

    text: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Ready:
    """The worker can take work."""

    detail: str  # one line for a person: the engine taken, the device, the model's size


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerFailed:
    """The worker cannot go on and is about to exit."""

    error: str  # one message for a person
    user_error: bool  # the user's input or machine is at fault


# ---------------------------------------------------------------- both directions


@dataclass(kw_only=True, slots=True, frozen=True)
class Heartbeat:
    """Still there."""


# ---------------------------------------------------------------- controller -> any worker


@dataclass(kw_only=True, slots=True, frozen=True)
class Welcome:
    """The worker belongs to the run now; all that it needs to know comes with this."""

    run_id: str
    run_dir: str
    config: str  # the resolved ExperimentConfig as JSON
    store: str  # weight store in shared memory that this worker writes (trainer: the master relay's; relay: its own)
    hop_key: bytes  # secret of the run; whoever opens a TCP hop shows that it knows it
    version_bytes: int  # of one weight version, 0 if it is not known yet


@dataclass(kw_only=True, slots=True, frozen=True)
class Shutdown:
    """End now, cleanly."""

    reason: str
