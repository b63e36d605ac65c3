"""What the launcher tells the controller when a process ends that was not told to."""

from types import SimpleNamespace

import pytest

from laminar.errors import WorkerLost
from laminar.launch.commands import Command
from laminar.launch.run import LocalRun


class Registry:
    """Notes what it is told; `never_ready` workers have not started."""

    def __init__(self, *, connected=(), expected=(), never_ready=()):
        self.workers = dict.fromkeys(connected)
        self.told = []
        self._expected, self._never_ready = expected, never_ready

    def expects(self, name):
        return name in self._expected

    def did_not_come(self, name, reason):
        if name in self._never_ready:
            raise WorkerLost(f"{name} did not start: {reason}")
        self.told.append(("did not come", name, reason))

    def lost(self, name, reason):
        if name in self.workers:
            self.told.append(("lost", name, reason))


def ended(registry, *, workers=("rollout-1",), status=-9, said_hello=()):
    run = LocalRun.__new__(LocalRun)
    run._ending = False
    run._launcher = SimpleNamespace(log_tail=lambda names: "")
    run._said_hello = dict.fromkeys([*registry.workers, *said_hello])
    run._controller = SimpleNamespace(registry=registry)
    run._on_exit(Command(name="rollout-1", argv=(), environment={}, workers=workers), status)
    return registry.told


def test_a_connected_worker_is_lost():
    told = ended(Registry(connected=["rollout-1"], expected=["rollout-1"]))
    assert told == [("lost", "rollout-1", "its process ended (signal SIGKILL)")]


def test_all_workers_of_a_process_are_lost_with_it():
    ranks = ("trainer-0", "trainer-1")
    told = ended(Registry(connected=ranks, expected=ranks), workers=ranks, status=1)
    assert [name for _, name, _ in told] == ["trainer-0", "trainer-1"]


def test_a_successor_that_ends_before_its_hello_is_one_more_failed_attempt():
    told = ended(Registry(expected=["rollout-1"]))
    assert told == [("did not come", "rollout-1", "its process ended (signal SIGKILL)")]


def test_workers_whose_connections_have_closed_before_are_not_lost_twice():
    ranks = ("trainer-0", "trainer-1")
    assert ended(Registry(expected=ranks), workers=ranks, said_hello=ranks) == []


def test_a_process_that_never_said_hello_ends_the_run():
    with pytest.raises(WorkerLost, match=r"rollout-1 did not start: its process ended \(exit status 2\)"):
        ended(Registry(expected=["rollout-1"], never_ready=["rollout-1"]), status=2)


def test_the_end_of_a_worker_that_was_given_up_concerns_nobody():
    assert ended(Registry(expected=["rollout-0"])) == []
