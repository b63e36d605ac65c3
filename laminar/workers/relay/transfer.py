"""One version on its way through one relay: in from the upstream neighbour, out to the downstream one.

    upstream --> [Receiver] --> checked chunks of the version's own file --> [Sender] --> downstream

Invariants:
- Either neighbour may be replaced at any time; what has been received stays.
- Losing one neighbour does not disturb the way to the other.
- `advance` never blocks. It owns no thread and no clock, so tests can step it.
"""

from __future__ import annotations

from typing import Literal

from laminar.weights.store import WeightStore
from laminar.workers.relay.carried_version import CarriedVersion
from laminar.workers.relay.hop import HopError
from laminar.workers.relay.receiver import OpenHop, Receiver, Reception, TakeChecksum, taken_at_once
from laminar.workers.relay.sender import Sender

Side = Literal["upstream", "downstream"]


class Transfer:
    """This relay's part in carrying one version."""

    def __init__(
        self,
        *,
        store: WeightStore,
        policy_version: int,
        chunk_bytes: int,
        take_checksum: TakeChecksum = taken_at_once,
    ) -> None:
        """Prepare; without neighbours nothing happens.

        Args:
            store: where the version is (head of the chain) or will be (all others).
            policy_version: what is carried.
            chunk_bytes: size of the chunks that this relay asks for.
            take_checksum: for the chunks that come.

        Raises:
            ValueError: the chunk size is not between 1 byte and 1 GiB, or the store's file is damaged.
        """
        self.version = CarriedVersion(store, policy_version, chunk_bytes)
        self.reception = Reception()
        self.lost: list[tuple[Side, HopError]] = []  # neighbours lost since the owner emptied this
        self._take_checksum = take_checksum
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._sent = 0  # to the last downstream neighbour

    @property
    def policy_version(self) -> int:
        """What is carried."""
        return self.version.policy_version

    @property
    def stored(self) -> bool:
        """The version is complete and visible in the store."""
        return self.version.stored

    @property
    def done(self) -> bool:
        """Stored, the upstream neighbour told so, and the downstream neighbour has it, too."""
        parts = (self._receiver, self._sender)
        return self.stored and all(part is None or part.finished for part in parts)

    @property
    def connected(self) -> bool:
        """There is a neighbour to go on with."""
        return any(part is not None and not part.finished for part in (self._receiver, self._sender))

    @property
    def chunks(self) -> int:
        """How many the version has; 0 while unknown."""
        return len(self.version.table.spans)

    @property
    def received(self) -> int:
        """Chunks that are here and checked."""
        return self.chunks - self.version.table.missing

    @property
    def sent(self) -> int:
        """Chunks given to the hop to the (last) downstream neighbour."""
        return self._sent if self._sender is None else self._sender.sent

    def set_upstream(self, open_hop: OpenHop | None, *, delta: bool = False) -> None:
        """Replace the upstream neighbour. `delta`: ask for deltas. A hop that cannot be opened is `lost` at once."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if open_hop is not None:
            try:
                self._receiver = Receiver(self.version, open_hop, self.reception, self._take_checksum, delta=delta)
            except HopError as error:
                self.lost.append(("upstream", error))

    def set_downstream(self, open_hop: OpenHop | None, *, delta: bool = False) -> None:
        """Replace the downstream neighbour. `delta`: send deltas where they are smaller. See `set_upstream`."""
        if self._sender is not None:
            self._sent = self._sender.sent
            self._sender.close()
            self._sender = None
        if open_hop is None:
            self.version.forget_deltas()
            return
        try:
            self._sender = Sender(self.version, open_hop, delta=delta)
        except HopError as error:
            self.lost.append(("downstream", error))

    def advance(self, now: float) -> bool:
        """Do what can be done without waiting; false if that was nothing. A neighbour that is lost goes to `lost`.

        Args:
            now: seconds on a clock that never goes back.

        Raises:
            UserError, ValueError, OSError: this relay cannot store the version (`CarriedVersion.learn_layout`).
        """
        progressed = False
        if self._receiver is not None:
            self._receiver.keep_deltas = self._sender is not None and not self._sender.finished
            try:
                progressed |= self._receiver.advance(now)
            except HopError as error:
                self.lost.append(("upstream", error))
                self.set_upstream(None)
                progressed = True
        if self._sender is not None:
            try:
                progressed |= self._sender.advance()
            except HopError as error:
                self.lost.append(("downstream", error))
                self.set_downstream(None)
                progressed = True
        return progressed

    def close(self) -> None:
        """Give everything back; an incomplete version is discarded."""
        self.set_upstream(None)
        self.set_downstream(None)
        self.version.close()

    def waiting_for(self) -> str:
        """Which neighbour has not done what, for the message when the time is up."""
        chunks = self.chunks or "?"
        parts = []
        if not self.stored:
            peer = "no upstream neighbour" if self._receiver is None else self._receiver.peer
            parts.append(f"{peer} has sent {self.received} of {chunks} chunks")
        if self._sender is not None and not self._sender.finished:
            parts.append(f"{self._sender.peer} has taken {self.sent} of {chunks} chunks")
        return ", ".join(parts)
