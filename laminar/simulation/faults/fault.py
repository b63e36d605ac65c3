"""What can go wrong in a run, one frozen dataclass a kind.

Invariant: a fault holds plain values only, so that it prints, compares, and goes through JSON unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from laminar.errors import UserError

TRAINER = "trainer"  # all ranks: torchrun ends them together
MOMENTS = ("", "publish", "broadcast", "loss", "restart")

Moment = Literal["", "publish", "broadcast", "loss", "restart"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Fault:
    """Base: when it strikes."""

    at: float  # virtual seconds since the start of the run
    moment: Moment = ""
    """It waits from `at` on for the next of these, then for `delay_s`: a publish, the start of a broadcast, the loss of any
    worker, the start of a worker in place of a lost one; "" strikes at `at` itself."""
    delay_s: float = 0.0  # after the moment


@dataclass(kw_only=True, slots=True, frozen=True)
class Kill(Fault):
    """The process is gone at once (SIGKILL); whoever started it notices."""

    worker: str  # "rollout-1", or "trainer" for all ranks


@dataclass(kw_only=True, slots=True, frozen=True)
class Fail(Fault):
    """The worker says that it cannot go on, and ends (an error inside the engine)."""

    worker: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Hang(Fault):
    """The process stands still (SIGSTOP) and then goes on."""

    worker: str
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Partition(Fault):
    """No message passes between the controller and the worker; what was sent arrives afterwards."""

    worker: str
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class SlowLink(Fault):
    """Every message to and from the worker takes longer."""

    worker: str
    seconds: float
    extra_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Duplicates(Fault):
    """Messages of the worker arrive a second time, with this probability, up to a second later."""

    worker: str
    seconds: float
    probability: float


@dataclass(kw_only=True, slots=True, frozen=True)
class BadReward(Fault):
    """The next rewards asked for fail: they never come, the user's function raises, or the value is NaN."""

    how: Literal["hang", "raise", "nan"]
    count: int


@dataclass(kw_only=True, slots=True, frozen=True)
class BadTurn(Fault):
    """The environment fails on the next turns: it never answers, raises, or its reward is NaN."""

    how: Literal["hang", "raise", "nan"]
    count: int


@dataclass(kw_only=True, slots=True, frozen=True)
class FailedCheckpoint(Fault):
    """The next checkpoints cannot be written (the disk is full)."""

    count: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Pause(Fault):
    """The user pauses, and resumes later."""

    generation: bool
    training: bool
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class RelayTierLost(Fault):
    """mpirun is killed, and with it all relays that it had started."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HostLost(Fault):
    """A host is gone, with the relay, its store, the rollouts that pull from it and, on relay 0's host, the trainer."""

    relay: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Add(Fault):
    """The user starts more rollouts."""

    count: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Remove(Fault):
    """The user takes a rollout out of the run; what it has goes on elsewhere. The last one stays."""

    worker: str


@dataclass(kw_only=True, slots=True, frozen=True)
class Drain(Fault):
    """The user has a rollout finish what it has, and leave. The last one stays."""

    worker: str


@dataclass(kw_only=True, slots=True, frozen=True)
class SpotNotice(Fault):
    """A rollout hears that it must be gone (SIGTERM), and after so many seconds it is."""

    worker: str
    seconds: float


@dataclass(kw_only=True, slots=True, frozen=True)
class ControllerLost(Fault):
    """The controller's process is killed; a while later another takes its place from the journal. All workers live on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Stop(Fault):
    """The user stops the run after the current step."""


FAULTS: dict[str, type[Fault]] = {
    kind.__name__: kind
    for kind in (
        *(Kill, Fail, Hang, Partition, SlowLink, Duplicates),
        *(BadReward, BadTurn, FailedCheckpoint, Pause, Stop, RelayTierLost, HostLost, ControllerLost),
        *(Add, Remove, Drain, SpotNotice),
    )
}


def kind_of(fault: Fault) -> str:
    """For counting: the kind, with the kind of worker that it strikes."""
    name = type(fault).__name__
    worker = worker_of(fault)
    return f"{name} {worker.partition('-')[0]}" if worker else name


def worker_of(fault: Fault) -> str:
    """The worker that it strikes; empty if it strikes none in particular."""
    return str(getattr(fault, "worker", ""))


def to_json(fault: Fault) -> dict[str, Any]:
    """As a JSON object."""
    return {"kind": type(fault).__name__, **asdict(fault)}


def from_json(entry: Mapping[str, Any]) -> Fault:
    """The fault that `to_json` was given.

    Raises:
        UserError: no such kind, or fields that it does not have.
    """
    values = dict(entry)
    kind = FAULTS.get(str(values.pop("kind", None)))
    if kind is None or values.get("moment", "") not in MOMENTS:
        raise UserError(f"fault {dict(entry)}: expected a kind of {', '.join(FAULTS)} and a moment of {MOMENTS}")
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(f"fault {dict(entry)}: {error}; expected the fields of {kind.__name__}") from None
