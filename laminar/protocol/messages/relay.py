"""What the controller and a relay, or the trainer's rank 0, say to each other: the chain that carries weight versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True, frozen=True)
class RelayJoined:
    """What a relay has and how it can be reached; sent before `Ready`."""

    versions: tuple[int, ...]  # that its store holds, oldest first: it may have lived before
    address: str  # host:port where it takes TCP hops
    world: str  # names the mpirun world that it belongs to; empty outside of one
    world_rank: int  # in that world; -1 outside of one
    library: str  # MPI library and version; empty outside of a world


@dataclass(kw_only=True, slots=True, frozen=True)
class HopOrder:
    """One neighbour in the chain, and the way to it."""

    peer: str  # "relay-2", "trainer-0"
    epoch: int  # of this hop: unique in the run, the same at both ends
    world_rank: int  # the neighbour's, when the hop goes by MPI; -1: by TCP
    address: str  # where the downstream neighbour takes TCP hops; empty at its own end


@dataclass(kw_only=True, slots=True, frozen=True)
class Carry:
    """These are your neighbours for this version.

    A later order for the same version replaces the neighbours: a hop whose epoch stays goes on, others are given up. An
    order for another version gives the whole transfer up.
    """

    policy_version: int
    order: int  # grows with every order of the run: one that comes late is not obeyed
    upstream: HopOrder | None  # None: it holds the version
    downstream: HopOrder | None  # None: the end of the chain
    chunk_bytes: int
    encoding: Literal["full", "delta"]
    limit_s: float  # from now on


@dataclass(kw_only=True, slots=True, frozen=True)
class BroadcastEnded:
    """Every relay has the version, or was given up: time to let old versions go, and to have memory ready for the next.

    Not earlier: zeroing memory takes the bandwidth that the chunks need.
    """

    policy_version: int


@dataclass(kw_only=True, slots=True, frozen=True)
class CarryProgress:
    """How far a transfer is; sent a few times a second as long as it lasts, so that silence tells a stalled relay."""

    policy_version: int
    order: int
    received: int  # chunks that are here and checked
    sent: int  # chunks handed to the downstream neighbour
    chunks: int  # of the version; 0 while unknown


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsStored:
    """The relay holds the complete, checked version."""

    policy_version: int
    seconds: float  # from its first order for the version to its commit; 0 where it was there already
    nbytes: int  # size of the version
    received_bytes: int  # that came over the wire for it
    chunks: int
    damaged: int  # chunks that came damaged and were asked for again
    latency_s: float  # of the hop: half a round trip of a small frame; 0 where nothing was received
    bytes_per_s: float  # of the hop while chunks kept coming; 0 where nothing was received


@dataclass(kw_only=True, slots=True, frozen=True)
class HopFailed:
    """A neighbour, or the way to it, is lost; the relay keeps what it has and waits for another order."""

    policy_version: int
    epoch: int
    peer: str
    error: str


@dataclass(kw_only=True, slots=True, frozen=True)
class CarryFailed:
    """The relay cannot do its part (no memory, it does not hold the version, its limit has passed) and has given it up."""

    policy_version: int
    order: int
    error: str
