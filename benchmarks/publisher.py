"""A stand-in for the trainer's rank 0: it publishes made-up weights into its store and can be the head of the chain.

Everything but the weights is real: the worker's session, the store, the carrier.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from laminar.protocol.messages import BroadcastEnded, Carry, PublishWeights, WeightsPublished
from laminar.weights.layout import WeightLayout
from laminar.weights.store import WeightStore
from laminar.workers.relay.carrier_session import CarrierSession
from laminar.workers.worker import WorkerSession, run_worker

MIB = 1 << 20
CHANGED_SHARE = 0.01  # of the elements from one version to the next, as bf16 weights at a small learning rate


class MadeUpWeights:
    """A state that drifts: of bf16 bit patterns, a few change by one place from one version to the next."""

    def __init__(self, nbytes: int) -> None:
        self._generator = np.random.default_rng(0)
        self._weights = self._generator.integers(0, 1 << 16, nbytes // 2, np.uint16)
        self.layout = WeightLayout.plan([("w", "bfloat16", (nbytes // 2,))])

    def write(self, store: WeightStore, version: int, keep: int) -> float:
        """Publish; returns the seconds that it took without making the weights up."""
        changed = self._generator.integers(0, len(self._weights), int(CHANGED_SHARE * len(self._weights)))
        self._weights[changed] += 1
        began = time.perf_counter()
        with store.begin(version, self.layout) as writer:
            writer.buffer[:] = self._weights.view(np.uint8)
            writer.commit()
        seconds = time.perf_counter() - began
        store.retain(keep)
        return seconds


async def serve(session: WorkerSession) -> None:
    """Publish when told to, and send what relays lack."""
    store = WeightStore(session.welcome.run_id, session.welcome.store)
    weights = MadeUpWeights(session.welcome.version_bytes)
    sending = CarrierSession(session, store, make_room=lambda: store.prepare(weights.layout))
    sending.make_room()
    reports = asyncio.create_task(sending.report_forever(), name="reports")
    await session.ready("made-up weights")
    async for message in session.messages():
        match message:
            case Carry() | BroadcastEnded():
                sending.take(message)
            case PublishWeights():
                seconds = weights.write(store, message.policy_version, session.config.relay.keep_versions)
                await session.send(
                    WeightsPublished(
                        policy_version=message.policy_version,
                        publish_stall_s=seconds,
                        nbytes=session.welcome.version_bytes,
                    )
                )
    reports.cancel()


if __name__ == "__main__":
    run_worker("trainer", serve, index=0)
