"""The one thread of a process that moves weights over hops; it obeys the controller's `Carry` orders.

    orders (queue) --> [thread: one Transfer, driven by polling] --> WeightsStored, HopFailed, CarryFailed (`report`)

Invariants:
- Everything that touches MPI, hops and the transfer is done by this thread; without work it is blocked in the queue and
  burns no CPU. The caller's loop is never blocked. At most the checksums of what comes are taken by a second one.
- Orders are obeyed in the order of their numbers; one that comes late is ignored.
- Each failure is reported once, and what has been received stays as long as the order for its version stands.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from laminar.errors import UserError
from laminar.protocol.messages import Carry, CarryFailed, CarryProgress, HopFailed, HopOrder, WeightsStored
from laminar.weights.checksum import checksum
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.workers.relay.hop_opener import HopOpener, World
from laminar.workers.relay.receiver import taken_at_once
from laminar.workers.relay.tcp_door import TcpDoor
from laminar.workers.relay.transfer import Side, Transfer

# Hops move data only while they are called. Calls without a pause at first, then naps that grow with the time waited: they
# delay what comes by little, and many relays on few cores do not take the cores from each other.
EAGER_S = 50e-6
NAP_SHARE = 0.25  # of the time waited so far
LONG_NAP_S = 500e-6
SETTLE_LIMIT_S = 1.0  # for which the thread looks after hops that it has closed; then at the next order

log = logging.getLogger("laminar.relay")

Event = WeightsStored | HopFailed | CarryFailed


class Carrier:
    """Carries versions between this process's store and its neighbours."""

    def __init__(
        self,
        store: WeightStore,
        *,
        hop_key: bytes,
        keep: int,
        keep_bytes: int | None = None,
        world_factory: Callable[[], World] | None = None,
        door: TcpDoor | None = None,
        own_core: bool = False,
        report: Callable[[Event], None],
    ) -> None:
        """Start the thread.

        Args:
            store: the versions of this process.
            hop_key: secret of the run, for TCP hops.
            keep: versions to retain.
            keep_bytes: bytes that they may have together; None for no bound.
            world_factory: joins the mpirun world, called in the thread; None outside of one.
            door: where upstream neighbours dial in; None where there never is one (the trainer).
            own_core: the thread shares its core with no other relay: a second one takes the checksums of what comes.
            report: called in the thread, must not block.
        """
        self.world: Future[World | None] = Future()  # as soon as it is joined, or why it was not
        self.ended: Future[None] = Future()  # the thread has ended: after `close`, or with an error of its own
        self._store = store
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._report = report
        self._orders: queue.SimpleQueue[Carry | None] = queue.SimpleQueue()
        self._progress: CarryProgress | None = None
        self._received_layout: WeightLayout | None = None  # of the last version that came over a hop
        # The rest belongs to the thread.
        self._ways = HopOpener(hop_key, door)
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="checksums") if own_core else None
        self._newest_order = -1
        self._transfer: Transfer | None = None
        self._order: Carry | None = None  # for the transfer
        self._hops: dict[Side, HopOrder | None] = {"upstream": None, "downstream": None}
        self._settle_until = 0.0  # time.monotonic()
        self._began = self._deadline = 0.0  # time.monotonic()
        self._carried: int | None = None  # version that `_hops` are for; its transfer may be done, and gone
        self._told_stored = False
        for future in (self.world, self.ended):
            future.set_running_or_notify_cancel()  # nobody who waits can cancel it
        # A daemon: the process does not wait for a call that hangs in MPI.
        threading.Thread(target=self._run, args=(world_factory,), name="carrier", daemon=True).start()

    def order(self, carry: Carry) -> None:
        """Give an order; from any thread."""
        self._orders.put(carry)

    def close(self) -> None:
        """Have the thread give up what it does and end; `ended` tells when."""
        self._orders.put(None)

    def make_room(self) -> None:
        """Let old versions go, and have memory ready where the next one will be received. Takes long; from any thread."""
        self._store.retain(self._keep, self._keep_bytes)
        layout = self._received_layout
        if layout is not None:
            with contextlib.suppress(FileNotFoundError):  # the run's memory is gone: it has ended
                self._store.prepare(layout)

    @property
    def progress(self) -> CarryProgress | None:
        """How far the transfer is; None if none is open. From any thread."""
        return self._progress

    def _run(self, world_factory: Callable[[], World] | None) -> None:
        try:
            self._ways.world = None if world_factory is None else world_factory()
        except Exception as error:  # belongs to whoever waits for the world
            self.world.set_exception(error)
            return
        self.world.set_result(self._ways.world)
        try:
            self._serve()
        except Exception as error:  # belongs to whoever waits for the end
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        finally:
            if self._checker is not None:
                self._checker.shutdown(wait=False)

    def _serve(self) -> None:
        idle_since: float | None = None  # time.monotonic()
        while True:
            try:
                order = self._next_order()
                if order is None:
                    break
                self._guarded(self._obey, order)
                idle_since = None
            except queue.Empty:
                pass
            if self._order is None:
                continue
            if self._guarded(self._step, self._order):
                idle_since = None
                continue
            now = time.monotonic()
            idle_since = now if idle_since is None else idle_since
            if now - idle_since > EAGER_S:
                time.sleep(min(NAP_SHARE * (now - idle_since), LONG_NAP_S))
        self._give_up()

    def _next_order(self) -> Carry | None:
        """The next order, None for the end; waits while nothing else can be done. Raises queue.Empty."""
        transfer = self._transfer
        if transfer is None:
            return self._orders.get(timeout=LONG_NAP_S) if self._unsettled() else self._orders.get()
        if not transfer.connected and not transfer.done:
            return self._orders.get(timeout=max(self._deadline - time.monotonic(), 0.0))
        return self._orders.get_nowait()

    def _unsettled(self) -> bool:
        """Whether closed hops still hold memory, and their neighbours may let go of it soon."""
        world = self._ways.world
        return world is not None and time.monotonic() < self._settle_until and not world.settle()

    def _guarded(self, action: Callable[[Carry], bool], order: Carry) -> bool:
        """Do something for an order; what makes it impossible ends the transfer and is reported."""
        try:
            return action(order)
        except (UserError, ValueError, OSError) as error:
            log.error("version %d: %s", order.policy_version, error)
            self._fail(order, str(error))
            return True

    def _fail(self, order: Carry, error: str) -> None:
        self._give_up()
        self._report(CarryFailed(policy_version=order.policy_version, order=order.order, error=error))

    def _obey(self, order: Carry) -> bool:
        if order.order <= self._newest_order:
            log.info("order %d comes late, after order %d: ignored", order.order, self._newest_order)
            return False
        self._newest_order = order.order
        now = time.monotonic()
        if self._carried != order.policy_version:
            self._give_up()
            self._began = now
        if self._transfer is None:
            checker = self._checker
            self._transfer = Transfer(
                store=self._store,
                policy_version=order.policy_version,
                chunk_bytes=order.chunk_bytes,
                take_checksum=taken_at_once if checker is None else lambda data: checker.submit(checksum, data),
            )
            self._carried = order.policy_version
            self._told_stored = self._told_stored and self._transfer.stored  # it may have gone since
        self._order, self._deadline = order, now + order.limit_s
        transfer = self._transfer
        if order.upstream is None and not transfer.stored:
            raise ValueError(
                f"version {order.policy_version} is not here to be sent: the store has {self._store.versions()}"
            )
        delta = order.encoding == "delta"
        new_upstream = self._replace("upstream", order.upstream)
        new_downstream = self._replace("downstream", order.downstream)
        if transfer.stored and (not self._told_stored or (new_upstream and order.upstream is not None)):
            self._tell_stored(transfer)
        if new_upstream:
            transfer.set_upstream(self._ways.upstream(order.upstream), delta=delta)
        if new_downstream:
            transfer.set_downstream(self._ways.downstream(order.downstream), delta=delta)
        self._report_losses(transfer)
        self._note_progress(transfer, order)
        return True

    def _replace(self, side: Side, hop: HopOrder | None) -> bool:
        """Whether the hop on this side is another one than before."""
        before, self._hops[side] = self._hops[side], hop
        return (None if hop is None else hop.epoch) != (None if before is None else before.epoch)

    def _step(self, order: Carry) -> bool:
        """Drive the transfer on; false if nothing could be done."""
        transfer = self._transfer
        assert transfer is not None
        now = time.monotonic()
        progressed = transfer.advance(now)
        if progressed:
            if transfer.stored and not self._told_stored:
                self._tell_stored(transfer)
            self._report_losses(transfer)
            self._note_progress(transfer, order)
        if transfer.done:
            self._rest(transfer)
        elif now > self._deadline:
            self._fail(
                order,
                f"version {order.policy_version} not carried within {order.limit_s:g} s: {transfer.waiting_for()}",
            )
        return progressed

    def _tell_stored(self, transfer: Transfer) -> None:
        self._told_stored = True
        reception, here = transfer.reception, transfer.version.received_here
        if here:
            self._received_layout = transfer.version.layout  # known before the controller can call for `make_room`
        self._report(
            WeightsStored(
                policy_version=transfer.policy_version,
                seconds=time.monotonic() - self._began if here else 0.0,
                nbytes=transfer.version.nbytes,
                received_bytes=reception.nbytes,
                chunks=transfer.chunks,
                damaged=reception.damaged,
                latency_s=reception.latency_s,
                bytes_per_s=reception.bytes_per_s,
            )
        )

    def _report_losses(self, transfer: Transfer) -> None:
        for side, error in transfer.lost:
            hop = self._hops[side]
            if hop is not None:
                log.warning("version %d: %s", transfer.policy_version, error)
                self._report(
                    HopFailed(policy_version=transfer.policy_version, epoch=hop.epoch, peer=hop.peer, error=str(error))
                )
        transfer.lost.clear()

    def _note_progress(self, transfer: Transfer, order: Carry) -> None:
        self._progress = CarryProgress(
            policy_version=transfer.policy_version,
            order=order.order,
            received=transfer.received,
            sent=transfer.sent,
            chunks=transfer.chunks,
        )

    def _rest(self, transfer: Transfer) -> None:
        """Everything is done until another order comes: let go of all but the memory of which hops are done with."""
        self._transfer = self._order = self._progress = None
        self._close(transfer)

    def _give_up(self) -> None:
        transfer, self._transfer = self._transfer, None
        self._progress = self._order = self._carried = None
        self._hops = {"upstream": None, "downstream": None}
        self._told_stored = False
        if transfer is not None:
            self._close(transfer)

    def _close(self, transfer: Transfer) -> None:
        transfer.close()
        self._settle_until = time.monotonic() + SETTLE_LIMIT_S
