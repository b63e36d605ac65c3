"""One relay of a real MPI world, for `test_mpi_chain.py`: fills the head's store, carries versions, says what happened."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

import numpy as np

from laminar.protocol.messages import Broadcast
from laminar.weights.checksum import checksum
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.workers.relay.broadcast import carry_version
from laminar.workers.relay.mpi_transport import MpiWorld


class DamagingWorld:
    """The world as seen over a bad link: in epoch 1 the n-th message to arrive has a flipped bit."""

    def __init__(self, world, message):
        self.rank = world.rank
        self._world = world
        self._message = message

    def hop(self, rank, epoch):
        hop = self._world.hop(rank, epoch)
        if epoch != 1:
            return hop
        receive, count = hop.receive, 0

        def damaged(into):
            nonlocal count
            request = receive(into)
            if count == self._message:
                test, flipped = request.test, False

                def damaging_test():
                    nonlocal flipped
                    complete = test()
                    if complete and not flipped:
                        into.view(np.uint8)[0] ^= 1
                        flipped = True
                    return complete

                request.test = damaging_test
            count += 1
            return request

        hop.receive = damaged
        return hop


def main():
    options = json.loads(sys.argv[1])
    world = MpiWorld()
    store = WeightStore("run", f"relay-{world.rank}", Path(options["base"]))
    layout = WeightLayout.plan([("w", "uint8", (options["nbytes"],))])
    seen = DamagingWorld(world, options["damage"]) if options.get("damage") and world.rank == 1 else world
    for order in options["orders"]:
        order = Broadcast(chunk_bytes=options["chunk_bytes"], **order | {"chain": tuple(order["chain"])})
        if order.chain[0] == world.rank and order.policy_version not in store.versions():
            writer = store.begin(order.policy_version, layout)
            writer.buffer[:] = np.random.default_rng(order.policy_version).integers(0, 256, options["nbytes"], np.uint8)
            writer.commit()
        if world.rank in options.get("dies", []):
            os.kill(os.getpid(), signal.SIGKILL)
        result = {"rank": world.rank, "version": order.policy_version, "error": None, "stored": None}
        if world.rank in order.chain and world.rank not in options.get("absent", []):
            try:
                carry_version(
                    order,
                    seen,
                    store=store,
                    keep=options.get("keep", 2),
                    stored=lambda report, result=result: result.update(stored=[report.nbytes, report.chunks]),
                )
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"
        result["versions"] = store.versions()
        result["checksums"] = {version: checksum(store.open(version).buffer) for version in store.versions()}
        result["cpu_s"] = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        print(json.dumps(result), flush=True)
        if not options.get("dies"):
            world._comm.Barrier()  # nobody leaves while another is at work
    os._exit(0)


main()
