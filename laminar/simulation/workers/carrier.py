"""A modelled carrier: obeys `Carry` orders as a real relay (or the trainer's rank 0) does, and computes when chunks come.

Chunks come one by one, in closed form: chunk i of a version is here at `start + i chunk_s`, at the earliest one chunk later
than at the upstream neighbour. That is recomputed when a neighbour changes, hangs or dies, never for each chunk.

Invariants:
- Chunks flow only between two ends that live, do not hang, and know the hop by the same epoch.
- What has been received stays while the orders for its version stand; it says that it holds a version only once it does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from laminar.protocol.messages import Carry, CarryFailed, CarryProgress, HopFailed, HopOrder, WeightsStored
from laminar.simulation.workers.modelled_worker import ModelledWorker
from laminar.simulation.workers.weight_stores import WeightStores, WeightTimes

PROGRESS_INTERVAL_S = 0.25
NOTICE_S = 0.001  # until a process knows that a neighbour's has ended, or has given up their hop


@dataclass(kw_only=True, slots=True)
class _Transfer:
    policy_version: int
    chunks: int
    chunk_s: float
    began: float
    stored: bool
    open: bool = True  # something is still to be received or sent
    told: bool = False  # that it is stored
    came: bool = False  # over a hop
    upstream: HopOrder | None = None
    downstream: HopOrder | None = None
    received: int = 0  # chunks, when the line was last laid
    start: float = math.inf  # chunk i comes at start + i chunk_s,
    limit: int = 0  # up to this one
    lost: set[int] = field(default_factory=set)  # epochs of hops that are known to be lost

    def received_at(self, now: float) -> int:
        """Chunks that are here."""
        if self.stored:
            return self.chunks
        if now < self.start:
            return self.received
        on_line = self.limit if self.chunk_s == 0 else int((now - self.start) / self.chunk_s + 1e-6)
        return max(self.received, min(on_line, self.limit))


class ModelledCarrier:
    """One process's."""

    def __init__(
        self,
        worker: ModelledWorker,
        *,
        store: str,
        times: WeightTimes,
        stores: WeightStores,
        carriers: MutableMapping[str, ModelledCarrier],
        keep_versions: int,
    ) -> None:
        """`carriers`: the newest of each worker, by name; this one enters itself."""
        self.worker = worker
        self._store = store
        self._times = times
        self._stores = stores
        self._carriers = carriers
        self._keep = keep_versions
        self._newest_order = 0
        self._transfer: _Transfer | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        carriers[worker.name] = self

    def obey(self, carry: Carry) -> None:
        """Take an order; one that comes late is ignored."""
        if carry.order <= self._newest_order:
            return
        self._newest_order = carry.order
        transfer = self._transfer
        if transfer is not None and transfer.policy_version != carry.policy_version:
            self._give_up("it carries another version")
            transfer = None
        if transfer is None:
            transfer = self._transfer = _Transfer(
                policy_version=carry.policy_version,
                chunks=self._times.chunks(carry.chunk_bytes),
                chunk_s=self._times.chunk_s(carry.chunk_bytes),
                began=self._now(),
                stored=self._holds(carry.policy_version),
            )
        elif not transfer.open:  # what it had at hand then may be gone now
            transfer.open, transfer.stored = True, self._holds(carry.policy_version)
            if not transfer.stored:
                transfer.told, transfer.received, transfer.start, transfer.limit = False, 0, math.inf, 0
        if carry.upstream is None and not transfer.stored:
            self._fail("it is not here to be sent")
            return
        self._replace(transfer, carry)
        self._set_timers(carry)
        self._refresh()

    def freeze(self) -> None:
        """Its process begins to hang."""
        self._refresh()

    def thaw(self) -> None:
        """Its process goes on."""
        self._refresh()

    def ended(self) -> None:
        """Its process has ended: neighbours notice at once."""
        self._give_up("its process has ended")

    # ------------------------------------------------------------ orders

    def _replace(self, transfer: _Transfer, carry: Carry) -> None:
        before = (transfer.upstream, transfer.downstream)
        transfer.upstream, transfer.downstream = carry.upstream, carry.downstream
        new_upstream, new_downstream = (
            hop is not None and (old is None or old.epoch != hop.epoch)
            for old, hop in zip(before, (carry.upstream, carry.downstream), strict=True)
        )
        kept = {hop.epoch for hop in (carry.upstream, carry.downstream) if hop is not None}
        for hop in before:
            if hop is not None and hop.epoch not in kept:
                self._tell_lost(hop, "it has another neighbour now")
        if transfer.stored and (not transfer.told or new_upstream):
            self._tell_stored(transfer)
        # Who dials a process that has ended knows it at once; who waits to be dialled does not.
        if new_upstream and carry.upstream is not None and carry.upstream.world_rank >= 0 and not transfer.stored:
            self._check_lives(carry.upstream)
        if new_downstream and carry.downstream is not None:
            self._check_lives(carry.downstream)

    def _check_lives(self, hop: HopOrder) -> None:
        peer = self._carriers.get(hop.peer)
        if peer is None or not peer.worker.alive:
            self._lose(hop.epoch, f"{hop.peer}: its process has ended")

    def _set_timers(self, carry: Carry) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.worker.after(carry.limit_s, self._expired, carry.order)
        if self._tick is None:
            self._tick = self.worker.after(PROGRESS_INTERVAL_S, self._report_progress)

    def _expired(self, order: int) -> None:
        if self._transfer is not None and self._transfer.open and order == self._newest_order:
            self._fail("not carried within its limit")

    def _report_progress(self) -> None:
        transfer = self._transfer
        assert transfer is not None
        downstream = self._peer(transfer.downstream)
        self.worker.send(
            CarryProgress(
                policy_version=transfer.policy_version,
                order=self._newest_order,
                received=transfer.received_at(self._now()),
                sent=0 if downstream is None else downstream[1].received_at(self._now()),
                chunks=transfer.chunks,
            )
        )
        self._tick = self.worker.after(PROGRESS_INTERVAL_S, self._report_progress)

    # ------------------------------------------------------------ chunks

    def _refresh(self) -> None:
        """Something has changed here: see what it means for this one and, if it does, for those downstream."""
        carrier: ModelledCarrier | None = self
        self._compute_line()
        while carrier is not None and (transfer := carrier._transfer) is not None:
            if transfer.stored:
                if (upstream := carrier._peer(transfer.upstream)) is not None:
                    upstream[0]._rest_if_done()
                carrier._rest_if_done()
            downstream = carrier._peer(transfer.downstream)
            carrier = downstream[0] if downstream is not None and downstream[0]._compute_line() else None

    def _compute_line(self) -> bool:
        """When chunks come from now on; false if nothing has changed."""
        transfer = self._transfer
        if transfer is None or not transfer.open or transfer.stored:
            return False
        now, before = self._now(), (transfer.start, transfer.limit)
        here = transfer.received_at(now)
        source = self._peer(transfer.upstream)
        if source is None or self.worker.hung or source[0].worker.hung:
            start, limit = math.inf, here
        else:
            start, limit = self._line_from(transfer, source[1], here, now)
        if (start, limit) == before:
            return False
        transfer.received, transfer.start, transfer.limit = here, start, limit
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
        if limit == transfer.chunks and start < math.inf:
            self._arrival = self.worker.at(max(now, start + limit * transfer.chunk_s), self._complete, transfer)
        return True

    def _line_from(self, transfer: _Transfer, source: _Transfer, here: int, now: float) -> tuple[float, int]:
        """(start, limit) behind this upstream neighbour."""
        c = transfer.chunk_s
        limit = transfer.chunks if source.stored else source.limit
        behind = -math.inf if source.stored or source.start == math.inf else source.start + c
        on_line = transfer.start < math.inf and transfer.start >= behind - 1e-9
        if on_line and transfer.limit == limit:  # it keeps coming as it does; a chunk is not begun anew
            return transfer.start, limit
        return max(now - here * c, behind), limit

    def _complete(self, transfer: _Transfer) -> None:
        if transfer is not self._transfer or transfer.stored:
            return
        transfer.stored = transfer.came = True
        self._stores.put(self._store, transfer.policy_version, self._keep)
        self._tell_stored(transfer)
        if (upstream := self._peer(transfer.upstream)) is not None:
            upstream[0]._rest_if_done()
        self._rest_if_done()

    def _rest_if_done(self) -> None:
        transfer = self._transfer
        if transfer is None or not transfer.open or not transfer.stored or self.worker.hung:
            return
        downstream = self._peer(transfer.downstream)
        if transfer.downstream is None or (downstream is not None and downstream[1].stored):
            transfer.open = False
            self._stop_timers()

    def _tell_stored(self, transfer: _Transfer) -> None:
        transfer.told = True
        nbytes, came = self._times.nbytes, transfer.came
        self.worker.send(
            WeightsStored(
                policy_version=transfer.policy_version,
                seconds=self._now() - transfer.began if came else 0.0,
                nbytes=nbytes,
                received_bytes=nbytes if came else 0,
                chunks=transfer.chunks,
                damaged=0,
                latency_s=self._times.latency_s if came else 0.0,
                bytes_per_s=self._times.bandwidth if came else 0.0,
            )
        )

    # ------------------------------------------------------------ neighbours

    def _peer(self, hop: HopOrder | None) -> tuple[ModelledCarrier, _Transfer] | None:
        """The other end of a hop, if it lives and has been told of the same hop."""
        peer = None if hop is None else self._carriers.get(hop.peer)
        if hop is None or peer is None or not peer.worker.alive or (transfer := peer._transfer) is None:
            return None
        for other in (transfer.upstream, transfer.downstream):
            if other is not None and other.epoch == hop.epoch and hop.epoch not in transfer.lost:
                return peer, transfer
        return None

    def _tell_lost(self, hop: HopOrder, why: str) -> None:
        """The other end finds the connection closed."""
        peer = self._carriers.get(hop.peer)
        if peer is not None and peer.worker.alive:
            peer._lose(hop.epoch, f"{self.worker.name}: {why}")

    def _lose(self, epoch: int, error: str) -> None:
        transfer = self._transfer
        if transfer is None or not transfer.open or epoch in transfer.lost:
            return
        hop = next((hop for hop in (transfer.upstream, transfer.downstream) if hop and hop.epoch == epoch), None)
        if hop is None or (hop is transfer.upstream and transfer.stored):
            return
        transfer.lost.add(epoch)
        self._refresh()
        self.worker.after(NOTICE_S, self._report_lost, transfer, hop, error)

    def _report_lost(self, transfer: _Transfer, hop: HopOrder, error: str) -> None:
        if transfer is self._transfer and hop in (transfer.upstream, transfer.downstream):
            self.worker.send(
                HopFailed(policy_version=transfer.policy_version, epoch=hop.epoch, peer=hop.peer, error=error)
            )

    def _fail(self, error: str) -> None:
        transfer = self._transfer
        assert transfer is not None
        self._give_up("it has given the version up")
        self.worker.send(CarryFailed(policy_version=transfer.policy_version, order=self._newest_order, error=error))

    def _give_up(self, why: str) -> None:
        transfer, self._transfer = self._transfer, None
        self._stop_timers()
        if transfer is not None and transfer.open:
            for hop in (transfer.upstream, transfer.downstream):
                if hop is not None:
                    self._tell_lost(hop, why)

    def _stop_timers(self) -> None:
        for timer in (self._arrival, self._limit, self._tick):
            if timer is not None:
                timer.cancel()
        self._arrival = self._limit = self._tick = None

    def _holds(self, version: int) -> bool:
        return version in self._stores.held(self._store)

    def _now(self) -> float:
        return self.worker.loop.time()
