"""Which relays the controller lets speak MPI with each other."""

import pytest

from laminar.config.schema import ExperimentConfig
from laminar.controller.relay_manager import RelayManager
from laminar.controller.worker_registry import Worker
from laminar.observability.events import EventBus, Notice
from laminar.protocol.messages import RelayJoined


class Registry:
    """Hands messages on; nobody is there otherwise."""

    def __init__(self):
        self.handlers = {}
        self.workers = {}

    def handle(self, message_type, handler):
        self.handlers[message_type] = handler

    def on_ready(self, kind, callback):
        pass

    def join(self, rank, library, world="mpirun-1"):
        worker = Worker(
            name=f"relay-{rank}", kind="relay", index=rank, peer=b"", pid=1, host=f"host-{rank}", last_heard=0.0
        )
        message = RelayJoined(versions=(), address=f"host-{rank}:1", world=world, world_rank=rank, library=library)
        self.handlers[RelayJoined](worker, message)


@pytest.fixture
def made():
    registry, events, notices = Registry(), EventBus(), []
    events.subscribe(notices.append, Notice)
    source = {"type": "jsonl", "path": "prompts.jsonl"}
    tree = {
        "name": "three-relays",
        "model": {"path": "model"},
        "data": {"source": source},
        "reward": {"function": "exact"},
        "relay": {"count": 3},
        "trainer": {"steps": 1, "groups_per_step": 1, "group_size": 1},
    }
    config = ExperimentConfig.model_validate(tree)
    return registry, RelayManager(registry, events, config), notices


async def test_relays_of_one_world_and_one_mpi_speak_it(made):
    registry, manager, notices = made
    for rank in range(2):
        registry.join(rank, "Open MPI v5.0.11")
    assert [(manager.relays[rank].world, manager.relays[rank].world_rank) for rank in range(2)] == [
        ("mpirun-1", 0),
        ("mpirun-1", 1),
    ]
    assert not notices


async def test_a_relay_with_another_mpi_is_reached_by_tcp_and_named(made):
    registry, manager, notices = made
    registry.join(0, "Open MPI v5.0.11")
    registry.join(1, "Open MPI v4.1.4")
    registry.join(2, "Open MPI v5.0.11")
    assert [relay.world for relay in manager.relays.values()] == ["mpirun-1", "", "mpirun-1"]
    [notice] = notices
    assert notice.level == "warning"
    assert notice.text == (
        "relay-1 on host-1 has Open MPI v4.1.4, relay-0 on host-0 Open MPI v5.0.11: weights go to relay-1 by TCP; "
        "install the same MPI on both hosts"
    )


async def test_outside_of_a_world_nothing_is_compared(made):
    registry, _, notices = made
    registry.join(0, "Open MPI v5.0.11")
    registry.join(1, "", world="")
    assert not notices
