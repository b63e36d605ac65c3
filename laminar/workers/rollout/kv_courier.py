"""Exported KV on its way from rollout to rollout: names, fetches and removes the files that engines write and read.

Invariants: an export is imported from this host's shared memory where it is there, and fetched from its exporter's door
otherwise; what was fetched or imported is removed as soon as the engine has read it, whatever came of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from laminar.protocol.messages import KvReference
from laminar.workers.relay.hop import HopError
from laminar.workers.rollout.engine import KvExported
from laminar.workers.rollout.kv_folder import KvFolder, export_name
from laminar.workers.rollout.kv_hop import KvDoor, fetch


class KvCourier:
    """One rollout's."""

    def __init__(self, rollout: str, folder: KvFolder, address: str, hop_key: bytes) -> None:
        """Open the door for other hosts, at this numeric address, and remove what a predecessor has left."""
        self._rollout = rollout
        self._folder = folder
        self._hop_key = hop_key
        self._door = KvDoor(address, hop_key, folder)
        folder.remove_all_of(rollout)

    def export_path(self, trajectory_id: str, lease: int) -> Path:
        """Where the engine is to write the KV of a trajectory that it has under this lease."""
        return self._folder.path(export_name(self._rollout, trajectory_id, lease))

    def exported(self, trajectory_id: str, lease: int, policy_version: int, export: KvExported) -> KvReference:
        """It is there: how an importer finds it."""
        name = export_name(self._rollout, trajectory_id, lease)
        return KvReference(
            trajectory_id=trajectory_id,
            lease=lease,
            exporter=self._rollout,
            name=name,
            policy_version=policy_version,
            tokens=export.tokens,
            nbytes=export.nbytes,
            shards=export.shards,
            address=self._door.address,
            epoch=self._door.offer(name, policy_version, export.shards),
        )

    async def bring(self, reference: KvReference, lease: int) -> tuple[Path | None, str]:
        """The files in this host's memory, to be imported under this lease; or None, and why there are none."""
        if self._folder.holds(reference.name):
            return self._folder.path(reference.name), ""
        if reference.exporter == self._rollout:
            return None, f"{reference.name} is not here any more"
        path = self.export_path(reference.trajectory_id, lease)
        try:
            await asyncio.to_thread(fetch, reference, self._hop_key, path)
        except (HopError, OSError, ValueError) as error:
            return None, f"{reference.name} could not be fetched: {error}"
        return path, ""

    def drop(self, name: str) -> None:
        """Nobody needs this export any more."""
        self._door.withdraw(name)
        self._folder.remove(name)

    def drop_all_of(self, exporter: str) -> None:
        """This rollout of our host does not come back."""
        self._folder.remove_all_of(exporter)

    async def close(self) -> None:
        """Close the door, and remove what nobody has taken."""
        await self._door.close()
        self._folder.remove_all_of(self._rollout)
